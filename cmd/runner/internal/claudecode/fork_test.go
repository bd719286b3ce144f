package claudecode

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

const (
	parentID = "11111111-2222-4333-8444-555555555555"
	spokenID = "00000000-0000-4000-8000-000000000001"
	resultID = "00000000-0000-4000-8000-000000000002"
	laterID  = "00000000-0000-4000-8000-000000000003"
)

// original is a transcript with a text, the result of a tool, and later lines. The ids of lines occur in other fields
// as well.
var original = strings.Join([]string{
	`{"type":"user","uuid":"00000000-0000-4000-8000-000000000000","leafUuid":"` + laterID + `"}`,
	`{"type":"assistant","uuid":"` + spokenID + `"}`,
	`{"type":"user","uuid":"` + resultID + `","parentUuid":"` + spokenID + `"}`,
	`{"type":"assistant","uuid":"` + laterID + `","parentUuid":"` + resultID + `"}`,
	``,
}, "\n")

// forkable returns a launch that forks a session whose transcript was written in another workspace.
func forkable(t *testing.T, content, anchor string) agent.Launch {
	t.Helper()
	l := installed(t)
	l.Resume, l.Fork = parentID, &runner.Fork{Anchor: anchor}
	folder := filepath.Join(configDir(l.Folders), "projects", "-elsewhere")
	if err := os.MkdirAll(folder, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(folder, parentID+".jsonl"), []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return l
}

func TestCommandForks(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		anchor string
		lines  int
		args   []string
	}{
		"after a text":           {spokenID, 2, nil},
		"after a tool's result":  {resultID, 3, []string{"--resume-session-at", resultID}},
		"at the end":             {laterID, 4, nil},
		"the whole conversation": {"", 4, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := forkable(t, original, c.anchor)
			id := transcript.ForkID(l)
			for range 2 { // the second attempt makes the same copy
				args := command(t, l).Args
				if want := append([]string{"--resume", id}, c.args...); !slices.Equal(args[max(0, len(args)-len(want)):], want) {
					t.Fatalf("arguments %v, want %v at the end", args, want)
				}
				path, err := Adapter{}.TranscriptPath(l.Folders, id)
				if err != nil {
					t.Fatal(err)
				}
				raw, err := os.ReadFile(path)
				if want := strings.Join(strings.SplitAfter(original, "\n")[:c.lines], ""); err != nil || string(raw) != want {
					t.Errorf("copied\n%s\nwant\n%s\n%v", raw, want, err)
				}
				if err := os.WriteFile(path, append(raw, "{\"uuid\":\"of the first attempt\"}\n"...), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			if told := loss(t, l); len(told) != 0 {
				t.Errorf("told %v", told)
			}
			if raw, err := os.ReadFile(filepath.Join(configDir(l.Folders), "projects", "-elsewhere", parentID+".jsonl")); err != nil || string(raw) != original {
				t.Errorf("the original is\n%s\n%v", raw, err)
			}
		})
	}
}

// Without the anchor's line the agent begins a new conversation and reports that: it never answers from lines after the
// anchor.
func TestFork_FailsWithoutTheAnchorInTheTranscript(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		resume, content, anchor, message string
	}{
		"unknown anchor":       {parentID, original, "00000000-0000-4000-8000-00000000000f", "with the line"},
		"anchor of no line":    {parentID, original, "elsewhere", "with the line"},
		"truncated transcript": {parentID, original[:strings.Index(original, resultID)+40], resultID, "with the line"},
		"damaged transcript":   {parentID, "not JSON\n" + original, resultID, "with the line"},
		"empty transcript":     {parentID, "", "", "has no transcript here"},
		"foreign transcript":   {parentID, "not JSON\n", "", "has no transcript here"},
		"unknown session":      {laterID, original, "", "has no transcript here"},
		"no session id":        {"../../etc/passwd", original, "", "has no transcript here"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l := forkable(t, c.content, c.anchor)
			l.Resume = c.resume
			stale, err := Adapter{}.TranscriptPath(l.Folders, transcript.ForkID(l))
			if err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Dir(stale), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(stale, []byte("{}\n"), 0o600); err != nil {
				t.Fatal(err)
			}
			if args := command(t, l).Args; slices.Contains(args, "--resume") {
				t.Errorf("arguments %v", args)
			}
			if err := beginTurn(t, l); err == nil || err.Code != runner.CodeConversationLost || !strings.Contains(err.Message, c.message) {
				t.Errorf("a turn that needs the conversation: %v", err)
			}
			l.ContinueAfterLoss = true
			told := loss(t, l)
			if len(told) != 1 || told[0].Code != "TRANSCRIPT_LOST" || !strings.Contains(told[0].Message, c.message) ||
				!strings.Contains(told[0].Message, "does not know the turns before") {
				t.Errorf("told %+v", told)
			}
		})
	}
}

// loss returns the errors that a query of the launch begins with.
func loss(t *testing.T, l agent.Launch) []events.Error {
	t.Helper()
	st := &stage{t: t, lossy: l.ContinueAfterLoss}
	st.session = Adapter{Now: agenttest.FixedTime}.OpenSession(l, &agenttest.Stdin{})
	st.begin()
	return of[events.Error](st, "error")
}

// beginTurn returns the refusal of a query of the launch that does not allow a new conversation.
func beginTurn(t *testing.T, l agent.Launch) *runner.CommandError {
	t.Helper()
	var refusal *runner.CommandError
	err := Adapter{Now: agenttest.FixedTime}.OpenSession(l, &agenttest.Stdin{}).BeginTurn(runner.Query{Content: "hello"}, agent.NewTurn(t.Context(), agent.TurnConfig{}))
	if !errors.As(err, &refusal) {
		t.Fatalf("the query was taken: %v", err)
	}
	return refusal
}

// The transcript of a session that has run in another workspace folder is copied into the folder of this one.
func TestCommand_FindsTheTranscriptOfAnotherWorkspace(t *testing.T) {
	t.Parallel()
	l := forkable(t, original, "")
	l.Fork = nil
	l.Workspace = t.TempDir()
	if args := command(t, l).Args; !slices.Contains(args, "--resume") || !hasTranscript(l.Folders, l.Resume) {
		t.Errorf("arguments %v", args)
	}
}
