package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

// database looks up and writes the rows of a group. It is a *connections or, in a rebuild, a *store.Store.
type database interface {
	// Load looks up rows.
	Load(ctx context.Context, m fold.Missing) (fold.Present, error)
	// Apply writes the changes of the group in a transaction of their own; its errors are those of store.Apply.
	Apply(ctx context.Context, w store.Write) error
}

// group projects a partition group, from taking the lock until the first error.
type group struct {
	p          *Projector
	n          int
	shard      int
	logger     *slog.Logger
	live       announcer
	quiet      bool // makes no announcements, for a rebuild
	progressed bool // whether anything was committed
	arrived    func()

	db         database
	conn       *lockConnection // holds the group's lock; nil in a rebuild
	model      *fold.Model
	checkpoint store.Checkpoint
	records    *queue[item]
	atEnd      bool // whether the end of the log was reached since the read began
}

func newGroup(p *Projector, n int, logger *slog.Logger) *group {
	return &group{
		p: p, n: n, shard: topology.ShardOfGroup(n, p.deps.Log.Shards()), logger: logger, live: announcer{nc: p.deps.NATS, group: n}, db: p.connections,
		records: newQueue[item](p.cfg.BufferBytes),
	}
}

// lead waits for the group's lock and then projects until an error occurs or ctx ends.
func (g *group) lead(ctx context.Context) (err error) {
	g.arrived = g.p.catchUps[g.shard].announceStart()
	defer g.arrived()
	if err := g.lock(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.p.writer.unlock(ctx, g.conn, g.n)) }()
	g.p.counts.setLeading(g.n, true)
	defer g.p.counts.setLeading(g.n, false)
	if err := g.begin(ctx); err != nil {
		return err
	}
	if err := g.live.started(); err != nil {
		return fmt.Errorf("announce the start: %w", err)
	}
	g.logger.Info("reading", "after", g.position(), "caught_up", g.checkpoint.CaughtUp)
	reading, stop := context.WithCancel(ctx)
	var feeder sync.WaitGroup
	after := g.position() // copied, because project changes the checkpoint while the feeder starts
	feeder.Go(func() { g.feed(reading, after) })
	defer feeder.Wait()
	defer stop()
	return g.project(ctx)
}

// lock waits until no other process has the group's lock. It polls instead of waiting inside Postgres, where a
// statement that waits for hours prevents vacuum on all tables.
func (g *group) lock(ctx context.Context) error {
	tick := time.NewTicker(g.p.cfg.LockRetry)
	defer tick.Stop()
	for {
		var err error
		if g.conn, err = g.p.writer.tryLock(ctx, g.n); err != nil || g.conn != nil {
			return err
		}
		g.arrived() // the group does not catch up now
		g.p.counts.clearLag(g.n)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// begin reads the checkpoint and checks that it matches the log.
func (g *group) begin(ctx context.Context) (err error) {
	g.model = fold.New(g.n, g.p.cfg.PresentRows)
	if err = g.readCheckpoint(ctx); err != nil {
		return err
	}
	reason, err := g.p.findMismatch(ctx, g.checkpoint, g.shard)
	if err != nil {
		return fmt.Errorf("verify checkpoint %s: %w", g.position(), err)
	}
	if reason != "" {
		g.logger.Warn("the read model does not match the log: folding the group again", "checkpoint", g.position(), "reason", reason)
		if err := g.p.writer.use(ctx, g.conn, func(c *lockConnection) error { return c.store.Reset(ctx, g.n) }); err != nil {
			return err
		}
		if err := g.readCheckpoint(ctx); err != nil {
			return err
		}
	}
	g.checkpoint.Shard = int16(g.shard)
	return nil
}

// readCheckpoint loads the group's checkpoint from Postgres.
func (g *group) readCheckpoint(ctx context.Context) error {
	return g.p.writer.use(ctx, g.conn, func(c *lockConnection) (err error) {
		g.checkpoint, err = c.store.Checkpoint(ctx, g.n)
		return err
	})
}

// findMismatch returns why a checkpoint does not match the log, or "" if it does.
func (p *Projector) findMismatch(ctx context.Context, c store.Checkpoint, shard int) (string, error) {
	if c.Position == 0 {
		return "", nil
	}
	if int(c.Shard) != shard {
		return fmt.Sprintf("the checkpoint is in shard %d, the group in shard %d", c.Shard, shard), nil
	}
	rec, err := p.deps.Log.CommitAt(ctx, eventlog.Position{Shard: shard, Seq: uint64(c.Position)})
	switch {
	case err != nil && ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, eventlog.ErrUnavailable):
		return "", err
	case rec.Position.Seq == 0 && errors.Is(err, eventlog.ErrNotFound):
		// The janitor purges deleted sessions, but the stream's sequence never decreases.
		tip, err := p.deps.Tip(ctx, shard)
		if err != nil {
			return "", err
		}
		if tip < uint64(c.Position) {
			return fmt.Sprintf("the log ends at sequence %d", tip), nil
		}
		return "", nil
	case rec.Commit.ID != c.CommitID:
		// Any other error concerns the content; the id shows whether the commit is the same.
		return fmt.Sprintf("the log has commit %q at the checkpoint, the read model %q", rec.Commit.ID, c.CommitID), nil
	}
	return "", nil
}

// position returns the position up to which the group is folded.
func (g *group) position() eventlog.Position {
	return eventlog.Position{Shard: g.shard, Seq: uint64(g.checkpoint.Position)}
}

// project folds waiting commits, as many at once as possible, until an error occurs.
func (g *group) project(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.conn.lost:
			return errLockLost
		case <-g.records.ready:
		}
		if err := g.projectWaiting(ctx); err != nil {
			return err
		}
	}
}

