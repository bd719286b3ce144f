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
	// rebuildLock is the advisory lock that allows only one rebuild: the bytes of "spoolreb".
	rebuildLock = 0x73706f6f6c726562

	// rebuildCommits and rebuildBytes bound a transaction of a rebuild. They are large, so that rows that change
	// often are written once.
	rebuildCommits = 5000
	rebuildBytes   = 16 << 20
	// nearCommits is the largest number of commits that the shadow schema may be behind the live one when live
	// projection is paused.
	nearCommits = 500
	// maxPasses bounds how often a rebuild tries to catch up with a log that grows as fast as it is folded.
	maxPasses    = 20
	closeTimeout = 30 * time.Second
)

// Report describes a completed rebuild.
type Report struct {
	Commits  uint64        // number of folded commits
	Rows     uint64        // number of compared rows; 0 without compare
	Duration time.Duration // duration of the whole rebuild
	Held     time.Duration // time for which live projection was paused; 0 with compare
}

// Rebuild folds the log from its beginning into a shadow schema, while live projection continues, and replaces the
// read models with it in one transaction. With compare it changes nothing and returns a *DifferenceError unless both
// are equal in every row. It needs Deps.Log but not Deps.NATS.
func Rebuild(ctx context.Context, cfg Config, deps Deps, compare bool) (r Report, err error) {
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
	r, err = (&rebuild{p: p, logger: logger, defers: true}).run(ctx, compare)
	if errors.Is(err, errIndexRefused) {
		// With all indexes in place, the commit of the row is found and projected without the row, as live.
		logger.Warn("fold again with indexes", "error", err)
		r, err = (&rebuild{p: p, logger: logger}).run(ctx, compare)
	}
	if err != nil {
		return r, fmt.Errorf("rebuild: %w", err)
	}
	r.Duration = deps.Now().Sub(began)
	return r, nil
}

// run folds the log once and compares or replaces the read models.
func (b *rebuild) run(ctx context.Context, compare bool) (r Report, err error) {
	defer func() { err = errors.Join(err, b.close()) }()
	if err := b.prepare(ctx); err != nil {
		return r, err
	}
	if compare {
		r.Rows, err = b.compare(ctx)
	} else {
		r.Held, err = b.replace(ctx)
	}
	if err != nil {
		return r, err
	}
	for _, g := range b.groups {
		r.Commits += g.commits
	}
	return r, nil
}

// rebuild is one run of Rebuild.
type rebuild struct {
	p      *Projector
	logger *slog.Logger
	conn   *pgx.Conn // connection to the live schema
	groups []*shadow

	defers  bool             // whether indexes are created after the rows
	indexes *deferredIndexes // nil if defers is false
}

// shadow is a projector group that folds into the shadow schema, which replaces the live schema at the end of a
// rebuild.
type shadow struct {
	*group
	store   *store.Store
	commits uint64
	target  uint64
	items   []item // items that were not written yet
	bytes   int
	from    uint64        // stream sequence at which the present read starts for the group
	written chan struct{} // closed when the last flush was written; nil before the first
}

// prepare takes the lock and creates an empty shadow schema.
func (b *rebuild) prepare(ctx context.Context) (err error) {
	url := b.p.cfg.DatabaseURL
	if err := readmodel.Migrate(ctx, url); err != nil {
		return err
	}
	if b.conn, err = readmodel.Connect(ctx, url, readmodel.Schema); err != nil {
		return fmt.Errorf("connect to postgres: %w", err)
	}
	var locked bool
	if err := b.conn.QueryRow(ctx, "SELECT pg_try_advisory_lock($1)", int64(rebuildLock)).Scan(&locked); err != nil {
		return err
	}
	if !locked {
		return errors.New("another rebuild is running on this database: wait until it ends")
	}
	if err := b.dropLeftovers(ctx); err != nil {
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
		if b.indexes, err = dropIndexes(ctx, url, b.logger); err != nil {
			return err
		}
	}
	for n := range b.p.deps.Log.Partitioning().GroupCount() {
		g := &shadow{group: newGroup(b.p, n, b.logger.With("group", n))}
		g.quiet, g.model = true, fold.New(n, b.p.cfg.PresentRows)
		b.groups = append(b.groups, g)
		if g.store, err = store.Open(ctx, url, readmodel.ShadowSchema); err != nil {
			return err
		}
		g.db, g.store.Disposable = g.store, true
		if b.indexes != nil {
			g.store.BeforeEventsLookup = b.indexes.createOfEvents
		}
		g.checkpoint.Shard = int16(g.shard)
	}
	return nil
}

