package e2e

import (
	"encoding/json"
	"io/fs"
	"maps"
	"net/http"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// project creates a user's folder with the given files.
func project(t *testing.T, files map[string]string) string {
	t.Helper()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	for name, content := range files {
		full := filepath.Join(dir, name)
		if err := os.MkdirAll(filepath.Dir(full), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(full, []byte(content), 0o644); err != nil { //nolint:gosec // like the file of a user
			t.Fatal(err)
		}
	}
	return dir
}

// filesIn returns the content of the files in a folder, by path.
func filesIn(t *testing.T, dir string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(dir, func(p string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(p)
		if err != nil {
			return err
		}
		rel, err := filepath.Rel(dir, p)
		out[filepath.ToSlash(rel)] = string(raw)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

var sessionID = regexp.MustCompile(`spool run --session (ses_\w+)`)

// runCLI runs a query with the command line tool, which must succeed, and returns its session and all its output.
func runCLI(t *testing.T, c *harness.Cluster, folder, data string, args ...string) (session, printed string) {
	t.Helper()
	code, out, says := c.RunCLI(t, folder, data, append([]string{"run", "--architecture", "spool", "--model", "known-model"}, args...)...)
	found := sessionID.FindStringSubmatch(says)
	if code != 0 || found == nil {
		t.Fatalf("spool run %q ended with %d\n%s\n%s", args, code, out, says)
	}
	return found[1], out + says
}

func listed(t *testing.T, c *harness.Cluster, session string) map[string]bool {
	t.Helper()
	status, raw := request(t, "GET", c.URL(0)+"/api/sessions/"+session+"/files", nil, nil)
	if status != http.StatusOK {
		return nil
	}
	var l struct{ Files []struct{ Path string } }
	if err := json.Unmarshal(raw, &l); err != nil {
		t.Fatal(err)
	}
	out := map[string]bool{}
	for _, f := range l.Files {
		out[f.Path] = true
	}
	return out
}

// TestRunWorkspace_WorksInTheFolderItself tests that a local session with a folder works in the folder, states that,
// keeps ignored files out of snapshots, never restores over the folder, and leaves it alone when the session is
// deleted.
func TestRunWorkspace_WorksInTheFolderItself(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml"), Session: session.Config{HostPaths: []string{"/"}}, Executor: executor.Config{HostPaths: []string{"/"}}})
	dir, data := project(t, map[string]string{"a.txt": "first\n", ".gitignore": "*.log\n", "big.log": "log\n", "sub/b.txt": "b\n", ".git/HEAD": "ref\n"}), t.TempDir()

	id, printed := runCLI(t, c, dir, data, "--workspace", ".", "run the command cat a.txt; echo made > made.txt; pwd")
	if !strings.Contains(printed, "first") || !strings.Contains(printed, "the agent works in "+dir+" itself") || !strings.Contains(printed, "nothing is isolated") {
		t.Errorf("spool run printed %s", printed)
	}
	if got := filesIn(t, dir); got["made.txt"] != "made\n" {
		t.Errorf("the folder has %v", got)
	}
	harness.Eventually(t, "the snapshot has what is not ignored", func() bool {
		l := listed(t, c, id)
		return l["made.txt"] && l["sub/b.txt"] && !l["big.log"] && !l[".git/HEAD"]
	})

	other, printed := runCLI(t, c, filepath.Join(dir, "sub"), data, "--workspace", ".", "run the command cat b.txt")
	if !strings.Contains(printed, "session "+id+" also works in "+dir) {
		t.Errorf("in the other session spool run printed %s", printed)
	}

	// The sandbox ends, and the user edits a file meanwhile. No snapshot is restored over the edit.
	if status, raw := request(t, "POST", c.URL(0)+"/api/sessions/"+id+"/environment/terminate", nil, nil); status/100 != 2 {
		t.Fatalf("terminate answered %d %s", status, raw)
	}
	harness.Eventually(t, "the sandbox is given up", func() bool { return len(harness.FindProcesses(dir+"\x00")) == 0 || terminated(t, c, id) })
	if err := os.WriteFile(filepath.Join(dir, "a.txt"), []byte("second\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if code, out, says := c.RunCLI(t, dir, data, "run", "--session", id, "run the command cat a.txt"); code != 0 || !strings.Contains(out, "second") {
		t.Errorf("after the sandbox ended: %d %s %s", code, out, says)
	}

	before := filesIn(t, dir)
	c.DeleteSession(id)
	c.DeleteSession(other)
	if after := filesIn(t, dir); len(after) != len(before) || after["a.txt"] != "second\n" || after["made.txt"] != "made\n" {
		t.Errorf("after the sessions were deleted the folder has %v, before %v", after, before)
	}
}

func terminated(t *testing.T, c *harness.Cluster, id string) bool {
	t.Helper()
	var s struct{ CurrentSandbox struct{ State string } }
	c.Call(0, "GET", "/api/sessions/"+id, nil, &s)
	return s.CurrentSandbox.State == "terminated"
}

// TestHostPath_IsRefusedByName tests that a folder that does not exist, is not a folder, belongs to the installation
// or is not allowed is refused with a typed error, and that no session is created.
func TestHostPath_IsRefusedByName(t *testing.T) {
	t.Parallel()
	dir := project(t, map[string]string{"allowed/f": "", "other/f": ""})
	c := harness.New(t, harness.Options{
		Script:  script(t, "docker.yaml"),
		Session: session.Config{HostPaths: []string{filepath.Join(dir, "allowed")}, Private: []string{filepath.Join(dir, "own")}},
	})
	for path, want := range map[string]string{
		filepath.Join(dir, "none"): "there is no folder", filepath.Join(dir, "allowed/f"): "is not a folder",
		filepath.Join(dir, "other"): "in none of the folders", "/": "keeps its data",
	} {
		var p struct{ Code, Field, Detail string }
		status := c.Call(0, "POST", "/api/sessions", map[string]any{"sessionOptions": map[string]any{"hostPath": path}}, &p)
		if status != http.StatusForbidden || p.Code != "HOST_PATH_REFUSED" || p.Field != "sessionOptions.hostPath" || !strings.Contains(p.Detail, want) {
			t.Errorf("%s: %d %+v", path, status, p)
		}
	}
	for _, body := range []map[string]any{
		{"sessionOptions": map[string]any{"hostPath": "relative"}},
		{"sessionOptions": map[string]any{"hostPath": dir + "/a\nb"}},
		{"sessionOptions": map[string]any{"hostPath": filepath.Join(dir, "allowed")}, "workspaceFiles": []map[string]any{{"path": "f", "content": "x"}}},
	} {
		var p struct{ Code, Field string }
		if status := c.Call(0, "POST", "/api/sessions", body, &p); status != http.StatusBadRequest || p.Code != "INVALID_REQUEST" {
			t.Errorf("%v: %d %+v", body, status, p)
		}
	}
	var p struct{ Code, SessionID string }
	body := map[string]any{"sessionOptions": map[string]any{"hostPath": filepath.Join(dir, "allowed"), "hostPathIdentity": "0123"}}
	if status := c.Call(0, "POST", "/api/sessions", body, &p); status != http.StatusForbidden || p.Code != "HOST_PATH_REFUSED" {
		t.Errorf("a path of another machine: %d %+v", status, p)
	}
	body = map[string]any{"sessionOptions": map[string]any{"hostPath": filepath.Join(dir, "allowed")}}
	if status := c.Call(0, "POST", "/api/sessions", body, &p); status != http.StatusCreated {
		t.Fatalf("an allowed one: %d %+v", status, p)
	}
	id := p.SessionID
	var s struct{ SessionOptions struct{ HostPath string } }
	harness.Eventually(t, "the session is read", func() bool { return c.Call(0, "GET", "/api/sessions/"+id, nil, &s) == http.StatusOK })
	if s.SessionOptions.HostPath != filepath.Join(dir, "allowed") {
		t.Errorf("the session has %+v", s)
	}
	if status := c.Call(0, "PATCH", "/api/sessions/"+id, map[string]any{"sessionOptions": map[string]any{"hostPath": dir}}, &p); status != http.StatusBadRequest {
		t.Errorf("a change of the folder: %d %+v", status, p)
	}
}

// TestRunWorkspaceCopy_PullBringsChangesBack tests that a copy leaves the folder alone. A pull shows the changes of
// the session, applies them when it is told to, keeps modes, never overwrites local changes, and refuses links that
// leave the folder.
func TestRunWorkspaceCopy_PullBringsChangesBack(t *testing.T) {
	t.Parallel()
	pulls(t, harness.New(t, harness.Options{Script: script(t, "docker.yaml")}), "--copy")
}

// TestRunWorkspaceDocker_UploadsAndPulls tests the same with containers, for which --workspace alone means a copy.
func TestRunWorkspaceDocker_UploadsAndPulls(t *testing.T) {
	harness.NeedDocker(t)
	t.Parallel()
	pulls(t, harness.New(t, harness.Options{Docker: true, Script: script(t, "docker.yaml")}))
}

func pulls(t *testing.T, c *harness.Cluster, flags ...string) {
	t.Helper()
	files := map[string]string{
		"keep.txt": "keep\n", "edit.txt": "one\ntwo\n", "both.txt": "both\n", "gone.txt": "gone\n", "sub/mode.sh": "echo\n", "node_modules/x": "x\n",
	}
	dir, data := project(t, files), t.TempDir()
	id, printed := runCLI(t, c, dir, data, append(flags, "--workspace", ".",
		"run the command cat edit.txt; sed -i s/two/2/ edit.txt; echo theirs > both.txt; rm gone.txt; mkdir new; echo new > new/n.txt; chmod 755 sub/mode.sh; "+
			"ln -s ../edit.txt new/link; ln -s /etc/passwd bad; mkdir -p node_modules; echo y > node_modules/y; ls node_modules")...)
	t.Cleanup(func() { c.DeleteSession(id) })
	if !strings.Contains(printed, "works on a copy of "+dir+" (5 files") || !strings.Contains(printed, "spool files pull "+id) {
		t.Errorf("spool run printed %s", printed)
	}
	same := func(when string, want map[string]string) {
		t.Helper()
		if got := filesIn(t, dir); !maps.Equal(got, want) {
			t.Errorf("%s the folder has %v, want %v", when, got, want)
		}
	}
	same("after the run", files)
	if err := os.WriteFile(filepath.Join(dir, "both.txt"), []byte("mine\n"), 0o644); err != nil { //nolint:gosec // like the file of a user
		t.Fatal(err)
	}
	files["both.txt"] = "mine\n"

	code, out, says := c.RunCLI(t, dir, data, "files", "pull", id, "--dry-run")
	for _, want := range []string{
		"M edit.txt", "-two\n+2\n", "D gone.txt", "A new/\n", "A new/n.txt (4 B)", "M sub/mode.sh", "A new/link",
		"M both.txt (7 B)  CONFLICT: changed in the session and locally", "R bad  not applied: it is a link to \"/etc/passwd\"",
	} {
		if !strings.Contains(out, want) {
			t.Errorf("the changes do not show %q:\n%s%s", want, out, says)
		}
	}
	if code != 0 || strings.Contains(out, "keep.txt") || strings.Contains(out, "node_modules") {
		t.Errorf("the dry run ended with %d:\n%s%s", code, out, says)
	}
	same("after the dry run", files)
	if code, _, says := c.RunCLI(t, dir, data, "files", "pull", id); code != 2 || !strings.Contains(says, "--yes") {
		t.Errorf("without a terminal: %d %s", code, says)
	}
	same("without a yes", files)

	if code, out, says := c.RunCLI(t, dir, data, "files", "pull", id, "--yes"); code != 1 || !strings.Contains(says, "1 changes were not applied") {
		t.Errorf("pull --yes: %d %s%s", code, out, says)
	}
	files["edit.txt"], files["new/n.txt"], files["new/link"] = "one\n2\n", "new\n", "one\n2\n"
	delete(files, "gone.txt")
	same("after the pull", files)
	if info, err := os.Stat(filepath.Join(dir, "sub/mode.sh")); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("the mode is %v, %v", info.Mode(), err)
	}
	if code, out, says := c.RunCLI(t, dir, data, "files", "pull", id, "--yes", "--force"); code != 0 || !strings.Contains(says, "both.txt: the session's version replaced a local change") {
		t.Errorf("pull --force: %d %s%s", code, out, says)
	}
	files["both.txt"] = "theirs\n"
	same("after the forced pull", files)
	if code, out, says := c.RunCLI(t, dir, data, "files", "pull", id, "--yes"); code != 0 || strings.Contains(out, "M ") || strings.Contains(out, "A ") {
		t.Errorf("once more: %d %s%s", code, out, says)
	}
}

// TestFilesPull_IntoAnotherFolderLeavesTheUploadedOneDue tests that changes that were pulled into another folder are
// still due for the uploaded folder.
func TestFilesPull_IntoAnotherFolderLeavesTheUploadedOneDue(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "docker.yaml")})
	dir, other, data := project(t, map[string]string{"a.txt": "old\n"}), project(t, map[string]string{"a.txt": "old\n"}), t.TempDir()
	id, _ := runCLI(t, c, dir, data, "--copy", "--workspace", ".", "run the command echo new > a.txt")
	t.Cleanup(func() { c.DeleteSession(id) })
	for _, folder := range []struct {
		args []string
		path string
	}{{[]string{other}, other}, {nil, dir}} {
		code, out, says := c.RunCLI(t, dir, data, append([]string{"files", "pull", id, "--yes"}, folder.args...)...)
		if got := filesIn(t, folder.path); code != 0 || got["a.txt"] != "new\n" {
			t.Errorf("pull %v: ended with %d, the folder has %v: %s%s", folder.args, code, got, out, says)
		}
	}
}
