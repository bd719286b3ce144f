package run

import "github.com/spoolhq/spool/pkg/events/session"

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
	// Release the sandbox: the session is idle, closed or deleted.
	Release Work = "release"
)

// Due tells what is due, from both halves of a session. It is the whole content of a job.
func Due(l session.State, s State) Work {
	active := l.Active.ExecutionID
	if active != "" && !s.Past(l.Active) {
		if s.Execution != active && l.ControlOf(active).N > 0 {
			return Refuse
		}
		return Execute
	}
	if s.Sandbox.ID != "" && (l.Idle || l.Status == session.Closed || l.Status == session.Deleted) {
		return Release
	}
	return Nothing
}

// ReleaseReason is the reason that sandbox_terminated gives when Release is due.
func ReleaseReason(l session.State) string {
	switch l.Status {
	case session.Closed:
		return "session_closed"
	case session.Deleted:
		return "session_deleted"
	}
	return "idle"
}
