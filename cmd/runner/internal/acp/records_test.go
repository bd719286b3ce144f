package acp

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/runner"
)

// The records of the session are moved into the folder of the launch's workspace; those of other sessions stay.
func TestCommand_MovesRecordsIntoTheWorkspacesFolder(t *testing.T) {
	t.Parallel()
	l := agent.Launch{Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}, Command: []string{os.Args[0]}, Resume: "s1"}
	own := transcript.FolderName(l.Workspace)
	write := func(path, content string) {
		t.Helper()
		path = filepath.Join(homeDir(l), path)
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	read := func(path string) string {
		raw, err := os.ReadFile(filepath.Join(homeDir(l), path))
		if err != nil {
			return "none"
		}
		return string(raw)
	}
	write(".qwen/projects/-old/chats/s1.jsonl", `{"cwd":"/old","n":9007199254740993}`+"\n"+`{"n":2}`+"\n")
	write(".qwen/projects/-old/chats/s2.jsonl", "{}\n")
	write(".claude/projects/-old/s1/part.txt", "part")
	write(".claude/todos/s1.json", "[]")
	for range 2 {
		if _, err := (Adapter{}).Command(l); err != nil {
			t.Fatal(err)
		}
		for path, want := range map[string]string{
			".qwen/projects/" + own + "/chats/s1.jsonl": `{"cwd":"` + l.Workspace + `","n":9007199254740993}` + "\n" + `{"n":2}` + "\n",
			".qwen/projects/-old/chats/s1.jsonl":        "none",
			".qwen/projects/-old/chats/s2.jsonl":        "{}\n",
			".claude/projects/" + own + "/s1/part.txt":  "part",
			".claude/todos/s1.json":                     "[]",
		} {
			if got := read(path); got != want {
				t.Errorf("%s is %q, want %q", path, got, want)
			}
		}
	}
}

// A record that cannot be moved is lost: the turn does not run without it, and nothing outside of the home changes.
func TestCommand_RefusesRecordsThatItCannotMove(t *testing.T) {
	t.Parallel()
	for name, prepare := range map[string]func(t *testing.T, l agent.Launch, projects, outside string){
		"damaged": func(t *testing.T, _ agent.Launch, projects, _ string) {
			must(t, os.WriteFile(filepath.Join(projects, "-old", "s1.jsonl"), []byte("not JSON\n{}\n"), 0o600))
		},
		"a link out of the home": func(t *testing.T, l agent.Launch, projects, outside string) {
			must(t, os.WriteFile(filepath.Join(projects, "-old", "s1.jsonl"), []byte("{}\n"), 0o600))
			must(t, os.Symlink(outside, filepath.Join(projects, transcript.FolderName(l.Workspace))))
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := agent.Launch{Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}, Command: []string{os.Args[0]}, Resume: "s1"}
			projects, outside := filepath.Join(homeDir(l), ".x", "projects"), t.TempDir()
			must(t, os.MkdirAll(filepath.Join(projects, "-old"), 0o700))
			prepare(t, l, projects, outside)
			_, err := Adapter{}.Command(l)
			if refusal, ok := err.(*runner.CommandError); !ok || refusal.Code != runner.CodeConversationLost || !strings.Contains(refusal.Message, "s1.jsonl") { //nolint:errorlint // as the supervisor gets it
				t.Errorf("error %v", err)
			}
			if files, err := os.ReadDir(outside); err != nil || len(files) > 0 {
				t.Errorf("written outside of the home: %v, %v", files, err)
			}
			l.ContinueAfterLoss = true
			if _, err := (Adapter{}).Command(l); err != nil {
				t.Errorf("allowed: %v", err)
			}
		})
	}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
