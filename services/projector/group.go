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

// rowDatabase looks up and writes the rows of a group in Postgres. It is a *storeConnections or, in a rebuild, a
// *store.Store.
type rowDatabase interface {
	// LoadRows reads the requested rows that Postgres has.
	LoadRows(ctx context.Context, m fold.MissingRows) (fold.FoundRows, error)
	// Apply writes the changes of the group in a transaction of their own; its errors are those of store.Store.Apply.
	Apply(ctx context.Context, w store.GroupWrite) error
}

// groupProjection folds the commits of one projector group into the read models, from the moment when it takes the
// group's lock until the first error.
type groupProjection struct {
	p          *Projector
	n          int
	shard      int
	logger     *slog.Logger
	live       announcer
	quiet      bool // makes no announcements, for a rebuild
	progressed bool // whether anything was committed
	arrived    func()

	db         rowDatabase
	conn       *lockConnection // holds the group's lock; nil in a rebuild
	model      *fold.Model
	checkpoint store.Checkpoint
	records    *queue[queuedCommit]
	atEnd      bool // whether the end of the log was reached since the read began
}

// newGroupProjection returns the projection of the group n. It does nothing before lockAndProject.
func newGroupProjection(p *Projector, n int, logger *slog.Logger) *groupProjection {
	return &groupProjection{
		p: p, n: n, shard: topology.ShardOfGroup(n, p.deps.Log.Shards()), logger: logger, live: announcer{nc: p.deps.NATS, group: n}, db: p.connections,
		records: newQueue[queuedCommit](p.cfg.BufferBytes),
	}
}

// lockAndProject blocks until it has the group's lock, and then folds the group's commits until an error occurs or ctx
// ends.
func (g *groupProjection) lockAndProject(ctx context.Context) (err error) {
	g.arrived = g.p.backlogReaders[g.shard].expectGroup()
	defer g.arrived()
	if err := g.awaitLock(ctx); err != nil {
		return err
	}
	defer func() { err = errors.Join(err, g.p.writer.unlockGroup(ctx, g.conn, g.n)) }()
	g.p.counts.setLeading(g.n, true)
	defer g.p.counts.setLeading(g.n, false)
	if err := g.loadCheckpoint(ctx); err != nil {
		return err
	}
	if err := g.live.announceTakeover(); err != nil {
		return fmt.Errorf("announce the start: %w", err)
	}
	g.logger.Info("reading the log", "after", g.foldedPosition(), "caught_up", g.checkpoint.CaughtUp)
	reading, stop := context.WithCancel(ctx)
	var reader sync.WaitGroup
	after := g.foldedPosition() // copied, because projectQueue changes the checkpoint while the reader starts
	reader.Go(func() { g.queueCommits(reading, after) })
	defer reader.Wait()
	defer stop()
	return g.projectQueue(ctx)
}

