package history

import (
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// applyExecution applies an event to the execution that it names.
func (s *State) applyExecution(e events.Event) {
	i := slices.IndexFunc(s.Executions, func(x Execution) bool { return x.ID == e.ExecutionID })
	if i < 0 {
		if e.ExecutionID == "" || !canBeginExecution(e) {
			return
		}
		// The list is copied because other states share it.
		s.Executions = append(slices.Clone(s.Executions), Execution{ID: e.ExecutionID, FirstSeq: s.Seq, Phase: PhaseQueued, QueuedAt: e.Time})
		s.Count.Executions++
		i = len(s.Executions) - 1
	}
	if x, changed := updateExecution(s.Executions[i], e); changed {
		s.Executions = slices.Clone(s.Executions)
		s.Executions[i] = x
	}
}

// canBeginExecution reports whether an event can be the first event of an execution. Other events may follow the end of an
// execution and must not reopen it.
func canBeginExecution(e events.Event) bool {
	switch e.Data.(type) {
	case events.MessageAccepted, events.ExecutionDispatched:
		return true
	}
	return false
}

// updateExecution returns x after an event, and whether the event changes it. updateWaitingPhase corrects the phase running of an execution with open
// approval requests.
func updateExecution(x Execution, e events.Event) (_ Execution, changed bool) {
	switch d := e.Data.(type) {
	case events.ExecutionDispatched:
		x.DispatchedAt = &e.Time
	case events.ExecutionClaimed:
		x.Executor = d.Executor
		if x.Phase == PhaseQueued {
			x.Phase = PhaseStarting
		}
	case events.ExecutionStarted:
		x.Phase, x.Attempt = PhaseRunning, d.Attempt
		if x.StartedAt == nil {
			x.StartedAt = &e.Time
		}
	case events.AttemptFailed:
		x.Phase = PhaseStarting
	case events.ExecutionPaused:
		x.Phase = PhasePaused
	case events.ExecutionResumed:
		x.Phase = PhaseRunning
	case events.MetadataUpdate:
		x.Usage, x.Model = newUsage(d.Usage, d.CostUSD), d.Model
	case events.SandboxUsage:
		x.Sandboxed = x.Sandboxed.plus(d)
	default:
		return x, false
	}
	return x, true
}

// terminalUsage returns the usage that a terminal event reports, and whether the event is terminal.
func terminalUsage(e events.Event) (u Usage, ended bool) {
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		return newUsage(d.Usage, d.CostUSD), true
	case events.ExecutionFailed:
		return newUsage(d.Usage, 0), true
	case events.ExecutionCancelled:
		return newUsage(d.Usage, 0), true
	}
	return u, events.IsTerminal(e.Type())
}

// endExecution removes the ended execution, its conversations and its approval requests. It runs after the other parts of Evolve.
func (s *State) endExecution(e events.Event) {
	i := slices.IndexFunc(s.Executions, func(x Execution) bool { return x.ID == e.ExecutionID })
	if i < 0 {
		return
	}
	u, _ := terminalUsage(e)
	if u.CostUSD == 0 {
		u.CostUSD = s.Executions[i].Usage.CostUSD
	}
	s.Ended = s.Ended.plus(u)
	s.Executions = slices.Delete(slices.Clone(s.Executions), i, i+1)
	for _, c := range s.Conversations {
		if c.ExecutionID == e.ExecutionID {
			s.removeConversation(c.ID)
		}
	}
	s.Approvals = slices.DeleteFunc(slices.Clone(s.Approvals), func(a OpenApproval) bool { return a.ExecutionID == e.ExecutionID })
}
