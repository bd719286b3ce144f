package session

import (
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
)

// RecoverExecution is the command that accepts a query that continues the last execution of the session, which has
// failed.
type RecoverExecution struct {
	CommandBase
	ExecutionID string                     // of the new execution
	Failed      string                     // id of the failed execution
	Message     events.MessageAccepted     // of the failed execution; not used if the command is refused for another reason than a secret
	Environment map[string]events.Variable // variables of the new execution; they override those of Message
	Run         RunView
}

// decideRecover returns the events of a RecoverExecution.
func decideRecover(s State, c RecoverExecution, m *events.EventList) ([]events.Event, error) {
	if s.queueIndex(c.ExecutionID) >= 0 || s.Active.ExecutionID == c.ExecutionID {
		return nil, nil
	}
	if err := s.checkRecoverable(c.Failed, c.Run); err != nil {
		return nil, err
	}
	variables, err := recoveredVariables(c)
	if err != nil {
		return nil, err
	}
	message := c.Message
	message.BlockID = events.DeriveID(events.KindBlock, c.ExecutionID, "message")
	message.Environment = variables
	message.RecoveredFrom = c.Failed
	// A recovery that ended before the agent received its query leaves the agent where it was.
	message.Continue = c.Message.Continue || c.Run.ActiveStarted
	m.Add(c.ExecutionID, message)
	m.Add(c.ExecutionID, events.ExecutionDispatched{})
	return m.Events(), nil
}

// checkRecoverable returns an *Error unless the execution with id failed is the last of the session and has failed.
func (s *State) checkRecoverable(failed string, r RunView) error {
	if s.Status == Closed {
		return newClosedError()
	}
	if by := s.recoveryOf(failed); by != "" {
		return &Error{CodeRecovered, "executionId", fmt.Sprintf("the execution is recovered by %s already; if that one fails, recover it", by)}
	}
	if s.queueIndex(failed) >= 0 {
		return &Error{CodeNotFailed, "executionId", "the execution is queued; only a failed execution can be recovered"}
	}
	switch {
	case s.Active.ExecutionID != failed, len(s.Queue) > 0:
		return &Error{CodeNotLast, "executionId", "the execution is not the last one that the session ran, or later messages are queued; post a message to continue the conversation"}
	case !r.ActiveEnded:
		return &Error{CodeNotFailed, "executionId", "the execution has not ended; only a failed execution can be recovered"}
	case !r.ActiveFailed:
		return &Error{CodeNotFailed, "executionId", "the execution has completed or was cancelled; only a failed execution can be recovered; post a message to continue the conversation"}
	}
	return nil
}

// recoveryOf returns the id of the queued or active execution that recovers the execution with id failed, or "" if
// there is none.
func (s *State) recoveryOf(failed string) string {
	for _, r := range append(slices.Clone(s.Queue), s.Active) {
		if r.RecoveredFrom == failed {
			return r.ExecutionID
		}
	}
	return ""
}

// recoveredVariables returns the variables of a recovery: the variables of the failed execution's message, overridden
// by the variables of the command. The secrets that the message brought were deleted when the failed execution ended,
// so the command must override each of them.
func recoveredVariables(c RecoverExecution) (map[string]events.Variable, error) {
	var missing []string
	for _, name := range slices.Sorted(maps.Keys(c.Message.Environment)) {
		if _, given := c.Environment[name]; !given && c.Message.Environment[name].Secret {
			missing = append(missing, name)
		}
	}
	if len(missing) > 0 {
		return nil, &Error{CodeSecretsRequired, "environment", fmt.Sprintf("the secrets of the failed execution's message were deleted at its end; send them again: %s", strings.Join(missing, ", "))}
	}
	if len(c.Message.Environment)+len(c.Environment) == 0 {
		return nil, nil
	}
	all := map[string]events.Variable{}
	maps.Copy(all, c.Message.Environment)
	maps.Copy(all, c.Environment)
	return all, nil
}
