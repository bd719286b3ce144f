package acp

import (
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

const promptDone = `{"id":3,"result":{"stopReason":"end_turn"}}`

// textUpdate returns an update with text of session s1.
func textUpdate(kind, message, text string) string {
	return fmt.Sprintf(`{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":%q,"messageId":%q,"content":{"type":"text","text":%q}}}}`, kind, message, text)
}

// completed returns the kinds and the contents of the completed blocks.
func completed(t *testing.T, j *agenttest.Journal) []string {
	t.Helper()
	var out []string
	for _, l := range j.Lines() {
		if l.Type != (events.BlockComplete{}).EventType() {
			continue
		}
		var c events.BlockComplete
		if err := json.Unmarshal(l.Data, &c); err != nil {
			t.Fatal(err)
		}
		out = append(out, strings.TrimSpace(string(c.Block.Kind)+" "+c.Block.Content))
	}
	return out
}

// Text that a notice reported before its update is journaled once, in the order of the updates.
func TestEarlyText_IsJournaledOnce(t *testing.T) {
	t.Parallel()
	early := func(message, piece string) string {
		return tells(t, Notice{Session: "s1", Text: &EarlyTextPiece{Message: message, Piece: piece}})
	}
	thought := func(message, piece string) string {
		return tells(t, Notice{Session: "s1", Text: &EarlyTextPiece{Message: message, Thought: true, Piece: piece}})
	}
	said := func(message, piece string) string { return textUpdate("agent_message_chunk", message, piece) }
	thinks := func(message, piece string) string { return textUpdate("agent_thought_chunk", message, piece) }
	const call = `{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"tool_call","toolCallId":"c1","title":"a tool","status":"completed"}}}`
	for name, c := range map[string]struct{ lines, want []string }{
		"updates repeat it":              {[]string{early("m", "a"), early("m", "b"), said("m", "a"), said("m", "b")}, []string{"assistant_text ab"}},
		"updates come between":           {[]string{early("m", "a"), said("m", "a"), early("m", "a"), said("m", "a")}, []string{"assistant_text aa"}},
		"updates go on":                  {[]string{early("m", "a"), said("m", "a"), said("m", "b"), said("m", "b")}, []string{"assistant_text abb"}},
		"updates have other pieces":      {[]string{early("m", "ab"), early("m", "cd"), said("m", "abc"), said("m", "de")}, []string{"assistant_text abcde"}},
		"updates leave out a piece":      {[]string{early("m", "a"), early("m", "b"), said("m", "b"), said("m", "c")}, []string{"assistant_text abc"}},
		"no update comes":                {[]string{early("m", "a")}, []string{"assistant_text a"}},
		"a notice is later than updates": {[]string{said("m", "a"), early("m", "a"), early("m", "b"), said("m", "b")}, []string{"assistant_text ab"}},
		"a thought comes first": {
			[]string{thought("p", "hm"), early("m", "a"), thinks("p", "hm"), said("m", "a"), said("m", "b")}, []string{"thinking hm", "assistant_text ab"},
		},
		"of two messages": {[]string{early("m", "a"), early("n", "a"), said("m", "a"), said("n", "a")}, []string{"assistant_text a", "assistant_text a"}},
		"after a call":    {[]string{call, early("m", "a"), said("m", "a")}, []string{"tool_use", "assistant_text a"}},
		"of a sub-agent":  {[]string{tells(t, Notice{Session: "s2", Text: &EarlyTextPiece{Message: "m", Piece: "x"}}), said("m", "a")}, []string{"assistant_text a"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			j := &agenttest.Journal{}
			s, turn := noticedIn(t, j)
			feed(t, s, turn, append(c.lines, promptDone)...)
			if got := completed(t, j); !slices.Equal(got, c.want) {
				t.Errorf("journaled %q, want %q", got, c.want)
			}
		})
	}
}

// A notice between two turns belongs to neither.
func TestEarlyText_BetweenTurnsIsIgnored(t *testing.T) {
	t.Parallel()
	j := &agenttest.Journal{}
	s, turn := noticedIn(t, j)
	feed(t, s, turn, promptDone)
	feed(t, s, agent.NewTurn(t.Context(), agent.TurnConfig{}), tells(t, Notice{Session: "s1", Text: &EarlyTextPiece{Message: "m", Piece: "late"}}))
	next := agenttest.NewJournalTurn(t, j, "exe_2")
	if err := s.BeginTurn(runner.Query{Content: "hello"}, next); err != nil {
		t.Fatal(err)
	}
	feed(t, s, next, tells(t, Notice{Session: "s1", Text: &EarlyTextPiece{Message: "n", Piece: "a"}}), textUpdate("agent_message_chunk", "n", "a"), `{"id":5,"result":{"stopReason":"end_turn"}}`)
	if got := completed(t, j); !slices.Equal(got, []string{"assistant_text a"}) {
		t.Errorf("journaled %q", got)
	}
}

// A warm agent gets a request that shows that it is alive, before the query unless it answers initialize at any time.
func TestBegin_AsksWhetherTheAgentIsAlive(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		dialect Dialect
		caps    string
		want    []string
	}{
		"list":       {caps: `{"sessionCapabilities":{"list":{}}}`, want: []string{"session/list", "session/prompt"}},
		"unknown":    {caps: `{}`, want: []string{pingMethod, "session/prompt"}},
		"initialize": {Dialect{AnswersInitialize: true}, `{"sessionCapabilities":{"list":{}}}`, []string{"session/prompt", "initialize"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			in, j := &agenttest.Stdin{}, &agenttest.Journal{}
			s := OpenSession(c.dialect, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, in)
			feed(t, s, agent.NewTurn(t.Context(), agent.TurnConfig{}), `{"id":1,"result":{"protocolVersion":1,"agentCapabilities":`+c.caps+`}}`, `{"id":2,"result":{"sessionId":"s1"}}`)
			if err := s.BeginTurn(runner.Query{Content: "hello"}, agenttest.NewJournalTurn(t, j, "exe_1")); err != nil {
				t.Fatal(err)
			}
			var methods []string
			for _, raw := range in.SentValues()[2:] {
				var m rpcMessage
				if err := json.Unmarshal(raw, &m); err != nil {
					t.Fatal(err)
				}
				methods = append(methods, m.Method)
			}
			if !slices.Equal(methods, c.want) {
				t.Errorf("sent %q", methods)
			}
		})
	}
}
