package command

import (
	"context"
	"os"
	"syscall"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

// handleSignals turns signals into requests to the server. The first interrupt requests an interrupt of the turn, the
// second a cancellation, and the third ends this program. A termination signal requests a cancellation at once.
func (r *queryRun) handleSignals(ctx context.Context, cancel context.CancelCauseFunc, posted <-chan *spoolv1.StartExecutionResponse) {
	var accepted *spoolv1.StartExecutionResponse
	signals := 0
	for {
		var sig os.Signal
		select {
		case <-ctx.Done():
			return
		case accepted = <-posted:
			if signals == 0 {
				continue
			}
		case <-r.typed:
			signals++
		case sig = <-r.app.Signals:
			signals++
			if sig == syscall.SIGTERM {
				signals = max(signals, 2)
			}
		}
		known := accepted.GetExecutionId() != ""
		switch {
		case signals >= 3 || !known && (signals >= 2 || !r.posting.Load()):
			cancel(errInterrupted)
			return
		case known:
			r.sendControl(ctx, accepted, signals)
		}
	}
}

// sendControl asks the server to interrupt or cancel the execution. signals is the number of signals so far: the first
// one interrupts, later ones cancel. A queued execution is always cancelled, because an interrupt would stop the
// running one.
func (r *queryRun) sendControl(ctx context.Context, accepted *spoolv1.StartExecutionResponse, signals int) {
	ctx, done := context.WithTimeout(ctx, 10*time.Second)
	defer done()
	var err error
	if signals == 1 && r.dispatched.Load() {
		r.printNote("stopping; press Ctrl-C again to cancel")
		_, err = r.client.Load().Sessions.InterruptSession(ctx, &spoolv1.InterruptSessionRequest{SessionId: accepted.SessionId})
	} else {
		r.printNote("cancelling; press Ctrl-C again to exit without waiting")
		_, err = r.client.Load().Executions.CancelExecution(ctx, &spoolv1.CancelExecutionRequest{ExecutionId: accepted.ExecutionId})
	}
	if err != nil && ctx.Err() == nil {
		r.printNote("the request failed: " + err.Error())
	}
}

// printNote prints a message of the program: on a terminal between the blocks of the session, otherwise on standard
// error.
func (r *queryRun) printNote(text string) {
	if r.watcher.renderer != nil && r.app.OutTTY {
		r.watcher.renderer.ShowNote(text)
		return
	}
	terminal.Fprintln(r.app.Err, "spool: "+text)
}

// closeStack stops the stack that this run has started. It first waits for the queries of other runs that use the
// stack.
func (r *queryRun) closeStack() error {
	if r.client.Load() != nil && r.app.ctx.Err() == nil {
		r.waitForQueries()
	}
	return r.stack.Close()
}

// waitForQueries blocks until no query runs on the server, or until a signal arrives.
func (r *queryRun) waitForQueries() {
	ctx, cancel := r.app.interruptibleContext()
	defer cancel()
	for announced := false; ; announced = true {
		busy, err := r.countQueries(ctx)
		if err != nil && ctx.Err() == nil {
			terminal.Fprintln(r.app.Err, "spool: cannot determine whether other runs use this stack, so it ends: "+err.Error())
		}
		if err != nil || busy == 0 {
			return
		}
		if !announced {
			terminal.Fprintf(r.app.Err, "spool: %d other queries run on this stack; waiting for them (Ctrl-C stops the stack; the next stack continues them)\n", busy)
		}
		select {
		case <-ctx.Done():
			return
		case <-r.stack.Done():
			return
		case <-time.After(500 * time.Millisecond):
		}
	}
}

// countQueries returns the number of executions on the server that have not ended.
func (r *queryRun) countQueries(ctx context.Context) (n int, err error) {
	for _, phase := range []string{"queued", "starting", "running", "waiting_for_approval"} {
		for _, err := range client.List[*spoolv1.Execution](ctx, r.client.Load().Executions.ListExecutions, &spoolv1.ListExecutionsRequest{Phase: phase}) {
			if err != nil {
				return 0, err
			}
			n++
		}
	}
	return n, nil
}
