package projector

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

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

	store      *store.Store
	model      *fold.Model
	checkpoint store.Checkpoint
	records    *queue[item]
	atEnd      bool // whether the end of the log was reached since the read began
}

func newGroup(p *Projector, n int, logger *slog.Logger) *group {
	return &group{
		p: p, n: n, shard: topology.GroupShard(n, p.deps.Log.Shards()), logger: logger, live: announcer{nc: p.deps.NATS, group: n},
		records: newQueue[item](p.cfg.BufferBytes),
	}
}

// lead waits for the group's lock and then projects until an error occurs or ctx ends.
func (g *group) lead(ctx context.Context) (err error) {
	g.arrived = g.p.catchUps[g.shard].announceStart()
	defer g.arrived()
	g.store, err = store.Open(ctx, g.p.cfg.DatabaseURL, readmodel.Schema, g.n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.store.Close()) }()
	if err := g.lock(ctx); err != nil {
		return err
	}
	g.p.counts.setLeading(g.n, true)
	defer g.p.counts.setLeading(g.n, false)
	if err := g.begin(ctx); err != nil {
		return err
	}
	if err := g.live.started(); err != nil {
		return fmt.Errorf("announce the start: %w", err)
	}
	g.logger.Info("reading", "after", g.position(), "caught_up", g.checkpoint.CaughtUp)
	ctx, stop := context.WithCancel(ctx)
	var feeder sync.WaitGroup
	after := g.position() // copied, because project changes the checkpoint while the feeder starts
	feeder.Go(func() { g.feed(ctx, after) })
	defer feeder.Wait()
	defer stop()
	return g.project(ctx)
}

// lock waits until no other connection has the group's lock. It polls instead of waiting inside Postgres, where a
// statement that waits for hours prevents vacuum on all tables.
func (g *group) lock(ctx context.Context) error {
	tick := time.NewTicker(g.p.cfg.LockRetry)
	defer tick.Stop()
	for {
		locked, err := g.store.TryLock(ctx)
		if err != nil || locked {
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
	if g.checkpoint, err = g.store.Checkpoint(ctx); err != nil {
		return err
	}
	reason, err := g.p.mismatch(ctx, g.checkpoint, g.shard)
	if err != nil {
		return fmt.Errorf("verify checkpoint %s: %w", g.position(), err)
	}
	if reason != "" {
		g.logger.Warn("the read model does not match the log: folding the group again", "checkpoint", g.position(), "reason", reason)
		if err := g.store.Reset(ctx); err != nil {
			return err
		}
		if g.checkpoint, err = g.store.Checkpoint(ctx); err != nil {
			return err
		}
	}
	g.checkpoint.Shard = int16(g.shard)
	return nil
}

// mismatch returns why a checkpoint does not match the log, or "" if it does.
func (p *Projector) mismatch(ctx context.Context, c store.Checkpoint, shard int) (string, error) {
	if c.Position == 0 {
		return "", nil
	}
	if int(c.Shard) != shard {
		return fmt.Sprintf("the checkpoint is in shard %d, the group in shard %d", c.Shard, shard), nil
	}
	rec, err := p.deps.Log.At(ctx, eventlog.Position{Shard: shard, Seq: uint64(c.Position)})
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

func (g *group) position() eventlog.Position {
	return eventlog.Position{Shard: g.shard, Seq: uint64(g.checkpoint.Position)}
}

// project folds waiting commits, as many at once as possible, until an error occurs.
func (g *group) project(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.records.ready:
		}
		items, more := g.records.take(g.p.cfg.BatchCommits)
		g.p.counts.stepBegan(g.n, items)
		began := time.Now()
		if err := g.step(ctx, newStep(items, more)); err != nil {
			return err
		}
		g.p.counts.stepDone(g.n, items, uint64(g.checkpoint.Position), time.Since(began))
		g.model.Trim()
	}
}

// step is the content of one transaction.
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

// step folds and commits a step. If Postgres refuses its rows, the step is divided.
func (g *group) step(ctx context.Context, s step) error {
	if err := g.reportToDead(ctx, s.batch.Poison); err != nil {
		return err
	}
	err := g.commit(ctx, s)
	var refused *store.RefusedError
	if errors.As(err, &refused) {
		return g.commitInPieces(ctx, s)
	}
	return err
}

// commit runs the transaction of a step.
func (g *group) commit(ctx context.Context, s step) error {
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
	if err := g.store.Apply(ctx, g.checkpoint.Position, next, &changes); err != nil {
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
		present, err := g.store.Load(ctx, missing)
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
