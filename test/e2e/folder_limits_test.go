package e2e

import (
	"encoding/json"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestRunWorkspace_WorksInALargeFolder tests that a session in the folder itself has no limit of files, of bytes or
// of kinds of files, because nothing is uploaded. The snapshot holds what fits and states that it is incomplete. A
// copy of the same folder is refused before a session is created.
func TestRunWorkspace_WorksInALargeFolder(t *testing.T) {
	t.Parallel()
	const files = 100_000
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml"), Session: session.Config{HostPaths: []string{"/"}}, Executor: executor.Config{HostPaths: []string{"/"}}})
	dir, data := project(t, map[string]string{"a.txt": "first\n"}), t.TempDir()
	in := func(name string) string { return filepath.Join(dir, name) }
	for i := range files {
		if i%1000 == 0 {
			if err := os.Mkdir(in(fmt.Sprintf("n%03d", i/1000)), 0o755); err != nil {
				t.Fatal(err)
			}
		}
		if err := syscall.Mknod(in(fmt.Sprintf("n%03d/%d", i/1000, i)), syscall.S_IFREG|0o600, 0); err != nil {
			t.Fatal(err)
		}
	}
	if code, _, says := c.RunCLI(t, dir, data, "run", "--architecture", "spool", "--model", "known-model", "--copy", "--workspace", ".", "hello"); code != 2 || !strings.Contains(says, "workspace: the folder has more than 50000 files and folders") {
		t.Errorf("a copy: %d %s", code, says)
	}
	if n := sessions(c); n != 0 {
		t.Errorf("after the refusal there are %d sessions", n)
	}

	l, err := net.Listen("unix", in("socket"))
	if err != nil {
		t.Fatal(err)
	}
	defer l.Close() //nolint:errcheck // the listener of the test
	for _, err := range []error{
		os.Symlink("/etc/passwd", in("link")), syscall.Mkfifo(in("pipe"), 0o600), os.WriteFile(in("big"), nil, 0o600), os.Truncate(in("big"), 5<<30),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
	if os.Geteuid() == 0 {
		if err := syscall.Mknod(in("device"), syscall.S_IFCHR|0o666, 1<<8|3); err != nil {
			t.Fatal(err)
		}
	}
	id, printed := runCLI(t, c, dir, data, "--workspace", ".", "run the command cat a.txt; find n0* -type f | wc -l; echo made > made.txt")
	if !strings.Contains(printed, "first") || !strings.Contains(printed, fmt.Sprint(files)) {
		t.Errorf("spool run printed %s", printed)
	}
	var synced events.WorkspaceSynced
	harness.Eventually(t, "a snapshot is taken", func() bool {
		for _, w := range eventsOf(t, c, id) {
			if w.Type == synced.EventType() {
				return json.Unmarshal(w.Data, &synced) == nil
			}
		}
		return false
	})
	if synced.Files < 20_000 || synced.Files > 20_100 || synced.Skipped == 0 { // the agent's own records are files, too
		t.Errorf("the snapshot is %+v", synced)
	}
	if l := listed(t, c, id); !l["made.txt"] || !l["link"] || l["big"] || l["pipe"] || l["socket"] || l["device"] {
		t.Errorf("the snapshot holds %d entries of the first page: made.txt %v, link %v", len(l), l["made.txt"], l["link"])
	}
	c.DeleteSession(id)
	left, err := filepath.Glob(in("n*/*"))
	if info, serr := os.Lstat(in("big")); err != nil || serr != nil || len(left) != files || info.Size() != 5<<30 {
		t.Errorf("after the session was deleted the folder has %d files; %v %v", len(left), err, serr)
	}
}

// TestRunWorkspace_RefusesAFolderThatHoldsSpoolsData tests that --yes confirms the root or the home folder, but that
// a session cannot work in a folder that contains Spool's data. The error names the flag and the remedy.
func TestRunWorkspace_RefusesAFolderThatHoldsSpoolsData(t *testing.T) {
	t.Parallel()
	home, data := project(t, map[string]string{"spool/nats/f": ""}), t.TempDir()
	c := harness.New(t, harness.Options{
		Script:  script(t, "docker.yaml"),
		Session: session.Config{HostPaths: []string{"/"}, Private: []string{filepath.Join(home, "spool")}}, Executor: executor.Config{HostPaths: []string{"/"}},
	})
	for _, dir := range []string{home, "/"} {
		code, out, says := c.RunCLI(t, home, data, "run", "--workspace", dir, "--yes", "hello")
		want := "spool: workspace: " + dir + " holds the folder in which Spool keeps its data (" + filepath.Join(home, "spool") + ")"
		if code != 2 || out != "" || !strings.HasPrefix(says, want) || !strings.Contains(says, "--copy") || strings.Count(says, "\n") != 1 {
			t.Errorf("%s: %d %s%s\nwant %s", dir, code, out, says, want)
		}
	}
	if n := sessions(c); n != 0 {
		t.Errorf("after the refusals there are %d sessions", n)
	}
}

// userFile creates a file that belongs to a user.
func userFile(t *testing.T, user *syscall.Credential, path, content string, mode os.FileMode) {
	t.Helper()
	dir := filepath.Dir(path)
	for _, err := range []error{
		os.MkdirAll(dir, 0o755), os.Chown(dir, int(user.Uid), int(user.Gid)), os.WriteFile(path, []byte(content), 0o600),
		os.Chmod(path, mode), os.Chown(path, int(user.Uid), int(user.Gid)),
	} {
		if err != nil {
			t.Fatal(err)
		}
	}
}

// TestRunWorkspace_RefusesWhatTheUserMayNotRead tests that a file or a folder that the user may not read is refused
// by name before a session is created, unless it is ignored. No session works in the folder of a user other than the
// server's.
func TestRunWorkspace_RefusesWhatTheUserMayNotRead(t *testing.T) {
	t.Parallel()
	user, dir, data := harness.UnprivilegedUser(t)
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml"), Session: session.Config{HostPaths: []string{"/"}}, Executor: executor.Config{HostPaths: []string{"/"}}})
	userFile(t, user, filepath.Join(dir, "fine/f"), "1", 0o600)
	userFile(t, user, filepath.Join(dir, "file/closed"), "2", 0)
	userFile(t, user, filepath.Join(dir, "folder/locked/f"), "3", 0o600)
	if err := os.Chmod(filepath.Join(dir, "folder/locked"), 0); err != nil {
		t.Fatal(err)
	}
	run := func(folder string, flags ...string) (int, string) {
		code, out, says := c.RunCLIAs(t, user, filepath.Join(dir, folder), data, append(append([]string{"run", "--architecture", "spool", "--model", "known-model", "--workspace", "."}, flags...), "run the command ls")...)
		return code, out + says
	}
	for folder, name := range map[string]string{"file": "closed", "folder": "locked"} {
		want := fmt.Sprintf("spool: workspace: no permission to read %q: change its mode, or list it in .spoolignore", name)
		if code, says := run(folder, "--copy"); code != 2 || !strings.Contains(says, want) {
			t.Errorf("%s: %d %s, want %s", folder, code, says, want)
		}
	}
	if code, says := run("fine"); code != 2 || !strings.Contains(says, "workspace: the server does not see the folder that you see: it runs on another machine, in a container or as another user") {
		t.Errorf("in place: %d %s", code, says)
	}
	if n := sessions(c); n != 0 {
		t.Errorf("after the refusals there are %d sessions", n)
	}
	userFile(t, user, filepath.Join(dir, "folder/.spoolignore"), "locked/\n", 0o600)
	code, says := run("folder", "--copy")
	found := sessionID.FindStringSubmatch(says)
	if code != 0 || found == nil {
		t.Fatalf("with the folder ignored: %d %s", code, says)
	}
	c.DeleteSession(found[1])
}

// TestFilesPull_NamesWhatTheUserMayNotWrite tests that changes in a folder that the user may not write to are
// reported by name, and that the others are applied. No file is written partially, and a later pull applies the rest.
func TestFilesPull_NamesWhatTheUserMayNotWrite(t *testing.T) {
	t.Parallel()
	user, dir, data := harness.UnprivilegedUser(t)
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml")})
	locked := filepath.Join(dir, "locked")
	userFile(t, user, filepath.Join(dir, "open/a.txt"), "a\n", 0o644)
	userFile(t, user, filepath.Join(locked, "b.txt"), "b\n", 0o644)
	userFile(t, user, filepath.Join(locked, "gone.txt"), "gone\n", 0o644)
	code, out, says := c.RunCLIAs(t, user, dir, data, "run", "--architecture", "spool", "--model", "known-model", "--workspace", ".", "--copy",
		"run the command echo A > open/a.txt; echo B > locked/b.txt; echo N > locked/new.txt; rm locked/gone.txt")
	found := sessionID.FindStringSubmatch(says)
	if code != 0 || found == nil {
		t.Fatalf("run: %d %s%s", code, out, says)
	}
	t.Cleanup(func() { c.DeleteSession(found[1]) })
	unreadable := filepath.Join(dir, "open/a.txt")
	if err := os.Chmod(unreadable, 0); err != nil {
		t.Fatal(err)
	}
	code, out, says = c.RunCLIAs(t, user, dir, data, "files", "pull", found[1], "--yes")
	if want := `spool: dir: no permission to read "open/a.txt": change its mode and pull again`; code != 2 || !strings.Contains(says, want) {
		t.Errorf("pull over an unreadable file: %d %s%s, want %s", code, out, says, want)
	}
	for _, err := range []error{os.Chmod(unreadable, 0o644), os.Chmod(locked, 0o555)} { //nolint:gosec // the folder is read-only for this test
		if err != nil {
			t.Fatal(err)
		}
	}
	code, out, says = c.RunCLIAs(t, user, dir, data, "files", "pull", found[1], "--yes")
	if code != 1 {
		t.Errorf("pull: %d %s%s", code, out, says)
	}
	for _, name := range []string{"locked/b.txt", "locked/new.txt", "locked/gone.txt"} {
		if want := name + ": no permission to write to the folder locked: change its mode and pull again"; !strings.Contains(says, want) {
			t.Errorf("the output lacks %q: %s", want, says)
		}
	}
	holds := func(want map[string]string) {
		t.Helper()
		if got := filesIn(t, dir); fmt.Sprint(got) != fmt.Sprint(want) {
			t.Errorf("the folder has %v, want %v", got, want)
		}
	}
	holds(map[string]string{"open/a.txt": "A\n", "locked/b.txt": "b\n", "locked/gone.txt": "gone\n"})
	if err := os.Chmod(locked, 0o755); err != nil { //nolint:gosec // the folder is writable again
		t.Fatal(err)
	}
	if code, out, says := c.RunCLIAs(t, user, dir, data, "files", "pull", found[1], "--yes"); code != 0 {
		t.Errorf("pull again: %d %s%s", code, out, says)
	}
	holds(map[string]string{"open/a.txt": "A\n", "locked/b.txt": "B\n", "locked/new.txt": "N\n"})
}
