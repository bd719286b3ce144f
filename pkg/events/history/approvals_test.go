package history_test

import (
	"fmt"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
)

func TestApprovals_AreOpenUntilTheirEnd(t *testing.T) {
	t.Parallel()
	ask := func(id string) events.Payload { return events.ApprovalRequested{ApprovalID: id} }
	decide := func(id, decision string) events.Payload {
		return events.ApprovalDecided{ApprovalID: id, Decision: decision}
	}
	resolve := func(id string) events.Payload { return events.ApprovalResolved{ApprovalID: id} }
	retract := func(id string) events.Payload { return events.ApprovalRetracted{ApprovalID: id} }
	for name, c := range map[string]struct {
		list []events.Payload
		want string // phase, then id, seq and decision of the open requests
	}{
		"requested":                   {[]events.Payload{ask("a"), ask("b")}, "waiting_for_approval a@5 b@6"},
		"requested twice":             {[]events.Payload{ask("a"), ask("a")}, "waiting_for_approval a@5"},
		"decided":                     {[]events.Payload{ask("a"), decide("a", "skip"), decide("a", "approve")}, "waiting_for_approval a@5skip"},
		"resolved":                    {[]events.Payload{ask("a"), decide("a", "skip"), resolve("a")}, "running"},
		"one of two is resolved":      {[]events.Payload{ask("a"), ask("b"), resolve("a")}, "waiting_for_approval b@6"},
		"retracted":                   {[]events.Payload{ask("a"), retract("a"), decide("a", "skip")}, "running"},
		"paused":                      {[]events.Payload{ask("a"), events.ExecutionPaused{}}, "paused a@5"},
		"resumed":                     {[]events.Payload{ask("a"), events.ExecutionPaused{}, events.ExecutionResumed{}}, "waiting_for_approval a@5"},
		"retracted while paused":      {[]events.Payload{ask("a"), events.ExecutionPaused{}, retract("a"), events.ExecutionResumed{}}, "running"},
		"the attempt failed":          {[]events.Payload{ask("a"), retract("a"), events.AttemptFailed{}}, "starting"},
		"the execution ended":         {[]events.Payload{ask("a"), events.ExecutionCompleted{}}, ""},
		"requested after it ended":    {[]events.Payload{events.ExecutionCompleted{}, ask("a")}, ""},
		"an unknown one is retracted": {[]events.Payload{retract("a")}, "running"},
	} {
		var s history.State
		for _, d := range append([]events.Payload{events.SessionCreated{}, events.MessageAccepted{}, events.ExecutionDispatched{}, events.ExecutionStarted{Attempt: 1}}, c.list...) {
			s = history.Fold(s, events.Event{ExecutionID: "exe_1", Data: d})
		}
		got := ""
		if len(s.Executions) > 0 {
			got = s.Executions[0].Phase
		}
		for _, a := range s.Approvals {
			got += fmt.Sprintf(" %s@%d%s", a.ID, a.Seq, a.Decision)
		}
		if got != c.want {
			t.Errorf("%s: got %q, want %q", name, got, c.want)
		}
	}
}

// TestNormalize_IDsOfApprovalsAreNoDifference tests that two runs that ask for the same differ only if they ask in another order.
func TestNormalize_IDsOfApprovalsAreNoDifference(t *testing.T) {
	t.Parallel()
	compare := func(decided string) string {
		a, b := history.NewEventNormalizer("ses_a"), history.NewEventNormalizer("ses_b")
		difference := ""
		for _, pair := range [][2]events.Payload{
			{events.ApprovalRequested{ApprovalID: "apr_1"}, events.ApprovalRequested{ApprovalID: "apr_8"}},
			{events.ApprovalRequested{ApprovalID: "apr_2"}, events.ApprovalRequested{ApprovalID: "apr_9"}},
			{events.ApprovalDecided{ApprovalID: "apr_2", Decision: "skip"}, events.ApprovalDecided{ApprovalID: decided, Decision: "skip"}},
		} {
			wire := func(run *history.EventNormalizer, session string, d events.Payload) history.ComparableEvent {
				w, err := events.Event{Data: d}.ToWire(session, 1, "0-1")
				if err != nil {
					t.Fatal(err)
				}
				c, ok := run.Normalize(w)
				if !ok {
					t.Fatalf("%s is not compared", w.Type)
				}
				return c
			}
			if d := history.FirstDifference(wire(a, "ses_a", pair[0]), wire(b, "ses_b", pair[1])); d != "" {
				difference = d
			}
		}
		return difference
	}
	if d := compare("apr_9"); d != "" {
		t.Errorf("equal runs differ in %s", d)
	}
	if d := compare("apr_8"); d != "data.approvalId" {
		t.Errorf("runs that decide different requests differ in %q", d)
	}
}
