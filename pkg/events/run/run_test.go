package run_test

import (
	"errors"
	"fmt"
	"reflect"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
)

var t0 = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

func fact(execution string, n uint64, data events.Payload) events.Event {
	return events.Event{ID: fmt.Sprint("e", n, data.EventType()), Time: t0, ExecutionID: execution, Source: events.FromServer, N: n, Data: data}
}

func given(list ...events.Event) run.State {
	var s run.State
	for i, e := range list {
		s = run.Fold(s, 0, []events.Event{e}).WithCommitSeq(uint64(i + 1))
	}
	return s
}

func claimed(x string, epoch uint64) events.Event {
	return fact(x, 0, events.ExecutionClaimed{Epoch: epoch, Executor: "x1"})
}

func opened(x, id string, n uint64) events.Event {
	return fact(x, n, events.BlockStart{Block: events.Block{ID: id, Kind: events.KindAssistantText, Status: events.StatusPending}})
}

func completed(x, id string, n uint64) events.Event {
	return fact(x, n, events.BlockComplete{Block: events.Block{ID: id, Status: events.StatusComplete}})
}

var (
	meta = events.CommandMeta{CommandID: "c", Now: t0.Add(1500 * time.Millisecond)}
	box  = fact("", 0, events.SandboxReady{SandboxID: "sbx", Provider: "local", Engine: "m1", Journal: "jnl"})
	done = fact("A", 9, events.ExecutionCompleted{})
)

