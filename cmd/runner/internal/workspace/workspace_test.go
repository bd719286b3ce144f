package workspace_test

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/workspace"
	"github.com/spoolhq/spool/pkg/sandbox"
)

// scene creates a workspace, a sibling folder with a secret, and links that try to reach it.
func scene(t *testing.T) (dir, evil string) {
	t.Helper()
	base := t.TempDir()
	dir, evil = filepath.Join(base, "ws"), filepath.Join(base, "ws-evil")
	for _, d := range []string{dir, evil, filepath.Join(dir, "sub")} {
		if err := os.MkdirAll(d, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	write(t, filepath.Join(evil, "secret"), "secret")
	write(t, filepath.Join(dir, "sub", "a.txt"), "a")
	for link, target := range map[string]string{
		"out": evil, "outfile": filepath.Join(evil, "secret"), "up": "../ws-evil", "dangling": filepath.Join(evil, "new"), "danglingup": "../ws-evil/new", "in": "sub",
	} {
		if err := os.Symlink(target, filepath.Join(dir, link)); err != nil {
			t.Fatal(err)
		}
	}
	return dir, evil
}

func write(t *testing.T, path, content string) {
	t.Helper()
	if err := os.WriteFile(path, []byte(content), 0o644); err != nil {
		t.Fatal(err)
	}
}

func TestRel(t *testing.T) {
	t.Parallel()
	dir, evil := scene(t)
	w, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	inside := map[string]string{
		"": ".", ".": ".", "a/b/new.txt": "a/b/new.txt", "sub/../sub/a.txt": "sub/a.txt", "in/a.txt": "in/a.txt", "..name": "..name",
		dir: ".", dir + "/x": "x", "/mnt/workspace": ".", "/mnt/workspace/x": "x", "/workspace/sub": "sub",
	}
	for path, want := range inside {
		if got, err := w.RelativePath(path); err != nil || got != want {
			t.Errorf("Rel(%q) = %q, %v; want %q", path, got, err, want)
		}
	}
	for _, path := range []string{
		"..", "../ws-evil/secret", "sub/../../ws-evil", evil, evil + "/secret", dir + "-evil/secret", dir + "/../ws-evil/secret", "/etc/passwd", "/workspace-evil/x", "/mnt/workspace/../x",
		"out", "out/secret", "outfile", "up/secret", "dangling", "dangling/x", "danglingup", "out/new/deep",
	} {
		if got, err := w.RelativePath(path); !errors.Is(err, sandbox.ErrOutsideWorkspace) {
			t.Errorf("Rel(%q) = %q, %v; want ErrOutside", path, got, err)
		}
	}
	if _, err := w.RelativePath("a\x00b"); err == nil {
		t.Error("a NUL was accepted")
	}
}

func TestPutReplacesAndStaysInside(t *testing.T) {
	t.Parallel()
	dir, evil := scene(t)
	w, err := workspace.Open(dir)
	if err != nil {
		t.Fatal(err)
	}
	defer w.Close()
	for _, content := range []string{"one", "two"} {
		rel, n, err := w.PutFile("new/deep/f.txt", strings.NewReader(content), 0o644)
		if err != nil || rel != "new/deep/f.txt" || n != 3 {
			t.Fatalf("put: %q %d %v", rel, n, err)
		}
		if got, err := os.ReadFile(filepath.Join(dir, rel)); err != nil || string(got) != content {
			t.Fatalf("content %q, %v", got, err)
		}
	}
	for _, path := range []string{"out/secret", "outfile", "../ws-evil/secret", ".", "sub", ""} {
		if _, _, err := w.PutFile(path, strings.NewReader("bad"), 0o644); err == nil {
			t.Errorf("put %q was accepted", path)
		}
	}
	if got, err := os.ReadFile(filepath.Join(evil, "secret")); err != nil || string(got) != "secret" {
		t.Errorf("the sibling's file is %q, %v", got, err)
	}
	if _, _, err := w.PutFile("broken", failing{}, 0o644); err == nil {
		t.Error("a broken source was accepted")
	}
	left, err := filepath.Glob(filepath.Join(dir, ".spool-*"))
	if err != nil || len(left) != 0 {
		t.Errorf("left behind: %v %v", left, err)
	}
}

type failing struct{}

func (failing) Read([]byte) (int, error) { return 0, errors.New("source broke") }
