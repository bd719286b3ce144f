package live

import (
	"context"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
)

// AwaitExecutionEnd blocks until the session has an event after the Reader's cursor that ends the execution, and returns its seq. It
// returns 0 if the feed no longer has all events after the cursor, so that the caller must read Postgres. Either way the
// read models have every event up to the cursor and up to the returned seq. AwaitExecutionEnd moves the cursor to the last event
// before the returned one, or to the session's last event. It holds no bytes of the gateway's limit. It is for a Reader
// whose Next is not called. The error is the cause of ctx, or the reason why no more events will come.
func (r *Reader) AwaitExecutionEnd(ctx context.Context, execution string) (seq uint32, err error) {
	for {
		seq, complete, err := r.findExecutionEnd(execution)
		if seq > 0 || !complete || err != nil {
			return seq, err
		}
		select {
		case <-r.wake:
		case <-ctx.Done():
			return 0, context.Cause(ctx)
		}
	}
}

// findExecutionEnd returns the seq of the event after the cursor that ends the execution, or 0 if there is none, and
// moves the cursor as AwaitExecutionEnd does. complete reports whether the feed had all events after the cursor. The
// error is the reason why no more events will come.
func (r *Reader) findExecutionEnd(execution string) (seq uint32, complete bool, err error) {
	f := r.feed
	f.mu.Lock()
	defer f.mu.Unlock()
	if r.cursor < f.oldestCursor() {
		r.cursor = f.tip
		return 0, false, nil
	}
	for _, frame := range r.eventsAfterCursor() {
		if !events.IsTerminal(frame.Type) {
			continue
		}
		w, err := events.DecodeWireEvent(frame.JSON)
		if err != nil {
			return 0, false, problem.From(err)
		}
		if w.ExecutionID == execution {
			r.cursor = frame.Seq - 1
			return frame.Seq, true, nil
		}
	}
	r.cursor = max(r.cursor, f.tip)
	return 0, true, f.ended
}