// createIndexes creates the indexes that were deferred.
func (b *rebuild) createIndexes(ctx context.Context) error {
	if b.indexes == nil {
		return nil
	}
	return b.indexes.create(ctx)
}

// dropLeftovers drops the schemas of this rebuild and of an earlier one that was interrupted.
func (b *rebuild) dropLeftovers(ctx context.Context) error {
	for _, schema := range []string{readmodel.ShadowSchema, readmodel.RetiredSchema} {
		if _, err := b.conn.Exec(ctx, "DROP SCHEMA IF EXISTS "+schema+" CASCADE"); err != nil {
			return fmt.Errorf("drop schema %s: %w", schema, err)
		}
	}
	return nil
}

// close releases all resources, also if ctx has ended.
func (b *rebuild) close() (err error) {
	ctx, cancel := context.WithTimeout(context.Background(), closeTimeout)
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
		err = errors.Join(err, b.dropLeftovers(ctx))
	}
	// The server ends a closed connection, and its locks, asynchronously; the next rebuild must not find this one's
	// lock.
	if _, uerr := b.conn.Exec(ctx, "SELECT pg_advisory_unlock_all()"); uerr != nil && !b.conn.IsClosed() {
		err = errors.Join(err, fmt.Errorf("release the lock of rebuilds: %w", uerr))
	}
	return errors.Join(err, b.conn.Close(ctx))
}

