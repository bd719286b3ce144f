package executor_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
)

// A gap in the journal's lines means that the journal was changed: the log gets an error event, the execution ends with
// JOURNAL_GAP, and its sandbox is ended without a request to the runner. The next message gets another sandbox.
func TestJournalGap_EndsTheExecution(t *testing.T) {
	t.Parallel()
	for _, name := range []string{"a line is left out", "lines are forgotten that are not stored"} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			allow := make(chan struct{}, 3)
			b := newBench(t, func(turn *fakeTurn) {
				if turn.Query.Content != "go" {
					turn.Start()
					turn.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: "again"})
					return
				}
				steps(2, allow)(turn)
			})
			b.run()
			s := b.session()
			execution := s.post("go")
			allow <- struct{}{}
			s.untilBlocks(1)
			r, sandbox := b.provider.onlyBox().runner, b.provider.onlyBox().ID()
			from, forgotten := r.last()+1, strings.HasPrefix(name, "lines")
			r.hide(func(n uint64) bool { return n == from || forgotten && n > from })
			allow <- struct{}{}
			if forgotten {
				b.until("the lines are erased", r.erase)
			}
			l := s.untilEnded(execution)
			if l.Run.Phase != run.Failed {
				t.Errorf("the execution is %s", l.Run.Phase)
			}
			var codes []string
			for _, e := range s.events() {
				switch d := e.Data.(type) {
				case events.Error:
					codes = append(codes, "error "+d.Code)
				case events.ExecutionFailed:
					codes = append(codes, "failed "+d.Code)
				case events.SandboxTerminated:
					codes = append(codes, "terminated "+d.Reason)
				}
			}
			slices.Sort(codes)
			if got := strings.Join(codes, ", "); got != "error JOURNAL_GAP, failed JOURNAL_GAP, terminated unhealthy" {
				t.Errorf("the log says %s", got)
			}
			if ops := r.operations(); slices.Contains(ops, runner.OpKill) || slices.Contains(ops, runner.OpShutdown) {
				t.Errorf("the runner was asked to %v", ops)
			}
			if _, gone := b.provider.wiped(sandbox); !gone {
				t.Error("the sandbox was not ended")
			}
			if l := s.untilEnded(s.post("more")); l.Run.Phase != run.Completed || l.Run.Sandbox.ID == sandbox {
				t.Errorf("the next execution: %+v", l.Run)
			}
		})
	}
}
