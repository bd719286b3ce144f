package eventlog_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	sessionstate "github.com/spoolhq/spool/pkg/events/session"
)

// TestActiveEvents_YieldsTheActiveExecution tests that the events of other executions, and those after the head that was loaded, are left out.
func TestActiveEvents_YieldsTheActiveExecution(t *testing.T) {
	t.Parallel()
	for name, resolved := range map[string]bool{"without execution_resolved": false, "with execution_resolved": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := newSessionWriter(t, 4)
			life, runs, exe := session("active")
			w.write(life, 0, exe(1), events.MessageAccepted{Content: "one"}, events.ExecutionDispatched{})
			message := w.write(life, 0, exe(2), events.MessageAccepted{Content: "two"}, events.ExecutionQueued{Ahead: 1})
			w.write(runs, 1, exe(1), events.ExecutionClaimed{Epoch: 1}, events.Log{Message: "of the first"}, events.ExecutionCompleted{})
			w.write(runs, 2, exe(2), events.ExecutionClaimed{Epoch: 2})
			at := w.write(runs, 2, exe(2), events.ExecutionResolved{})
			w.write(runs, 2, exe(2), events.Log{Message: "a"}, events.Log{Message: strings.Repeat("b", 300_000)})
			w.write(runs, 2, "", events.Log{Message: "of no execution"})
			w.write(runs, 2, exe(2), events.Log{Message: "c"})
			l := &eventlog.SessionState{
				Tenant: tenant, ID: life.ID, RunHead: w.heads[runs],
				Life: sessionstate.State{Active: sessionstate.QueryRef{ExecutionID: exe(2), Message: message.Seq}},
			}
			if resolved {
				l.Run = run.State{Resolved: run.ResolvedLocation{Known: true, At: at.Seq}}
			}
			w.write(runs, 2, exe(2), events.Log{Message: "after the head"})
			var got []string
			for e, err := range (eventlog.Sessions{Log: w.log}).ActiveEvents(t.Context(), l) {
				if err != nil {
					t.Fatal(err)
				}
				if m, ok := e.Data.(events.Log); ok {
					got = append(got, m.Message[:1])
				}
			}
			if strings.Join(got, "") != "abc" {
				t.Errorf("logs %q", got)
			}
			l.RunHead = eventlog.Head{}
			for e := range (eventlog.Sessions{Log: w.log}).ActiveEvents(t.Context(), l) {
				t.Errorf("an event of a session without runs: %+v", e)
			}
		})
	}
}
