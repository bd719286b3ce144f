package projector

import (
	"context"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"runtime"
	"time"

	"github.com/jackc/pgx/v5"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/fold"
	"github.com/spoolhq/spool/services/projector/internal/store"
)

const (
	// rebuildLockKey is the key of the Postgres advisory lock that allows only one rebuild at a time: the bytes of
	// "spoolreb".
	rebuildLockKey = 0x73706f6f6c726562

	// maxCommitsPerWrite and maxBytesPerWrite bound a transaction of a rebuild. They are large, so that rows that change
	// often are written once.
	maxCommitsPerWrite = 5000
	maxBytesPerWrite   = 16 << 20
	// maxCommitsBehindAtPause is the maximum number of commits that the last pass of a rebuild may have folded before
	// the rebuild pauses live projection.
	maxCommitsBehindAtPause = 500
	// maxCatchUpPasses is the maximum number of passes in which a rebuild catches up with a log that grows as fast as
	// it is folded.
	maxCatchUpPasses = 20
	// rebuildCloseTimeout is the maximum time in which a rebuild releases its locks and connections.
	rebuildCloseTimeout = 30 * time.Second
)

// RebuildReport describes a completed rebuild.
type RebuildReport struct {
	Commits  uint64        // number of folded commits
	Rows     uint64        // number of compared rows; 0 without compare
	Duration time.Duration // duration of the whole rebuild
	Held     time.Duration // time for which live projection was paused; 0 with compare
}

// Rebuild folds the log from its beginning into a shadow schema, while live projection continues, and replaces the read
// models with the shadow schema in one transaction. If compare is true, Rebuild instead compares the two, changes
// nothing, and returns a *DifferenceError if a row differs. It needs Deps.Log but not Deps.NATS.
func Rebuild(ctx context.Context, cfg Config, deps Deps, compare bool) (r RebuildReport, err error) {
	if cfg, err = cfg.withDefaults(); err != nil {
		return r, err
	}
	if deps.Log == nil {
		return r, errors.New("rebuild: Deps.Log is required")
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	began := deps.Now()
	p := &Projector{cfg: cfg, deps: deps, counts: newMetrics(nil, deps.Now, deps.Log.Partitioning().GroupCount())}
	logger := deps.Logger.With("doing", "rebuild")
	r, err = (&rebuild{p: p, logger: logger, defers: true}).foldAndFinish(ctx, compare)
	if errors.Is(err, errIndexRefused) {
		// With all indexes in place, the commit of the row is found and projected without the row, as live.
		logger.Warn("fold again with indexes", "error", err)
		r, err = (&rebuild{p: p, logger: logger}).foldAndFinish(ctx, compare)
	}
	if err != nil {
		return r, fmt.Errorf("rebuild: %w", err)
	}
	r.Duration = deps.Now().Sub(began)
	return r, nil
}

// foldAndFinish folds the log into the shadow schema, and then compares the live schema with it or replaces the live schema by
// it.
func (b *rebuild) foldAndFinish(ctx context.Context, compare bool) (r RebuildReport, err error) {
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.createShadowSchema(ctx); err != nil {
		return r, err
	}
	if compare {
		r.Rows, err = b.compareWithLive(ctx)
	} else {
		r.Held, err = b.replaceLiveSchema(ctx)
	}
	if err != nil {
		return r, err
	}
	for _, g := range b.groups {
		r.Commits += g.commits
	}
	return r, nil
}

// rebuild holds the state of one call of Rebuild: its connection, its lock and its shadow schema.
type rebuild struct {
	p      *Projector
	logger *slog.Logger
	conn   *pgx.Conn // connection to the live schema
	groups []*shadowGroup

	defers  bool             // whether indexes are created after the rows
	indexes *deferredIndexes // nil if defers is false
}

// shadowGroup folds the commits of one projector group into the shadow schema, which replaces the live schema at the
// end of a rebuild.
type shadowGroup struct {
	*groupProjection
	store   *store.Store
	commits uint64
	target  uint64
	items   []queuedCommit // items that were not written yet
	bytes   int
	from    uint64        // stream sequence at which the present read starts for the group
	written chan struct{} // closed when the last call of writeCommits has written its commits; nil before the first call
}

// createShadowSchema takes the lock of rebuilds and creates an empty shadow schema.
func (b *rebuild) createShadowSchema(ctx context.Context) (err error) {
	url := b.p.cfg.DatabaseURL
	if err := readmodel.Migrate(ctx, url); err != nil {
		return err
	}
	if b.conn, err = readmodel.Connect(ctx, url, readmodel.Schema); err != nil {
		return fmt.Errorf("connect to postgres: %w", err)
	}
	var locked bool
	if err := b.conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", int64(rebuildLockKey)).Scan(&locked); err != nil {
		return err
	}
	if !locked {
		return errors.New("another rebuild is running on this database: wait until it ends")
	}
	if err := b.dropLeftoverSchemas(ctx); err != nil {
		return err
	}
	if err := readmodel.MigrateSchema(ctx, url, readmodel.ShadowSchema); err != nil {
		return err
	}
	for _, schema := range []string{readmodel.Schema, readmodel.ShadowSchema} {
		if err := store.PrepareGroups(ctx, url, schema, b.p.deps.Log.Partitioning().GroupCount()); err != nil {
			return err
		}
	}
	if b.defers {
		if b.indexes, err = dropDeferredIndexes(ctx, url, b.logger); err != nil {
			return err
		}
	}
	for n := range b.p.deps.Log.Partitioning().GroupCount() {
		g := &shadowGroup{groupProjection: newGroupProjection(b.p, n, b.logger.With("group", n))}
		g.quiet, g.model = true, fold.New(n, b.p.cfg.PresentRows)
		b.groups = append(b.groups, g)
		if g.store, err = store.Open(ctx, url, readmodel.ShadowSchema); err != nil {
			return err
		}
		g.db, g.store.Disposable = g.store, true
		if b.indexes != nil {
			g.store.BeforeEventsLookup = b.indexes.createForEvents
		}
		g.checkpoint.Shard = int16(g.shard)
	}
	return nil
}

