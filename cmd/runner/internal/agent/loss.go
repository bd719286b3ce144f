package agent

import (
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// ReportLoss is called when the agent cannot continue the conversation of its launch, because of why. If allowed is true, it journals the event
// TRANSCRIPT_LOST, and the turn goes on in a new conversation. Otherwise it returns the refusal CONVERSATION_LOST: the turn must not run, because
// the agent does not know the earlier turns.
func ReportLoss(t *Turn, allowed bool, why string) *runner.CommandError {
	if !allowed {
		return LossRefusal(why)
	}
	t.Emit(events.MainConversation, LossEvent(why))
	return nil
}

// LossEvent returns the event that tells that the agent runs without the earlier conversation, because of why.
func LossEvent(why string) events.Error {
	return events.Error{Code: "TRANSCRIPT_LOST", Message: why + ": the agent does not know the turns before"}
}

// LossRefusal returns the refusal of a turn whose agent would not know the earlier conversation, because of why.
func LossRefusal(why string) *runner.CommandError {
	return &runner.CommandError{
		Code:    runner.CodeConversationLost,
		Message: why + `: the agent would not know the turns before; to run it all the same, set conversation.onLoss to "continue" in the agent's definition or in the session's options`,
	}
}
