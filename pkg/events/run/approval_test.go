package run

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// at returns the time n seconds after the begin of the test's execution.
func at(n int) time.Time { return time.Unix(int64(1000+n), 0).UTC() }

// approvalState returns the state of a running execution.
func approvalState() State {
	return Fold(State{}, 1, []events.Event{
		{ExecutionID: "exe", Time: at(0), Data: events.ExecutionClaimed{Epoch: 1, Turn: 1}},
		{ExecutionID: "exe", Time: at(0), Data: events.ExecutionStarted{Attempt: 1}},
	})
}

func evolve(s State, n int, p events.Payload) State {
	return Evolve(s, events.Event{ExecutionID: "exe", Time: at(n), Data: p})
}

// An execution waits as long as a request is open, and its wait is no run time.
func TestApprovals_FoldTheWait(t *testing.T) {
	s := approvalState()
	s = evolve(s, 10, events.ApprovalRequested{ApprovalID: "a", Class: "reads"})
	s = evolve(s, 11, events.ApprovalRequested{ApprovalID: "b"})
	if s.Phase != Waiting || len(s.Approvals) != 2 || s.RunMilliseconds(at(60)) != 10_000 {
		t.Fatalf("two requests: %s, %+v, ran %d ms", s.Phase, s.Approvals, s.RunMilliseconds(at(60)))
	}
	s = evolve(s, 20, events.ApprovalResolved{ApprovalID: "a", Outcome: events.OutcomeApproved, Class: "reads", All: true})
	if s.Phase != Waiting || len(s.Approved) != 1 {
		t.Fatalf("one request: %s, approved %v", s.Phase, s.Approved)
	}
	s = evolve(s, 30, events.ExecutionPaused{}) // the pause ends the wait
	if s.Phase != Paused || s.RunMilliseconds(at(60)) != 10_000 {
		t.Fatalf("paused: %s, ran %d ms", s.Phase, s.RunMilliseconds(at(60)))
	}
	s = evolve(s, 50, events.ExecutionResumed{PausedMs: 20_000})
	if s.Phase != Waiting || s.RunMilliseconds(at(60)) != 10_000 {
		t.Fatalf("resumed: %s, ran %d ms", s.Phase, s.RunMilliseconds(at(60)))
	}
	s = evolve(s, 60, events.ApprovalRetracted{ApprovalID: "b"})
	if s.Phase != Running || len(s.Approvals) > 0 || s.RunMilliseconds(at(61)) != 11_000 || s.SuspendedTime() != 50*time.Second {
		t.Fatalf("retracted: %s, %+v, ran %d ms, suspended %s", s.Phase, s.Approvals, s.RunMilliseconds(at(61)), s.SuspendedTime())
	}
	s = evolve(s, 70, events.ExecutionCompleted{})
	s = Evolve(s, events.Event{ExecutionID: "next", Time: at(80), Data: events.ExecutionClaimed{Epoch: 2, Turn: 2}})
	if s.Approved != nil || s.WaitedMs != 0 {
		t.Errorf("the next execution: %+v", s)
	}
}

// RecordEvents keeps one event for each change of a request, and no more requests than may be open.
func TestRecordEvents_DropsRepeatedApprovals(t *testing.T) {
	s := approvalState()
	var list []events.Event
	add := func(p events.Payload) { list = append(list, events.Event{ExecutionID: "exe", Time: at(1), Data: p}) }
	add(events.ApprovalRequested{ApprovalID: "a"})
	add(events.ApprovalRequested{ApprovalID: "a"})
	add(events.ApprovalResolved{ApprovalID: "unknown"})
	add(events.ApprovalRetracted{ApprovalID: "a"})
	add(events.ApprovalResolved{ApprovalID: "a"})
	d, err := Decide(s, RecordEvents{Epoch: 1, Events: list})
	if err != nil || len(d.Events) != 2 {
		t.Fatalf("%d events, %v; want the request and its retraction", len(d.Events), err)
	}
	list = nil
	for i := range events.MaxOpenApprovals + 50 {
		add(events.ApprovalRequested{ApprovalID: string(rune('a' + i))})
	}
	if d, err = Decide(s, RecordEvents{Epoch: 1, Events: list}); err != nil || len(d.Events) != events.MaxOpenApprovals {
		t.Errorf("%d requests, %v; want %d", len(d.Events), err, events.MaxOpenApprovals)
	}
}

// The end of an execution retracts its open requests before the terminal event, under the same ids in a retry.
func TestEndExecution_RetractsApprovals(t *testing.T) {
	s := evolve(evolve(approvalState(), 1, events.ApprovalRequested{ApprovalID: "a"}), 2, events.ApprovalRequested{ApprovalID: "b"})
	end := EndExecution{CommandMeta: events.CommandMeta{CommandID: "c", Now: at(9)}, Epoch: 1, ExecutionID: "exe", Outcome: events.ExecutionCancelled{Reason: "cancelled"}}
	d, err := Decide(s, end)
	if err != nil || len(d.Events) != 3 {
		t.Fatalf("%+v, %v", d.Events, err)
	}
	for i, id := range []string{"a", "b"} {
		if p, ok := d.Events[i].Data.(events.ApprovalRetracted); !ok || p != (events.ApprovalRetracted{ApprovalID: id, Reason: "execution_ended"}) {
			t.Errorf("event %d: %+v", i, d.Events[i])
		}
	}
	after := Fold(s, 1, d.Events)
	if after.Phase != Cancelled || len(after.Approvals) > 0 {
		t.Errorf("after the end: %+v", after)
	}
	again, err := Decide(Fold(s, 1, d.Events[:1]), end)
	if err != nil || len(again.Events) != 2 || again.Events[0].ID != d.Events[1].ID {
		t.Errorf("after a part of it: %+v, %v", again.Events, err)
	}
}
