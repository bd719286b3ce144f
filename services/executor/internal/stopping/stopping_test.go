package stopping

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
)

const grace = 10 * time.Second

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// A moment is a time at which a Plan gets some news, and the step that must be due then.
type moment struct {
	after       time.Duration
	aim         *session.Control
	idle        bool // the runner has not accepted the query
	missed      runner.Op
	reconnected bool
	exceeded    string
	want        Step
}

// TestPlan_Next: each step is due at its time, and the outcome names the reason.
func TestPlan_Next(t *testing.T) {
	t.Parallel()
	interrupt := &session.Control{N: 1, Kind: session.Interrupt, Reason: "interrupted"}
	cancel := &session.Control{N: 2, Kind: session.Cancel, Reason: "cancelled"}
	for name, c := range map[string]struct {
		limit   time.Duration
		moments []moment
		reason  events.Payload
	}{
		"nothing": {0, []moment{{want: StepNone}, {after: time.Hour, want: StepNone}}, nil},
		"interrupt never kills": {0, []moment{
			{aim: interrupt, want: StepInterrupt}, {after: time.Hour, want: StepNone},
		}, events.ExecutionCancelled{Reason: "interrupted"}},
		"interrupt waits for the runner": {0, []moment{
			{aim: interrupt, idle: true, want: StepNone}, {after: time.Second, want: StepInterrupt},
		}, events.ExecutionCancelled{Reason: "interrupted"}},
		"cancel": {0, []moment{
			{aim: cancel, want: StepInterrupt}, {after: grace - 1, want: StepNone}, {after: grace, want: StepKill},
			{after: 2*grace - 1, want: StepNone}, {after: 2 * grace, want: StepTerminate},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"cancel of what was never taken": {0, []moment{
			{aim: cancel, idle: true, want: StepNone}, {after: grace, idle: true, want: StepKill}, {after: 2 * grace, idle: true, want: StepTerminate},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"cancel after interrupt": {0, []moment{
			{aim: interrupt, want: StepInterrupt}, {after: time.Hour, aim: cancel, want: StepNone},
			{after: time.Hour + grace, want: StepKill},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"seen again": {0, []moment{
			{aim: cancel, want: StepInterrupt}, {after: 5 * time.Second, aim: cancel, want: StepNone}, {after: grace, aim: cancel, want: StepKill},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"commands that were missed": {0, []moment{
			{aim: cancel, want: StepInterrupt}, {missed: runner.OpInterrupt, want: StepInterrupt}, {after: grace, want: StepKill},
			{after: grace, missed: runner.OpKill, want: StepKill}, {after: 2 * grace, want: StepTerminate},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"a new stream": {0, []moment{
			{aim: cancel, want: StepInterrupt}, {after: 1, reconnected: true, want: StepInterrupt}, {after: grace, want: StepKill},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"limit": {time.Minute, []moment{
			{want: StepNone}, {after: time.Minute, want: StepInterrupt}, {after: time.Minute + grace, want: StepKill}, {after: time.Minute + 2*grace, want: StepTerminate},
		}, events.ExecutionFailed{Code: "TURN_LIMIT_EXCEEDED", Message: "the turn did not end before its limit at 2026-01-02T03:05:05Z"}},
		"a budget": {0, []moment{
			{want: StepNone}, {after: time.Second, exceeded: "all is used up", want: StepInterrupt}, {after: 2 * time.Second, exceeded: "again", want: StepNone},
			{after: time.Second + grace, want: StepKill}, {after: time.Second + 2*grace, want: StepTerminate},
		}, events.ExecutionFailed{Code: "BUDGET_EXCEEDED", Message: "all is used up"}},
		"a control is the reason also when a budget is used up": {0, []moment{
			{exceeded: "all is used up", want: StepInterrupt}, {after: time.Second, aim: cancel, want: StepNone},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"a control is the reason also past the limit": {time.Minute, []moment{
			{after: time.Minute, aim: interrupt, want: StepInterrupt},
		}, events.ExecutionCancelled{Reason: "interrupted"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := New(grace)
			limit := time.Time{}
			if c.limit > 0 {
				limit = start.Add(c.limit)
			}
			s.SetControl(session.Control{}, limit, start)
			for i, m := range c.moments {
				at := start.Add(m.after)
				if m.aim != nil {
					s.SetControl(*m.aim, limit, at)
				}
				if m.exceeded != "" {
					s.RecordExceeded("BUDGET_EXCEEDED", m.exceeded, at)
				}
				if m.missed != "" {
					s.RecordUndelivered(m.missed)
				}
				if m.reconnected {
					s.RecordReconnected()
				}
				if got := s.NextStep(at, !m.idle); got != m.want {
					t.Errorf("moment %d: %d, want %d", i, got, m.want)
				}
			}
			if got := s.TerminalEvent(events.Usage{}); got != c.reason {
				t.Errorf("reason %+v, want %+v", got, c.reason)
			}
		})
	}
}
