package run

import (
	"cmp"

	"github.com/spoolhq/spool/pkg/events/session"
)

// Work is the kind of work that a session's state requires from an executor.
type Work string

// The kinds of work.
const (
	// Nothing is due.
	Nothing Work = ""
	// Execute starts or continues the active execution.
	Execute Work = "execute"
	// Refuse ends the active execution without starting it: a control stopped it before an executor claimed it.
	Refuse Work = "refuse"
	// Sync applies file changes to a sandbox between turns and takes a snapshot.
	Sync Work = "sync"
	// Release terminates the sandbox: the session is idle, closed or deleted, or a client requested it.
	Release Work = "release"
)

// Due returns the work that is due, from both halves of a session's state. A job contains nothing else.
func Due(l *session.State, s *State) Work {
	active := l.Active.ExecutionID
	if active != "" && !s.IsDone(l.Active) {
		if s.Execution != active && l.ControlOf(active).N > 0 {
			return Refuse
		}
		if l.PausedNow(active) && (s.Execution != active || s.Phase == Paused) {
			return Nothing
		}
		return Execute
	}
	switch {
	case s.Sandbox.ID == "":
		return Nothing
	case l.Idle || l.Status == session.Closed || l.Status == session.Deleted:
		return Release
	case s.Unsynced(l):
		return Sync
	}
	return Nothing
}

// JobID returns the message id of the job that is due, or "" if no job is due or an executor already holds it.
//
// JetStream drops a job whose message id it has stored within the last two minutes, even if that job was acknowledged
// meanwhile. An executor acknowledges a job as soon as no work is due, for example while an execution is paused. The id
// must therefore change whenever work becomes due again: it contains the id of the event that made it due.
func JobID(l *session.State, s *State) string {
	active := l.Active
	switch Due(l, s) {
	case Execute:
		switch {
		case s.Execution != active.ExecutionID && l.Pause.ExecutionID == active.ExecutionID:
			return cmp.Or(l.Pause.Cause, active.Dispatch) // paused and resumed before its first claim
		case s.Execution != active.ExecutionID:
			return active.Dispatch
		case s.Phase == Paused:
			return l.Waker()
		case !s.NotBefore.IsZero() && l.ControlOf(s.Execution).N > 0:
			return l.ControlOf(s.Execution).Cause // its job may be delayed until the next attempt
		}
	case Release:
		return afterExecution(l.Release, s)
	case Sync:
		return afterExecution(l.Cause, s)
	}
	return ""
}

// afterExecution returns the id of a job for a sandbox between turns. The id contains the cause and the last
// execution, so that the same cause makes the job due again after an execution that ran in between.
func afterExecution(cause string, s *State) string {
	if s.Execution == "" {
		return cause
	}
	return cause + "." + s.Execution
}

// ReleaseReason returns the reason for sandbox_terminated when Release is due.
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

// Unsynced reports whether a client waits for a snapshot, or for file changes to be applied.
func (s *State) Unsynced(l *session.State) bool {
	return l.Syncs > s.Synced || len(l.After(s.Applied)) > 0
}
