// Package handling records which sessions an executor handles, so that one delivery at a time works on a session.
package handling

import (
	"sync"

	"github.com/spoolhq/spool/pkg/topology"
)

// A Set holds the sessions that this executor handles, each by one delivery of a job. It is safe for concurrent use.
//
// A job carries no instruction, so a further delivery for a session that is being handled marks the session as dirty and is
// acknowledged. Nothing is lost if the executor dies then: the delivery that handles the session stays unacknowledged until
// Finish has found, under the lock, that no delivery has marked the session since the handler last read what is due. Its
// redelivery does what is due then.
type Set struct {
	mu       sync.Mutex
	sessions map[string]*Session
}

// A Session is a session that is being handled.
type Session struct {
	changed chan struct{} // signalled when the session has a new fact
	job     Job           // of the delivery that handles it
	isHeld  func() bool   // reports whether no other executor can have that delivery

	// Guarded by Set.mu.
	dirty     bool   // a delivery arrived after the handler last read what is due
	execution string // the execution that the handler runs; "" for none
	syncing   bool   // the handler works on the sandbox while nothing runs in it
}

// A Job identifies a message of JOBS. All deliveries of the message have the same.
type Job struct {
	Stream   string
	Sequence uint64
}

// NewSet returns an empty Set.
func NewSet() *Set { return &Set{sessions: map[string]*Session{}} }

// Begin returns a new Session if the session is not being handled; the caller must call Finish or Abandon. isHeld reports
// whether no other executor can have the caller's delivery. If the session is being handled, Begin returns nil, marks the
// session, wakes its handler, and reports whether the delivery is covered by that handler and can be acknowledged. It is not
// covered if it is a delivery of the handler's own job, which would be acknowledged with it, or if another executor may have
// the handler's delivery by now.
func (s *Set) Begin(id string, j Job, isHeld func() bool) (b *Session, covered bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.sessions[id]; ok {
		b.dirty = true
		b.signal()
		return nil, b.job != j && b.isHeld()
	}
	b = &Session{changed: make(chan struct{}, 1), job: j, isHeld: isHeld}
	s.sessions[id] = b
	return b, false
}

// Finish ends the handling of a session and returns true. If the session is dirty, Finish removes the mark and returns false:
// the handler has to read again what is due.
func (s *Set) Finish(id string, b *Session) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.dirty {
		b.dirty = false
		return false
	}
	s.remove(id, b)
	return true
}

// Abandon ends the handling of a session whose job is returned. It does nothing after Finish has returned true.
func (s *Set) Abandon(id string, b *Session) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(id, b)
}

// remove removes a session. mu is held.
func (s *Set) remove(id string, b *Session) {
	if s.sessions[id] == b {
		delete(s.sessions, id)
	}
}

// Wake tells the handler of a session, if it is being handled, that the session has a new fact.
func (s *Set) Wake(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.sessions[id]; ok {
		b.signal()
	}
}

// Answer returns what this executor does for a session, and wakes the handler if it works on the sandbox of a session in which nothing runs:
// the executor that asks wants to do something instead.
func (s *Set) Answer(id string) topology.CtlAnswer {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.sessions[id]
	if !ok {
		return topology.CtlAnswer{}
	}
	if b.syncing {
		b.signal()
	}
	return topology.CtlAnswer{Running: b.execution, Syncing: b.syncing}
}

// SetSyncing sets whether the handler of a session works on the sandbox while nothing runs in it.
func (s *Set) SetSyncing(b *Session, syncing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.syncing = syncing
}

// Executions returns the number of executions that run here.
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

// Changed returns the channel that is signalled when the session has a new fact.
func (b *Session) Changed() <-chan struct{} { return b.changed }
