package runlog_test

import (
	"errors"
	"slices"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
)

// TestExecution_Append: facts belong to the execution, and update the state of its runs.
func TestExecution_Append(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.ClaimExecution()
	head := x.Session.RunHead
	if err := x.AppendFacts(t.Context(), fact, fact); err != nil {
		t.Fatal(err)
	}
	if x.Session.RunHead.Seq == head.Seq || x.Session.RunHead.Seq != bed.LoadSession().RunHead.Seq {
		t.Errorf("the head after the append is %+v", x.Session.RunHead)
	}
	if list := bed.StoredEvents(); list[len(list)-1].ExecutionID != runlogtest.Execution {
		t.Errorf("the fact is %+v", list[len(list)-1])
	}
}

// TestExecution_AppendTo: the session stays as it is until SetStored, which leaves its life alone.
func TestExecution_AppendTo(t *testing.T) {
	t.Parallel()
	x := runlogtest.New(t).ClaimExecution()
	head := x.Session.RunHead
	stored, err := x.AppendTo(t.Context(), x.Session, x.NewEvents(fact))
	if err != nil || x.Session.RunHead.Seq != head.Seq || stored.RunHead.Seq == head.Seq {
		t.Fatalf("head %+v, stored %+v, %v", x.Session.RunHead, stored.RunHead, err)
	}
	x.Session.Life.Architecture = "codex"
	x.SetStored(stored)
	if x.Session.RunHead.Seq != stored.RunHead.Seq || x.Session.Life.Architecture != "codex" {
		t.Errorf("head %+v, architecture %q", x.Session.RunHead, x.Session.Life.Architecture)
	}
}

// TestExecution_AppendEnd: the end is the execution's, and the last event that the claim can store.
func TestExecution_AppendEnd(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.ClaimExecution()
	end := run.EndExecution{CommandMeta: bed.Writer.NewMeta(), Outcome: events.ExecutionFailed{Code: "TEST"}, With: x.NewEvents(fact)}
	if err := x.AppendEnd(t.Context(), end); err != nil {
		t.Fatal(err)
	}
	if !x.Session.Run.HasEnded(runlogtest.Execution) || !bed.LoadSession().Run.HasEnded(runlogtest.Execution) {
		t.Errorf("phase %s", x.Session.Run.Phase)
	}
	if types := bed.StoredTypes(); !slices.Contains(types, fact.EventType()) || types[len(types)-1] != (events.ExecutionFailed{}).EventType() {
		t.Errorf("stored %v", types)
	}
}

// TestExecution_Refresh: a claim of another executor fences the execution, its appends and its end.
func TestExecution_Refresh(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.ClaimExecution()
	if err := x.ReloadLife(t.Context()); err != nil {
		t.Fatal(err)
	}
	bed.ClaimExecution()
	end := run.EndExecution{CommandMeta: bed.Writer.NewMeta(), Outcome: events.ExecutionFailed{Code: "TEST"}}
	for name, err := range map[string]error{"refresh": x.ReloadLife(t.Context()), "append": x.AppendFacts(t.Context(), fact), "end": x.AppendEnd(t.Context(), end)} {
		if !errors.Is(err, run.ErrFenced) {
			t.Errorf("%s after another claim: %v", name, err)
		}
	}
}
