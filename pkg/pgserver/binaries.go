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

// FetchNever as Config.FetchURL forbids fetching binaries.
const FetchNever = "never"

// sharedBinaries is where root fetches to: the user that Postgres then runs as cannot enter root's data folder.
const sharedBinaries = "/var/cache/spool/postgres"

const remedy = "set SPOOL_DATABASE_URL to a Postgres that runs already, or install one (Debian: apt-get install postgresql; macOS: brew install postgresql)"

// installFolders is where packages put binaries without putting them on the PATH.
var installFolders = []string{"/usr/lib/postgresql/*/bin", "/usr/pgsql-*/bin", "/opt/homebrew/opt/postgresql@*/bin", "/usr/local/opt/postgresql@*/bin"}

// binaries are the two programs that are needed, of one version.
type binaries struct{ initdb, postgres string }

// findBinaries looks in BinDir, else on the PATH, in the installation folders (the newest first) and for a release fetched before, else
// fetches one. A cluster is only served by the major version that made it.
func findBinaries(ctx context.Context, cfg Config, user account, major string) (binaries, error) {
	if cfg.BinDir != "" {
		b, ok := binariesIn(cfg.BinDir)
		if !ok {
			return binaries{}, fmt.Errorf("postgres: %w in BinDir %s (initdb and postgres are needed): %s", ErrNoBinary, cfg.BinDir, remedy)
		}
		v := b.major(ctx, user)
		if v == "" {
			return binaries{}, fmt.Errorf("postgres: %s does not run as user %s: %s", b.postgres, user.name, remedy)
		}
		if major != "" && v != major {
			return binaries{}, fmt.Errorf("postgres: the data folder %s was made by Postgres %s, but %s is Postgres %s: use binaries of version %s, or another data folder",
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
		return binaries{}, fmt.Errorf("postgres: the data folder %s was made by Postgres %s, but only versions %v were found: install postgresql-%s, or choose another data folder",
			cfg.DataDir, major, seen, major)
	}
	return fetch(cfg, fetched)
}

// candidates are the folders in the order of preference.
func (c *Config) candidates() []string {
	if c.search != nil {
		return c.search
	}
	var dirs []string
	if path, err := exec.LookPath("initdb"); err == nil {
		// A link on the PATH often stands alone, its neighbours are where it leads.
		if real, err := filepath.EvalSymlinks(path); err == nil {
			dirs = append(dirs, filepath.Dir(real))
		}
		dirs = append(dirs, filepath.Dir(path))
	}
	for _, pattern := range installFolders {
		found, _ := filepath.Glob(pattern) // the only error is a bad pattern
		slices.SortFunc(found, func(a, b string) int { return folderVersion(b) - folderVersion(a) })
		dirs = append(dirs, found...)
	}
	return dirs
}

var number = regexp.MustCompile(`\d+`)

func folderVersion(dir string) int {
	n, err := strconv.Atoi(number.FindString(dir))
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

// major is the version as PG_VERSION writes it, empty when user cannot run the binary.
func (b binaries) major(ctx context.Context, user account) string {
	cmd := exec.CommandContext(ctx, b.postgres, "--version")
	cmd.Dir = "/"
	user.apply(cmd)
	out, err := cmd.Output()
	if err != nil {
		return ""
	}
	return number.FindString(string(out))
}

// fetch downloads a release into dir. The library can only fetch as a part of starting a server, its own way: over TCP and not as root.
// A data path that no system accepts ends its start right after the binaries are in place, so only they tell whether it worked.
func fetch(cfg Config, dir string) (binaries, error) {
	if cfg.FetchURL == FetchNever {
		return binaries{}, fmt.Errorf("postgres: %w: %s", ErrNoBinary, remedy)
	}
	cfg.Logger.Info("no Postgres binary found on this machine, fetching one", "folder", dir)
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
	return binaries{}, fmt.Errorf("postgres: %w, and fetching one failed (%w): %s", ErrNoBinary, err, remedy)
}