func TestDecide_AppendsTheExpectedEvents(t *testing.T) {
	t.Parallel()
	five := []events.Event{claimed("A", 1), claimed("A", 2), claimed("A", 3), claimed("A", 4), claimed("A", 5)}
	end := func(epoch uint64) run.EndExecution {
		return run.EndExecution{CommandMeta: meta, Epoch: epoch, ExecutionID: "A", N: 9, Outcome: events.ExecutionCompleted{Result: "ok"}}
	}
	for _, c := range []struct {
		name  string
		given run.State
		when  run.Command
		epoch uint64
		then  string
		err   error
	}{
		{"first claim", given(), run.ClaimExecution{CommandMeta: meta, ExecutionID: "A"}, 1, "execution_claimed/A", nil},
		{"claim again", given(claimed("A", 1)), run.ClaimExecution{CommandMeta: meta, ExecutionID: "A"}, 2, "execution_claimed/A", nil},
		{"claim what has ended", given(claimed("A", 1), done), run.ClaimExecution{CommandMeta: meta, ExecutionID: "A"}, 0, "", run.ErrEnded},
		{"claim the next", given(claimed("A", 1), done), run.ClaimExecution{CommandMeta: meta, ExecutionID: "B"}, 2, "execution_claimed/B", nil},
		{"sixth claim without progress: its holder stops the agent", given(five...), run.ClaimExecution{CommandMeta: meta, ExecutionID: "A"}, 6, "execution_claimed/A", nil},
		{"ninth claim without progress", given(append(five, claimed("A", 6), claimed("A", 7), claimed("A", 8))...), run.ClaimExecution{CommandMeta: meta, ExecutionID: "A"}, 9, "execution_failed/A", nil},
		{"sixth claim after progress", given(append(five, opened("A", "b", 1))...), run.ClaimExecution{CommandMeta: meta, ExecutionID: "A"}, 6, "execution_claimed/A", nil},
		{"record", given(claimed("A", 1)), run.RecordEvents{Epoch: 1, Events: []events.Event{opened("A", "b", 1)}}, 1, "block_start/A", nil},
		{"record of a zombie", given(claimed("A", 1), claimed("A", 2)), run.RecordEvents{Epoch: 1, Events: []events.Event{opened("A", "b", 1)}}, 0, "", run.ErrFenced},
		{"record from the future while it runs", given(claimed("A", 1)), run.RecordEvents{Epoch: 2, Events: []events.Event{opened("A", "b", 1)}}, 0, "", run.ErrFenced},
		{"taking over at rest", given(claimed("A", 1), box, done), run.RecordEvents{Epoch: 2, Events: []events.Event{fact("", 0, events.SandboxTerminated{})}}, 2, "sandbox_terminated", nil},
		{"record after the end", given(claimed("A", 1), done), run.RecordEvents{Epoch: 1, Events: []events.Event{opened("A", "b", 1)}}, 1, "", nil},
		{"record about another execution", given(claimed("A", 1)), run.RecordEvents{Epoch: 1, Events: []events.Event{opened("B", "b", 1)}}, 1, "", nil},
		{"a block that opens twice, closes twice, or was never open", given(claimed("A", 1)), run.RecordEvents{Epoch: 1, Events: []events.Event{
			opened("A", "b", 1), opened("A", "b", 2), completed("A", "b", 3), completed("A", "b", 4), completed("A", "z", 5),
			fact("A", 6, events.BlockUpdate{BlockID: "z"}),
		}}, 1, "block_start/A block_complete/A", nil},
		{"end", given(claimed("A", 1)), end(1), 1, "execution_completed/A", nil},
		{"end with a block open", given(claimed("A", 1), opened("A", "b", 1)), end(1), 1, "block_complete/A execution_completed/A", nil},
		{"end of a zombie", given(claimed("A", 1), claimed("A", 2)), end(1), 0, "", run.ErrFenced},
		{"end twice", given(claimed("A", 1), done), end(1), 0, "", run.ErrEnded},
		{"abandon what nobody claimed", given(), run.AbandonExecution{CommandMeta: meta, ExecutionID: "A", Outcome: events.ExecutionCancelled{Reason: "cancelled"}}, 1, "execution_claimed/A execution_cancelled/A", nil},
		{"abandon what was lost", given(claimed("A", 3), opened("A", "b", 1)), run.AbandonExecution{CommandMeta: meta, ExecutionID: "A", Outcome: events.ExecutionFailed{}}, 4, "block_complete/A execution_failed/A", nil},
		{"abandon after the end", given(claimed("A", 1), done), run.AbandonExecution{CommandMeta: meta, ExecutionID: "A", Outcome: events.ExecutionFailed{}}, 0, "", run.ErrEnded},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			d, err := run.Decide(c.given, c.when)
			if !errors.Is(err, c.err) || (err != nil) != (c.err != nil) {
				t.Fatalf("error %v, want %v", err, c.err)
			}
			var got []string
			for _, e := range d.Events {
				s := string(e.Type())
				if e.ExecutionID != "" {
					s += "/" + e.ExecutionID
				}
				got = append(got, s)
			}
			if d.Epoch != c.epoch || strings.Join(got, " ") != c.then {
				t.Fatalf("epoch %d, %q; want %d, %q", d.Epoch, got, c.epoch, c.then)
			}
		})
	}
	if _, err := run.Decide(given(claimed("A", 1)), run.RecordEvents{Epoch: 1, Events: []events.Event{done}}); err == nil {
		t.Fatal("RecordEvents accepted a terminal event")
	}
}

// TestEndExecution_KeepsKindAndTextOfClosedBlocks tests that the end closes an open block with its kind and text, and that
// facts before the end count.
func TestEndExecution_KeepsKindAndTextOfClosedBlocks(t *testing.T) {
	t.Parallel()
	s := given(claimed("A", 1), opened("A", "b", 1), opened("A", "c", 2))
	d, err := run.Decide(s, run.EndExecution{
		CommandMeta: meta, Epoch: 1, ExecutionID: "A", Outcome: events.ExecutionFailed{Code: "X"},
		Blocks: map[string]events.Block{"b": {ID: "b", Kind: events.KindAssistantText, Content: "half"}},
		Before: []events.Event{completed("A", "c", 3)},
	})
	if err != nil || len(d.Events) != 3 {
		t.Fatalf("%d events, %v", len(d.Events), err)
	}
	b := d.Events[1].Data.(events.BlockComplete).Block
	if b.ID != "b" || b.Content != "half" || b.Status != events.StatusError {
		t.Fatalf("closed as %+v", b)
	}
	if f := d.Events[2].Data.(events.ExecutionFailed); f.DurationMs != 1500 {
		t.Fatalf("took %d ms", f.DurationMs)
	}
}

