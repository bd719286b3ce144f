package pgserver

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"

	embeddedpostgres "github.com/fergusstrange/embedded-postgres"
)

// FetchNever as Config.FetchURL forbids downloading Postgres binaries.
const FetchNever = "never"

// sharedBinariesDir is the folder of downloaded Postgres binaries if this process runs as root. Postgres then runs as
// another user, which cannot enter root's data folder.
const sharedBinariesDir = "/var/cache/spool/postgres"

const installRemedy = "set SPOOL_DATABASE_URL to a running Postgres, or install one (Debian: apt-get install postgresql; macOS: brew install postgresql)"

// installFolders are the folders in which packages install Postgres binaries that are not on the PATH.
var installFolders = []string{"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin"}

// postgresBinaries are the paths of the two required Postgres programs, of the same version.
type postgresBinaries struct{ initdb, postgres string }

// findBinaries searches Config.BinDir for Postgres or, if it is empty, the PATH, the installation folders (newest
// version first) and an earlier download; otherwise it downloads a release. Only the major version that created a
// cluster can serve the cluster.
func findBinaries(ctx context.Context, cfg Config, user postgresAccount, major string) (postgresBinaries, error) {
	if cfg.BinDir != "" {
		b, ok := binariesIn(cfg.BinDir)
		if !ok {
			return postgresBinaries{}, fmt.Errorf("postgres: %w in BinDir %s (initdb and postgres are needed): %s", ErrNoBinary, cfg.BinDir, installRemedy)
		}
		v := b.majorVersion(ctx, user)
		if v == "" {
			return postgresBinaries{}, fmt.Errorf("postgres: %s cannot run as user %s: %s", b.postgres, user.name, installRemedy)
		}
		if major != "" && v != major {
			return postgresBinaries{}, fmt.Errorf("postgres: the data folder %s was created by Postgres %s, but %s is Postgres %s: use binaries of version %s, or another data folder",
				cfg.DataDir, major, b.postgres, v, major)
		}
		return b, nil
	}
	fetched := cfg.FetchDir
	switch {
	case fetched != "":
	case user.switched:
		fetched = sharedBinariesDir
	default:
		fetched = filepath.Join(cfg.DataDir, "binaries")
	}
	var seen []string
	for _, dir := range append(cfg.searchFolders(), filepath.Join(fetched, "bin")) {
		b, ok := binariesIn(dir)
		if !ok {
			continue
		}
		v := b.majorVersion(ctx, user)
		if v != "" && (major == "" || v == major) {
			return b, nil
		}
		seen = append(seen, v)
	}
	if major != "" {
		return postgresBinaries{}, fmt.Errorf("postgres: the data folder %s was created by Postgres %s, but only versions %v were found: install postgresql-%s, or choose another data folder",
			cfg.DataDir, major, seen, major)
	}
	return downloadBinaries(cfg, fetched)
}

// searchFolders returns the folders in which to search for Postgres binaries, in the order of preference.
func (c *Config) searchFolders() []string {
	if c.search != nil {
		return c.search
	}
	var dirs []string
	if path, err := exec.LookPath("initdb"); err == nil {
		// A link on the PATH often stands alone; the other programs are next to its target.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
		dirs = append(dirs, filepath.Dir(path))
	}
	for _, pattern := range installFolders {
		found, _ := filepath.Glob(pattern) // the only error is a malformed pattern
		slices.SortFunc(found, func(a, b string) int { return versionInFolderName(b) - versionInFolderName(a) })
		dirs = append(dirs, found...)
	}
	return dirs
}

var digits = regexp.MustCompile(`\d+`)

func versionInFolderName(dir string) int {
	n, err := strconv.Atoi(digits.FindString(dir))
	if err != nil {
		return 0
	}
	return n
}

func binariesIn(dir string) (postgresBinaries, bool) {
	b := postgresBinaries{initdb: filepath.Join(dir, "initdb"), postgres: filepath.Join(dir, "postgres")}
	for _, path := range []string{b.initdb, b.postgres} {
		info, err := os.Stat(path)
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return postgresBinaries{}, false
		}
	}
	return b, true
}

// majorVersion returns the major version of the binaries as written in PG_VERSION, or "" if user cannot run them.
func (b postgresBinaries) majorVersion(ctx context.Context, user postgresAccount) string {
	cmd := exec.CommandContext(ctx, b.postgres, "--version")
	cmd.Dir = "/"
	user.runAs(cmd)
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return digits.FindString(string(out))
}

// downloadBinaries downloads a Postgres release into dir. The library can only download while it starts a server, over
// TCP and not as root. downloadBinaries therefore passes a data path that no system accepts, so the start fails right
// after the download. The download has succeeded if the binaries exist.
func downloadBinaries(cfg Config, dir string) (postgresBinaries, error) {
	if cfg.FetchURL == FetchNever {
		return postgresBinaries{}, fmt.Errorf("postgres: %w: %s", ErrNoBinary, installRemedy)
	}
	cfg.Logger.Info("no Postgres binary found on this machine, downloading one", "folder", dir)
	ec := embeddedpostgres.DefaultConfig().Version(embeddedpostgres.V17).Port(0).
		CachePath(dir + ".archive").RuntimePath(dir + ".runtime").
		BinariesPath(dir).DataPath("\x00")
	if cfg.FetchURL != "" {
		ec = ec.BinaryRepositoryURL(cfg.FetchURL)
	}
	err := embeddedpostgres.NewDatabase(ec).Start()
	if b, ok := binariesIn(filepath.Join(dir, "bin")); ok {
		return b, nil
	}
	return postgresBinaries{}, fmt.Errorf("postgres: %w, and the download failed (%w): %s", ErrNoBinary, err, installRemedy)
}
