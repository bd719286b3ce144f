package run

import (
	"cmp"

	"github.com/spoolhq/spool/pkg/events/session"
)

// Work is what a session's state asks of an executor.
type Work string

// The kinds of work.
const (
	// Nothing is due.
	Nothing Work = ""
	// Execute the active execution, or go on with it.
	Execute Work = "execute"
	// Refuse the active execution: a control came before anybody claimed it.
	Refuse Work = "refuse"
	// Sync the sandbox at rest: put in what file changes say, take a snapshot.
	Sync Work = "sync"
	// Release the sandbox: the session is idle, closed or deleted, or somebody asked for it.
	Release Work = "release"
)

// Due tells what is due, from both halves of a session. It is the whole content of a job.
func Due(l session.State, s State) Work {
	active := l.Active.ExecutionID
	if active != "" && !s.Past(l.Active) {
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

// JobID returns the message id of the job that is due, or "" if none is due or if an executor already holds it.
//
// JetStream drops a job whose message id it has stored within the last two minutes, also if that job was
// acknowledged meanwhile. An executor acknowledges a job as soon as nothing is due: also while an execution
// stands still. So the id changes whenever something becomes due again: it names the event that made it due.
func JobID(l session.State, s State) string {
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

// afterExecution makes the id of a job at rest from its cause and the last execution: the same cause makes
// the job due a second time when an execution that came between has ended.
func afterExecution(cause string, s State) string {
	if s.Execution == "" {
		return cause
	}
	return cause + "." + s.Execution
}

// ReleaseReason is the reason that sandbox_terminated gives when Release is due.
func ReleaseReason(l session.State) string {
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

// Unsynced tells whether somebody waits for a snapshot, or for files to be in the workspace.
func (s State) Unsynced(l session.State) bool {
	return l.Syncs > s.Synced || len(l.After(s.Applied)) > 0
}