// TestClaims_CountThoseWithoutProgress tests that only claims without progress exhaust an execution: those whose
// holder neither attached to the running agent, nor handed the execution over, nor wrote what the agent did. A log
// from before execution_attached and execution_handed_over existed folds as it did then.
func TestClaims_CountThoseWithoutProgress(t *testing.T) {
	t.Parallel()
	attached := fact("A", 0, events.ExecutionAttached{Epoch: 1, SandboxID: "sbx"})
	handedOver := fact("A", 0, events.ExecutionHandedOver{Epoch: 1})
	claims := func(n int, after ...events.Event) (out []events.Event) {
		for range n {
			out = append(append(out, claimed("A", uint64(len(out)+1))), after...)
		}
		return out
	}
	for name, c := range map[string]struct {
		given     []events.Event
		exhausted bool
		takenOver bool
	}{
		"the first claim":                        {claims(1), false, false},
		"five claims":                            {claims(5), false, true},
		"six claims":                             {claims(6), true, true},
		"five claims, an attach, five claims":    {slices.Concat(claims(5), []events.Event{attached}, claims(4)), false, true},
		"five claims, an attach, six claims":     {slices.Concat(claims(5), []events.Event{attached}, claims(5)), true, true},
		"twenty claims that attached":            {claims(20, attached), false, false},
		"twenty claims that were handed over":    {append(claims(20, handedOver), claimed("A", 99)), false, true},
		"five claims that died, many handovers":  {slices.Concat(claims(4), claims(20, handedOver), claims(1)), false, true},
		"six claims that died between handovers": {slices.Concat(claims(3), claims(5, handedOver), claims(3)), true, true},
		"an attach of another execution":         {slices.Concat(claims(6), []events.Event{fact("B", 0, events.ExecutionAttached{})}), true, true},
		"an attach after the end":                {append(claims(6), done, attached), false, false},
	} {
		s := given(c.given...)
		if s.HasTooManyClaims() != c.exhausted || s.WasTakenOver() != c.takenOver {
			t.Errorf("%s: exhausted %t, taken over %t, with %d claims", name, s.HasTooManyClaims(), s.WasTakenOver(), s.Claims)
		}
	}
}

// TestUnstopped_MarksTheSandboxUntilItIsReplaced tests that an end whose agent could not be stopped marks the
// sandbox, until another execution starts in it or it is gone.
func TestUnstopped_MarksTheSandboxUntilItIsReplaced(t *testing.T) {
	t.Parallel()
	lost := fact("A", 0, events.ExecutionFailed{Code: "EXECUTOR_LOST"}.WithStopFailure(errors.New("nobody was there")))
	if d := lost.Data.(events.ExecutionFailed); !d.Unstopped || !strings.Contains(d.Message, "nobody was there") {
		t.Errorf("%+v", d)
	}
	marked := []events.Event{claimed("A", 1), box, lost}
	for name, c := range map[string]struct {
		given []events.Event
		want  bool
	}{
		"the end":                      {marked, true},
		"the next claim":               {append(slices.Clone(marked), claimed("B", 2)), true},
		"the next start":               {append(slices.Clone(marked), claimed("B", 2), fact("B", 1, events.ExecutionStarted{Attempt: 1})), false},
		"the sandbox's end":            {append(slices.Clone(marked), fact("", 0, events.SandboxTerminated{SandboxID: "sbx"})), false},
		"an end without a sandbox":     {[]events.Event{claimed("A", 1), lost}, false},
		"an end as it was before":      {[]events.Event{claimed("A", 1), box, fact("A", 0, events.ExecutionFailed{Code: "EXECUTOR_LOST"})}, false},
		"an end that somebody stopped": {[]events.Event{claimed("A", 1), box, fact("A", 0, events.ExecutionFailed{Code: "CLAIMS_EXHAUSTED"})}, false},
	} {
		if got := given(c.given...).Sandbox.Unstopped; got != c.want {
			t.Errorf("%s: %t", name, got)
		}
	}
}

