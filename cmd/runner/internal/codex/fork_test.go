package codex

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

const parentID = "11111111-2222-4333-8444-555555555555"

// original is a transcript as the CLI writes it: the end of an item comes before the entry for the model. The calls a
// and b ended in the order b, a; the call p has no item.
var original = []string{
	`{"type":"session_meta","payload":{"id":"` + parentID + `","session_id":"` + parentID + `","cwd":"/w"}}`,
	`{"type":"event_msg","payload":{"type":"task_started","turn_id":"t1"}}`,
	`{"type":"event_msg","payload":{"type":"item_completed","turn_id":"t1","item":{"id":"m1"}}}`,
	`{"type":"response_item","payload":{"type":"message","id":"m1"}}`,
	`{"type":"event_msg","payload":{"type":"task_started","turn_id":"t2"}}`,
	`{"type":"turn_context","payload":{"turn_id":"t2"}}`,
	`{"type":"response_item","payload":{"type":"function_call","id":"f1","call_id":"p"}}`,
	`{"type":"response_item","payload":{"type":"function_call","id":"f2","call_id":"a"}}`,
	`{"type":"response_item","payload":{"type":"function_call","id":"f3","call_id":"b"}}`,
	`{"type":"event_msg","payload":{"type":"item_completed","turn_id":"t2","item":{"id":"b"}}}`,
	`{"type":"event_msg","payload":{"type":"item_completed","turn_id":"t2","item":{"id":"a"}}}`,
	`{"type":"response_item","payload":{"type":"function_call_output","id":"o1","call_id":"p"}}`,
	`{"type":"response_item","payload":{"type":"function_call_output","id":"o2","call_id":"a"}}`,
	`{"type":"response_item","payload":{"type":"function_call_output","id":"o3","call_id":"b"}}`,
	`{"type":"event_msg","payload":{"type":"item_completed","turn_id":"t2","item":{"id":"m2"}}}`,
	`{"type":"response_item","payload":{"type":"message","id":"m2"}}`,
	`{"type":"event_msg","payload":{"type":"task_complete","turn_id":"t2"}}`,
}

// forkable returns a launch that forks a thread with a transcript.
func forkable(t *testing.T, content, anchor string) (l agent.Launch, path string) {
	t.Helper()
	l = installed(t)
	l.Resume, l.Fork = parentID, &runner.Fork{Anchor: anchor}
	path = filepath.Join(homeDir(l.Folders), "sessions", "2026", "11", "21", "rollout-2026-11-21T20-49-08-"+parentID+".jsonl")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
	return l, path
}

func TestCommandForks(t *testing.T) {
	t.Parallel()
	content := strings.Join(original, "\n") + "\n"
	for name, c := range map[string]struct {
		anchor  string
		lines   int
		without []int
	}{
		"after a message":                         {"t1/m1", 4, nil},
		"after the call that ended last":          {"t2/a", 14, nil},
		"after the call that ended before others": {"t2/b", 14, []int{12}},
		"after a message in a later turn":         {"t2/m2", 16, nil},
		"the whole conversation":                  {"", 17, nil},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, path := forkable(t, content, c.anchor)
			id := transcript.ForkID(l)
			var want []string
			for i, line := range original[:c.lines] {
				if i == 0 {
					line = `{"payload":{"cwd":"/w","id":"` + id + `","session_id":"` + id + `"},"type":"session_meta"}`
				}
				if len(c.without) == 0 || c.without[0] != i {
					want = append(want, line)
				}
			}
			for range 2 { // the second attempt makes the same copy
				command(t, l)
				copied, err := Adapter{}.TranscriptPath(l.Folders, id)
				if err != nil {
					t.Fatal(err)
				}
				raw, err := os.ReadFile(copied) //nolint:gosec // a test's
				if err != nil || string(raw) != strings.Join(want, "\n")+"\n" {
					t.Errorf("copied\n%s\nwant\n%s\n%v", raw, strings.Join(want, "\n"), err)
				}
				if err := os.WriteFile(copied, append(raw, "{\"of\":\"the first attempt\"}\n"...), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			told, sent := opened(t, l)
			if len(told) != 0 || !strings.Contains(sent, `"thread/resume"`) || !strings.Contains(sent, id) {
				t.Errorf("told %v, sent %s", told, sent)
			}
			if raw, err := os.ReadFile(path); err != nil || string(raw) != content { //nolint:gosec // a test's
				t.Errorf("the original is\n%s\n%v", raw, err)
			}
		})
	}
}