// awaitLock blocks until this process has the group's lock. It polls, because a statement that waits inside Postgres
// for hours would prevent vacuum on all tables.
func (g *groupProjection) awaitLock(ctx context.Context) error {
	tick := time.NewTicker(g.p.cfg.LockRetry)
	defer tick.Stop()
	for {
		var err error
		if g.conn, err = g.p.writer.tryLockGroup(ctx, g.n); err != nil || g.conn != nil {
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

// loadCheckpoint reads the group's checkpoint from Postgres. If the checkpoint does not match the log, loadCheckpoint
// deletes the group's rows, so that the group is folded from the beginning.
func (g *groupProjection) loadCheckpoint(ctx context.Context) (err error) {
	g.model = fold.New(g.n, g.p.cfg.PresentRows)
	if err = g.readCheckpoint(ctx); err != nil {
		return err
	}
	reason, err := g.p.checkpointMismatch(ctx, g.checkpoint, g.shard)
	if err != nil {
		return fmt.Errorf("verify checkpoint %s: %w", g.foldedPosition(), err)
	}
	if reason != "" {
		g.logger.Warn("the read model does not match the log: folding the group again", "checkpoint", g.foldedPosition(), "reason", reason)
		if err := g.p.writer.withConnection(ctx, g.conn, func(c *lockConnection) error { return c.store.ResetGroup(ctx, g.n) }); err != nil {
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
func (g *groupProjection) readCheckpoint(ctx context.Context) error {
	return g.p.writer.withConnection(ctx, g.conn, func(c *lockConnection) (err error) {
		g.checkpoint, err = c.store.ReadCheckpoint(ctx, g.n)
		return err
	})
}

// checkpointMismatch returns the reason why a group's checkpoint does not match the log, or "" if it matches.
func (p *Projector) checkpointMismatch(ctx context.Context, c store.Checkpoint, shard int) (string, error) {
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

// foldedPosition returns the position up to which the group is folded.
func (g *groupProjection) foldedPosition() eventlog.Position {
	return eventlog.Position{Shard: g.shard, Seq: uint64(g.checkpoint.Position)}
}

// projectQueue folds the commits in the group's queue, as many at once as possible, until an error occurs or ctx ends.
func (g *groupProjection) projectQueue(ctx context.Context) error {
	for {
		select {
		case <-ctx.Done():
			return nil
		case <-g.conn.lost:
			return errLockLost
		case <-g.records.ready:
		}
		if err := g.projectNextCommits(ctx); err != nil {
			return err
		}
	}
}

// projectNextCommits takes up to BatchCommits commits from the group's queue and writes the folded rows. If the queue
// has fewer, the group takes part in the next shared commit, and also folds the commits that arrive until that begins.
func (g *groupProjection) projectNextCommits(ctx context.Context) error {
	most := g.p.cfg.BatchCommits
	items, more := g.records.take(most)
	if len(items) == 0 {
		return nil
	}
	g.p.counts.recordStepBegin(g.n, items)
	t := sharedCommitMember{w: g.p.writer}
	if !more {
		var err error
		if t, err = g.p.writer.joinNextCommit(ctx); err != nil {
			return err
		}
		var rest []queuedCommit
		rest, more = g.records.take(most - len(items))
		items = append(items, rest...)
		g.p.counts.recordStepBegin(g.n, items)
	}
	defer t.leaveCommit()
	began := time.Now()
	err := g.projectStep(ctx, newProjectionStep(items, more), func(ctx context.Context, w store.GroupWrite) error {
		if w.IsBulk() {
			t.leaveCommit()
			return g.db.Apply(ctx, w)
		}
		return t.submitWrite(ctx, g.conn, w)
	})
	if err != nil {
		return err
	}
	g.p.counts.recordStepEnd(g.n, items, uint64(g.checkpoint.Position), time.Since(began))
	g.model.EvictRows()
	return nil
}

// projectionStep holds the commits that a group folds and writes to Postgres in one transaction.
type projectionStep struct {
	batch      fold.CommitBatch
	last       *queuedCommit // the last record
	more       bool          // whether more items are waiting
	reachedEnd bool          // whether the items include the end of the log
}

// newProjectionStep returns a projectionStep of items, which were taken from the queue. more reports whether the queue
// has further items.
func newProjectionStep(items []queuedCommit, more bool) projectionStep {
	s := projectionStep{more: more}
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

// writeFunc writes the changed rows of a group to the read models. Its errors are those of store.Store.Apply.
type writeFunc func(context.Context, store.GroupWrite) error

// projectStep folds the commits of a step and writes the rows with apply. If Postgres refuses a row, projectStep folds
// and writes each commit in a transaction of its own.
func (g *groupProjection) projectStep(ctx context.Context, s projectionStep, apply writeFunc) error {
	if err := g.reportPoisonToDead(ctx, s.batch.Poison); err != nil {
		return err
	}
	err := g.foldAndWrite(ctx, s, apply)
	var refused *store.RowRefusedError
	if errors.As(err, &refused) {
		return g.projectSeparately(ctx, s)
	}
	return err
}

// foldAndWrite folds the commits of a step, writes the changed rows with apply, and announces the changes to gateways.
func (g *groupProjection) foldAndWrite(ctx context.Context, s projectionStep, apply writeFunc) error {
	changes, err := g.loadAndFold(ctx, s.batch)
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
	w := store.GroupWrite{Group: g.n, Previous: g.checkpoint.Position, Next: next, Changes: &changes}
	if g.conn != nil {
		w.LockedBy = g.conn.store.BackendPID()
	}
	if err := apply(ctx, w); err != nil {
		return err
	}
	g.checkpoint, g.progressed = next, true
	if g.quiet {
		return nil
	}
	if err := g.live.announceChanges(changes.Announcements); err != nil {
		// The rows are stored; gateways detect the missing announcement.
		g.logger.Warn("publish announcements on LIVE", "error", err)
	}
	return nil
}

// loadAndFold reads the rows that a batch of commits needs from Postgres, and folds the batch. An error that a row
// causes is a *store.RowRefusedError.
func (g *groupProjection) loadAndFold(ctx context.Context, b fold.CommitBatch) (fold.Changes, error) {
	for missing := g.model.MissingRows(b); !missing.Empty(); missing = g.model.MissingRows(b) {
		present, err := g.db.LoadRows(ctx, missing)
		if err != nil {
			return fold.Changes{}, err
		}
		if err := g.model.PutRows(missing, present); err != nil {
			return fold.Changes{}, &store.RowRefusedError{Err: err}
		}
	}
	changes, err := g.model.Fold(b)
	if err != nil {
		return changes, &store.RowRefusedError{Err: err}
	}
	return changes, nil
}