// createDeferredIndexes creates the indexes of the shadow schema that were dropped before its rows were copied.
func (b *rebuild) createDeferredIndexes(ctx context.Context) error {
	if b.indexes == nil {
		return nil
	}
	return b.indexes.createAll(ctx)
}

// dropLeftoverSchemas drops the schemas that this rebuild no longer needs, and those that an interrupted rebuild has
// left.
func (b *rebuild) dropLeftoverSchemas(ctx context.Context) error {
	for _, schema := range []string{readmodel.ShadowSchema, readmodel.RetiredSchema} {
		if _, err := b.conn.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE"); err != nil {
			return fmt.Errorf("drop schema %s: %w", schema, err)
		}
	}
	return nil
}

// close releases the locks and connections of the rebuild, also if ctx has ended.
func (b *rebuild) close() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), rebuildCloseTimeout)
	defer cancel()
	for _, g := range b.groups {
		if g.store != nil {
			err = errors.Join(err, g.store.Close())
		}
	}
	if b.indexes != nil {
		err = errors.Join(err, b.indexes.close(ctx))
	}
	if b.conn == nil {
		return err
	}
	if !b.conn.IsClosed() && len(b.groups) > 0 {
		err = errors.Join(err, b.dropLeftoverSchemas(ctx))
	}
	// The server ends a closed connection, and its locks, asynchronously; the next rebuild must not find this one's
	// lock.
	if _, uerr := b.conn.Exec(ctx, "SELECT pg_advisory_unlock_all()"); uerr != nil && !b.conn.IsClosed() {
		err = errors.Join(err, fmt.Errorf("release the lock of rebuilds: %w", uerr))
	}
	return errors.Join(err, b.conn.Close(ctx))
}

// readLiveCheckpoints returns the checkpoints of all groups in the live schema, in the order of the groups. suffix is
// appended to the SQL query.
func readLiveCheckpoints(ctx context.Context, q pgx.Tx, groups int, suffix string) ([]store.Checkpoint, error) {
	rows, err := q.Query(ctx, "SELECT shard, position, commit_id FROM spool.checkpoints WHERE grp < $1 ORDER BY grp"+suffix, groups)
	if err != nil {
		return nil, fmt.Errorf("read checkpoints: %w", err)
	}
	list, err := pgx.CollectRows(rows, func(row pgx.CollectableRow) (c store.Checkpoint, err error) {
		err = row.Scan(&c.Shard, &c.Position, &c.CommitID)
		return c, err
	})
	if err == nil && len(list) != groups {
		err = fmt.Errorf("got %d checkpoints, want %d", len(list), groups)
	}
	if err != nil {
		return nil, fmt.Errorf("read checkpoints: %w", err)
	}
	return list, nil
}

