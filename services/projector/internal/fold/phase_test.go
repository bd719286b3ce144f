package fold_test

import (
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// TestPhase_FollowsTheEvents tests the phase of a session, its time and its totals after each event, also with rows
// that are read from the store for each commit.
func TestPhase_FollowsTheEvents(t *testing.T) {
	t.Parallel()
	steps := []struct {
		execution string
		data      events.Payload
		phase     string
		failed    string
		approvals int32
		input     int64
		cost      float64
	}{
		{"", events.SessionCreated{}, "idle", "", 0, 0, 0},
		{"exe_1", events.MessageAccepted{}, "queued", "", 0, 0, 0},
		{"exe_1", events.ExecutionDispatched{}, "queued", "", 0, 0, 0},
		{"exe_1", events.ExecutionClaimed{}, "running", "", 0, 0, 0},
		{"exe_2", events.MessageAccepted{}, "running", "", 0, 0, 0},
		{"exe_1", events.ExecutionStarted{Attempt: 1}, "running", "", 0, 0, 0},
		{"exe_1", requested("apr_1"), "waiting_for_approval", "", 1, 0, 0},
		{"exe_1", requested("apr_2"), "waiting_for_approval", "", 2, 0, 0},
		{"exe_1", requested("apr_2"), "waiting_for_approval", "", 2, 0, 0},
		{"exe_1", decided("apr_1"), "waiting_for_approval", "", 2, 0, 0},
		{"exe_1", resolved("apr_1", events.OutcomeApproved), "waiting_for_approval", "", 1, 0, 0},
		{"exe_1", events.ExecutionPaused{}, "running", "", 1, 0, 0},
		{"exe_1", events.ExecutionResumed{}, "waiting_for_approval", "", 1, 0, 0},
		{"exe_1", events.AttemptFailed{}, "running", "", 1, 0, 0},
		{"exe_1", events.ExecutionStarted{Attempt: 2}, "waiting_for_approval", "", 1, 0, 0},
		{"exe_1", retracted("apr_2"), "running", "", 0, 0, 0},
		{"exe_1", requested("apr_3"), "waiting_for_approval", "", 1, 0, 0},
		{"exe_1", events.MetadataUpdate{Usage: events.Usage{InputTokens: 3}, CostUSD: 0.5}, "waiting_for_approval", "", 1, 3, 0.5},
		{"exe_1", events.MetadataUpdate{Usage: events.Usage{InputTokens: 5}, CostUSD: 0.75}, "waiting_for_approval", "", 1, 5, 0.75},
		{"exe_1", events.ExecutionFailed{Code: "C", Usage: events.Usage{InputTokens: 6}}, "queued", "exe_1", 0, 6, 0.75},
		{"exe_2", events.ExecutionDispatched{}, "queued", "exe_1", 0, 6, 0.75},
		{"exe_2", events.ExecutionClaimed{}, "running", "exe_1", 0, 6, 0.75},
		{"exe_1", events.MetadataUpdate{Usage: events.Usage{InputTokens: 99}, CostUSD: 9}, "running", "exe_1", 0, 6, 0.75},
		{"exe_2", events.ExecutionCompleted{Usage: events.Usage{InputTokens: 4}, CostUSD: 0.25}, "idle", "", 0, 10, 1},
		{"exe_3", events.MessageAccepted{}, "queued", "", 0, 10, 1},
		{"exe_3", events.ExecutionFailed{Code: "C"}, "failed", "exe_3", 0, 10, 1},
		{"", events.SessionIdle{}, "failed", "exe_3", 0, 10, 1},
		{"exe_4", events.MessageAccepted{}, "queued", "exe_3", 0, 10, 1},
		{"exe_4", events.ExecutionWithdrawn{}, "idle", "", 0, 10, 1},
		{"exe_5", events.MessageAccepted{}, "queued", "", 0, 10, 1},
		{"exe_5", events.OpaquePayload{Name: events.Event{Data: events.ExecutionFailed{}}.Type(), Raw: []byte("{}")}, "failed", "exe_5", 0, 10, 1},
	}
	for _, limit := range []int{1, 1000} {
		m, model := newMemory(t), fold.New(3, limit)
		phase, since := "", int64(0)
		for i, step := range steps {
			e := events.Event{ExecutionID: step.execution, Time: time.Unix(int64(i), 0), Data: step.data}
			m.fold(model, fold.CommitBatch{Records: []eventlog.Record{{Position: eventlog.Position{Seq: uint64(i + 1)}, Subject: events.LifeSubject("t", "ses_1"), Events: []events.Event{e}}}})
			if step.phase != phase {
				phase, since = step.phase, int64(i)
			}
			s := m.sessions[fold.RowKey{Tenant: "t", ID: "ses_1"}]
			if s.Phase != step.phase || s.PhaseSince.Unix() != since || s.FailedExecution != step.failed || s.OpenApprovals != step.approvals || s.Input != step.input || s.CostUSD != step.cost {
				t.Errorf("with %d rows in memory, after event %d, %s of %q: phase %s since %d, failed %q, %d open approvals, %d tokens, $%v; want %+v since %d",
					limit, i, e.Type(), step.execution, s.Phase, s.PhaseSince.Unix(), s.FailedExecution, s.OpenApprovals, s.Input, s.CostUSD, step, since)
			}
		}
	}
}

// TestPhase_TotalsAreTheSumsOfTheExecutions tests the totals of sessions with any events, valid or not.
func TestPhase_TotalsAreTheSumsOfTheExecutions(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(rt *rapid.T) {
		m := newMemory(t)
		m.fold(fold.New(3, 1000), fold.CommitBatch{Records: records(rt)})
		for k, s := range m.sessions {
			var sum fold.Session
			for id, x := range m.executions {
				if id.Session == k {
					sum.OpenApprovals += x.OpenApprovals
					sum.Input += x.Input
					sum.CostUSD += x.CostUSD // multiples of 0.5, whose sums are exact
				}
			}
			if s.OpenApprovals != sum.OpenApprovals || s.Input != sum.Input || s.CostUSD != sum.CostUSD {
				rt.Fatalf("%s has %d open approvals, %d tokens, $%v; its executions have %d, %d, $%v",
					s.ID, s.OpenApprovals, s.Input, s.CostUSD, sum.OpenApprovals, sum.Input, sum.CostUSD)
			}
		}
	})
}
