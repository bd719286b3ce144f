package worker

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/budgets"
)

const grace = 10 * time.Second

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// moment is what is asked of a stopper, and what it has to answer.
type moment struct {
	after  time.Duration
	aim    *session.Control
	idle   bool // the runner has not taken the query
	missed runner.Op
	again  bool
	spent  string
	want   step
}

func TestStopper(t *testing.T) {
	t.Parallel()
	interrupt := &session.Control{N: 1, Kind: session.Interrupt, Reason: "interrupted"}
	cancel := &session.Control{N: 2, Kind: session.Cancel, Reason: "cancelled"}
	for name, c := range map[string]struct {
		limit   time.Duration
		moments []moment
		reason  events.Payload
	}{
		"nothing": {0, []moment{{want: doNothing}, {after: time.Hour, want: doNothing}}, nil},
		"interrupt never kills": {0, []moment{
			{aim: interrupt, want: doInterrupt}, {after: time.Hour, want: doNothing},
		}, events.ExecutionCancelled{Reason: "interrupted"}},
		"interrupt waits for the runner": {0, []moment{
			{aim: interrupt, idle: true, want: doNothing}, {after: time.Second, want: doInterrupt},
		}, events.ExecutionCancelled{Reason: "interrupted"}},
		"cancel": {0, []moment{
			{aim: cancel, want: doInterrupt}, {after: grace - 1, want: doNothing}, {after: grace, want: doKill},
			{after: 2*grace - 1, want: doNothing}, {after: 2 * grace, want: doTerminate},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"cancel of what was never taken": {0, []moment{
			{aim: cancel, idle: true, want: doNothing}, {after: grace, idle: true, want: doKill}, {after: 2 * grace, idle: true, want: doTerminate},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"cancel after interrupt": {0, []moment{
			{aim: interrupt, want: doInterrupt}, {after: time.Hour, aim: cancel, want: doNothing},
			{after: time.Hour + grace, want: doKill},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"seen again": {0, []moment{
			{aim: cancel, want: doInterrupt}, {after: 5 * time.Second, aim: cancel, want: doNothing}, {after: grace, aim: cancel, want: doKill},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"commands that were missed": {0, []moment{
			{aim: cancel, want: doInterrupt}, {missed: runner.OpInterrupt, want: doInterrupt}, {after: grace, want: doKill},
			{after: grace, missed: runner.OpKill, want: doKill}, {after: 2 * grace, want: doTerminate},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"a new stream": {0, []moment{
			{aim: cancel, want: doInterrupt}, {after: 1, again: true, want: doInterrupt}, {after: grace, want: doKill},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"limit": {time.Minute, []moment{
			{want: doNothing}, {after: time.Minute, want: doInterrupt}, {after: time.Minute + grace, want: doKill}, {after: time.Minute + 2*grace, want: doTerminate},
		}, events.ExecutionFailed{Code: "TURN_LIMIT_EXCEEDED", Message: "the turn did not end before its limit at 2026-01-02T03:05:05Z"}},
		"a budget": {0, []moment{
			{want: doNothing}, {after: time.Second, spent: "all is gone", want: doInterrupt}, {after: 2 * time.Second, spent: "again", want: doNothing},
			{after: time.Second + grace, want: doKill}, {after: time.Second + 2*grace, want: doTerminate},
		}, events.ExecutionFailed{Code: "BUDGET_EXCEEDED", Message: "all is gone"}},
		"a control is the reason also when the budget is gone": {0, []moment{
			{spent: "all is gone", want: doInterrupt}, {after: time.Second, aim: cancel, want: doNothing},
		}, events.ExecutionCancelled{Reason: "cancelled"}},
		"a control is the reason also past the limit": {time.Minute, []moment{
			{after: time.Minute, aim: interrupt, want: doInterrupt},
		}, events.ExecutionCancelled{Reason: "interrupted"}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := escalation{killAfter: grace}
			limit := time.Time{}
			if c.limit > 0 {
				limit = start.Add(c.limit)
			}
			s.aim(session.Control{}, limit, start)
			for i, m := range c.moments {
				at := start.Add(m.after)
				if m.aim != nil {
					s.aim(*m.aim, limit, at)
				}
				if m.spent != "" {
					s.exhaust(budgets.CodeExceeded, m.spent, at)
				}
				if m.missed != "" {
					s.missed(m.missed)
				}
				if m.again {
					s.again()
				}
				if got := s.next(at, !m.idle); got != m.want {
					t.Errorf("moment %d: %d, want %d", i, got, m.want)
				}
			}
			if got := s.reason(events.Usage{}); got != c.reason {
				t.Errorf("reason %+v, want %+v", got, c.reason)
			}
		})
	}
}