// replaceLiveSchema folds the log until the shadow schema is almost as far as the live one, pauses live projection, and
// swaps the two schemas. It returns for how long live projection was paused.
func (b *rebuild) replaceLiveSchema(ctx context.Context) (held time.Duration, err error) {
	for pass := 0; ; pass++ {
		before := b.foldedCommits()
		var target []store.Checkpoint
		err := pgx.BeginFunc(ctx, b.conn, func(tx pgx.Tx) (err error) {
			target, err = readLiveCheckpoints(ctx, tx, len(b.groups), "")
			return err
		})
		if err == nil {
			err = b.foldUpTo(ctx, target)
		}
		if err == nil {
			err = b.createDeferredIndexes(ctx)
		}
		if err != nil {
			return 0, err
		}
		b.logger.Info("folded", "pass", pass, "commits", b.foldedCommits())
		if b.foldedCommits()-before <= maxCommitsBehindAtPause || pass == maxCatchUpPasses {
			break
		}
	}
	if err := b.analyzeTables(ctx); err != nil {
		return 0, err
	}
	from := b.p.deps.Now()
	if err := pgx.BeginFunc(ctx, b.conn, func(tx pgx.Tx) error { return b.swapSchemas(ctx, tx) }); err != nil {
		return 0, fmt.Errorf("swap: %w", err)
	}
	return b.p.deps.Now().Sub(from), nil
}

// analyzeTables updates the Postgres statistics of the shadow schema, so that the gateways' queries have good plans
// from the beginning.
func (b *rebuild) analyzeTables(ctx context.Context) error {
	for _, t := range rebuiltTables {
		if _, err := b.conn.Exec(ctx, "ANALYZE "+readmodel.ShadowSchema+"."+t.table); err != nil {
			return fmt.Errorf("analyze %s: %w", t.table, err)
		}
	}
	return nil
}

// swapSchemas pauses live projection, folds the remaining commits, and renames the shadow schema to the live one. A
// projector that was writing to the old live schema finds that its checkpoint has moved, and starts again on the new
// one.
func (b *rebuild) swapSchemas(ctx context.Context, tx pgx.Tx) error {
	target, err := readLiveCheckpoints(ctx, tx, len(b.groups), " FOR UPDATE")
	if err != nil {
		return err
	}
	if err := b.foldUpTo(ctx, target); err != nil {
		return err
	}
	for _, sql := range []string{
		`UPDATE spool_shadow.checkpoints s SET caught_up = l.caught_up, lag_ms = l.lag_ms
			FROM spool.checkpoints l WHERE l.grp = s.grp`,
		`UPDATE spool.checkpoints SET position = -1`,
		`ALTER SCHEMA spool RENAME TO spool_retired`,
		`ALTER SCHEMA spool_shadow RENAME TO spool`,
	} {
		if _, err := tx.Exec(ctx, sql); err != nil {
			return fmt.Errorf("%.40s…: %w", sql, err)
		}
	}
	return nil
}

// foldedCommits returns the number of commits that all groups have folded.
func (b *rebuild) foldedCommits() (n uint64) {
	for _, g := range b.groups {
		n += g.commits
	}
	return n
}

// foldUpTo folds each group up to the position of its checkpoint in target, or up to the end of the log if that comes
// first.
func (b *rebuild) foldUpTo(ctx context.Context, target []store.Checkpoint) error {
	for n, g := range b.groups {
		g.target = uint64(target[n].Position)
	}
	shards := b.p.deps.Log.Shards()
	var all errgroup.Group
	all.SetLimit(max(1, runtime.GOMAXPROCS(0)/2))
	for shard := range shards {
		var list []*shadowGroup
		for n := shard; n < len(b.groups); n += shards {
			list = append(list, b.groups[n])
		}
		all.Go(func() error { return foldShard(ctx, b.p.deps.Log, shard, list) })
	}
	return all.Wait()
}

// errTargetReached ends a read of the log when every group has reached its target.
var errTargetReached = errors.New("every group has reached its target")