// largeText is the length of a text of which three fit into a commit, and four do not.
const largeText = 228_000

// TestEndExecution_SplitsInOrder tests an end that is too large for one commit. It is split so that each part fits, the blocks
// are completed first, and the facts that become true with the end are in its commit. After any part, the next
// executor that ends the execution completes the rest, under the same ids.
func TestEndExecution_SplitsInOrder(t *testing.T) {
	t.Parallel()
	given := given(claimed("A", 1), box, opened("A", "b1", 1), opened("A", "b2", 2), opened("A", "b3", 3), opened("A", "b4", 4))
	end := run.EndExecution{
		CommandMeta: meta, Epoch: 1, ExecutionID: "A", N: 9, Outcome: events.ExecutionFailed{Code: "X", Message: strings.Repeat("m", largeText)},
		Before: []events.Event{fact("A", 5, events.Log{Message: strings.Repeat("l", largeText)})},
		With:   []events.Event{fact("", 0, events.SandboxTerminated{SandboxID: "s"})},
		Blocks: map[string]events.Block{},
	}
	for _, b := range given.Open {
		end.Blocks[b.ID] = events.Block{ID: b.ID, Kind: events.KindAssistantText, Content: strings.Repeat("t", largeText)}
	}
	whole, err := run.Decide(given, end)
	if err != nil {
		t.Fatal(err)
	}
	parts, err := whole.Split()
	if err != nil || len(parts) != 2 {
		t.Fatalf("%d parts, %v", len(parts), err)
	}
	var all []events.Event
	state := given
	for i, p := range parts {
		size := 0
		for _, e := range p.Events {
			n, err := events.StoredSize(e)
			if err != nil {
				t.Fatal(err)
			}
			size += n + 1
		}
		if size > events.MaxCommitEventBytes {
			t.Errorf("part %d has %d bytes of events", i, size)
		}
		all = append(all, p.Events...)
		state = run.Fold(state, p.Epoch, p.Events)
		if over := i == len(parts)-1; state.IsIdle() != over || (state.Sandbox.ID == "") != over {
			t.Errorf("after part %d: %+v", i, state)
		}
		if state.IsIdle() {
			break
		}
		again := end
		again.Before = nil // the journal is read on from the end of what is stored
		rest, err := run.Decide(state, again)
		if err != nil {
			t.Fatal(err)
		}
		ids := map[string]bool{}
		for _, e := range append(slices.Clone(all), rest.Events...) {
			if ids[e.ID] && e.ID != "" {
				t.Errorf("event %s %s is stored twice if part %d was the last", e.Type(), e.ID, i)
			}
			ids[e.ID] = true
		}
		if got := run.Fold(state, rest.Epoch, rest.Events); !got.HasEnded("A") || len(got.Open) != 0 {
			t.Errorf("a decision repeated after part %d: %+v", i, got)
		}
	}
	for i, e := range whole.Events {
		if whole.Events[i], _, err = e.Encoded(); err != nil {
			t.Fatal(err)
		}
	}
	if !reflect.DeepEqual(all, whole.Events) {
		t.Error("the parts do not add up to the decision")
	}
	last := parts[len(parts)-1].Events
	if n := len(last); n < 2 || last[n-1].Type() != (events.ExecutionFailed{}).EventType() || last[n-2].Type() != (events.SandboxTerminated{}).EventType() {
		t.Errorf("the last part has %d events; want the end of the sandbox with that of the execution", n)
	}
}

