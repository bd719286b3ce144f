package launchfiles_test

import (
	"io/fs"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/launchfiles"
)

// contentOf returns the content of the state folder: files with their content, links with their target, without
// folders.
func contentOf(t *testing.T, state string) map[string]string {
	t.Helper()
	out := map[string]string{}
	err := filepath.WalkDir(state, func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		rel, err := filepath.Rel(state, path)
		if err != nil {
			return err
		}
		if d.Type() == fs.ModeSymlink {
			target, err := os.Readlink(path)
			out[rel] = "-> " + target
			return err
		}
		info, err := d.Info()
		if err != nil {
			return err
		}
		if info.Mode().Perm() != 0o600 {
			t.Errorf("%s has mode %s", rel, info.Mode())
		}
		raw, err := os.ReadFile(path)
		out[rel] = string(raw)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return out
}

func lay(t *testing.T, state string, files ...agent.LaunchFile) {
	t.Helper()
	if err := launchfiles.Write(state, files); err != nil {
		t.Fatal(err)
	}
}

func TestWrite_ReplacesTheFilesOfEarlierLaunches(t *testing.T) {
	t.Parallel()
	state := filepath.Join(t.TempDir(), "state")
	lay(t, state)
	if got := contentOf(t, state); len(got) != 0 {
		t.Errorf("nothing was wanted, there is %v", got)
	}
	lay(t, state, agent.LaunchFile{Path: "a/memory.md", Content: "one"}, agent.LaunchFile{Path: "a/commands/x.md", Content: "x"}, agent.LaunchFile{Path: "a/skills/s", Link: "/skills/1"})
	own := filepath.Join(state, "a/commands/own.md")
	if err := os.WriteFile(own, []byte("the agent's own"), 0o600); err != nil {
		t.Fatal(err)
	}
	// Another runner continues with the folder, for another agent.
	lay(t, state, agent.LaunchFile{Path: "a/memory.md", Content: "two"}, agent.LaunchFile{Path: "a/skills/s", Link: "/skills/2"})
	got := contentOf(t, state)
	delete(got, "outfit.json")
	want := map[string]string{"a/memory.md": "two", "a/skills/s": "-> /skills/2", "a/commands/own.md": "the agent's own"}
	if len(got) != len(want) {
		t.Errorf("there is %v, want %v", got, want)
	}
	for k, v := range want {
		if got[k] != v {
			t.Errorf("%s is %q, want %q", k, got[k], v)
		}
	}
	lay(t, state)
	if got := contentOf(t, state); got["a/memory.md"] != "" || got["a/commands/own.md"] == "" {
		t.Errorf("in the end there is %v", got)
	}
}

// What the agent put in the place of a file, or on the way to one, is not followed.
func TestLayStaysInside(t *testing.T) {
	t.Parallel()
	state, outside := t.TempDir(), t.TempDir()
	victim := filepath.Join(outside, "memory.md")
	if err := os.WriteFile(victim, []byte("mine"), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink(victim, filepath.Join(state, "memory.md")); err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Join(state, "folder.md", "full"), 0o700); err != nil {
		t.Fatal(err)
	}
	lay(t, state, agent.LaunchFile{Path: "memory.md", Content: "ours"}, agent.LaunchFile{Path: "folder.md", Content: "ours"})
	if got := contentOf(t, state); got["memory.md"] != "ours" || got["folder.md"] != "ours" {
		t.Errorf("there is %v", got)
	}
	if err := os.Symlink(outside, filepath.Join(state, "way")); err != nil {
		t.Fatal(err)
	}
	if err := launchfiles.Write(state, []agent.LaunchFile{{Path: "way/memory.md", Content: "ours"}}); err == nil || !strings.Contains(err.Error(), "way/memory.md") {
		t.Errorf("through a link: %v", err)
	}
	if raw, err := os.ReadFile(victim); err != nil || string(raw) != "mine" {
		t.Errorf("outside: %q, %v", raw, err)
	}
	// A list that was tampered with removes nothing outside.
	if err := os.WriteFile(filepath.Join(state, "outfit.json"), []byte(`["../`+filepath.Base(outside)+`/memory.md","way/memory.md"]`), 0o600); err != nil {
		t.Fatal(err)
	}
	if err := launchfiles.Write(state, nil); err == nil {
		t.Error("a path out of the folder was taken")
	}
	if raw, err := os.ReadFile(victim); err != nil || string(raw) != "mine" {
		t.Errorf("outside: %q, %v", raw, err)
	}
}
