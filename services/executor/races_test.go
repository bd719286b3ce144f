package executor_test

import (
	"strconv"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor"
)

// The budget of a turn, its controls and its maintenance read state while commits are in flight. With the race
// detector, this test fails if they share state with a commit.
func TestTurn_ReadsItsStateWhileCommitsAreInFlight(t *testing.T) {
	t.Parallel()
	const lines = 300
	b := newBench(t, func(turn *fakeTurn) {
		turn.Start()
		for i := range lines {
			turn.Say("log", events.Log{Level: "info", Stream: "stdout", Message: strconv.Itoa(i)})
			turn.Text("b"+strconv.Itoa(i), "text")
			turn.Say("metadata_update", events.MetadataUpdate{Usage: events.Usage{OutputTokens: uint32(i + 1)}}) //nolint:gosec // small
		}
		turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: "all"})
	})
	b.egress = &fakeEgress{}
	b.setSpent(events.Budget{Tokens: 1 << 30}, events.BudgetUsage{Tokens: 1})
	b.run(func(c *executor.Config) { c.Beat, c.CommitWindow = time.Millisecond, time.Millisecond })
	s := b.session(withBudget(events.Budget{Tokens: 1 << 30, TimeMs: 3600_000}), func(c *events.SessionCreated) { c.Options.HealthIntervalMs = 1 })
	if l := s.untilEnded(s.post("go")); l.Run.Phase != run.Completed || l.Run.TotalUsage().Tokens != lines {
		t.Errorf("the turn ended %s after %d tokens", l.Run.Phase, l.Run.TotalUsage().Tokens)
	}
	if got := blocksStored(s); got != lines {
		t.Errorf("%d of %d blocks are stored", got, lines)
	}
}

// A resting agent is checked and measured while its session's next turn takes it.
func TestWarm_ChecksAnAgentWhileATurnTakesIt(t *testing.T) {
	t.Parallel()
	const turns = 25
	b := newBench(t, func(turn *fakeTurn) {
		turn.Start()
		turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
	})
	b.run(func(c *executor.Config) { c.WarmEvery = time.Millisecond })
	s := b.session(func(c *events.SessionCreated) { c.Options.HealthIntervalMs = 1 })
	for range turns {
		if l := s.untilEnded(s.post("go")); l.Run.Phase != run.Completed {
			t.Fatalf("a turn ended %s", l.Run.Phase)
		}
	}
	if got := len(starts(s.events())); got != turns {
		t.Errorf("%d starts for %d turns", got, turns)
	}
}