// foldShard reads a shard of the log once for all its groups, and writes the folded rows concurrently with the read.
func foldShard(ctx context.Context, log eventlog.Log, shard int, groups []*shadowGroup) error {
	f := commitReader{group: shard, partitions: log.Partitioning(), retry: newBackoff(groups[0].logger, "read the log")}
	var end uint64
	f.after = groups[0].foldedPosition()
	for _, g := range groups {
		g.from = g.foldedPosition().Seq
		if g.from < g.target {
			end = max(end, g.target)
		}
		f.after.Seq = min(f.after.Seq, g.from)
	}
	writers, ctx := errgroup.WithContext(ctx)
	writers.SetLimit(runtime.GOMAXPROCS(0) + 2) // some of them wait for Postgres
	f.push = func(it queuedCommit, bytes int) error {
		at := it.rec.Position.Seq
		// The groups of a shard are numbered shard, shard + shards, …
		g := groups[(it.groupNumber(log.Partitioning(), shard)-shard)/log.Shards()]
		if at > g.from && at <= g.target {
			g.addCommit(ctx, writers, it, bytes)
		}
		if at >= end {
			return errTargetReached
		}
		return ctx.Err()
	}
	read := log.Read
	if u, ok := log.(undecodedLog); ok {
		read = u.ReadUndecoded
	}
	for f.after.Seq < end && ctx.Err() == nil {
		if f.pushCommits(ctx, read(ctx, f.after, eventlog.Filter{})) {
			break
		}
	}
	for _, g := range groups {
		g.writeCommits(ctx, writers)
	}
	return writers.Wait()
}

// undecodedLog is a log that can yield commits without decoding their events; Resolve decodes the events later. A
// rebuild uses it so that the goroutines that write rows decode the events concurrently, and so that waiting commits
// are bytes, which cost the garbage collector less than events.
type undecodedLog interface {
	ReadUndecoded(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error]
	ResolveEvents(ctx context.Context, rec eventlog.Record) (eventlog.Record, error)
}

// decodeCommits decodes the events of commits that an undecodedLog yielded. A commit that cannot be decoded gets a
// fold.PoisonCommit, as in live projection.
func (g *shadowGroup) decodeCommits(ctx context.Context, items []queuedCommit) error {
	log, ok := g.p.deps.Log.(undecodedLog)
	if !ok {
		return nil
	}
	f := commitReader{retry: newBackoff(g.logger, "read the log")}
	for i := range items {
		it := &items[i]
		if it.poison != nil {
			continue
		}
		for {
			rec, err := log.ResolveEvents(ctx, it.rec)
			if err == nil || f.isPoison(rec, err) {
				if err != nil {
					it.poison = newPoisonCommit(g.p.deps.Log.Partitioning(), g.n, rec, err)
				}
				rec.Commit.Events = nil
				it.rec, f.tries = rec, 0
				break
			}
			if !f.retry.logAndPause(ctx, err) {
				return ctx.Err()
			}
		}
	}
	return nil
}

// addCommit adds a commit to those that wait to be written, and calls writeCommits if many wait.
func (g *shadowGroup) addCommit(ctx context.Context, writers *errgroup.Group, it queuedCommit, bytes int) {
	g.items, g.bytes = append(g.items, it), g.bytes+bytes
	if len(g.items) >= maxCommitsPerWrite || g.bytes >= maxBytesPerWrite {
		g.writeCommits(ctx, writers)
	}
}

// writeCommits starts a goroutine that folds and writes the waiting commits after those of the call before.
func (g *shadowGroup) writeCommits(ctx context.Context, writers *errgroup.Group) {
	items := g.items
	g.items, g.bytes = nil, 0
	if len(items) == 0 {
		return
	}
	before, done := g.written, make(chan struct{})
	g.written = done
	writers.Go(func() error {
		defer close(done)
		if before != nil {
			<-before
		}
		if err := ctx.Err(); err != nil {
			return err
		}
		if err := g.decodeCommits(ctx, items); err != nil {
			return err
		}
		if err := g.projectStep(ctx, newProjectionStep(items, true), g.store.Apply); err != nil {
			return fmt.Errorf("group %d: %w", g.n, err)
		}
		g.model.EvictRows()
		g.commits += uint64(len(items))
		return nil
	})
}
