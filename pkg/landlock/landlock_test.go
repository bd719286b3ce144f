package landlock_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/landlock"
)

// The first argument with which the test's program calls Exec, or runs a program of bash from which a folder is hidden.
const (
	launch  = "landlock-exec"
	runBash = "landlock-bash"
)

func TestMain(m *testing.M) {
	switch {
	case len(os.Args) > 1 && os.Args[1] == launch:
		fmt.Fprintln(os.Stderr, landlock.Exec(os.Args[2:]))
		os.Exit(1)
	case len(os.Args) > 3 && os.Args[1] == runBash:
		cmd := exec.Command("bash", "-c", os.Args[3])
		cmd.Stdout, cmd.Stderr = os.Stdout, os.Stderr
		err := landlock.Rules{Hidden: []string{os.Args[2]}}.Start(cmd, os.Args[0], launch)
		if err = errors.Join(err, cmd.Wait()); err != nil {
			fmt.Fprintln(os.Stderr, err)
			os.Exit(1)
		}
		os.Exit(0)
	}
	os.Exit(m.Run())
}

// folders are a hidden folder with a visible one in it, and a folder beside it.
type folders struct{ root, hidden, visible, sockets, beside string }

func newFolders(t *testing.T) folders {
	t.Helper()
	root := t.TempDir()
	f := folders{root, filepath.Join(root, "hidden"), filepath.Join(root, "hidden/visible"), filepath.Join(root, "hidden/sockets"), filepath.Join(root, "beside")}
	for _, dir := range []string{f.visible, f.sockets, f.beside} {
		if err := os.MkdirAll(dir, 0o700); err != nil {
			t.Fatal(err)
		}
	}
	for _, file := range []string{f.hidden + "/key", f.visible + "/own", f.sockets + "/record", f.beside + "/file"} {
		if err := os.WriteFile(file, []byte("content"), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Symlink(f.hidden+"/key", f.beside+"/link"); err != nil {
		t.Fatal(err)
	}
	return f
}

func (f folders) rules() landlock.Rules {
	return landlock.Rules{Hidden: []string{f.hidden}, Visible: []string{f.visible}, Sockets: []string{f.sockets}}
}

// runShell runs a program of bash with the rules in the folder root, and returns its output and whether it succeeded.
func (f folders) runShell(t *testing.T, program string) (out string, ok bool) {
	t.Helper()
	var said strings.Builder
	command := []string{"bash", "-c", program}
	if os.Geteuid() == 0 { // the kernel lets CAP_PERFMON read the environment of every process
		command = append([]string{"setpriv", "--inh-caps=-all", "--bounding-set=-perfmon,-sys_admin"}, command...)
	}
	cmd := exec.CommandContext(t.Context(), command[0], command[1:]...)
	cmd.Dir, cmd.Stdout, cmd.Stderr = f.root, &said, &said
	if err := f.rules().Start(cmd, os.Args[0], launch); err != nil {
		t.Fatal(err)
	}
	err := cmd.Wait()
	var exit *exec.ExitError
	if err != nil && !errors.As(err, &exit) {
		t.Fatal(err)
	}
	return said.String(), err == nil
}

func TestStart_HidesTheFolderAndNothingElse(t *testing.T) {
	t.Parallel()
	if !landlock.Supported() {
		f := newFolders(t)
		if err := f.rules().Start(exec.Command("true"), os.Args[0], launch); !errors.Is(err, landlock.ErrUnsupported) {
			t.Errorf("without Landlock Start returns %v, want ErrUnsupported", err)
		}
		return
	}
	for _, c := range []struct {
		program string
		allowed bool
	}{
		{"cat hidden/key", false},
		{"cat beside/link", false},
		{"cat hidden/sockets/record", false},
		{"echo x > hidden/key", false},
		{"echo x > hidden/new", false},
		{"truncate -s 0 hidden/key", false},
		{"rm hidden/key", false},
		{"ln hidden/key beside/hard", false},
		{"ln -s /dev/null hidden/new", false},
		{"mkdir hidden/new", false},
		{"mv hidden moved", false},
		{"mv hidden/key beside/key", false},
		{"mv beside/file hidden/key", false},
		{"cp -r hidden beside/copy", false},
		{"cat /proc/" + strconv.Itoa(os.Getpid()) + "/environ", false},
		{"cat /proc/" + strconv.Itoa(os.Getpid()) + "/root/etc/passwd", false},
		{"cat beside/file hidden/visible/own /etc/passwd /proc/self/environ", true},
		{"echo x > beside/new && mv beside/new hidden/visible/ && mkdir -p beside/a/b && mv beside/a hidden/visible/a && rm -r hidden/visible/a", true},
		{"ls / . hidden > /dev/null", true},
		{"(exec 3<>/dev/null; echo a | cat > /dev/null; cat <(echo b) <<< c > /dev/null)", true},
		{"sleep 60 & kill $!; wait", true},
		{"bash -c 'cat /proc/$PPID/environ > /dev/null' && echo its parent", true},
	} {
		t.Run(c.program, func(t *testing.T) {
			t.Parallel()
			f := newFolders(t)
			out, ok := f.runShell(t, c.program)
			if ok != c.allowed {
				t.Errorf("allowed is %t, want %t: %s", ok, c.allowed, out)
			}
			if got, err := os.ReadFile(f.hidden + "/key"); err != nil || string(got) != "content" {
				t.Errorf("the hidden file is now %q, %v", got, err)
			}
		})
	}
}

func TestStart_LeavesItsOwnProcessUnrestricted(t *testing.T) {
	t.Parallel()
	if !landlock.Supported() {
		t.Skip("this kernel has no Landlock; TestStart_HidesTheFolderAndNothingElse tests that Start reports it")
	}
	f := newFolders(t)
	for range 20 {
		if out, ok := f.runShell(t, "cat hidden/key"); ok {
			t.Fatalf("the process read %q", out)
		}
		if _, err := os.ReadFile(f.hidden + "/key"); err != nil {
			t.Fatal(err)
		}
		if out, err := exec.CommandContext(t.Context(), "cat", f.hidden+"/key").CombinedOutput(); err != nil {
			t.Fatalf("a process that was started without rules: %v: %s", err, out)
		}
	}
}

// A folder above the hidden one may be one that its user can enter and not list, as /home is on machines of many users.
func TestStart_FollowsAFolderThatCannotBeListed(t *testing.T) {
	t.Parallel()
	if !landlock.Supported() {
		t.Skip("this kernel has no Landlock; TestStart_HidesTheFolderAndNothingElse tests that Start reports it")
	}
	f := newFolders(t)
	if err := os.Chmod(f.root, 0o311); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := os.Chmod(f.root, 0o700); err != nil {
			t.Error(err)
		}
	})
	for path, allowed := range map[string]bool{f.hidden + "/key": true, f.visible + "/own": false} {
		command := []string{os.Args[0], runBash, f.visible, "! ls " + f.root + " 2>/dev/null && cat " + path}
		if os.Geteuid() == 0 { // root lists every folder
			command = append([]string{"setpriv", "--inh-caps=-all", "--bounding-set=-dac_override,-dac_read_search"}, command...)
		}
		out, err := exec.CommandContext(t.Context(), command[0], command[1:]...).CombinedOutput()
		if (err == nil) != allowed {
			t.Errorf("%s: %v: %s", path, err, out)
		}
	}
}

func TestStart_RefusesRulesThatItCannotApply(t *testing.T) {
	t.Parallel()
	if !landlock.Supported() {
		t.Skip("this kernel has no Landlock; TestStart_HidesTheFolderAndNothingElse tests that Start reports it")
	}
	f := newFolders(t)
	for name, r := range map[string]landlock.Rules{
		"the root is hidden":         {Hidden: []string{"/"}},
		"a hidden folder is missing": {Hidden: []string{f.root + "/missing"}},
		"a visible path is missing":  {Hidden: []string{f.hidden}, Visible: []string{f.hidden + "/missing"}},
		"a socket folder is missing": {Hidden: []string{f.hidden}, Sockets: []string{f.hidden + "/missing"}},
	} {
		if err := r.Start(exec.Command("true"), os.Args[0], launch); err == nil {
			t.Errorf("%s: the process was started", name)
		}
	}
	if err := f.rules().Start(exec.Command(f.root+"/missing"), os.Args[0], launch); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("a missing program: %v", err)
	}
	if err := landlock.Exec([]string{"3"}); err == nil {
		t.Error("Exec without a command succeeded")
	}
}
