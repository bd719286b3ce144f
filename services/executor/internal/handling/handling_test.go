package handling

import (
	"sync"
	"sync/atomic"
	"testing"

	"pgregory.net/rapid"
)

// TestSet_MissesNoAcknowledgedJob: of many deliveries for one session at once, one at a time handles it, and what was due when
// a delivery arrived is read afterwards, before the delivery is acknowledged.
func TestSet_MissesNoAcknowledgedJob(t *testing.T) {
	t.Parallel()
	for range 200 {
		s := NewSessionSet()
		var due, handlers, covered atomic.Int64
		var all sync.WaitGroup
		const jobs = 32
		for n := range uint64(jobs) {
			all.Go(func() {
				due.Add(1) // the log has the fact before the job is published
				b, w := s.BeginHandling("ses", n+1)
				if b == nil {
					if <-w.Done(); !w.CanAcknowledge() {
						t.Error("a job is not covered by a handler that did what was due")
					}
					covered.Add(1)
					return
				}
				for done := false; !done; done = s.FinishHandling("ses", b, true) {
					if handlers.Add(1) != 1 {
						t.Error("two deliveries handle the session")
					}
					due.Store(0)
					handlers.Add(-1)
				}
			})
		}
		all.Wait()
		if n := due.Load(); n != 0 {
			t.Fatalf("%d jobs were acknowledged, %d of them covered by others, and %d were not handled", jobs, covered.Load(), n)
		}
		if len(s.sessions) != 0 {
			t.Fatal("the session is still being handled")
		}
	}
}

// TestSet_CoversEarlierJobsOnly: a later job of the session waits for the end of the handling, an earlier one is acknowledged, and
// another delivery of the latest is returned. Each of them makes the handler read again what is due.
func TestSet_CoversEarlierJobsOnly(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		job            uint64
		waits, covered bool
	}{
		"an earlier job":     {job: 1, covered: true},
		"the same job again": {job: 2},
		"a later job":        {job: 3, waits: true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewSessionSet()
			b, _ := s.BeginHandling("ses", 2)
			other, w := s.BeginHandling("ses", test.job)
			if other != nil || isResolved(w) == test.waits || (!test.waits && w.CanAcknowledge() != test.covered) {
				t.Errorf("handled: %v; waits: %v", other != nil, !isResolved(w))
			}
			if len(b.changed) != 1 {
				t.Error("the handler is not woken")
			}
			if s.FinishHandling("ses", b, true) {
				t.Error("finished without reading again what is due")
			}
			if !s.FinishHandling("ses", b, true) {
				t.Error("not finished after reading again")
			}
			if !isResolved(w) || w.CanAcknowledge() != (test.covered || test.waits) {
				t.Errorf("covered after the end: %v", w.CanAcknowledge())
			}
		})
	}
}

// TestSet_ReturnsTheWaiter: a job that waits is returned if the handler fails or gives up, and covered by a later job.
func TestSet_ReturnsTheWaiter(t *testing.T) {
	t.Parallel()
	for name, end := range map[string]func(*SessionSet, *Session){
		"abandoned": func(s *SessionSet, b *Session) { s.AbandonHandling("ses", b) },
		"failed": func(s *SessionSet, b *Session) {
			for !s.FinishHandling("ses", b, false) {
			}
		},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := NewSessionSet()
			b, _ := s.BeginHandling("ses", 0)
			_, first := s.BeginHandling("ses", 1)
			_, second := s.BeginHandling("ses", 2)
			if !isResolved(first) || !first.CanAcknowledge() || isResolved(second) {
				t.Error("a later job does not cover the one that waits")
			}
			end(s, b)
			if !isResolved(second) || second.CanAcknowledge() {
				t.Error("the job that waits is not returned")
			}
		})
	}
}

func isResolved(w *WaitingJob) bool {
	select {
	case <-w.Done():
		return true
	default:
		return false
	}
}

// TestSet_LosesNoJob: whatever is delivered to several executors, acknowledged late, and lost with an executor, a session with
// something due has a job that nobody has acknowledged.
func TestSet_LosesNoJob(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		m := &model{executors: []*executor{newExecutor(), newExecutor()}, unacknowledged: map[uint64]bool{}}
		for range rapid.IntRange(0, 100).Draw(t, "steps") {
			e := m.pick(t)
			switch rapid.SampledFrom([]string{"publish", "deliver", "deliver", "deliver", "read", "do", "finish", "finish", "fail", "kill"}).Draw(t, "step") {
			case "publish":
				m.facts++
				m.unacknowledged[uint64(m.facts)] = true
			case "deliver": // possibly a redelivery: after the ack wait, or after a killed server lost the state of the consumer
				if m.facts > 0 {
					m.deliver(e, uint64(rapid.IntRange(1, m.facts).Draw(t, "job")))
				}
			case "read":
				e.read = m.facts
			case "do":
				e.do(m)
			case "finish":
				m.finish(e)
			case "fail":
				e.stop()
			case "kill":
				*e = *newExecutor()
			}
			m.settle()
			if m.done < m.facts && len(m.unacknowledged) == 0 {
				t.Fatalf("%d facts, %d done, and no job is left", m.facts, m.done)
			}
		}
	})
}

// A model is one session whose nth fact is stored before the nth job. A job can be delivered as long as it is not acknowledged.
type model struct {
	executors      []*executor
	facts, done    int
	unacknowledged map[uint64]bool
}

type executor struct {
	set     *SessionSet
	session *Session
	job     uint64
	read    int // facts that the handler has read
	done    int // facts that it has acted on
	waiting map[uint64]*WaitingJob
}

func newExecutor() *executor {
	return &executor{set: NewSessionSet(), waiting: map[uint64]*WaitingJob{}}
}

func (m *model) pick(t *rapid.T) *executor { return rapid.SampledFrom(m.executors).Draw(t, "executor") }

func (m *model) deliver(e *executor, job uint64) {
	if !m.unacknowledged[job] {
		return
	}
	b, w := e.set.BeginHandling("ses", job)
	if b == nil {
		e.waiting[job] = w
		return
	}
	e.session, e.job, e.read, e.done = b, job, 0, 0
}

// do acts on the facts that the handler has read.
func (e *executor) do(m *model) {
	if e.session != nil {
		e.done = e.read
		m.done = max(m.done, e.done)
	}
}

// finish ends a handler that has read the session and has done all that it read.
func (m *model) finish(e *executor) {
	if e.session == nil || e.read == 0 || e.done < e.read {
		return
	}
	if !e.set.FinishHandling("ses", e.session, true) {
		e.read, e.done = 0, 0
		return
	}
	delete(m.unacknowledged, e.job)
	e.session = nil
}

func (e *executor) stop() {
	if e.session != nil {
		e.set.AbandonHandling("ses", e.session)
		e.session = nil
	}
}

// settle acknowledges the jobs whose waiters are covered.
func (m *model) settle() {
	for _, e := range m.executors {
		for job, w := range e.waiting {
			if isResolved(w) {
				delete(e.waiting, job)
				if w.CanAcknowledge() {
					delete(m.unacknowledged, job)
				}
			}
		}
	}
}
