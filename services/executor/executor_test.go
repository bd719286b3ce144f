package executor_test

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
)

// answers is an agent that answers hello.
func answers(t *fakeTurn) {
	t.Start()
	t.Text("b1-"+t.Query.ExecutionID, "Hello, ", t.Query.Content)
	t.Say("metadata_update", events.MetadataUpdate{Usage: events.Usage{InputTokens: 3, OutputTokens: 4}, Model: "m"})
	t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: "done", Usage: events.Usage{InputTokens: 3, OutputTokens: 4}})
}

func TestTurn_RunsAQueryAndStoresItsEvents(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run()
	s := b.session()
	first := s.post("Ada")
	l := s.untilEnded(first)
	if l.Run.Phase != run.Completed || l.Run.Sandbox.Journal == "" || l.Run.Epoch != 1 {
		t.Errorf("after the turn: %+v", l.Run)
	}
	want := "execution_claimed sandbox_creating sandbox_ready execution_started block_start block_complete metadata_update execution_completed"
	list := s.events()
	if types(list) != want {
		t.Errorf("events: %s\nwant:   %s", types(list), want)
	}
	if wrote(list) != "[Hello, Ada]" {
		t.Errorf("wrote %s", wrote(list))
	}
	done, _ := s.last(first).(events.ExecutionCompleted)
	if done.Result != "done" || done.Usage.OutputTokens != 4 {
		t.Errorf("end: %+v", done)
	}
	b.noJobs()
	b.until("all text in flight is published", func() bool { // the last piece may follow the end by the interval between two frames
		b.mu.Lock()
		defer b.mu.Unlock()
		text := ""
		for _, d := range b.deltas {
			text += d.Text
			if want := events.DeriveID(events.KindBlock, l.Run.Sandbox.Journal, "b1-"+first); d.BlockID != want || d.Epoch != 1 || d.ExecutionID != first {
				t.Errorf("delta %+v, want block %s", d, want)
			}
		}
		return text == "Hello, Ada"
	})
	b.until("the journal is acknowledged", func() bool { return b.provider.onlyBox().runner.acknowledged() == l.Run.Sandbox.N })

	second := s.post("Bob")
	l = s.untilEnded(second)
	if l.Run.Epoch != 2 || b.provider.made != 1 {
		t.Errorf("second turn: epoch %d, %d sandboxes", l.Run.Epoch, b.provider.made)
	}
	started := ""
	for _, e := range s.events() {
		if d, ok := e.Data.(events.ExecutionStarted); ok {
			started += map[bool]string{true: "warm ", false: "cold "}[d.Warm]
		}
	}
	if started != "cold warm " {
		t.Errorf("started %s", started)
	}
	if got := wrote(s.events()); !strings.Contains(got, "Hello, Bob") {
		t.Errorf("wrote %s", got)
	}
	b.noJobs()
}