// Without the anchor the agent begins a new conversation and reports that: it never answers from entries after the
// anchor.
func TestFork_FailsWithoutTheAnchorInTheTranscript(t *testing.T) {
	t.Parallel()
	content := strings.Join(original, "\n") + "\n"
	for name, c := range map[string]struct {
		resume, content, anchor, message string
	}{
		"unknown item":           {parentID, content, "t2/m9", "with the item"},
		"item of another turn":   {parentID, content, "t1/m2", "with the item"},
		"anchor without an item": {parentID, content, "t2", "with the item"},
		"truncated transcript":   {parentID, strings.Join(original[:15], "\n") + "\n" + original[15][:20], "t2/m2", "with the item"},
		"damaged transcript":     {parentID, "not JSON\n" + content, "t2/m2", "with the item"},
		"foreign transcript":     {parentID, "not JSON\n", "", "has no transcript here"},
		"empty transcript":       {parentID, "", "", "has no transcript here"},
		"unknown thread":         {strings.Replace(parentID, "1", "2", 1), content, "", "has no transcript here"},
		"no thread id":           {"../../etc/passwd", content, "", "has no transcript here"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			l, path := forkable(t, c.content, c.anchor)
			l.Resume = c.resume
			stale := strings.Replace(path, parentID, transcript.ForkID(l), 1)
			if c.resume == parentID {
				if err := os.WriteFile(stale, []byte(content), 0o600); err != nil {
					t.Fatal(err)
				}
			}
			command(t, l)
			if err := beginTurn(t, l); err == nil || err.Code != runner.CodeConversationLost || !strings.Contains(err.Message, c.message) {
				t.Errorf("a turn that needs the conversation: %v", err)
			}
			l.ContinueAfterLoss = true
			told, sent := opened(t, l)
			if !strings.Contains(sent, `"thread/start"`) || strings.Contains(sent, `"thread/resume"`) {
				t.Errorf("sent %s", sent)
			}
			if len(told) != 1 || told[0].Code != "TRANSCRIPT_LOST" || !strings.Contains(told[0].Message, c.message) ||
				!strings.Contains(told[0].Message, "does not know the turns before") {
				t.Errorf("told %+v", told)
			}
		})
	}
}

// opened returns the errors with which a query of the launch begins, and the lines that were sent to the CLI.
func opened(t *testing.T, l agent.Launch) ([]events.Error, string) {
	t.Helper()
	st := &stage{t: t, lossy: l.ContinueAfterLoss}
	st.session = Adapter{}.OpenSession(l, &st.in)
	st.begin()
	var sent strings.Builder
	for _, raw := range st.in.SentValues() {
		sent.Write(raw)
	}
	return of[events.Error](st, "error"), sent.String()
}

// Only an item that the model sees by itself has an anchor.
func TestAnchor(t *testing.T) {
	t.Parallel()
	s := newSession(agent.Launch{}, &agenttest.Stdin{})
	s.thread = "main"
	for name, c := range map[string]struct {
		n    notification
		i    threadItem
		want string
	}{
		"message":                {notification{ThreadID: "main", TurnID: "t"}, threadItem{Type: "agentMessage", ID: "m"}, "t/m"},
		"call":                   {notification{ThreadID: "main", TurnID: "t"}, threadItem{Type: "commandExecution", ID: "c"}, "t/c"},
		"call within a script":   {notification{ThreadID: "main", TurnID: "t"}, threadItem{Type: "commandExecution", ID: "exec-c"}, ""},
		"thought":                {notification{ThreadID: "main", TurnID: "t"}, threadItem{Type: "reasoning", ID: "r"}, ""},
		"message of a sub-agent": {notification{ThreadID: "other", TurnID: "t"}, threadItem{Type: "agentMessage", ID: "m"}, ""},
	} {
		if got := s.itemAnchor(c.n, c.i); got != c.want {
			t.Errorf("%s: anchor %q, want %q", name, got, c.want)
		}
	}
}

// beginTurn returns the refusal of a query of the launch that does not allow a new conversation.
func beginTurn(t *testing.T, l agent.Launch) *runner.CommandError {
	t.Helper()
	var refusal *runner.CommandError
	err := Adapter{}.OpenSession(l, &agenttest.Stdin{}).BeginTurn(runner.Query{Content: "hello"}, agent.NewTurn(t.Context(), agent.TurnConfig{}))
	if !errors.As(err, &refusal) {
		t.Fatalf("the query was taken: %v", err)
	}
	return refusal
}
