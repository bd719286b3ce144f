package worker

import (
	"context"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/loops"
)

// restoreLoops sets t.loops to a detector of repeated tool calls that knows the calls which the log has. t.resolved must be set.
func (t *turn) restoreLoops(ctx context.Context) error {
	t.loops = loops.New(t.resolved.Definition)
	if t.Session.Run.Output.Events == 0 {
		return nil // the agent has written nothing yet
	}
	for e, err := range t.w.deps.Sessions.ActiveEvents(ctx, t.Session) {
		if err != nil {
			return fmt.Errorf("read the tool calls of the execution: %w", err)
		}
		t.loops.Restore(e)
	}
	return nil
}

// checkLoops stops the turn, or adds a warning to the log, if the event shows that the agent repeats a tool call or that sub-agents
// start sub-agents too deep.
func (f *follower) checkLoops(e events.Event) { f.handleFinding(f.loops.Event(e)) }

// checkRestoredLoops does the same for the events that earlier executors have stored.
func (f *follower) checkRestoredLoops() {
	for _, found := range f.loops.Pending() {
		f.handleFinding(found)
	}
}

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
		f.stop.Exceed(found.Code, found.Message, f.w.deps.Now())
	}
}
