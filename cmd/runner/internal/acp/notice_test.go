package acp

import (
	"encoding/json"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// noticed opens a session s1 whose agent sends notices unchanged, and gives it a query.
func noticed(t *testing.T) (agent.Session, *agent.Turn) {
	t.Helper()
	return noticedIn(t, &agenttest.Journal{})
}

// noticedIn is noticed with a journal.
func noticedIn(t *testing.T, j *agenttest.Journal) (agent.Session, *agent.Turn) {
	t.Helper()
	d := Dialect{Notice: func(_ string, raw json.RawMessage) *Notice {
		var n Notice
		if err := json.Unmarshal(raw, &n); err != nil {
			t.Error(err)
		}
		return &n
	}}
	s := OpenSession(d, agent.Launch{Folders: agent.Folders{Workspace: t.TempDir()}}, &agenttest.Stdin{})
	turn := agenttest.NewJournalTurn(t, j, "exe_1")
	if err := s.BeginTurn(runner.Query{Content: "hello"}, turn); err != nil {
		t.Fatal(err)
	}
	feed(t, s, turn, `{"id":1,"result":{"protocolVersion":1,"agentCapabilities":{}}}`, `{"id":2,"result":{"sessionId":"s1"}}`)
	return s, turn
}

func feed(t *testing.T, s agent.Session, turn *agent.Turn, lines ...string) {
	t.Helper()
	for _, l := range lines {
		if err := s.HandleLine([]byte(l), turn); err != nil {
			t.Errorf("%s: %v", l, err)
		}
	}
	turn.RunAlarm() // the agent is quiet
}

func tells(t *testing.T, n Notice) string {
	t.Helper()
	raw, err := json.Marshal(n)
	if err != nil {
		t.Fatal(err)
	}
	return `{"method":"_x","params":` + string(raw) + `}`
}

func TestNotices_ChangeTheEndOfTheTurn(t *testing.T) {
	t.Parallel()
	one, two := events.Usage{InputTokens: 10, OutputTokens: 1}, events.Usage{InputTokens: 20, OutputTokens: 2}
	const (
		done   = `{"id":3,"result":{"stopReason":"end_turn","usage":{"inputTokens":1,"outputTokens":1,"totalTokens":2}}}`
		failed = `{"id":3,"error":{"code":-32603,"message":"no"}}`
		lost   = "the agent ended its turn without a report: its answer, or a part of it, is lost"
	)
	for name, c := range map[string]struct {
		notices []Notice
		answer  string
		want    runner.TurnEnd
	}{
		"usage of every answer": {
			[]Notice{{Session: "s1", Usage: one, CostUSD: 1}, {Session: "other", Usage: one, CostUSD: 2}}, done,
			runner.TurnEnd{Outcome: runner.OutcomeCompleted, Usage: two, CostUSD: 3},
		},
		"cut": {
			[]Notice{{Session: "s1", Usage: one, Cut: true}}, done,
			runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_ERROR", Message: "the model reached its limit of tokens", Usage: one},
		},
		"cut before, whole then": {
			[]Notice{{Session: "s1", Usage: one, Cut: true}, {Session: "s1", Usage: one}}, done,
			runner.TurnEnd{Outcome: runner.OutcomeCompleted, Usage: two},
		},
		"a sub-agent was cut": {
			[]Notice{{Session: "other", Usage: one, Cut: true}}, done,
			runner.TurnEnd{Outcome: runner.OutcomeCompleted, Usage: one},
		},
		"status": {
			[]Notice{{Session: "s1", Status: 401}, {Session: "s1"}}, failed,
			runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_UNAUTHORIZED", Message: "no"},
		},
		"a sub-agent's status": {
			[]Notice{{Session: "other", Status: 401}}, failed,
			runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_ERROR", Message: "no"},
		},
		"over without an end": {
			[]Notice{{Session: "s1", Usage: one}, {Session: "s1", Over: true}}, "",
			runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: lost, Usage: one},
		},
		"the turn before is over": {
			[]Notice{{Session: "s1", Over: true}}, done,
			runner.TurnEnd{Outcome: runner.OutcomeCompleted, Usage: events.Usage{InputTokens: 1, OutputTokens: 1}},
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s, turn := noticed(t)
			for _, n := range c.notices {
				feed(t, s, turn, tells(t, n))
			}
			if c.answer != "" {
				feed(t, s, turn, c.answer)
			}
			if got := turn.Ended(); got == nil || *got != c.want {
				t.Errorf("ended %+v, want %+v", got, c.want)
			}
			if c.want.Message == lost && s.BeginTurn(runner.Query{Content: "hello"}, turn) == nil {
				t.Error("the process is given another query")
			}
		})
	}
}