// projectWaiting folds and commits the waiting commits, at most BatchCommits. Fewer wait for the next round, which takes
// those that arrive meanwhile too.
func (g *group) projectWaiting(ctx context.Context) error {
	most := g.p.cfg.BatchCommits
	items, more := g.records.take(most)
	if len(items) == 0 {
		return nil
	}
	g.p.counts.stepBegan(g.n, items)
	t := roundMember{w: g.p.writer}
	if !more {
		var err error
		if t, err = g.p.writer.begin(ctx); err != nil {
			return err
		}
		var rest []item
		rest, more = g.records.take(most - len(items))
		items = append(items, rest...)
		g.p.counts.stepBegan(g.n, items)
	}
	defer t.leave()
	began := time.Now()
	err := g.step(ctx, newStep(items, more), func(ctx context.Context, w store.Write) error {
		if w.Bulk() {
			t.leave()
			return g.db.Apply(ctx, w)
		}
		return t.submit(ctx, g.conn, w)
	})
	if err != nil {
		return err
	}
	g.p.counts.stepDone(g.n, items, uint64(g.checkpoint.Position), time.Since(began))
	g.model.Trim()
	return nil
}

// step is the items that a group folds and commits in one transaction.
type step struct {
	batch      fold.Batch
	last       *item // the last record
	more       bool  // whether more items are waiting
	reachedEnd bool  // whether the items include the end of the log
}

// newStep returns the step of items that were taken from the queue.
func newStep(items []item, more bool) step {
	s := step{more: more}
	for i := range items {
		it := &items[i]
		if it.end {
			s.reachedEnd = true
			continue
		}
		s.last = it
		if it.poison != nil {
			s.batch.Poison = append(s.batch.Poison, *it.poison)
		}
		if len(it.rec.Events) > 0 {
			s.batch.Records = append(s.batch.Records, it.rec)
		}
	}
	return s
}

// applyFunc writes the changes of a group to the read models. Its errors are those of store.Store.Apply.
type applyFunc func(context.Context, store.Write) error

// step folds and commits a step. If Postgres refuses its rows, the step is divided, and its parts are committed in
// transactions of their own.
func (g *group) step(ctx context.Context, s step, apply applyFunc) error {
	if err := g.reportToDead(ctx, s.batch.Poison); err != nil {
		return err
	}
	err := g.commit(ctx, s, apply)
	var refused *store.RefusedError
	if errors.As(err, &refused) {
		return g.commitInPieces(ctx, s)
	}
	return err
}

// commit folds a step and applies the changes.
func (g *group) commit(ctx context.Context, s step, apply applyFunc) error {
	changes, err := g.fold(ctx, s.batch)
	if err != nil {
		return err
	}
	next := g.checkpoint
	if s.reachedEnd {
		g.atEnd, next.CaughtUp = true, true
	}
	if s.last != nil {
		rec := s.last.rec
		next.Position, next.CommitID, next.LogTime, next.LagMs = int64(rec.Position.Seq), rec.Commit.ID, &rec.Time, 0
		if s.more || !g.atEnd {
			next.LagMs = max(0, g.p.deps.Now().Sub(rec.Time).Milliseconds())
		}
	}
	if s.last == nil && next.CaughtUp == g.checkpoint.CaughtUp && changes.Empty() {
		return nil
	}
	w := store.Write{Group: g.n, Previous: g.checkpoint.Position, Next: next, Changes: &changes}
	if g.conn != nil {
		w.LockedBy = g.conn.store.Backend()
	}
	if err := apply(ctx, w); err != nil {
		return err
	}
	g.checkpoint, g.progressed = next, true
	if g.quiet {
		return nil
	}
	if err := g.live.send(changes.Live); err != nil {
		// The rows are stored; gateways detect the missing announcement.
		g.logger.Warn("announce on LIVE", "error", err)
	}
	return nil
}

// fold looks up the rows that a batch needs, and folds the batch. Errors of rows are *store.RefusedError.
func (g *group) fold(ctx context.Context, b fold.Batch) (fold.Changes, error) {
	for missing := g.model.Missing(b); !missing.Empty(); missing = g.model.Missing(b) {
		present, err := g.db.Load(ctx, missing)
		if err != nil {
			return fold.Changes{}, err
		}
		if err := g.model.Put(missing, present); err != nil {
			return fold.Changes{}, &store.RefusedError{Err: err}
		}
	}
	changes, err := g.model.Fold(b)
	if err != nil {
		return changes, &store.RefusedError{Err: err}
	}
	return changes, nil
}
