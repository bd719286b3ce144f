package main

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

const (
	// interval is the time from line to line of one runner.
	interval = 100 * time.Millisecond
	// pieces of text are in a block, which has one event at its begin and one at its end: 9 of 10 lines are text.
	pieces = 18
	// setUp is how long it may take until all sessions are at work, and patience how long after its last line an event may still be on its way.
	setUp    = time.Minute
	patience = 30 * time.Second
	// callers are how many sessions are set up at once.
	callers = 16
)

// result is what one load came to.
type result struct {
	sessions int
	each     time.Duration
	samples  []time.Duration // the age of every piece and event
	took     time.Duration   // from the first line to the last one shown
	broken   error           // what the first broken session's client saw
	brokenIn int
	warnings int64
}

func (r *result) reached() bool {
	return r.broken == nil && row.Percentile(r.samples, 0.99) < target
}

func (r *result) rate() float64 { return float64(len(r.samples)) / r.took.Seconds() }

// stage lets all runners begin at once.
type stage struct {
	each    time.Duration
	waiting sync.WaitGroup // runners that are not there yet
	begin   chan struct{}  // closed when all are
	began   time.Time

	mu    sync.Mutex
	parts int // runners that came
	of    int
}

// play is the script of one runner: blocks of text, a line every interval, late lines at once.
func (s *stage) play(ctx context.Context, t *fake.Turn) {
	s.mu.Lock()
	phase := interval * time.Duration(s.parts) / time.Duration(s.of)
	s.parts++
	s.mu.Unlock()
	s.waiting.Done()
	select {
	case <-s.begin:
	case <-ctx.Done():
		return
	}
	due := s.began.Add(phase)
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

// blocks is how many blocks each runner writes.
func (s *stage) blocks() int { return max(1, int(s.each/((pieces+2)*interval))) }

// load runs a system under a load.
func load(ctx context.Context, dir string, sessions int, each time.Duration) (_ *result, err error) {
	ctx, cancel := context.WithTimeout(ctx, setUp+each+patience)
	defer cancel()
	tmp, remove, err := system.Scratch(dir)
	if err != nil {
		return nil, err
	}
	defer remove()
	s := &stage{each: each, begin: make(chan struct{}), of: sessions}
	s.waiting.Add(sessions)
	sys, err := system.Start(ctx, system.Config{
		Dir: tmp, Provider: fake.New(s.play), Executor: executor.Config{Engine: "bench", Slots: sessions},
	})
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	readers, err := cast(ctx, sys, sessions)
	if err != nil {
		return nil, err
	}
	if err := s.ready(ctx); err != nil {
		return nil, err
	}
	s.began = time.Now()
	close(s.begin)
	reading, stop := context.WithTimeout(ctx, each+patience)
	defer stop()
	r := &result{sessions: sessions, each: each}
	var all sync.WaitGroup
	for _, c := range readers {
		all.Go(func() { c.read(reading, s.blocks()) })
	}
	all.Wait()
	r.took, r.warnings = time.Since(s.began), sys.Warnings()
	for _, c := range readers {
		r.samples = append(r.samples, c.samples...)
		if c.err != nil {
			r.brokenIn++
			if r.broken == nil {
				r.broken = fmt.Errorf("session %s: %w", c.session, c.err)
			}
		}
	}
	return r, ctx.Err()
}

// ready waits until every runner has its query.
func (s *stage) ready(ctx context.Context) error {
	all := make(chan struct{})
	go func() { s.waiting.Wait(); close(all) }()
	select {
	case <-all:
		return nil
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		return fmt.Errorf("%d of %d runners have a query: %w", s.parts, s.of, ctx.Err())
	}
}

// cast makes the sessions, joins them and gives each a message.
func cast(ctx context.Context, sys *system.System, sessions int) ([]*reader, error) {
	c := system.NewClient(sys.URL)
	list := make([]*reader, sessions)
	group, ctx := errgroup.WithContext(ctx)
	group.SetLimit(callers)
	for i := range list {
		group.Go(func() error {
			session, err := c.Create(ctx, "spool")
			if err != nil {
				return err
			}
			list[i] = &reader{session: session}
			// The socket outlives the group.
			if list[i].socket, err = c.Join(context.WithoutCancel(ctx), session); err != nil {
				return err
			}
			list[i].execution, err = c.Post(ctx, session, "begin")
			return err
		})
	}
	return list, group.Wait()
}

// reader is a client of one session.
type reader struct {
	session, execution string
	socket             *system.Socket
	samples            []time.Duration
	err                error
}

// read reads to the end of the execution.
func (c *reader) read(ctx context.Context, blocks int) {
	defer c.socket.Close()
	c.samples = make([]time.Duration, 0, blocks*(pieces+2))
	var stamps system.Stamps
	kept := 0
	for {
		w, at, err := c.socket.Next(ctx)
		if err != nil {
			c.err = err
			return
		}
		late, err := stamps.Add(w, at)
		if err != nil {
			c.err = err
			return
		}
		c.samples = append(c.samples, late...)
		switch w.Type {
		case events.BlockStart{}.EventType(), events.BlockComplete{}.EventType():
			if w.Source == events.FromRunner {
				c.samples = append(c.samples, at.Sub(w.Time))
				kept++
			}
		}
		if w.ExecutionID == c.execution && events.Terminal(w.Type) {
			if stamps.Pieces != blocks*pieces || kept != 2*blocks || w.Type != (events.ExecutionCompleted{}).EventType() {
				c.err = fmt.Errorf("%s after %d pieces and %d events of %d and %d", w.Type, stamps.Pieces, kept, blocks*pieces, 2*blocks)
			}
			return
		}
	}
}
