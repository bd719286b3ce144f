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

// deltasEarlier is how long before its checkpoint text in flight is taken up
// again: its stream stamps times at its own pace, and it is idempotent.
const deltasEarlier = 10 * time.Second

// group is one reading of a partition group, from the lock to the first fault.
type group struct {
	p          *Projector
	n          int
	shard      int
	logger     *slog.Logger
	live       announcer
	quiet      bool // nothing is said to others: a rebuild
	progressed bool // something was committed
	rides      func()

	store      *store.Store
	model      *fold.Model
	checkpoint store.Checkpoint
	records    *queue[item]
	deltas     *queue[delta]
	atEnd      bool // the log's end was reached since the reading began
}

func newGroup(p *Projector, n int, logger *slog.Logger) *group {
	return &group{
		p: p, n: n, shard: topology.GroupShard(n, p.deps.Log.Shards()), logger: logger, live: announcer{nc: p.deps.NATS, group: n},
		records: newQueue[item](p.cfg.BufferBytes), deltas: newQueue[delta](p.cfg.BufferBytes / 4),
	}
}

// lead waits for the group's lock and then projects until a fault, or until ctx ends.
func (g *group) lead(ctx context.Context) (err error) {
	g.rides = g.p.catchUps[g.shard].expect()
	defer g.rides()
	g.store, err = store.Open(ctx, g.p.cfg.DatabaseURL, readmodel.Schema, g.n)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.store.Close()) }()
	if err := g.lock(ctx); err != nil {
		return err
	}
	g.p.counts.lead(g.n, true)
	defer g.p.counts.lead(g.n, false)
	if err := g.begin(ctx); err != nil {
		return err
	}
	if err := g.live.started(); err != nil {
		return fmt.Errorf("announce the start: %w", err)
	}
	g.logger.Info("reading", "after", g.position(), "caught_up", g.checkpoint.CaughtUp)
	ctx, stop := context.WithCancel(ctx)
	var feeders sync.WaitGroup
	after, deltasAt := g.position(), g.checkpoint.DeltasAt // the feeders begin while what they feed is written already
	feeders.Go(func() { g.feed(ctx, after) })
	feeders.Go(func() { g.feedDeltas(ctx, deltasAt) })
	defer feeders.Wait()
	defer stop()
	return g.project(ctx)
}

// lock waits until no other connection holds the group. It asks again and again
// rather than wait inside Postgres, where a statement that waits for hours keeps
// vacuum from every table.
func (g *group) lock(ctx context.Context) error {
	tick := time.NewTicker(g.p.cfg.LockRetry)
	defer tick.Stop()
	for {
		locked, err := g.store.TryLock(ctx)
		if err != nil || locked {
			return err
		}
		g.rides() // in its own time
		g.p.counts.follow(g.n)
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// begin reads the checkpoint and checks that the log still holds what it says.
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
		g.logger.Warn("the read model is not of this log: folding the group again", "checkpoint", g.position(), "reason", reason)
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

// mismatch says why a checkpoint is not a place in the log; "" when it is.
func (p *Projector) mismatch(ctx context.Context, c store.Checkpoint, shard int) (string, error) {
	if c.Position == 0 {
		return "", nil
	}
	if int(c.Shard) != shard {
		return fmt.Sprintf("it is in shard %d, the group's is %d", c.Shard, shard), nil
	}
	rec, err := p.deps.Log.At(ctx, eventlog.Position{Shard: shard, Seq: uint64(c.Position)})
	switch {
	case err != nil && ctx.Err() != nil:
		return "", ctx.Err()
	case errors.Is(err, eventlog.ErrUnavailable):
		return "", err
	case rec.Position.Seq == 0 && errors.Is(err, eventlog.ErrNotFound):
		// The janitor purges deleted sessions, but never the end of the stream's numbers.
		tip, err := p.deps.Tip(ctx, shard)
		if err != nil {
			return "", err
		}
		if tip < uint64(c.Position) {
			return fmt.Sprintf("the log ends at %d", tip), nil
		}
		return "", nil
	case rec.Commit.ID != c.CommitID:
		// Another error is of its contents; the id tells whether it is the same commit.
		return fmt.Sprintf("there is commit %q, not %q", rec.Commit.ID, c.CommitID), nil
	}
	return "", nil
}

func (g *group) position() eventlog.Position {
	return eventlog.Position{Shard: g.shard, Seq: uint64(g.checkpoint.Position)}
}

// project folds what comes, as much at once as there is, until a fault.
func (g *group) project(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.records.ready:
		case <-g.deltas.ready:
		}
		items, more := g.records.take(g.p.cfg.BatchCommits)
		texts, _ := g.deltas.take(g.p.cfg.BatchCommits)
		g.p.counts.began(g.n, items)
		began := time.Now()
		if err := g.step(ctx, newStep(items, texts, more)); err != nil {
			return err
		}
		g.p.counts.done(g.n, items, uint64(g.checkpoint.Position), time.Since(began))
		g.model.Trim()
	}
}

// step is what one transaction takes.
type step struct {
	batch     fold.Batch
	last      *item // of the records
	more      bool  // others wait
	reachedIt bool  // the log's end is among the items
	deltasAt  *time.Time
}

func newStep(items []item, texts []delta, more bool) step {
	s := step{more: more}
	for i := range items {
		it := &items[i]
		if it.end {
			s.reachedIt = true
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
	for _, d := range texts {
		s.batch.Deltas = append(s.batch.Deltas, d.Delta)
		s.deltasAt = &d.at
	}
	return s
}

// step folds and commits; what Postgres refuses is folded apart.
func (g *group) step(ctx context.Context, s step) error {
	if err := g.bury(ctx, s.batch.Poison); err != nil {
		return err
	}
	err := g.commit(ctx, s)
	var refused *store.RefusedError
	if errors.As(err, &refused) {
		return g.apart(ctx, s)
	}
	return err
}

// commit is the one transaction of a step.
func (g *group) commit(ctx context.Context, s step) error {
	changes, err := g.fold(ctx, s.batch)
	if err != nil {
		return err
	}
	next := g.checkpoint
	if s.deltasAt != nil {
		next.DeltasAt = s.deltasAt
	}
	if s.reachedIt {
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
		// Only text that was known: where it ended is written with the next change.
		g.checkpoint = next
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
		// The rows are there; whoever follows finds the hole.
		g.logger.Warn("announce on LIVE", "error", err)
	}
	return nil
}

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
