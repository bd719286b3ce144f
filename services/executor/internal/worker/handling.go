package worker

import (
	"sync"

	"github.com/spoolhq/spool/pkg/topology"
)

// handling is the set of sessions that are being handled, each by one delivery. It is safe for concurrent use.
//
// Deliveries for a session that is being handled are not needed, since a job carries no instruction: they mark the
// session as dirty and are acknowledged. What they are about is not lost when this executor dies: the delivery that
// handles the session stays unacknowledged until release has found, under the lock, that nobody has marked the session
// since the handler began to look at what is due. Its redelivery does whatever is due then.
type handling struct {
	mu       sync.Mutex
	sessions map[string]*busy
}

// busy is a session that is being handled.
type busy struct {
	poke chan struct{} // signalled when the session has a new fact
	job  job           // the delivery that handles it
	held func() bool   // reports whether that delivery is this executor's alone

	// The lock of handling guards these.
	dirty     bool   // a delivery came after the handler last read what is due
	execution string // the execution that the handler runs; "" for none
	syncing   bool   // the handler puts file changes into the sandbox at rest
}

// job identifies a message of JOBS, however often it is delivered.
type job struct {
	stream   string
	sequence uint64
}

func newHandling() *handling { return &handling{sessions: map[string]*busy{}} }

// take returns a new entry for a session that nobody handles; the caller must release it. held reports whether the
// caller's delivery of the job is this executor's alone. For a session that is being handled it returns nil, marks the
// session and wakes its handler, and reports whether that covers the delivery, so that it can be acknowledged. It does
// not when the delivery is of the handler's own job, which would be acknowledged with it, or when the handler's
// delivery may be with another executor by now.
func (s *handling) take(id string, j job, held func() bool) (b *busy, covered bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.sessions[id]; ok {
		b.dirty = true
		b.wake()
		return nil, b.job != j && b.held()
	}
	b = &busy{poke: make(chan struct{}, 1), job: j, held: held}
	s.sessions[id] = b
	return b, false
}

// release ends the handling of a session and returns true, unless the session is dirty: then it removes the mark, and
// the handler has to look again.
func (s *handling) release(id string, b *busy) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b.dirty {
		b.dirty = false
		return false
	}
	s.remove(id, b)
	return true
}

// drop ends the handling of a session whose job is given back. It does nothing after release returned true.
func (s *handling) drop(id string, b *busy) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.remove(id, b)
}

// remove needs the lock.
func (s *handling) remove(id string, b *busy) {
	if s.sessions[id] == b {
		delete(s.sessions, id)
	}
}

// wake tells the handler of a session, if there is one, that the session has a new fact.
func (s *handling) wake(id string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if b, ok := s.sessions[id]; ok {
		b.wake()
	}
}

// answer returns what is done for a session here, and wakes its handler if that works on the sandbox at rest.
func (s *handling) answer(id string) topology.CtlAnswer {
	s.mu.Lock()
	defer s.mu.Unlock()
	b, ok := s.sessions[id]
	if !ok {
		return topology.CtlAnswer{}
	}
	if b.syncing {
		b.wake()
	}
	return topology.CtlAnswer{Running: b.execution, Syncing: b.syncing}
}

// syncs sets whether the handler of a session works on the sandbox at rest.
func (s *handling) syncs(b *busy, syncing bool) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.syncing = syncing
}

// running returns the number of executions that are run here.
func (s *handling) running() (n int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, b := range s.sessions {
		if b.execution != "" {
			n++
		}
	}
	return n
}

// runs sets the execution that the handler of a session runs; "" for none.
func (s *handling) runs(b *busy, execution string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	b.execution = execution
}

func (b *busy) wake() {
	select {
	case b.poke <- struct{}{}:
	default:
	}
}
