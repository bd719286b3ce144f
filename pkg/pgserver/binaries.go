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

// FetchNever as Config.FetchURL forbids downloading binaries.
const FetchNever = "never"

// sharedBinaries is the download folder if this process runs as root. Postgres then runs as another user, which
// cannot enter root's data folder.
const sharedBinaries = "/var/cache/spool/postgres"

const installRemedy = "set SPOOL_DATABASE_URL to a running Postgres, or install one (Debian: apt-get install postgresql; macOS: brew install postgresql)"

// installFolders are the folders in which packages install binaries that are not on the PATH.
var installFolders = []string{"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin"}

// binaries are the two required programs, of the same version.
type binaries struct{ initdb, postgres string }

// findBinaries searches BinDir or, if it is empty, the PATH, the installation folders (newest version first) and an
// earlier download; otherwise it downloads a release. Only the major version that created a cluster can serve it.
func findBinaries(ctx context.Context, cfg Config, user account, major string) (binaries, error) {
	if cfg.BinDir != "" {
		b, ok := binariesIn(cfg.BinDir)
		if !ok {
			return binaries{}, fmt.Errorf("postgres: %w in BinDir %s (initdb and postgres are needed): %s", ErrNoBinary, cfg.BinDir, installRemedy)
		}
		v := b.major(ctx, user)
		if v == "" {
			return binaries{}, fmt.Errorf("postgres: %s cannot run as user %s: %s", b.postgres, user.name, installRemedy)
		}
		if major != "" && v != major {
			return binaries{}, fmt.Errorf("postgres: the data folder %s was created by Postgres %s, but %s is Postgres %s: use binaries of version %s, or another data folder",
				cfg.DataDir, major, b.postgres, v, major)
		}
		return b, nil
	}
	fetched := cfg.FetchDir
	switch {
	case fetched != "":
	case user.switched:
		fetched = sharedBinaries
	default:
		fetched = filepath.Join(cfg.DataDir, "binaries")
	}
	var seen []string
	for _, dir := range append(cfg.candidates(), filepath.Join(fetched, "bin")) {
		b, ok := binariesIn(dir)
		if !ok {
			continue
		}
		v := b.major(ctx, user)
		if v != "" && (major == "" || v == major) {
			return b, nil
		}
		seen = append(seen, v)
	}
	if major != "" {
		return binaries{}, fmt.Errorf("postgres: the data folder %s was created by Postgres %s, but only versions %v were found: install postgresql-%s, or choose another data folder",
			cfg.DataDir, major, seen, major)
	}
	return fetch(cfg, fetched)
}

// candidates returns the folders to search, in the order of preference.
func (c *Config) candidates() []string {
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
		slices.SortFunc(found, func(a, b string) int { return folderVersion(b) - folderVersion(a) })
		dirs = append(dirs, found...)
	}
	return dirs
}

var digits = regexp.MustCompile(`\d+`)

func folderVersion(dir string) int {
	n, err := strconv.Atoi(digits.FindString(dir))
	if err != nil {
		return 0
	}
	return n
}

func binariesIn(dir string) (binaries, bool) {
	b := binaries{initdb: filepath.Join(dir, "initdb"), postgres: filepath.Join(dir, "postgres")}
	for _, path := range []string{b.initdb, b.postgres} {
		info, err := os.Stat(path)
		if err != nil || info.IsDir() || info.Mode()&0o111 == 0 {
			return binaries{}, false
		}
	}
	return b, true
}

// major returns the major version as written in PG_VERSION, or "" if user cannot run the binary.
func (b binaries) major(ctx context.Context, user account) string {
	cmd := exec.CommandContext(ctx, b.postgres, "--version")
	cmd.Dir = "/"
	user.apply(cmd)
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return digits.FindString(string(out))
}

// fetch downloads a release into dir. The library can only download while it starts a server, in its own way: over
// TCP and not as root. fetch passes a data path that no system accepts, so the start fails right after the binaries
// are in place, and only the binaries show whether the download succeeded.
func fetch(cfg Config, dir string) (binaries, error) {
	if cfg.FetchURL == FetchNever {
		return binaries{}, fmt.Errorf("postgres: %w: %s", ErrNoBinary, installRemedy)
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
	return binaries{}, fmt.Errorf("postgres: %w, and the download failed (%w): %s", ErrNoBinary, err, installRemedy)
}