// checkpoints returns the checkpoints of the live groups.
func checkpoints(ctx context.Context, q pgx.Tx, groups int, suffix string) ([]store.Checkpoint, error) {
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

// replace follows live projection until the shadow is near, pauses live projection, and swaps the schemas.
func (b *rebuild) replace(ctx context.Context) (held time.Duration, err error) {
	for pass := 0; ; pass++ {
		before := b.folded()
		var target []store.Checkpoint
		err := pgx.BeginFunc(ctx, b.conn, func(tx pgx.Tx) (err error) {
			target, err = checkpoints(ctx, tx, len(b.groups), "")
			return err
		})
		if err == nil {
			err = b.foldTo(ctx, target)
		}
		if err == nil {
			err = b.createIndexes(ctx)
		}
		if err != nil {
			return 0, err
		}
		b.logger.Info("folded", "pass", pass, "commits", b.folded())
		if b.folded()-before <= nearCommits || pass == maxPasses {
			break
		}
	}
	if err := b.analyze(ctx); err != nil {
		return 0, err
	}
	from := b.p.deps.Now()
	if err := pgx.BeginFunc(ctx, b.conn, func(tx pgx.Tx) error { return b.swap(ctx, tx) }); err != nil {
		return 0, fmt.Errorf("swap: %w", err)
	}
	return b.p.deps.Now().Sub(from), nil
}

// analyze updates statistics, so that the gateways' queries have good plans from the beginning.
func (b *rebuild) analyze(ctx context.Context) error {
	for _, t := range rebuiltTables {
		if _, err := b.conn.Exec(ctx, "ANALYZE "+readmodel.ShadowSchema+"."+t.table); err != nil {
			return fmt.Errorf("analyze %s: %w", t.table, err)
		}
	}
	return nil
}

// swap pauses live projection, folds the remaining commits, and renames the schemas. A projector that was writing the
// live rows finds that its checkpoint has moved and starts again on the new rows.
func (b *rebuild) swap(ctx context.Context, tx pgx.Tx) error {
	target, err := checkpoints(ctx, tx, len(b.groups), " FOR UPDATE")
	if err != nil {
		return err
	}
	if err := b.foldTo(ctx, target); err != nil {
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

// folded returns the number of commits that all groups have folded.
func (b *rebuild) folded() (n uint64) {
	for _, g := range b.groups {
		n += g.commits
	}
	return n
}

// foldTo folds each group up to its target, or up to the end of the log if that comes first.
func (b *rebuild) foldTo(ctx context.Context, target []store.Checkpoint) error {
	for n, g := range b.groups {
		g.target = uint64(target[n].Position)
	}
	shards := b.p.deps.Log.Shards()
	var all errgroup.Group
	all.SetLimit(max(1, runtime.GOMAXPROCS(0)/2))
	for shard := range shards {
		var list []*shadow
		for n := shard; n < len(b.groups); n += shards {
			list = append(list, b.groups[n])
		}
		all.Go(func() error { return foldShard(ctx, b.p.deps.Log, shard, list) })
	}
	return all.Wait()
}

// errTargetReached ends a read that has reached its target.
var errTargetReached = errors.New("done")

// foldShard reads a shard once for all its groups, and writes concurrently with the read.
func foldShard(ctx context.Context, log eventlog.Log, shard int, groups []*shadow) error {
	f := feeder{group: shard, partitions: log.Partitioning(), retry: newBackoff(groups[0].logger, "read the log")}
	var end uint64
	f.after = groups[0].position()
	for _, g := range groups {
		g.from = g.position().Seq
		if g.from < g.target {
			end = max(end, g.target)
		}
		f.after.Seq = min(f.after.Seq, g.from)
	}
	writers, ctx := errgroup.WithContext(ctx)
	writers.SetLimit(runtime.GOMAXPROCS(0) + 2) // some of them wait for Postgres
	f.push = func(it item, bytes int) error {
		at := it.rec.Position.Seq
		// The groups of a shard are numbered shard, shard + shards, …
		g := groups[(it.group(log.Partitioning(), shard)-shard)/log.Shards()]
		if at > g.from && at <= g.target {
			g.take(ctx, writers, it, bytes)
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
		if f.run(ctx, read(ctx, f.after, eventlog.Filter{})) {
			break
		}
	}
	for _, g := range groups {
		g.flush(ctx, writers)
	}
	return writers.Wait()
}

// undecodedLog is a log that can yield commits without decoding their events; Resolve decodes them later. The
// goroutines that write rows then decode concurrently, and commits that wait for them are bytes, which cost the garbage
// collector less than events.
type undecodedLog interface {
	ReadUndecoded(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error]
	ResolveEvents(ctx context.Context, rec eventlog.Record) (eventlog.Record, error)
}

// decode decodes the events of items that an undecodedLog yielded. Commits that cannot be decoded become poison, as if the feeder had
// decoded them.
func (g *shadow) decode(ctx context.Context, items []item) error {
	log, ok := g.p.deps.Log.(undecodedLog)
	if !ok {
		return nil
	}
	f := feeder{retry: newBackoff(g.logger, "read the log")}
	for i := range items {
		it := &items[i]
		if it.poison != nil {
			continue
		}
		for {
			rec, err := log.ResolveEvents(ctx, it.rec)
			if err == nil || f.isPoison(rec, err) {
				if err != nil {
					it.poison = newPoison(g.p.deps.Log.Partitioning(), g.n, rec, err)
				}
				rec.Commit.Events = nil
				it.rec, f.tries = rec, 0
				break
			}
			if !f.retry.wait(ctx, err) {
				return ctx.Err()
			}
		}
	}
	return nil
}

// take adds an item, and flushes the items if there are many.
func (g *shadow) take(ctx context.Context, writers *errgroup.Group, it item, bytes int) {
	g.items, g.bytes = append(g.items, it), g.bytes+bytes
	if len(g.items) >= rebuildCommits || g.bytes >= rebuildBytes {
		g.flush(ctx, writers)
	}
}

// flush writes the collected items, after those of the flush before.
func (g *shadow) flush(ctx context.Context, writers *errgroup.Group) {
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
		if err := g.decode(ctx, items); err != nil {
			return err
		}
		if err := g.step(ctx, newStep(items, true), g.store.Apply); err != nil {
			return fmt.Errorf("group %d: %w", g.n, err)
		}
		g.model.Trim()
		g.commits += uint64(len(items))
		return nil
	})
}
