package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
)

// treeOf creates a workspace, a sibling whose name begins with the same letters, and symbolic links in and out.
func treeOf(t *testing.T) string {
	t.Helper()
	base := t.TempDir()
	dir := filepath.Join(base, "ws")
	for path, content := range map[string]string{"ws/a/b.txt": "bee", "ws/a-b": "1", "ws/a/.spool-put-X": "half", "ws-evil/secret": "secret"} {
		if err := os.MkdirAll(filepath.Dir(filepath.Join(base, path)), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(base, path), []byte(content), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	for name, target := range map[string]string{"in": "a", "out": "../ws-evil", "file": filepath.Join(base, "ws-evil/secret")} {
		if err := os.Symlink(target, filepath.Join(dir, name)); err != nil {
			t.Fatal(err)
		}
	}
	return dir
}

func TestListCommand(t *testing.T) {
	t.Parallel()
	dir := treeOf(t)
	for arg, want := range map[string]string{"": "a/ a-b a/b.txt file in out", "a": "a/b.txt", "./a/": "a/b.txt", "in": "in/b.txt"} {
		args := []string{"list", "--workspace", dir}
		if arg != "" {
			args = append(args, arg)
		}
		r := runCommand(t, "", args...)
		var got []string
		for line := range strings.Lines(r.out) {
			var e workspace.Entry
			if err := json.Unmarshal([]byte(line), &e); err != nil {
				t.Fatal(err)
			}
			if at, err := time.Parse(time.RFC3339Nano, e.ModTime); err != nil || time.Since(at) > time.Hour {
				t.Errorf("time of %+v: %v", e, err)
			}
			if e.Path == "a/b.txt" && e.Size != 3 {
				t.Errorf("size of %+v", e)
			}
			got = append(got, e.Path+map[bool]string{true: "/"}[e.Dir])
		}
		if r.code != 0 || strings.Join(got, " ") != want {
			t.Errorf("list %q: %q, exit code %d, %s", arg, got, r.code, r.err)
		}
	}
}

func TestGetPutRemoveCommands(t *testing.T) {
	t.Parallel()
	dir := treeOf(t)
	if r := runCommand(t, "", "get", "in/b.txt", "--workspace", dir); r.out != "bee" || r.code != 0 {
		t.Errorf("get: %+v", r)
	}
	r := runCommand(t, "#!/bin/sh\n", "put", "bin/x", "--workspace", dir, "--mode", "0o755")
	if r.code != 0 || r.out != `{"bytes":10,"path":"bin/x","type":"file_put"}`+"\n" {
		t.Fatalf("put: %+v", r)
	}
	if info, err := os.Stat(filepath.Join(dir, "bin/x")); err != nil || info.Mode().Perm() != 0o755 {
		t.Errorf("file: %v, %v", info, err)
	}
	// A symbolic link is replaced, not its target.
	if r := runCommand(t, "mine", "put", "file", "--workspace", dir); r.code != 0 {
		t.Errorf("put onto a symlink: %+v", r)
	}
	if got, err := os.ReadFile(dir + "-evil/secret"); err != nil || string(got) != "secret" {
		t.Errorf("the sibling's file is %q, %v", got, err)
	}
	for _, path := range []string{"out", "a"} {
		if r := runCommand(t, "", "remove", "--workspace", dir, "--", path); r.code != 0 || r.out != "" {
			t.Errorf("remove %s: %+v", path, r)
		}
		if _, err := os.Lstat(filepath.Join(dir, path)); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	if _, err := os.Stat(dir + "-evil/secret"); err != nil {
		t.Error("what a removed symlink led to is gone:", err)
	}
}

func TestPutInChunks(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	at := filepath.Join(dir, "f")
	if r := runCommand(t, "5\nhello4\n you0\n", "put", "f", "--chunked", "--workspace", dir); r.code != 0 {
		t.Fatalf("put: %+v", r)
	}
	for _, broken := range []string{"5\nhello", "5\nhel", "nonsense", "-3\nabc0\n", "99999999999999999999\n"} {
		if r := runCommand(t, broken, "put", "f", "--chunked", "--workspace", dir); r.code != 1 || !strings.Contains(r.err, "broke off") {
			t.Errorf("%q: %+v", broken, r)
		}
	}
	if got, err := os.ReadFile(at); err != nil || string(got) != "hello you" {
		t.Errorf("content %q, %v", got, err)
	}
	if left, err := os.ReadDir(dir); err != nil || len(left) != 1 {
		t.Errorf("left behind: %v, %v", left, err)
	}
}

func TestFileCommandsExitCodes(t *testing.T) {
	t.Parallel()
	dir := treeOf(t)
	none := []string{"none", "a/none", "none/deep"}
	outside := []string{"..", "../ws-evil/secret", "/etc/passwd", dir + "/a-b", "a/../../ws-evil/secret", "out/secret"}
	for _, command := range []string{"get", "list", "remove", "put"} {
		cases := map[int][]string{3: none, 4: outside, 6: {"nul\n/.."}}
		switch command {
		case "put":
			cases = map[int][]string{4: outside, 6: {".", "a"}}
		case "get":
			cases[4] = append(slices.Clone(outside), "file")
			cases[6] = append(cases[6], ".", "a", "in")
		case "list":
			cases[4] = append(slices.Clone(outside), "out")
			cases[6] = nil
		case "remove":
			cases[6] = append(cases[6], ".")
		}
		for code, paths := range cases {
			for _, path := range paths {
				r := runCommand(t, "x", command, "--workspace", dir, "--", path)
				if r.code != code || strings.Count(r.err, "\n") != 1 || !strings.HasPrefix(r.err, "runner: ") || r.out != "" {
					t.Errorf("%s %q: %+v, want exit code %d", command, path, r, code)
				}
			}
		}
	}
	if r := runCommand(t, "", "get", "x", "--workspace", dir+"/none"); r.code != 1 || !strings.Contains(r.err, "workspace") {
		t.Errorf("no workspace: %+v", r)
	}
	if r := runCommand(t, "", "get", "a-b"); r.code != 2 {
		t.Errorf("no workspace given: %+v", r)
	}
}