// TestDecision_FitsIntoOneCommit tests that a decision that fits is not split, even if it fits only because its data
// is stored as an object.
func TestDecision_FitsIntoOneCommit(t *testing.T) {
	t.Parallel()
	s := given(claimed("A", 1))
	var list []events.Event
	for n := range uint64(5) {
		list = append(list, fact("A", n+1, events.Log{Message: strings.Repeat("x", events.MaxInlineBytes+1)}))
	}
	d, err := run.Decide(s, run.RecordEvents{Epoch: 1, Events: list})
	if err != nil {
		t.Fatal(err)
	}
	if parts, err := d.Split(); err != nil || len(parts) != 1 || len(parts[0].Events) != len(list) {
		t.Errorf("%d parts, %v", len(parts), err)
	}
}

func TestDueWork_NamesTheNextStep(t *testing.T) {
	t.Parallel()
	active := session.State{Status: session.Open, Active: session.QueryRef{ExecutionID: "A"}}
	told := active
	told.Control = session.Control{N: 1, Kind: session.Cancel, ExecutionID: "A"}
	paused, resumed, told2 := active, active, active
	paused.Pause = session.PauseState{ExecutionID: "A", Wanted: true}
	resumed.Pause = session.PauseState{ExecutionID: "A"}
	told2.Pause, told2.Control = paused.Pause, told.Control
	synced, changed := active, active
	synced.Syncs = 1
	changed.Pending = []session.FileChange{{N: 1, At: 7}}
	still := []events.Event{claimed("A", 1), box, fact("A", 0, events.ExecutionPaused{})}
	idle, gone := active, active
	idle.Idle, gone.Status = true, session.Deleted
	for _, c := range []struct {
		name string
		l    session.State
		s    run.State
		want run.Work
	}{
		{"nothing dispatched", session.State{Status: session.Open}, given(), run.NoWork},
		{"dispatched", active, given(), run.ExecuteTurn},
		{"claimed", active, given(claimed("A", 1)), run.ExecuteTurn},
		{"ended", active, given(claimed("A", 1), box, done), run.NoWork},
		{"told before the claim", told, given(), run.EndUnstarted},
		{"told after the claim", told, given(claimed("A", 1)), run.ExecuteTurn},
		{"idle", idle, given(claimed("A", 1), box, done), run.ReleaseSandbox},
		{"idle without a sandbox", idle, given(claimed("A", 1), done), run.NoWork},
		{"deleted", gone, given(claimed("A", 1), box, done), run.ReleaseSandbox},
		{"to be paused", paused, given(claimed("A", 1), box), run.ExecuteTurn},
		{"paused before the claim", paused, given(), run.NoWork},
		{"paused", paused, given(still...), run.NoWork},
		{"resumed", resumed, given(still...), run.ExecuteTurn},
		{"cancelled while it is paused", told2, given(still...), run.ExecuteTurn},
		{"a snapshot is asked for", synced, given(claimed("A", 1), box, done), run.SyncWorkspace},
		{"it was taken", synced, given(claimed("A", 1), box, done, fact("", 0, events.WorkspaceSynced{Request: 1})), run.NoWork},
		{"without a sandbox", synced, given(claimed("A", 1), done), run.NoWork},
		{"a file is put", changed, given(claimed("A", 1), box, done), run.SyncWorkspace},
		{"it was applied", changed, given(claimed("A", 1), box, done, fact("", 0, events.FilesApplied{N: 1})), run.NoWork},
		{"deleted while it runs", gone, given(claimed("A", 1), box), run.ExecuteTurn},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := run.DueWork(&c.l, &c.s); got != c.want {
				t.Fatalf("due %q, want %q", got, c.want)
			}
		})
	}
}

