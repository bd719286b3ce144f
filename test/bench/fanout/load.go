package fanout

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

const (
	// interval is the time from line to line of one runner.
	interval = 100 * time.Millisecond
	// pieces is the number of pieces of text in a block. A block also has one event at its start and one at its end, so
	// 9 of 10 lines are text.
	pieces = 18
	// startTimeout is the time in which all sessions have to be active.
	startTimeout = time.Minute
	// drainTimeout is the time after the last line in which all events have to arrive.
	drainTimeout = 30 * time.Second
	// creators is the number of sessions that are created at once.
	creators = 16
)

// result is the result of one load.
type result struct {
	sessions int
	each     time.Duration
	samples  []time.Duration // the ages of all pieces and events
	took     time.Duration   // from the first line to the end of the last client
	err      error           // of the first session that failed
	failed   int             // sessions
	warnings int64           // logged by the services
}

// met reports whether the load met the target.
func (r *result) met() bool {
	return r.err == nil && row.Percentile(r.samples, 0.99) < target
}

// rate returns the pieces and events per second.
func (r *result) rate() float64 { return float64(len(r.samples)) / r.took.Seconds() }

// load starts all runners at once and is their script.
type load struct {
	each    time.Duration
	waiting sync.WaitGroup // counts the runners that have no query yet
	start   chan struct{}  // closed when all runners have a query
	started time.Time

	mu      sync.Mutex
	runners int // that have a query
	total   int
}

// play is the script of one runner: blocks of text, one line every interval. A late line follows at once.
func (s *load) play(ctx context.Context, t *fake.Turn) {
	s.mu.Lock()
	phase := interval * time.Duration(s.runners) / time.Duration(s.total)
	s.runners++
	s.mu.Unlock()
	s.waiting.Done()
	select {
	case <-s.start:
	case <-ctx.Done():
		return
	}
	due := s.started.Add(phase)
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	next := func() bool {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return false
		}
		due = due.Add(interval)
		timer.Reset(time.Until(due))
		return true
	}
	for n := range s.blocks() {
		id := fmt.Sprint("b", n)
		var text strings.Builder
		if !next() {
			return
		}
		t.Open(id)
		for range pieces {
			if !next() {
				return
			}
			piece := system.Stamp(time.Now())
			t.Text(id, text.Len(), piece)
			text.WriteString(piece)
		}
		if !next() {
			return
		}
		t.Complete(id, text.String())
	}
}

// blocks returns the number of blocks that each runner writes.
func (s *load) blocks() int { return max(1, int(s.each/((pieces+2)*interval))) }

// runLoad runs a system under a load.
func runLoad(ctx context.Context, b *harness.Bench, sessions int, each time.Duration) (r *result, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout+each+drainTimeout)
	defer cancel()
	err = b.Part(fmt.Sprintf("%d sessions", sessions), func(b *harness.Bench) error {
		s := &load{each: each, start: make(chan struct{}), total: sessions}
		s.waiting.Add(sessions)
		sys, err := b.System(ctx, system.Config{Provider: fake.New(s.play), Executor: executor.Config{Engine: "bench", Slots: sessions}})
		if err != nil {
			return err
		}
		readers, err := createSessions(ctx, sys, sessions)
		if err != nil {
			return err
		}
		if err := s.ready(ctx); err != nil {
			return err
		}
		s.started = time.Now()
		close(s.start)
		readAll(ctx, readers, s)
		r = &result{sessions: sessions, each: each, took: time.Since(s.started), warnings: sys.Warnings()}
		for _, c := range readers {
			r.samples = append(r.samples, c.samples...)
			if c.err != nil {
				r.failed++
				if r.err == nil {
					r.err = fmt.Errorf("session %s: %w", c.session, c.err)
				}
			}
		}
		return ctx.Err()
	})
	return r, err
}

// readAll blocks until all readers have read to the end of their executions, or have failed.
func readAll(ctx context.Context, readers []*reader, s *load) {
	ctx, stop := context.WithTimeout(ctx, s.each+drainTimeout)
	defer stop()
	var all sync.WaitGroup
	for _, c := range readers {
		all.Go(func() { c.read(ctx, s.blocks()) })
	}
	all.Wait()
}

// ready blocks until every runner has its query.
func (s *load) ready(ctx context.Context) error {
	all := make(chan struct{})
	go func() { s.waiting.Wait(); close(all) }()
	select {
	case <-all:
		return nil
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		return fmt.Errorf("%d of %d runners have a query: %w", s.runners, s.total, ctx.Err())
	}
}

// createSessions creates the sessions, joins them and posts a message to each.
func createSessions(ctx context.Context, sys *system.System, sessions int) ([]*reader, error) {
	c := system.NewClient(sys.URL)
	list := make([]*reader, sessions)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(creators)
	for i := range list {
		group.Go(func() error {
			session, err := c.Create(ctx, system.SessionSpec{Architecture: "spool"})
			if err != nil {
				return err
			}
			list[i] = &reader{session: session}
			// The socket is used after the group has ended.
			if list[i].socket, err = c.Join(context.WithoutCancel(ctx), session); err != nil {
				return err
			}
			list[i].execution, err = c.Post(ctx, session, "begin")
			return err
		})
	}
	return list, group.Wait()
}

// reader is the client of one session.
type reader struct {
	session, execution string
	socket             *system.Socket
	samples            []time.Duration
	err                error
}

// read reads until the end of the execution.
func (c *reader) read(ctx context.Context, blocks int) {
	defer c.socket.Close()
	c.samples = make([]time.Duration, 0, blocks*(pieces+2))
	var stamps system.Stamps
	kept := 0
	for {
		w, received, err := c.socket.Next(ctx)
		if err != nil {
			c.err = err
			return
		}
		ages, err := stamps.Add(w, received)
		if err != nil {
			c.err = err
			return
		}
		c.samples = append(c.samples, ages...)
		switch w.Type {
		case events.BlockStart{}.EventType(), events.BlockComplete{}.EventType():
			if w.Source == events.FromRunner {
				c.samples = append(c.samples, received.Sub(w.Time))
				kept++
			}
		}
		if w.ExecutionID == c.execution && events.Terminal(w.Type) {
			if stamps.Pieces != blocks*pieces || kept != 2*blocks || w.Type != (events.ExecutionCompleted{}).EventType() {
				c.err = fmt.Errorf("%s after %d pieces and %d events, want %d and %d", w.Type, stamps.Pieces, kept, blocks*pieces, 2*blocks)
			}
			return
		}
	}
}
