package session

import (
	"encoding/json"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// maxRememberedDecisions is the maximum number of decisions that a State remembers. It is greater than the number of
// approval requests that may be open at a time (events.MaxOpenApprovals), so that the state has the decision on every
// open request.
const maxRememberedDecisions = 128

// maxCommentBytes is the maximum length in bytes of a comment on an approval request.
const maxCommentBytes = 16 << 10

// OpenApproval is an approval request, in the run state, on which a person can still decide.
type OpenApproval struct {
	Kind     events.ApprovalKind
	Class    string
	Editable bool
}

// DecideApproval is the command that decides an approval request of the active execution. The caller has checked
// answers and arguments against the request.
type DecideApproval struct {
	CommandBase
	events.ApprovalDecided
	ExecutionID string        // the active execution
	Open        *OpenApproval // nil if the request is not open
}

// decideApproval returns the decision on an approval request. The first decision counts; a second one is refused.
func decideApproval(s State, c DecideApproval, m *events.EventList) ([]events.Event, error) {
	if slices.ContainsFunc(s.Decided, func(d DecidedApproval) bool { return d.ApprovalID == c.ApprovalID }) {
		return nil, &Error{CodeApprovalDecided, "", "the approval request was decided already; the first decision counts"}
	}
	if c.Open == nil || s.Active.ExecutionID != c.ExecutionID {
		return nil, &Error{CodeApprovalNotOpen, "", "the approval request is not open: it was decided, or the agent no longer waits for it"}
	}
	if err := checkDecision(c); err != nil {
		return nil, err
	}
	m.Add(c.ExecutionID, c.ApprovalDecided)
	return m.Events(), nil
}

// checkDecision returns an error if the approval request does not allow the decision, for example an answer to a
// request that is no question.
func checkDecision(c DecideApproval) error {
	asks := c.Open.Kind == events.ApprovalQuestion || c.Open.Kind == events.ApprovalElicitation
	switch c.Decision {
	case events.DecisionApprove, events.DecisionApproveAll:
		if asks {
			return &Error{CodeInvalid, "decision", "a question is answered with the decision answer, or with skip or reject"}
		}
		if c.Decision == events.DecisionApproveAll && c.Open.Class == "" {
			return &Error{CodeInvalid, "decision", "the request belongs to no class, so that only this request can be approved"}
		}
	case events.DecisionAnswer:
		if !asks {
			return &Error{CodeInvalid, "decision", "the request is not a question; approve, skip or reject it"}
		}
	case events.DecisionSkip, events.DecisionReject:
	default:
		return &Error{CodeInvalid, "decision", "decision must be approve, approve_all, skip, reject or answer"}
	}
	answers := len(c.Answers) + len(c.Sealed)
	switch {
	case len(c.Comment) > maxCommentBytes:
		return &Error{CodeInvalid, "comment", "the comment is longer than 16 KiB"}
	case c.Comment != "" && c.Decision != events.DecisionReject:
		return &Error{CodeInvalid, "comment", "a comment is sent to the agent only with the decision reject"}
	case len(c.Arguments) > 0 && c.Decision != events.DecisionApprove:
		return &Error{CodeInvalid, "arguments", "arguments can be changed only with the decision approve"}
	case len(c.Arguments) > 0 && !c.Open.Editable:
		return &Error{CodeNotEditable, "arguments", "this agent cannot run a call with changed arguments; reject the request with a comment instead"}
	case len(c.Arguments) > 0 && !isObject(c.Arguments):
		return &Error{CodeInvalid, "arguments", "arguments must be a JSON object"}
	case answers > 0 && c.Open.Kind != events.ApprovalQuestion, c.Decision == events.DecisionAnswer && c.Open.Kind == events.ApprovalQuestion && answers == 0:
		return &Error{CodeInvalid, "answers", "answers are given to a question, and only to a question"}
	case len(c.Content) > 0 && c.Open.Kind != events.ApprovalElicitation, c.Decision == events.DecisionAnswer && c.Open.Kind == events.ApprovalElicitation && len(c.Content) == 0:
		return &Error{CodeInvalid, "content", "content is given to an elicitation, and only to an elicitation"}
	case len(c.Content) > 0 && !isObject(c.Content):
		return &Error{CodeInvalid, "content", "content must be a JSON object"}
	}
	return nil
}

// isObject reports whether raw is a JSON object.
func isObject(raw json.RawMessage) bool {
	var o map[string]json.RawMessage
	return json.Unmarshal(raw, &o) == nil && o != nil
}
