package builtin_test

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A fork knows what the agent knew at the anchor, and nothing that came later.
func TestFork_KnowsNothingAfterTheAnchor(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, says("I will."), func(w http.ResponseWriter, _ *http.Request) {
		send(w,
			chunk(`{"content":"I look."}`, ""),
			chunk(`{"tool_calls":[{"index":0,"id":"call_1","function":{"name":"list_directory","arguments":"{}"}},`+
				`{"index":1,"id":"call_2","function":{"name":"list_directory","arguments":"{}"}}]}`, ""),
			chunk(`{}`, "tool_calls"), "[DONE]")
	}, says("It is empty."), says("Forgotten."), says("plum"))
	parent := newPlace(t)
	s := startSpool(t, e, parent, "", nil)
	first := s.turn("remember plum", nil)
	second := s.turn("list", nil)
	third := s.turn("forget it", nil)
	s.close()
	id := ""
	for _, l := range first {
		if l.Type == "transcript_written" {
			id = decode[events.TranscriptWritten](t, l).AgentSessionID
		}
	}
	text := func(lines []runner.JournalLine) []events.Block { return completed(t, lines, events.KindAssistantText) }
	for name, c := range map[string]struct {
		anchor  string
		history string
		last    string // the last text before the question, "" for the result of a tool
	}{
		"at the end of a turn":       {text(first)[0].Anchor, "user assistant user", "I will."},
		"at a result in a turn":      {completed(t, second, events.KindToolResult)[1].Anchor, "user assistant user assistant tool tool user", ""},
		"at the end of the next one": {text(second)[1].Anchor, "user assistant user assistant tool tool assistant user", "It is empty."},
		"at the end":                 {text(third)[0].Anchor, "user assistant user assistant tool tool assistant user assistant user", "Forgotten."},
		"of the whole conversation":  {"", "user assistant user assistant tool tool assistant user assistant user", "Forgotten."},
	} {
		t.Run(name, func(t *testing.T) {
			place := newPlace(t)
			if err := os.CopyFS(place.State, os.DirFS(parent.State)); err != nil {
				t.Fatal(err)
			}
			original := record(t, place, id)
			l := agent.Launch{Folders: place, SessionID: "ses_fork", Resume: id, Fork: &runner.Fork{Anchor: c.anchor}}
			for attempt := range 2 { // the second finds the same
				f := startLaunch(t, e, l, nil)
				lines := f.turn("which word?", nil)
				f.close()
				requests := e.seen()
				messages := requests[len(requests)-1].Messages[1:]
				var roles []string
				for _, m := range messages {
					roles = append(roles, m.Role)
				}
				if got := strings.Join(roles, " "); got != c.history {
					t.Errorf("attempt %d: history %s, want %s", attempt+1, got, c.history)
				}
				if got := fmt.Sprint(messages[len(messages)-2].Content); c.last != "" && got != c.last {
					t.Errorf("attempt %d: the history ends with %q, want %q", attempt+1, got, c.last)
				}
				for _, l := range lines {
					if l.Type == "error" || l.Type == "transcript_written" && decode[events.TranscriptWritten](t, l).AgentSessionID == id {
						t.Errorf("attempt %d: %s %s", attempt+1, l.Type, l.Data)
					}
				}
			}
			if got := record(t, place, id); got != original {
				t.Errorf("the original is\n%s\nwas\n%s", got, original)
			}
		})
	}
}

// Without the anchor the agent begins a new conversation and reports that: it never answers from entries after the
// anchor.
func TestForkWithoutItsAnchor(t *testing.T) {
	t.Parallel()
	const whole = `{"role":"user","text":"remember plum"}` + "\n" + `{"role":"assistant","text":"I will."}` + "\n"
	for name, c := range map[string]struct{ resume, content, anchor string }{
		"message beyond the end":   {"agt-1", whole, "3"},
		"message before the first": {"agt-1", whole, "0"},
		"no number":                {"agt-1", whole, "02"},
		"truncated transcript":     {"agt-1", whole[:len(whole)-5], "2"},
		"damaged transcript":       {"agt-1", "not JSON\n" + whole, "2"},
		"empty transcript":         {"agt-1", "", ""},
		"unknown session":          {"agt-2", whole, ""},
		"no session id":            {"../agt-1", whole, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEndpoint(t, says("ok"))
			place := newPlace(t)
			path, err := builtin.Adapter{}.TranscriptPath(place, "agt-1")
			if err != nil {
				t.Fatal(err)
			}
			if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
				t.Fatal(err)
			}
			if err := os.WriteFile(path, []byte(c.content), 0o600); err != nil {
				t.Fatal(err)
			}
			l := agent.Launch{Folders: place, SessionID: "ses_fork", Resume: c.resume, Fork: &runner.Fork{Anchor: c.anchor}}
			s := startLaunch(t, e, l, nil)
			s.query.ContinueAfterLoss = true
			lines := s.turn("which word?", nil)
			var told []events.Error
			for _, l := range lines {
				if l.Type == "error" {
					told = append(told, decode[events.Error](t, l))
				}
			}
			if len(told) != 1 || told[0].Code != "TRANSCRIPT_LOST" || !strings.Contains(told[0].Message, "does not know the turns before") {
				t.Errorf("told %+v", told)
			}
			if m := e.seen()[0].Messages; len(m) != 2 {
				t.Errorf("the model was asked with %+v", m)
			}
		})
	}
}

func record(t *testing.T, place agent.Folders, id string) string {
	t.Helper()
	path, err := builtin.Adapter{}.TranscriptPath(place, id)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path) //nolint:gosec // a test's
	if err != nil {
		t.Fatal(err)
	}
	return string(raw)
}
