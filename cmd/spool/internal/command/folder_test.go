package command

import (
	"errors"
	"net"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
)

// makeFolder creates a folder with files. A name that ends in a slash is a folder.
func makeFolder(t *testing.T, names ...string) string {
	t.Helper()
	dir := t.TempDir()
	for _, name := range names {
		full := filepath.Join(dir, name)
		err := os.MkdirAll(filepath.Dir(full), 0o755)
		if strings.HasSuffix(name, "/") {
			err = errors.Join(err, os.MkdirAll(full, 0o755))
		} else {
			err = errors.Join(err, os.WriteFile(full, []byte(name), 0o600))
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func scanned(t *testing.T, dir string, limits folderLimits) ([]folderEntry, error) {
	t.Helper()
	root, err := os.OpenRoot(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer root.Close() //nolint:errcheck // only read
	return scanFolder(t.Context(), root, limits)
}

func TestScan_OmitsIgnoredFiles(t *testing.T) {
	t.Parallel()
	dir := makeFolder(t, "a.txt", "b.log", "sub/c.txt", "sub/d.tmp", "sub/deep/e.tmp", "node_modules/x/y", ".git/HEAD", "empty/", ".env")
	for name, text := range map[string]string{".gitignore": "*.log\n.env\n", "sub/.gitignore": "*.tmp\n!e.tmp\n", ".spoolignore": "!.env\n"} {
		if err := os.WriteFile(filepath.Join(dir, name), []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink("sub/c.txt", filepath.Join(dir, "link")); err != nil {
		t.Fatal(err)
	}
	list, err := scanned(t, dir, uploadLimits)
	var names []string
	for _, e := range list {
		names = append(names, e.Path)
	}
	want := []string{".env", ".gitignore", ".spoolignore", "a.txt", "empty", "link", "sub", "sub/.gitignore", "sub/c.txt", "sub/deep", "sub/deep/e.tmp"}
	if err != nil || !slices.Equal(names, want) {
		t.Errorf("got %q, %v; want %q", names, err, want)
	}
}

func TestScan_ErrorNamesTheEntry(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		make   func(dir string) error
		limits folderLimits
		says   []string
	}{
		"a link to an absolute path": {func(dir string) error { return os.Symlink("/etc/passwd", filepath.Join(dir, "out")) }, uploadLimits, []string{`"out"`, "/etc/passwd", "outside the folder"}},
		"a link above the folder":    {func(dir string) error { return os.Symlink("../../x", filepath.Join(dir, "in/up")) }, uploadLimits, []string{`"in/up"`, "outside the folder"}},
		"a link through a name":      {func(dir string) error { return os.Symlink("f/../../x", filepath.Join(dir, "in/up")) }, uploadLimits, []string{`"in/up"`}},
		"a named pipe":               {func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, "in/pipe"), 0o600) }, uploadLimits, []string{`"in/pipe"`, "named pipe"}},
		"a socket": {func(dir string) error {
			l, err := net.Listen("unix", filepath.Join(dir, "s"))
			if err == nil {
				l.(*net.UnixListener).SetUnlinkOnClose(false)
				err = l.Close()
			}
			return err
		}, uploadLimits, []string{`"s"`, "socket"}},
		"a device":            {func(dir string) error { return device(filepath.Join(dir, "in/d")) }, uploadLimits, []string{`"in/d"`, "device"}},
		"a control character": {func(dir string) error { return os.WriteFile(filepath.Join(dir, "a\x1b[2Jb"), nil, 0o600) }, uploadLimits, []string{`"a\x1b[2Jb"`, "control character"}},
		"a backslash":         {func(dir string) error { return os.WriteFile(filepath.Join(dir, `a\b`), nil, 0o600) }, uploadLimits, []string{"backslash"}},
		"not UTF-8":           {func(dir string) error { return os.WriteFile(filepath.Join(dir, "a\xff"), nil, 0o600) }, uploadLimits, []string{"UTF-8"}},
		"5 GB in one file":    {func(dir string) error { return sparse(filepath.Join(dir, "in/big"), 5<<30) }, uploadLimits, []string{`"in/big"`, "5.0 GiB", "1.0 GiB"}},
		"too much in all":     {func(dir string) error { return sparse(filepath.Join(dir, "in/big"), 700<<20) }, folderLimits{100, 600 << 20}, []string{"600.0 MiB"}},
		"too many files":      {func(dir string) error { return nil }, folderLimits{2, 1 << 30}, []string{"more than 2 files"}},
		"unreadable rules":    {func(dir string) error { return syscall.Mkfifo(filepath.Join(dir, ".gitignore"), 0o600) }, uploadLimits, []string{".gitignore"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			dir := makeFolder(t, "in/f", "g")
			if err := c.make(dir); errors.Is(err, errNeedsRoot) {
				t.Skip(err)
			} else if err != nil {
				t.Fatal(err)
			}
			_, err := scanned(t, dir, c.limits)
			var exit *exitError
			if !errors.As(err, &exit) || exit.code != ExitUsage || !strings.HasPrefix(err.Error(), "workspace: ") {
				t.Fatalf("got %v", err)
			}
			for _, says := range c.says {
				if !strings.Contains(err.Error(), says) {
					t.Errorf("%q does not say %q", err, says)
				}
			}
		})
	}
}

var errNeedsRoot = errors.New("only root can make a device")

// device creates a device like /dev/null.
func device(name string) error {
	if os.Geteuid() != 0 {
		return errNeedsRoot
	}
	return syscall.Mknod(name, syscall.S_IFCHR|0o666, 1<<8|3)
}

func sparse(name string, size int64) error {
	f, err := os.Create(name)
	if err != nil {
		return err
	}
	return errors.Join(f.Truncate(size), f.Close())
}

// TestRunWorkspace_ReportsErrorsBeforeARequest tests that invalid folders are refused without a request.
func TestRunWorkspace_ReportsErrorsBeforeARequest(t *testing.T) {
	t.Parallel()
	dir := makeFolder(t, "file")
	home, err := os.UserHomeDir()
	if err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"--workspace", filepath.Join(dir, "none")}, "does not exist"},
		{[]string{"--workspace", filepath.Join(dir, "file")}, "is not a folder"},
		{[]string{"--workspace", "/"}, "is the root of the file system"},
		{[]string{"--workspace", home}, "is your home folder"},
		{[]string{"--workspace", dir, "--session", ses}, "leave --workspace out"},
		{[]string{"--copy"}, "requires --workspace"},
	} {
		f := serve(t, accepted)
		got := spool(t, testIO(t), append([]string{"run", "--url", f.URL, "q"}, c.args...)...)
		if got.code != ExitUsage || !strings.Contains(got.err, c.says) || len(f.requests) > 0 {
			t.Errorf("%v: %+v, requests %v", c.args, got, f.requests)
		}
	}
}

func TestStaysInside_DetectsLinksOutOfTheFolder(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		path, target string
		want         bool
	}{
		{"a", "b", true}, {"d/a", "../b", true}, {"d/e/a", "../../b", true}, {"a", ".", true}, {"a", "./b/c", true},
		{"a", "..", false}, {"d/a", "../../b", false}, {"a", "/b", false}, {"a", "", false}, {"d/a", "b/../../c", false}, {"d/a", "b/../c", false}, {"a", "b\n", false},
	} {
		if got := linkStaysInside(c.path, c.target); got != c.want {
			t.Errorf("%s -> %s: %v", c.path, c.target, got)
		}
	}
}
