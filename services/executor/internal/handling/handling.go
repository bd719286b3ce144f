// Package handling records which sessions an executor handles, so that one delivery at a time works on a session.
package handling

import (
	"sync"

	"github.com/spoolhq/spool/pkg/topology"
)

// A SessionSet holds the sessions that this executor handles at present. It lets one handler at a time handle a session. It is safe for
// concurrent use.
//
// A job carries no instruction: the handler of any job of a session carries out all work that is due for the session. JetStream may deliver
// a job to several executors, and accepts the acknowledgement of each of them. So an executor acknowledges a job in two cases only: its
// handler has read what is due after the job was delivered, and has done it; or another job of the session was stored later, because the
// handler that acknowledges the later job reads everything that the earlier one was sent for.
//
// For this reason, only the latest of the jobs that arrive while their session is being handled waits for the end of the handling.
type SessionSet struct {
	mu       sync.Mutex
	sessions map[string]*Session
}

// A Session is a session that a handler of this executor is handling.
type Session struct {
	changed chan struct{} // signalled when the session has a new fact

	// Guarded by SessionSet.mu.
	job       uint64      // the latest job of the session that arrived; 0 for none
	waiter    *WaitingJob // waits for the end of the handling with that job; nil if the handler itself has the job
	dirty     bool        // a delivery arrived after the handler last read what is due
	execution string      // the execution that the handler runs; "" for none
	syncing   bool        // the handler works on the sandbox while nothing runs in it
}

// A WaitingJob is a delivered job that waits until another handler of this executor has finished handling the job's session.
type WaitingJob struct {
	done    chan struct{}
	covered bool // set before done is closed
}

// Done returns a channel that is closed when the result of CanAcknowledge is known.
func (w *WaitingJob) Done() <-chan struct{} { return w.done }

// CanAcknowledge reports whether the waiting job can be acknowledged, because the handling did its work. The caller must have received from
// Done.
func (w *WaitingJob) CanAcknowledge() bool { return w.covered }

// resolve sets the result of CanAcknowledge and closes the channel of Done. It does nothing if w is nil.
func (w *WaitingJob) resolve(covered bool) {
	if w != nil {
		w.covered = covered
		close(w.done)
	}
}

// NewSessionSet returns an empty SessionSet.
func NewSessionSet() *SessionSet { return &SessionSet{sessions: map[string]*Session{}} }

// BeginHandling returns a new Session if the session is not being handled; the caller must call FinishHandling or AbandonHandling. job is the sequence
// of the caller's job in JOBS, or 0 if the caller has none.
//
// If the session is being handled, BeginHandling returns a nil Session, marks the session as dirty and wakes its handler. The
// result of the WaitingJob then determines whether the caller acknowledges its delivery.
func (s *SessionSet) BeginHandling(id string, job uint64) (*Session, *WaitingJob) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.sessions[id]
	if !ok {
		b = &Session{changed: make(chan struct{}, 1), job: job}
		s.sessions[id] = b
		return b, nil
	}
	b.dirty = true
	b.signalChanged()
	w := &WaitingJob{done: make(chan struct{})}
	if job <= b.job {
		w.resolve(job < b.job) // another delivery of the latest job is acknowledged with it
		return nil, w
	}
	b.waiter.resolve(true)
	b.job, b.waiter = job, w
	return nil, w
}

// FinishHandling ends the handling of a session and returns true, unless another job of the session arrived meanwhile: in that case it
// returns false, and the handler has to read again what is due. isDone reports whether the handler has done what was due.
func (s *SessionSet) FinishHandling(id string, b *Session, isDone bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.dirty {
		b.dirty = false
		return false
	}
	s.removeSession(id, b, isDone)
	return true
}

// AbandonHandling ends the handling of a session whose work was not done, so that its job is returned to the queue. It does nothing after
// FinishHandling has returned true.
func (s *SessionSet) AbandonHandling(id string, b *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.removeSession(id, b, false)
}

// removeSession removes a session from the set. covered is the result for the job that waits: whether it can be acknowledged. The caller
// holds mu.
func (s *SessionSet) removeSession(id string, b *Session, covered bool) {
	if s.sessions[id] == b {
		delete(s.sessions, id)
		b.waiter.resolve(covered)
	}
}

// WakeHandler signals the handler of a session that the session has a new event. It does nothing if the session is not being handled.
func (s *SessionSet) WakeHandler(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.sessions[id]; ok {
		b.signalChanged()
	}
}

// Answer returns what this executor does for a session, as the answer to another executor. If this executor works on the sandbox of a
// session in which nothing runs, Answer also wakes the handler, which stops that work: the other executor has something to do in the
// session.
func (s *SessionSet) Answer(id string) topology.CtlResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.sessions[id]
	if !ok {
		return topology.CtlResponse{}
	}
	if b.syncing {
		b.signalChanged()
	}
	return topology.CtlResponse{Running: b.execution, Syncing: b.syncing}
}

// SetSyncing records whether the handler of a session works on the session's sandbox while no execution runs.
func (s *SessionSet) SetSyncing(b *Session, syncing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.syncing = syncing
}

// CountExecutions returns the number of executions that this executor runs.
func (s *SessionSet) CountExecutions() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.sessions {
		if b.execution != "" {
			n++
		}
	}
	return n
}

// SetExecution records which execution the handler of a session runs; "" is none.
func (s *SessionSet) SetExecution(b *Session, execution string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.execution = execution
}

// signalChanged makes the channel of Changed receive a value.
func (b *Session) signalChanged() {
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

// Changed returns a channel that receives a value when the session may have a new event.
func (b *Session) Changed() <-chan struct{} { return b.changed }
