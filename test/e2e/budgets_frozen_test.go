package e2e

import (
	"crypto/rand"
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// frozenBudgets is a cluster whose only copy of the session service can be frozen. The test acts as another copy, which accepts messages and
// does nothing else.
type frozenBudgets struct {
	t        *testing.T
	c        *harness.Cluster
	js       jetstream.JetStream
	sessions eventlog.Sessions
	service  *harness.SessionProcess
}

func newFrozenBudgets(t *testing.T) *frozenBudgets {
	t.Helper()
	c := harness.New(t, harness.Options{Outages: true})
	f := &frozenBudgets{t: t, c: c, sessions: eventlog.Sessions{Log: c.Servers.Log}, service: c.StartSessionProcess()}
	c.StopSessions()
	nc, _, err := c.Servers.Connect("")
	f.must(err)
	t.Cleanup(nc.Close)
	f.js, err = jetstream.New(nc)
	f.must(err)
	return f
}

func (f *frozenBudgets) must(err error) {
	f.t.Helper()
	if err != nil {
		f.t.Fatal(err)
	}
}

func (f *frozenBudgets) load(id string) *eventlog.SessionState {
	f.t.Helper()
	l, err := f.sessions.Load(f.t.Context(), harness.DefaultTenant, id, eventlog.LeaderOnly)
	f.must(err)
	return l
}

func (f *frozenBudgets) newID(kind events.IDKind) string {
	f.t.Helper()
	id, err := events.NewID(kind, time.Now(), rand.Reader)
	f.must(err)
	return id
}

// runFirst runs a session's first turn to its end, and freezes the session service when the agent has started.
func (f *frozenBudgets) runFirst(id string) (execution string) {
	f.t.Helper()
	execution = f.c.PostMessage(id, program)
	harness.Eventually(f.t, "the first turn has started", func() bool { l := f.load(id); return l.Run.Execution == execution && l.Run.Attempt > 0 })
	f.service.Freeze()
	harness.Eventually(f.t, "the first turn has ended", func() bool { return f.load(id).Run.HasEnded(execution) })
	return execution
}

// post accepts a message as the session service does, and publishes a job for the session.
func (f *frozenBudgets) post(id string) (execution string) {
	f.t.Helper()
	l := f.load(id)
	execution = f.newID(events.KindExecution)
	command := f.newID(events.KindCommand)
	list, err := session.Decide(l.Life, session.PostQuery{
		CommandBase: session.CommandBase{CommandMeta: events.CommandMeta{CommandID: command, Now: time.Now().UTC()}},
		ExecutionID: execution, Content: program, ActiveEnded: l.RunView().ActiveEnded,
	})
	f.must(err)
	f.must(f.sessions.AppendLife(f.t.Context(), l, events.Actor{Kind: "service", ID: "session"}, command, list))
	job, err := topology.SessionRef{Tenant: l.Tenant, Session: id}.Encode()
	f.must(err)
	_, err = f.js.Publish(f.t.Context(), topology.EngineJobSubject(l.Run.Sandbox.Provider, l.Run.Sandbox.Engine), job)
	f.must(err)
	return execution
}

// requireNotClaimed waits until the executor has returned the job of a session's second turn to the queue, and tests that it has not claimed
// the turn.
func (f *frozenBudgets) requireNotClaimed(id, execution string) {
	f.t.Helper()
	sandbox := f.load(id).Run.Sandbox
	delivered := func() uint64 {
		c, err := f.js.Consumer(f.t.Context(), topology.StreamJobs, topology.EngineJobsDurable(sandbox.Provider, sandbox.Engine))
		f.must(err)
		return c.CachedInfo().Delivered.Consumer
	}
	before := delivered()
	harness.Eventually(f.t, "the job was delivered again", func() bool { return delivered() > before+1 || f.load(id).Run.Execution == execution })
	if f.load(id).Run.Execution == execution {
		f.t.Errorf("the second turn of %s was claimed or ended although the usage of the first one is not counted", id)
	}
}

// requireRefused waits for the end of a turn, which must have failed with a code before it started.
func (f *frozenBudgets) requireRefused(id, execution, code, message string) {
	f.t.Helper()
	harness.Eventually(f.t, "the second turn has ended", func() bool { return f.load(id).Run.HasEnded(execution) })
	for n, err := range eventlog.SessionEvents(f.t.Context(), f.c.Servers.Log, harness.DefaultTenant, id) {
		f.must(err)
		if n.Event.ExecutionID != execution {
			continue
		}
		if _, ok := n.Event.Data.(events.ExecutionStarted); ok {
			f.t.Errorf("the second turn of %s started", id)
		}
		if failed, ok := n.Event.Data.(events.ExecutionFailed); events.IsTerminal(n.Event.Type()) && (!ok || failed.Code != code || !strings.Contains(failed.Message, message)) {
			f.t.Errorf("the second turn of %s ended with %+v, want %s: …%s…", id, n.Event.Data, code, message)
		}
	}
}

// TestBudgets_HoldWhileTheSessionServiceIsFrozen tests that no second turn of a session starts beyond a budget of the session, a budget of
// the tenant or the tenant's limit of events while a session service is frozen. An executor applies the budget of a session by itself. The
// budgets and limits of the tenant apply when the frozen copy continues or another copy counts the usage.
func TestBudgets_HoldWhileTheSessionServiceIsFrozen(t *testing.T) {
	t.Parallel()
	f := newFrozenBudgets(t)
	defer f.service.Continue()
	for name, limit := range map[string]any{"turns": 1, "tokens": 1, "timeMs": 1} {
		id := f.c.CreateSession("spool", map[string]any{"sessionOptions": map[string]any{"budget": map[string]any{name: limit}}})
		f.runFirst(id)
		f.requireRefused(id, f.post(id), "BUDGET_EXCEEDED", "the session has")
		f.service.Continue()
	}

	var now struct {
		Used struct{ EventsPerDay float64 }
	}
	f.c.Call(0, "PUT", "/api/limits", map[string]any{"limits": map[string]any{"eventsPerDay": 1 << 40}}, nil)
	f.c.Call(0, "GET", "/api/limits", nil, &now)
	id := f.c.CreateSession("spool", nil)
	const beforeTheEnd = 12 // fewer events than the session has when its first turn has ended
	f.c.Call(0, "PUT", "/api/limits", map[string]any{"limits": map[string]any{"eventsPerDay": now.Used.EventsPerDay + beforeTheEnd}}, nil)
	f.runFirst(id)
	second := f.post(id)
	f.requireNotClaimed(id, second)
	f.service.Continue()
	f.requireRefused(id, second, "TENANT_EVENTS", "events to the log")
	f.c.Call(0, "DELETE", "/api/limits", nil, nil)

	for _, budget := range []string{"tokens", "timeMs", "turns"} {
		t.Log("tenant's budget of", budget)
		var used struct {
			Budgets []struct{ Spent map[string]float64 }
		}
		f.c.Call(0, "PUT", "/api/budgets/total", map[string]any{"budget": map[string]any{budget: 1 << 30}}, nil)
		f.c.Call(0, "GET", "/api/budgets", nil, &used)
		f.c.Call(0, "PUT", "/api/budgets/total", map[string]any{"budget": map[string]any{budget: used.Budgets[0].Spent[budget] + 1}}, nil)
		id := f.c.CreateSession("spool", nil)
		f.runFirst(id)
		second := f.post(id)
		f.requireNotClaimed(id, second)
		if budget == "turns" { // the last one
			f.c.StartSessionService("other")
		} else {
			f.service.Continue()
		}
		f.requireRefused(id, second, "BUDGET_EXCEEDED", "tenant default has")
	}
}
