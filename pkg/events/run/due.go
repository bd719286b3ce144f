package run

import (
	"cmp"

	"github.com/spoolhq/spool/pkg/events/session"
)

// Work is the kind of work that a session's state requires from an executor.
type Work string

// The kinds of work.
const (
	// NoWork means that the session requires nothing from an executor.
	NoWork Work = ""
	// ExecuteTurn means that an executor must start or continue the active execution.
	ExecuteTurn Work = "execute"
	// EndUnstarted means that an executor must end the active execution without starting it: a control stopped it
	// before an executor claimed it.
	EndUnstarted Work = "refuse"
	// SyncWorkspace means that an executor must apply file changes to a sandbox between turns, and take a snapshot.
	SyncWorkspace Work = "sync"
	// ReleaseSandbox means that an executor must terminate the sandbox: the session is idle, closed or deleted, or a
	// client requested it.
	ReleaseSandbox Work = "release"
)

// DueWork returns the work that a session requires from an executor, from the states of its life and its runs. A job
// contains nothing else.
func DueWork(l *session.State, s *State) Work {
	active := l.Active.ExecutionID
	if active != "" && !s.IsDone(l.Active) {
		if s.Execution != active && l.ControlOf(active).N > 0 {
			return EndUnstarted
		}
		if l.ShouldBePaused(active) && (s.Execution != active || s.Phase == Paused) {
			return NoWork
		}
		return ExecuteTurn
	}
	switch {
	case s.Sandbox.ID == "":
		return NoWork
	case l.Idle || l.Status == session.Closed || l.Status == session.Deleted:
		return ReleaseSandbox
	case s.NeedsSync(l):
		return SyncWorkspace
	}
	return NoWork
}

// JobID returns the message id of the job that is due, or "" if no job is due or an executor already holds it.
//
// JetStream drops a job whose message id it has stored within the last two minutes, even if that job was acknowledged
// meanwhile. An executor acknowledges a job as soon as no work is due, for example while an execution is paused. The id
// must therefore change whenever work becomes due again: it contains the id of the event that made it due.
func JobID(l *session.State, s *State) string {
	active := l.Active
	switch DueWork(l, s) {
	case ExecuteTurn:
		switch {
		case s.Execution != active.ExecutionID && l.Pause.ExecutionID == active.ExecutionID:
			return cmp.Or(l.Pause.Cause, active.Dispatch) // paused and resumed before its first claim
		case s.Execution != active.ExecutionID:
			return active.Dispatch
		case s.Phase == Paused:
			return l.ResumeEventID()
		case !s.NotBefore.IsZero() && l.ControlOf(s.Execution).N > 0:
			return l.ControlOf(s.Execution).Cause // its job may be delayed until the next attempt
		}
	case ReleaseSandbox:
		return sandboxJobID(l.Release, s)
	case SyncWorkspace:
		return sandboxJobID(l.Cause, s)
	}
	return ""
}

// sandboxJobID returns the id of a job for a sandbox between turns. The id contains the cause and the last execution,
// so that the same cause makes the job due again after an execution that ran in between.
func sandboxJobID(cause string, s *State) string {
	if s.Execution == "" {
		return cause
	}
	return cause + "." + s.Execution
}

// ReleaseReason returns the reason for sandbox_terminated when ReleaseSandbox is due.
func ReleaseReason(l *session.State) string {
	switch l.Status {
	case session.Closed:
		return "session_closed"
	case session.Deleted:
		return "session_deleted"
	}
	if l.Manual {
		return "terminated"
	}
	return "idle"
}

// NeedsSync reports whether a client waits for a snapshot, or for file changes to be applied to the sandbox.
func (s *State) NeedsSync(l *session.State) bool {
	return l.Syncs > s.Synced || len(l.ChangesAfter(s.Applied)) > 0
}
