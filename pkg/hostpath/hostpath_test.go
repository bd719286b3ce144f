package hostpath_test

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/hostpath"
)

func mkdir(t *testing.T, path string) string {
	t.Helper()
	if err := os.MkdirAll(path, 0o755); err != nil {
		t.Fatal(err)
	}
	return path
}

func TestResolve_RefusesForbiddenFolders(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	root, outside := mkdir(t, filepath.Join(dir, "root")), mkdir(t, filepath.Join(dir, "outside"))
	good, data := mkdir(t, filepath.Join(root, "good")), mkdir(t, filepath.Join(root, "data", "nats"))
	file, fifo, out, in := filepath.Join(root, "file"), filepath.Join(root, "fifo"), filepath.Join(root, "out"), filepath.Join(root, "in")
	for _, err := range []error{
		os.WriteFile(file, nil, 0o600), syscall.Mkfifo(fifo, 0o600), os.Symlink(outside, out), os.Symlink(good, in),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	p := hostpath.Policy{Roots: []string{root}, Private: []string{filepath.Join(root, "data")}}
	for path, want := range map[string]string{good: good, in: good} {
		if got, err := p.CheckAndResolve(path); err != nil || got != want {
			t.Errorf("%s: %q, %v", path, got, err)
		}
	}
	for path, want := range map[string]string{
		"": "not an absolute path", "relative": "not an absolute path", good + "/": "not a clean path", good + "/../good": "not a clean path",
		good + "\x1b[2J": "control character", good + "\xff": "not valid UTF-8", filepath.Join(root, "none"): "there is no folder",
		file: "is not a folder", fifo: "is not a folder", out: "in none of the folders", outside: "in none of the folders", root + "-other": "there is no folder",
		root: "keeps its data", data: "keeps its data", filepath.Dir(data): "keeps its data", "/": "keeps its data",
	} {
		if got, err := p.CheckAndResolve(path); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %q, %v; want an error with %q", path, got, err, want)
		}
	}
	if _, err := (hostpath.Policy{}).CheckAndResolve(good); !errors.Is(err, hostpath.ErrNotEnabled) {
		t.Errorf("without roots: %v", err)
	}
	if got, err := (hostpath.Policy{Roots: []string{"/"}}).CheckAndResolve(outside); err != nil || got != outside {
		t.Errorf("with root /: %q, %v", got, err)
	}
}

// resolveVar names the variable that makes the test binary resolve a folder.
const resolveVar = "HOSTPATH_TEST_RESOLVE"

func TestMain(m *testing.M) {
	if path := os.Getenv(resolveVar); path != "" {
		_, err := hostpath.Policy{Roots: []string{"/"}}.CheckAndResolve(path)
		fmt.Println(err)
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// TestResolve_RefusesWhatTheProcessMayNotUse runs CheckAndResolve as a user without the rights of root.
func TestResolve_RefusesWhatTheProcessMayNotUse(t *testing.T) {
	t.Parallel()
	const nobody = 65534
	dir, err := os.MkdirTemp("", "hostpath") //nolint:usetesting // only root may enter the parents of t.TempDir
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.RemoveAll(dir); err != nil {
			t.Error(err)
		}
	})
	program, err := os.ReadFile(os.Args[0])
	binary := filepath.Join(dir, "resolve")
	if err = errors.Join(err, os.Chmod(dir, 0o755), os.WriteFile(binary, program, 0o755)); err != nil { //nolint:gosec // another user runs it
		t.Fatal(err)
	}
	for mode, want := range map[os.FileMode]string{
		0o700: "<nil>", 0o500: "the server may not read and write ", 0o300: "the server may not read and write ", 0: "the server may not read and write ",
	} {
		folder := mkdir(t, filepath.Join(dir, mode.String()))
		cmd := exec.CommandContext(t.Context(), binary)
		cmd.Dir, cmd.Env = dir, append(os.Environ(), resolveVar+"="+folder)
		if os.Geteuid() == 0 {
			if err := os.Chown(folder, nobody, nobody); err != nil {
				t.Fatal(err)
			}
			cmd.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		}
		if err := os.Chmod(folder, mode); err != nil {
			t.Fatal(err)
		}
		if out, err := cmd.CombinedOutput(); err != nil || !strings.HasPrefix(string(out), want) {
			t.Errorf("mode %v: %s, %v; want %s", mode, out, err, want)
		}
	}
}

func TestParseRoots(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		in   []string
		want string
		ok   bool
	}{
		{nil, "", true}, {[]string{""}, "", true}, {[]string{"none"}, "", true}, {[]string{"/a/", "/"}, "/a /", true},
		{[]string{"a"}, "", false}, {[]string{"/a", "none"}, "", false}, {[]string{"/a\n"}, "", false},
	} {
		got, err := hostpath.ParseRoots("host-paths", c.in)
		if (err == nil) != c.ok || strings.Join(got, " ") != c.want || err != nil && !strings.HasPrefix(err.Error(), "host-paths: ") {
			t.Errorf("%q: %q, %v", c.in, got, err)
		}
	}
}

func TestIdentity_DiffersBetweenFolders(t *testing.T) {
	t.Parallel()
	a, b := mkdir(t, filepath.Join(t.TempDir(), "a")), t.TempDir()
	link := filepath.Join(b, "link")
	if err := os.Symlink(a, link); err != nil {
		t.Fatal(err)
	}
	one, err1 := hostpath.FolderIdentity(a)
	same, err2 := hostpath.FolderIdentity(link)
	other, err3 := hostpath.FolderIdentity(b)
	if errors.Join(err1, err2, err3) != nil || one != same || one == other || len(one) != 32 {
		t.Errorf("%q %q %q %v", one, same, other, errors.Join(err1, err2, err3))
	}
	if _, err := hostpath.FolderIdentity(filepath.Join(a, "none")); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("folder that does not exist: %v", err)
	}
}
