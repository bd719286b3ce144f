package executor_test

import (
	"strings"
	"testing"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor"
)

// largeText is the length of a text of which one fits into a commit, and four do not.
const largeText = 228_000

// openTexts is an agent that opens blocks a, b, c and d, streams a large text into each, and, once
// it is allowed to, completes d and fails in one go.
func openTexts(allow <-chan struct{}) script {
	return func(turn *fakeTurn) {
		turn.Start()
		for _, id := range []string{"a", "b", "c", "d"} {
			turn.Open(id)
			turn.Stream(id, 0, strings.Repeat(id, largeText/2), strings.Repeat(id, largeText/2))
		}
		if !turn.Wait(allow) {
			turn.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
			return
		}
		turn.Say("block_complete", events.BlockComplete{Block: events.Block{ID: "d", Kind: events.KindAssistantText, Content: strings.Repeat("d", largeText)}})
		turn.End(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "MODEL_ERROR", Message: "the model went away"})
	}
}

// completed returns the content of every completed block by its id; one that is completed twice fails the test.
func (s *talk) completed() map[string]events.Block {
	s.b.t.Helper()
	out := map[string]events.Block{}
	for _, e := range s.events() {
		if d, ok := e.Data.(events.BlockComplete); ok {
			if _, twice := out[d.Block.ID]; twice {
				s.b.t.Errorf("block %s is completed twice", d.Block.ID)
			}
			out[d.Block.ID] = d.Block
		}
	}
	return out
}

// checkLargeEnd checks that the execution failed with the agent's error, and that every block of openTexts has its
// whole text.
func (s *talk) checkLargeEnd(execution string) {
	s.b.t.Helper()
	if f, ok := s.last(execution).(events.ExecutionFailed); !ok || f.Code != "MODEL_ERROR" {
		s.b.t.Errorf("the end is %+v", s.last(execution))
	}
	blocks := s.completed()
	for _, id := range []string{"a", "b", "c", "d"} {
		var b events.Block
		for _, x := range blocks {
			if strings.HasPrefix(x.Content, id) {
				b = x
			}
		}
		if b.Content != strings.Repeat(id, largeText) {
			s.b.t.Errorf("the text of block %s has %d of %d bytes", id, len(b.Content), largeText)
		}
	}
}

// openBlocks waits until the log has n open blocks.
func (s *talk) openBlocks(n int) {
	s.b.t.Helper()
	s.b.until("the blocks are open", func() bool { return len(s.load().Run.Open) == n })
}

// The end of a turn that closes more text than one commit can hold is stored in several commits by the first executor
// that tries. The terminal event is in the last commit.
func TestEnd_LargerThanACommitIsSplit(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, openTexts(allow))
	b.run(func(c *executor.Config) { c.CommitWindow = time.Second })
	s := b.session()
	execution := s.post("go")
	s.openBlocks(4)
	close(allow)
	l := s.untilEnded(execution)
	s.checkLargeEnd(execution)
	if l.Run.Epoch != 1 || l.Run.Phase != run.Failed {
		t.Errorf("the turn ended %s under epoch %d, not by the first executor", l.Run.Phase, l.Run.Epoch)
	}
	b.noJobs()
}

// If an executor dies between the commits of such an end, the next executor stores the rest, and completes no block
// twice.
func TestEnd_CutBetweenItsCommitsIsFinishedByTheNextExecutor(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, openTexts(allow))
	first := b.run(func(c *executor.Config) { c.CommitWindow = time.Second })
	s := b.session()
	execution := s.post("go")
	s.openBlocks(4)
	first.log.afterAppend(func(d events.Draft) {
		if strings.Contains(types(d.Events), "block_complete") {
			first.wire.kill()
		}
	})
	close(allow)
	s.openBlocks(1)
	b.run()
	l := s.untilEnded(execution)
	s.checkLargeEnd(execution)
	if l.Run.Epoch != 2 || l.Run.Phase != run.Failed {
		t.Errorf("the turn ended %s under epoch %d, not by the second executor", l.Run.Phase, l.Run.Epoch)
	}
	b.noJobs()
}

// A normal end reads neither DELTAS nor the commits of blocks whose completion is stored together with the end.
func TestEnd_ReadsNothingWhenTheAgentCompletedItsBlocks(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, func(turn *fakeTurn) {
		turn.Start()
		turn.Open("a")
		turn.Stream("a", 0, "Hello")
		if turn.Wait(allow) {
			turn.Say("block_complete", events.BlockComplete{Block: events.Block{ID: "a", Kind: events.KindAssistantText, Content: "Hello"}})
		}
		turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	// The completion waits for this window, and so is stored with the end.
	x := b.run(func(c *executor.Config) { c.CommitWindow = time.Second })
	s := b.session()
	execution := s.post("go")
	s.openBlocks(1)
	requests := make(chan *nats.Msg, 10_000)
	sub, err := b.nc.ChanSubscribe("$JS.API.>", requests)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	before := x.log.readsOfCommits()
	close(allow)
	if l := s.untilEnded(execution); l.Run.Phase != run.Completed {
		t.Fatalf("the turn ended %s", l.Run.Phase)
	}
	if err := b.nc.Flush(); err != nil {
		t.Fatal(err)
	}
	if err := sub.Unsubscribe(); err != nil {
		t.Fatal(err)
	}
	deltas := 0
	for range len(requests) {
		if m := <-requests; strings.Contains(m.Subject+".", ".DELTAS.") {
			deltas++
		}
	}
	if n := x.log.readsOfCommits() - before; deltas != 0 || n != 0 {
		t.Errorf("the end sent %d requests to DELTAS and read %d commits", deltas, n)
	}
}
