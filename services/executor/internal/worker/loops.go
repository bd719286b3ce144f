package worker

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/loops"
)

// restoreLoops sets t.loops to a detector of repeated tool calls, with the calls of the execution that the log has. t.resolved must be
// set. If an event in the log is damaged, the detector starts without earlier calls, because a damaged event must not prevent the
// execution's end.
func (t *turn) restoreLoops(ctx context.Context) error {
	t.loops = loops.New(t.resolved.Definition)
	if t.Session.Run.Output.Events == 0 {
		return nil // the agent has written nothing yet
	}
	for e, err := range t.w.deps.Sessions.ActiveEvents(ctx, t.Session) {
		switch {
		case err == nil:
		case ctx.Err() != nil || errors.Is(err, eventlog.ErrUnavailable):
			return fmt.Errorf("read the tool calls of the execution: %w", err)
		default:
			t.Log.Warn("the log has an event that cannot be read: repeated tool calls are counted anew", "error", err)
			t.loops = loops.New(t.resolved.Definition)
			return nil
		}
		t.loops.RestoreEvent(e)
	}
	return nil
}

// checkLoops stops the turn, or adds a warning to the log, if an event shows that the agent repeats a tool call, or that sub-agents
// start other sub-agents too many levels deep.
func (f *follower) checkLoops(e events.Event) { f.handleFinding(f.loops.HandleEvent(e)) }

// checkRestoredLoops stops the turn, or adds a warning to the log, if the events that earlier executors have stored show a repeated
// tool call or too deep sub-agents.
func (f *follower) checkRestoredLoops() {
	for _, found := range f.loops.PendingFindings() {
		f.handleFinding(found)
	}
}

// handleFinding acts on what the detector of repeated tool calls has found: it adds a warning to the log, or stops the turn.
func (f *follower) handleFinding(found loops.Finding) {
	if found.Warning != nil {
		list := f.NewEvents(*found.Warning)
		for i := range list {
			list[i].ConversationID = found.Conversation
		}
		if err := f.commits.Add(list...); err != nil {
			f.Log.Error("the warning about a repeated tool call could not be recorded", "error", err)
		}
	}
	if found.Code != "" {
		f.stop.RecordExceeded(found.Code, found.Message, f.w.deps.Now())
	}
}