// TestEvolve_LostWorkspaceLacksItsChanges tests that the changes that a new workspace lacks are due again: all of
// them if it is empty, otherwise those after its snapshot.
func TestEvolve_LostWorkspaceLacksItsChanges(t *testing.T) {
	t.Parallel()
	life := session.State{Pending: []session.FileChange{{N: 1, At: 7}, {N: 2, At: 8}}}
	s := given(box, fact("", 0, events.FilesApplied{N: 1}), fact("", 0, events.WorkspaceSynced{Snapshot: "m", Applied: 1}), fact("", 0, events.FilesApplied{N: 2}))
	if s.NeedsSync(&life) {
		t.Fatal("changes count as unsynced although all were applied")
	}
	lost := run.Fold(s, 0, []events.Event{fact("", 0, events.SandboxReplaced{SandboxID: "sbx"}), fact("", 0, events.SandboxReady{SandboxID: "s2", Empty: true})})
	if got := life.ChangesAfter(lost.Applied); len(got) != 2 {
		t.Fatalf("an empty workspace lacks %v", got)
	}
	lost = run.Fold(lost, 0, []events.Event{fact("", 0, events.WorkspaceRestored{SandboxID: "s2", Snapshot: "m"})})
	if got := life.ChangesAfter(lost.Applied); len(got) != 1 || got[0].N != 2 {
		t.Fatalf("a restored workspace lacks %v", got)
	}
	kept := run.Fold(s, 0, []events.Event{fact("", 0, events.SandboxReplaced{SandboxID: "sbx", Kept: true})})
	if kept.Lost.Workspace != "sbx" || kept.Lost.Engine != "m1" {
		t.Fatalf("the workspace is at %+v", kept.Lost)
	}
	kept = run.Fold(kept, 0, []events.Event{fact("", 0, events.SandboxReady{SandboxID: "s2", Workspace: "sbx"})})
	if kept.NeedsSync(&life) || kept.Sandbox.Workspace != "sbx" || kept.Lost.Workspace != "" {
		t.Fatalf("taken over: %+v", kept)
	}
}

// TestRecordEvents_KeepsEachEgressLineOnce tests that a line of the egress proxy's journal is recorded once.
func TestRecordEvents_KeepsEachEgressLineOnce(t *testing.T) {
	t.Parallel()
	denied := func(n uint64) events.Event { return fact("", 0, events.EgressDenied{Journal: "j", Line: n}) }
	s := given(claimed("A", 1), denied(3))
	d, err := run.Decide(s, run.RecordEvents{Epoch: 1, Events: []events.Event{denied(2), denied(3), denied(4), denied(4), fact("", 0, events.ModelCalled{Journal: "other", Line: 1})}})
	if err != nil || len(d.Events) != 2 {
		t.Fatalf("%d events, %v", len(d.Events), err)
	}
}

// TestEvolve_FailedAttemptDelaysTheNext tests that a failed attempt counts as progress and delays the next attempt,
// and that the next execution begins without it.
func TestEvolve_FailedAttemptDelaysTheNext(t *testing.T) {
	t.Parallel()
	started := func(n uint32) events.Event { return fact("A", 0, events.ExecutionStarted{Attempt: n}) }
	s := given(claimed("A", 1), claimed("A", 2), started(1))
	if s.CurrentAttempt() != 1 {
		t.Fatalf("Dying is %d", s.CurrentAttempt())
	}
	s = run.Evolve(s, fact("A", 4, events.AttemptFailed{Attempt: 1, WaitMs: 1500}))
	if s.Phase != run.Starting || s.Claims != 0 || s.DiedAttempts != 1 || !s.NotBefore.Equal(t0.Add(1500*time.Millisecond)) || s.Sandbox.N != 4 {
		t.Fatalf("after a death: %+v", s)
	}
	if s.CurrentAttempt() != 2 { // the second attempt has not started
		t.Fatalf("Dying is %d", s.CurrentAttempt())
	}
	if s = run.Evolve(s, started(2)); !s.NotBefore.IsZero() || s.Phase != run.Running || s.CurrentAttempt() != 2 {
		t.Fatalf("in the second attempt: %+v", s)
	}
	ended := run.Evolve(run.Evolve(s, fact("A", 5, events.AttemptFailed{WaitMs: 1})), fact("A", 0, events.ExecutionFailed{}))
	if !ended.NotBefore.IsZero() {
		t.Fatalf("after the end: %+v", ended)
	}
	if next := run.Evolve(ended, claimed("B", 3)); next.DiedAttempts != 0 || next.CurrentAttempt() != 1 {
		t.Fatalf("the next execution: %+v", next)
	}
}
