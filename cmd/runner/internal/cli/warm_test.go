package cli_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// warm requests a process without a turn.
func (c *client) warm(change ...func(*runner.Query)) runner.Reply {
	c.t.Helper()
	q := runner.Query{Architecture: "script"}
	for _, f := range change {
		f(&q)
	}
	return c.ask(runner.Command{Op: runner.OpWarm, Query: &q})
}

func TestWarmedUpProcessTakesTheFirstQuery(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	r := c.warm()
	if r.Error != nil || r.Status == nil || r.Status.AgentPID == 0 || r.Status.Architecture != "script" || r.Status.ExecutionID != "" {
		t.Fatalf("warm: %+v", r)
	}
	if again := c.warm(); again.Error != nil || again.Status.AgentPID != r.Status.AgentPID {
		t.Errorf("warm again: %+v", again)
	}
	// The query determines its session.
	one := decode[runner.TurnStart](t, c.run("exe_1", "say a")[0])
	if !one.Warm || one.PID != r.Status.AgentPID {
		t.Errorf("the first query: %+v, warmed %d", one, r.Status.AgentPID)
	}
	if two := decode[runner.TurnStart](t, c.run("exe_2", "say b")[0]); !two.Warm || two.PID != one.PID {
		t.Errorf("the second: %+v", two)
	}
	// From now on it belongs to that session.
	other := decode[runner.TurnStart](t, c.run("exe_3", "say c", func(q *runner.Query) { q.SessionID = "ses_2" })[0])
	if other.Warm || other.PID == one.PID {
		t.Errorf("another session: %+v", other)
	}
}

func TestWarmedUpProcessThatDoesNotFit(t *testing.T) {
	t.Parallel()
	for name, change := range map[string]func(*runner.Query){
		"model":       func(q *runner.Query) { q.Model = "m2" },
		"environment": func(q *runner.Query) { q.Env = map[string]string{"SECRET": "of the session"} },
		"resumed":     func(q *runner.Query) { q.Resume = "s-1" },
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			c := serveRunner(t).attach(1, 0)
			r := c.warm()
			if r.Error != nil {
				t.Fatal(r.Error)
			}
			lines := c.run("exe_1", "args", change)
			if s := decode[runner.TurnStart](t, lines[0]); s.Warm || s.PID == r.Status.AgentPID {
				t.Errorf("started %+v", s)
			}
			if alive(r.Status.AgentPID) {
				t.Error("the warmed process lives")
			}
			if got := find[events.BlockStart](t, lines).Block.Content; name == "resumed" && got != ",s-1" {
				t.Errorf("arguments %q", got)
			}
		})
	}
}

// A process for an existing session can be warmed up too, and resumes the session.
func TestWarmUpOfASession(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	c.run("exe_1", "session s-7")
	if r := c.ask(runner.Command{Op: runner.OpKill}); r.Error != nil {
		t.Fatal(r.Error)
	}
	mine := func(q *runner.Query) { q.SessionID = "ses_1" }
	r := c.warm(mine)
	if r.Error != nil {
		t.Fatal(r.Error)
	}
	lines := c.run("exe_2", "args", mine)
	if s := decode[runner.TurnStart](t, lines[0]); !s.Warm || s.PID != r.Status.AgentPID {
		t.Errorf("started %+v", s)
	}
	if got := find[events.BlockStart](t, lines).Block.Content; got != ",s-7" {
		t.Errorf("arguments %q", got)
	}
}

// A process that was started for a fork takes the query of that fork, and no other fork afterwards: it then knows more
// than the anchor.
func TestWarmUpOfAFork(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	fork := func(q *runner.Query) { q.SessionID, q.Resume, q.Fork = "ses_1", "s-9", &runner.Fork{Anchor: "a"} }
	r := c.warm(fork)
	if r.Error != nil {
		t.Fatal(r.Error)
	}
	lines := c.run("exe_1", "args", fork)
	one := decode[runner.TurnStart](t, lines[0])
	if !one.Warm || one.PID != r.Status.AgentPID {
		t.Errorf("started %+v, warmed %d", one, r.Status.AgentPID)
	}
	if got := find[events.BlockStart](t, lines).Block.Content; got != ",s-9,a" {
		t.Errorf("arguments %q", got)
	}
	again := decode[runner.TurnStart](t, c.run("exe_2", "say a", fork)[0])
	if again.Warm || again.PID == one.PID {
		t.Errorf("the same fork again: %+v after %+v", again, one)
	}
	own := decode[runner.TurnStart](t, c.run("exe_3", "say a", func(q *runner.Query) { q.Resume = "s-10" })[0])
	if !own.Warm || own.PID != again.PID {
		t.Errorf("the fork's next turn: %+v after %+v", own, again)
	}
}

func TestWarmedUpForkThatDoesNotFit(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	r := c.warm(func(q *runner.Query) { q.SessionID, q.Resume = "ses_1", "s-9" })
	if r.Error != nil {
		t.Fatal(r.Error)
	}
	lines := c.run("exe_1", "args", func(q *runner.Query) { q.Resume, q.Fork = "s-9", &runner.Fork{Anchor: "b"} })
	if s := decode[runner.TurnStart](t, lines[0]); s.Warm || s.PID == r.Status.AgentPID {
		t.Errorf("started %+v", s)
	}
	if got := find[events.BlockStart](t, lines).Block.Content; got != ",s-9,b" {
		t.Errorf("arguments %q", got)
	}
}

func TestWarmUp_IsRefused(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	for name, tc := range map[string]struct {
		change func(*runner.Query)
		code   string
	}{
		"architecture": {func(q *runner.Query) { q.Architecture = "cobol" }, "UNKNOWN_ARCHITECTURE"},
		"missing":      {func(q *runner.Query) { q.Model = "missing" }, "AGENT_NOT_FOUND"},
		"gone":         {func(q *runner.Query) { q.Model = "gone" }, "AGENT_NOT_FOUND"},
	} {
		if r := c.warm(tc.change); r.Error == nil || r.Error.Code != tc.code {
			t.Errorf("%s: %+v", name, r.Error)
		}
	}
	if r := c.ask(runner.Command{Op: runner.OpWarm}); r.Error == nil || !strings.Contains(r.Error.Message, "query") {
		t.Errorf("without a query: %+v", r.Error)
	}
	// While a turn runs a warm-up is refused.
	if r := c.start("exe_1", "say x\nwait"); r.Error != nil {
		t.Fatal(r.Error)
	}
	c.until(runner.AgentStarted)
	if r := c.warm(); r.Error != nil || r.Status.ExecutionID != "exe_1" {
		t.Errorf("in a turn: %+v", r)
	}
}
