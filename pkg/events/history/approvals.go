package history

import (
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// OpenApproval is an approval request in a State. States contain only requests that have not ended.
type OpenApproval struct {
	ID          string `json:"id"`
	Seq         uint32 `json:"seq"` // of the event approval_requested
	ExecutionID string `json:"executionId"`
	Decision    string `json:"decision,omitempty"` // of a person; the agent has not received it yet
}

// applyApproval applies an event about an approval request to the state. It runs after applyExecution, and before
// endExecution.
func (s *State) applyApproval(e events.Event) {
	switch d := e.Data.(type) {
	case events.ApprovalRequested:
		if s.approvalIndex(d.ApprovalID) < 0 && s.executionIndex(e.ExecutionID) >= 0 {
			s.Approvals = append(slices.Clone(s.Approvals), OpenApproval{ID: d.ApprovalID, Seq: s.Seq, ExecutionID: e.ExecutionID})
		}
	case events.ApprovalDecided:
		if i := s.approvalIndex(d.ApprovalID); i >= 0 && s.Approvals[i].Decision == "" {
			s.Approvals = slices.Clone(s.Approvals)
			s.Approvals[i].Decision = d.Decision
		}
	case events.ApprovalResolved:
		s.removeApproval(d.ApprovalID)
	case events.ApprovalRetracted:
		s.removeApproval(d.ApprovalID)
	case events.ExecutionStarted, events.ExecutionResumed:
	default:
		return
	}
	s.updateWaitingPhase(e.ExecutionID)
}

// updateWaitingPhase sets the phase of a running execution to waiting_for_approval if it has open approval requests,
// and to running otherwise.
func (s *State) updateWaitingPhase(execution string) {
	i := s.executionIndex(execution)
	if i < 0 || s.Executions[i].Phase != PhaseRunning && s.Executions[i].Phase != PhaseWaiting {
		return
	}
	phase := PhaseRunning
	if slices.ContainsFunc(s.Approvals, func(a OpenApproval) bool { return a.ExecutionID == execution }) {
		phase = PhaseWaiting
	}
	s.Executions = slices.Clone(s.Executions)
	s.Executions[i].Phase = phase
}

// executionIndex returns the index in s.Executions of an execution that has not ended, or -1.
func (s *State) executionIndex(id string) int {
	return slices.IndexFunc(s.Executions, func(x Execution) bool { return x.ID == id })
}

// approvalIndex returns the index in s.Approvals of an open approval request, or -1.
func (s *State) approvalIndex(id string) int {
	return slices.IndexFunc(s.Approvals, func(a OpenApproval) bool { return a.ID == id })
}

func (s *State) removeApproval(id string) {
	s.Approvals = slices.DeleteFunc(slices.Clone(s.Approvals), func(a OpenApproval) bool { return a.ID == id })
}
