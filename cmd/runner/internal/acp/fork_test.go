package acp

import (
	"encoding/json"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestFork_ContinuesInTheCopiedSession(t *testing.T) {
	t.Parallel()
	const (
		hello = `{"id":1,"result":{"protocolVersion":1,"agentCapabilities":{"loadSession":true}}}`
		load  = `"method":"session/load"`
		begin = `"method":"session/new"`
	)
	copied := func(f ForkResult) string { return tells(t, Notice{Forked: &f}) }
	for name, c := range map[string]struct {
		forks   bool
		anchor  string
		lines   []string
		sent    string // the request that opens the session, "" for none
		session string
		lost    string
	}{
		"copy after the handshake":           {true, "m1", []string{hello, copied(ForkResult{Session: "s2"})}, load, "s2", ""},
		"copy before the handshake":          {true, "m1", []string{copied(ForkResult{Session: "s2"}), hello}, load, "s2", ""},
		"two copies":                         {true, "", []string{copied(ForkResult{Session: "s2"}), hello, copied(ForkResult{Session: "s3"})}, load, "s2", ""},
		"no copy yet":                        {true, "m1", []string{hello}, "", "", ""},
		"no copy":                            {true, "m1", []string{hello, copied(ForkResult{Error: "no message m1"})}, begin, "", "no message m1"},
		"whole, by an agent that only loads": {false, "", []string{hello}, load, "s1", ""},
		"cut, by an agent that only loads":   {false, "m1", []string{hello}, begin, "", "cannot cut"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			d := Dialect{Forks: c.forks, Notice: func(_ string, raw json.RawMessage) *Notice {
				var n Notice
				if err := json.Unmarshal(raw, &n); err != nil {
					t.Error(err)
				}
				return &n
			}}
			var in agenttest.Stdin
			var journal agenttest.Journal
			s := OpenSession(d, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}, Resume: "s1", Fork: &runner.Fork{Anchor: c.anchor}, ContinueAfterLoss: true}, &in)
			turn := agenttest.NewJournalTurn(t, &journal, "exe_1")
			if err := s.BeginTurn(runner.Query{Content: "hello"}, turn); err != nil {
				t.Fatal(err)
			}
			feed(t, s, turn, c.lines...)
			sent := in.SentValues()[1:]
			if c.sent == "" && len(sent) == 0 {
				return
			}
			if len(sent) != 1 || c.sent == "" || !strings.Contains(string(sent[0]), c.sent) || !strings.Contains(string(sent[0]), c.session) {
				t.Fatalf("sent %s", sent)
			}
			var lost []string
			for _, l := range journal.Lines() {
				var e events.Error
				if err := json.Unmarshal(l.Data, &e); err == nil && l.Type == e.EventType() && e.Code == "TRANSCRIPT_LOST" {
					lost = append(lost, e.Message)
				}
			}
			if (len(lost) == 1) != (c.lost != "") || c.lost != "" && (!strings.Contains(lost[0], c.lost) || !strings.Contains(lost[0], "s1")) {
				t.Errorf("lost %v", lost)
			}
		})
	}
}

// The last text of a message has the message's id as its anchor, in a dialect with anchors.
func TestAnchors(t *testing.T) {
	t.Parallel()
	const (
		text = `{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"agent_message_chunk","messageId":"M","content":{"type":"text","text":"x"}}}}`
		call = `{"method":"session/update","params":{"sessionId":"s1","update":{"sessionUpdate":"tool_call","toolCallId":"c1","title":"t","status":"completed","rawInput":{"a":1}}}}`
	)
	said := func(message string) string { return strings.Replace(text, "M", message, 1) }
	for name, c := range map[string]struct {
		anchors bool
		want    string
	}{"of a dialect that has them": {true, "m1 - m3"}, "of plain ACP": {false, "- - -"}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var journal agenttest.Journal
			s := OpenSession(Dialect{Anchors: c.anchors}, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, &agenttest.Stdin{})
			turn := agenttest.NewJournalTurn(t, &journal, "exe_1")
			if err := s.BeginTurn(runner.Query{Content: "hello"}, turn); err != nil {
				t.Fatal(err)
			}
			feed(t, s, turn, `{"id":1,"result":{"protocolVersion":1,"agentCapabilities":{}}}`, `{"id":2,"result":{"sessionId":"s1"}}`,
				said("m1"), said("m2"), call, said("m3"), `{"id":3,"result":{"stopReason":"end_turn"}}`)
			var got []string
			for _, l := range journal.Lines() {
				var d events.BlockComplete
				if err := json.Unmarshal(l.Data, &d); err != nil {
					t.Fatal(err)
				}
				switch {
				case l.Type != d.EventType() || d.Block.Kind != events.KindAssistantText:
				case d.Block.Anchor == "":
					got = append(got, "-")
				default:
					got = append(got, d.Block.Anchor)
				}
			}
			if strings.Join(got, " ") != c.want {
				t.Errorf("anchors %v, want %s", got, c.want)
			}
			agenttest.CheckAnchors(t, journal.Lines())
		})
	}
}
