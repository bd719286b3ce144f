// Package handling records which sessions an executor handles, so that one delivery at a time works on a session.
package handling

import (
	"sync"

	"github.com/spoolhq/spool/pkg/topology"
)

// A Set holds the sessions that this executor handles, each by one delivery of a job. It is safe for concurrent use.
//
// A job carries no instruction: the handler of any job of a session carries out all work that is due for the session.
// JetStream may deliver a job to several executors, and accepts the acknowledgement of each of them. So a job is
// acknowledged in two cases only:
//
//   - Its own handler has read what is due after it received the job, and has done it.
//   - Another job of the session was stored later. Whoever acknowledges that one has read the session after the later job was
//     stored, and so has read the reason for this one.
//
// Hence of the jobs that arrive for a session that is being handled, the latest one waits for the end of the handling.
type Set struct {
	mu       sync.Mutex
	sessions map[string]*Session
}

// A Session is a session whose jobs a handler of this executor handles.
type Session struct {
	changed chan struct{} // signalled when the session has a new fact

	// Guarded by Set.mu.
	job       uint64  // the latest job of the session that arrived; 0 for none
	waiter    *Waiter // waits for the end of the handling with that job; nil if the handler itself has the job
	dirty     bool    // a delivery arrived after the handler last read what is due
	execution string  // the execution that the handler runs; "" for none
	syncing   bool    // the handler works on the sandbox while nothing runs in it
}

// A Waiter is a delivered job that waits, because another handler of this executor handles its session.
type Waiter struct {
	done    chan struct{}
	covered bool // set before done is closed
}

// Done returns a channel that is closed when Covered is known.
func (w *Waiter) Done() <-chan struct{} { return w.done }

// Covered reports whether the job can be acknowledged. The caller must have received from Done.
func (w *Waiter) Covered() bool { return w.covered }

func (w *Waiter) resolve(covered bool) {
	if w != nil {
		w.covered = covered
		close(w.done)
	}
}

// NewSet returns an empty Set.
func NewSet() *Set { return &Set{sessions: map[string]*Session{}} }

// Begin returns a new Session if the session is not being handled; the caller must call Finish or Abandon. job is the sequence
// of the caller's job in JOBS, or 0 if the caller has none.
//
// If the session is being handled, Begin returns a nil Session, marks the session as dirty and wakes its handler. The
// result of the Waiter then determines whether the caller acknowledges its delivery.
func (s *Set) Begin(id string, job uint64) (*Session, *Waiter) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.sessions[id]
	if !ok {
		b = &Session{changed: make(chan struct{}, 1), job: job}
		s.sessions[id] = b
		return b, nil
	}
	b.dirty = true
	b.signal()
	w := &Waiter{done: make(chan struct{})}
	if job <= b.job {
		w.resolve(job < b.job) // another delivery of the latest job is acknowledged with it
		return nil, w
	}
	b.waiter.resolve(true)
	b.job, b.waiter = job, w
	return nil, w
}

// Finish ends the handling of a session and returns true. isDone reports whether the handler has done what was due. If the session
// is dirty, Finish removes the mark and returns false: the handler has to read again what is due.
func (s *Set) Finish(id string, b *Session, isDone bool) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.dirty {
		b.dirty = false
		return false
	}
	s.remove(id, b, isDone)
	return true
}

// Abandon ends the handling of a session whose job is returned. It does nothing after Finish has returned true.
func (s *Set) Abandon(id string, b *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(id, b, false)
}

// remove removes a session. covered is the result for its Waiter: whether the Waiter's job can be acknowledged. mu is
// held.
func (s *Set) remove(id string, b *Session, covered bool) {
	if s.sessions[id] == b {
		delete(s.sessions, id)
		b.waiter.resolve(covered)
	}
}

// Wake signals the handler of a session, if there is one, that the session has a new event.
func (s *Set) Wake(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.sessions[id]; ok {
		b.signal()
	}
}

// Answer returns what this executor does for a session, and wakes the handler if it works on the sandbox of a session in which nothing runs:
// the executor that asks wants to do something instead.
func (s *Set) Answer(id string) topology.CtlResponse {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.sessions[id]
	if !ok {
		return topology.CtlResponse{}
	}
	if b.syncing {
		b.signal()
	}
	return topology.CtlResponse{Running: b.execution, Syncing: b.syncing}
}

// SetSyncing sets whether the handler of a session works on the sandbox while nothing runs in it.
func (s *Set) SetSyncing(b *Session, syncing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.syncing = syncing
}

// Executions returns the number of executions that this executor runs.
func (s *Set) Executions() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.sessions {
		if b.execution != "" {
			n++
		}
	}
	return n
}

// SetExecution sets the execution that the handler of a session runs; "" for none.
func (s *Set) SetExecution(b *Session, execution string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.execution = execution
}

func (b *Session) signal() {
	select {
	case b.changed <- struct{}{}:
	default:
	}
}

// Changed returns the channel that receives a value when the session may have a new event.
func (b *Session) Changed() <-chan struct{} { return b.changed }
