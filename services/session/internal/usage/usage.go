// Package usage folds the usage of sessions from the log into the bucket budgets, from which dispatch and executors
// read tenants' limits and usage (docs/adr/0064). Any number of copies of the service may run an Aggregator: one of them
// folds, and compare-and-set prevents the others from counting anything twice.
package usage

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"iter"
	"log/slog"
	"slices"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// maxBatchCommits is the maximum number of commits that are folded before the bucket budgets is written.
	maxBatchCommits = 1000
	// batchPause is the pause between two writes of the entries of tenants that have budgets or limits.
	batchPause = 25 * time.Millisecond
	// checkpointInterval is the interval at which the entries of the other tenants, and the checkpoint, are written.
	checkpointInterval = time.Second
	// standbyCheckInterval is the interval at which a copy on standby checks the checkpoint. The copy begins to fold if
	// the checkpoint was not written since the last check and is behind the log.
	standbyCheckInterval = 3 * time.Second
	// maxConcurrentWrites is the maximum number of tenants' entries that are written to the bucket budgets at the same
	// time.
	maxConcurrentWrites = 16
	// writeTimeout is the timeout of each write to the bucket budgets.
	writeTimeout = 10 * time.Second

	// firstRetryPause is the pause after the first failure of Run.
	firstRetryPause = 50 * time.Millisecond
	// maxRetryPause is the maximum pause after several failures of Run in a row.
	maxRetryPause = 2 * time.Second
)

// Config configures an Aggregator. Every field is required.
type Config struct {
	Log       eventlog.Log
	JetStream jetstream.JetStream
	Now       func() time.Time
	Logger    *slog.Logger
}

// Aggregator folds the log into the usage of each tenant, and writes it to the bucket budgets. Run must be called once.
type Aggregator struct {
	cfg      Config
	revision uint64       // of the checkpoint that this copy wrote last
	oldest   atomic.Int64 // when the log stored the oldest commit that was read and is not in the bucket yet, in Unix milliseconds; 0 for none
}

// New returns an Aggregator.
func New(cfg Config) *Aggregator { return &Aggregator{cfg: cfg} }

// Collectors returns the Prometheus metrics of the Aggregator.
func (f *Aggregator) Collectors() []prometheus.Collector {
	return []prometheus.Collector{prometheus.NewGaugeFunc(prometheus.GaugeOpts{
		Name: "spool_session_usage_lag_seconds",
		Help: "Age of the oldest commit that this copy has read and not yet counted in the usage of its tenant; 0 if there is none, or if another copy counts.",
	}, func() float64 {
		if at := f.oldest.Load(); at > 0 {
			return max(0, f.cfg.Now().Sub(time.UnixMilli(at)).Seconds())
		}
		return 0
	})}
}

// Run folds the log until ctx ends. After a failure it starts again at the checkpoint. While another copy of the
// service folds, it is on standby.
func (f *Aggregator) Run(ctx context.Context) error {
	pauses := retry.NewDoubling(firstRetryPause, maxRetryPause)
	for ctx.Err() == nil {
		err := f.foldAsLeader(ctx, pauses.Reset)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errKeyChanged) && !f.isLeading(ctx) {
			f.oldest.Store(0)
			f.awaitLeadership(ctx)
			continue
		}
		pause := pauses.NextBackOff()
		f.cfg.Logger.Warn("the usage of tenants is not counted; trying again", "wait", pause, "error", err)
		if retry.Pause(ctx, pause) != nil {
			break
		}
	}
	return nil
}

// isLeading reports whether this copy of the service wrote the checkpoint last.
func (f *Aggregator) isLeading(ctx context.Context) bool {
	kv, err := f.cfg.JetStream.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return false
	}
	_, revision, err := readCheckpoint(ctx, kv)
	return err == nil && revision == f.revision
}

// awaitLeadership blocks until no other copy of the service folds although the checkpoint is behind the log, or until
// ctx ends.
func (f *Aggregator) awaitLeadership(ctx context.Context) {
	for last := uint64(0); ; {
		if retry.Pause(ctx, standbyCheckInterval) != nil {
			return
		}
		revision, behind, err := f.readProgress(ctx)
		if err != nil {
			f.cfg.Logger.Warn("the checkpoint of tenants' usage cannot be read", "error", err)
			continue
		}
		if revision == last && behind {
			return
		}
		last = revision
	}
}

// readProgress returns the revision of the checkpoint, and whether the checkpoint is behind the log.
func (f *Aggregator) readProgress(ctx context.Context) (revision uint64, behind bool, err error) {
	kv, err := f.cfg.JetStream.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return 0, false, err
	}
	c, revision, err := readCheckpoint(ctx, kv)
	if err != nil {
		return 0, false, err
	}
	for shard := range f.cfg.Log.Shards() {
		id, end, err := streamState(ctx, f.cfg.JetStream, shard)
		if err != nil {
			return 0, false, err
		}
		behind = behind || c.Positions[id] < end
	}
	return revision, behind, nil
}

// leaderFold folds the log in the one copy of the service that writes the bucket budgets, from the checkpoint until the
// first failure.
type leaderFold struct {
	*Aggregator
	kv       jetstream.KeyValue
	streams  []string // ids of the streams, by shard
	tenants  map[string]*tenantState
	dirty    map[string]*tenantState // tenants whose changed entry is not written yet
	sessions *sessionUsageCache
	// positions are the last commits read, by shard. stored are those of the checkpoint, or nil if it has to be
	// written.
	positions, stored []uint64
	// fresh are the shards that are read from the beginning. Nothing is written until the end of each of them was
	// reached, so that services use the figures of an earlier version until the whole log is counted.
	fresh map[int]bool
	ends  []uint64 // last sequences of the streams when the reading began
}

// tenantState is the entry of one tenant as the copy of the service that folds the log holds it in memory.
type tenantState struct {
	name     string
	entry    tenantEntry
	revision uint64 // 0 if the bucket has none
	// published reports whether the entry in the bucket has budgets or limits, which services read.
	published bool
}

// readCommit is a commit that a leaderFold has read, or the information that it has reached the end of a shard.
type readCommit struct {
	rec eventlog.Record
	end bool
}

// foldAsLeader makes this copy of the service the only one that can write the checkpoint, and folds the log until a
// failure, which it returns. The error wraps errKeyChanged if another copy has taken over. foldAsLeader calls
// progressed after each write to the bucket budgets.
func (f *Aggregator) foldAsLeader(ctx context.Context, progressed func()) error {
	l, err := f.becomeLeader(ctx)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	items := make(chan readCommit, maxBatchCommits)
	for shard, after := range l.positions {
		fresh := l.fresh[shard]
		g.Go(func() error { return l.sendCommits(ctx, eventlog.Position{Shard: shard, Seq: after}, fresh, items) })
	}
	g.Go(func() error { return l.foldCommits(ctx, items, progressed) })
	return g.Wait()
}

// becomeLeader writes the checkpoint, after which writes of other copies fail, and then reads the entries of all
// tenants.
func (f *Aggregator) becomeLeader(ctx context.Context) (*leaderFold, error) {
	l := &leaderFold{
		Aggregator: f, tenants: map[string]*tenantState{}, dirty: map[string]*tenantState{}, sessions: newSessionUsageCache(f.cfg.Log, maxCachedUsage), fresh: map[int]bool{},
	}
	var err error
	if l.kv, err = f.cfg.JetStream.KeyValue(ctx, topology.BucketBudgets); err != nil {
		return nil, fmt.Errorf("open bucket %s: %w", topology.BucketBudgets, err)
	}
	for shard := range f.cfg.Log.Shards() {
		id, end, err := streamState(ctx, f.cfg.JetStream, shard)
		if err != nil {
			return nil, err
		}
		l.streams, l.ends = append(l.streams, id), append(l.ends, end)
	}
	c, revision, err := readCheckpoint(ctx, l.kv)
	if err != nil {
		return nil, err
	}
	if f.revision, err = putValue(ctx, l.kv, checkpointKey, c, revision); err != nil {
		return nil, err
	}
	earlier, err := l.readEntries(ctx)
	if err != nil {
		return nil, err
	}
	if earlier {
		f.cfg.Logger.Info("counting the usage of tenants from the beginning of the log: an earlier version wrote entries")
		c = checkpoint{}
	}
	for shard, id := range l.streams {
		position, known := c.Positions[id]
		l.positions = append(l.positions, position)
		if !known {
			l.fresh[shard], l.sessions.whole[shard] = true, true
		}
	}
	l.stored = slices.Clone(l.positions)
	return l, nil
}

// readEntries reads the entries of all tenants. earlier reports whether the projector of an earlier version of Spool
// wrote one of them.
func (l *leaderFold) readEntries(ctx context.Context) (earlier bool, err error) {
	w, err := l.kv.WatchAll(ctx)
	if err != nil {
		return false, fmt.Errorf("read bucket %s: %w", topology.BucketBudgets, err)
	}
	defer func() { err = errors.Join(err, w.Stop()) }()
	for {
		select {
		case <-ctx.Done():
			return false, ctx.Err()
		case e, ok := <-w.Updates():
			switch {
			case !ok:
				return false, fmt.Errorf("read bucket %s: the watch ended", topology.BucketBudgets)
			case e == nil:
				return earlier, nil
			case e.Key() == checkpointKey:
				continue
			}
			// Only earlier versions delete entries.
			t := &tenantState{name: e.Key(), revision: e.Revision()}
			if e.Operation() == jetstream.KeyValuePut {
				if err := json.Unmarshal(e.Value(), &t.entry); err != nil {
					l.cfg.Logger.Error("the entry of a tenant does not decode; its usage is counted from the beginning of the log", "tenant", e.Key(), "error", err)
					t.entry = tenantEntry{}
				}
			}
			t.published = !t.entry.IsEmpty()
			earlier = earlier || t.entry.Shards == nil
			l.tenants[t.name] = t
		}
	}
}

// sendCommits sends the commits of a shard after a position to items, until ctx ends. If fresh is set, it also sends an
// item when it reaches the end of the shard.
func (l *leaderFold) sendCommits(ctx context.Context, after eventlog.Position, fresh bool, items chan<- readCommit) error {
	push := func(it readCommit) bool {
		select {
		case items <- it:
			return true
		case <-ctx.Done():
			return false
		}
	}
	pass := func(list iter.Seq2[eventlog.Record, error]) error {
		for rec, err := range list {
			if err != nil {
				return fmt.Errorf("read %s: %w", topology.EventsStreamName(after.Shard), err)
			}
			after = rec.Position
			if !push(readCommit{rec: rec}) {
				break
			}
		}
		return ctx.Err()
	}
	filter := eventlog.Filter{Foreign: true}
	if fresh {
		err := pass(readableCommits(ctx, after, func(p eventlog.Position) iter.Seq2[eventlog.Record, error] { return l.cfg.Log.Read(ctx, p, filter) }))
		if err != nil {
			return err
		}
		// The last commit may have been erased.
		after.Seq = max(after.Seq, l.ends[after.Shard])
		push(readCommit{rec: eventlog.Record{Position: after}, end: true})
	}
	return pass(readableCommits(ctx, after, func(p eventlog.Position) iter.Seq2[eventlog.Record, error] { return l.cfg.Log.Tail(ctx, p, filter) }))
}

// foldCommits folds the commits that it receives from items, and writes the entries and the checkpoint to the bucket
// budgets.
func (l *leaderFold) foldCommits(ctx context.Context, items <-chan readCommit, progressed func()) error {
	tick := time.NewTicker(checkpointInterval)
	defer tick.Stop()
	var last time.Time // time of the last write of all entries
	for {
		var batch []readCommit
		select {
		case <-ctx.Done():
			return ctx.Err()
		case it := <-items:
			batch = takeBatch(it, items)
		case <-tick.C:
		}
		all := time.Since(last) >= checkpointInterval
		caughtUp := len(l.fresh) == 0
		if err := l.applyBatch(ctx, batch); err != nil {
			return err
		}
		if len(l.fresh) > 0 {
			continue
		}
		if !caughtUp {
			l.cfg.Logger.Info("the usage of tenants is counted up to the end of the log", "tenants", len(l.tenants))
			all, l.stored = true, nil
		}
		if err := l.writeEntries(ctx, all); err != nil {
			return err
		}
		if all {
			last = time.Now()
		}
		progressed()
		if len(batch) > 0 {
			if err := retry.Pause(ctx, batchPause); err != nil {
				return err
			}
		}
	}
}

// takeBatch returns a batch of commits: it and those that already wait in the channel items, up to maxBatchCommits.
func takeBatch(it readCommit, items <-chan readCommit) []readCommit {
	batch := []readCommit{it}
	for len(batch) < maxBatchCommits {
		select {
		case it := <-items:
			batch = append(batch, it)
		default:
			return batch
		}
	}
	return batch
}

// applyBatch folds a batch of commits into the tenants' entries in memory.
func (l *leaderFold) applyBatch(ctx context.Context, batch []readCommit) error {
	if len(batch) == 0 {
		return nil
	}
	records := make([]eventlog.Record, 0, len(batch))
	for _, it := range batch {
		if at := it.rec.Time.UnixMilli(); !it.end && (l.oldest.Load() == 0 || len(l.fresh) > 0) {
			l.oldest.Store(at)
		}
		records = append(records, it.rec)
	}
	if err := l.sessions.loadSessions(ctx, records); err != nil {
		return err
	}
	keep := keptWindowAt(l.cfg.Now())
	for _, it := range batch {
		p := it.rec.Position
		if it.end {
			delete(l.fresh, p.Shard)
		}
		if p.Seq <= l.positions[p.Shard] {
			continue
		}
		l.positions[p.Shard] = p.Seq
		if len(it.rec.Events) == 0 {
			continue
		}
		name := it.rec.Subject.Tenant
		usage := l.sessions.foldCommit(it.rec)
		t := l.tenants[name]
		if t == nil {
			t = &tenantState{name: name}
			l.tenants[name] = t
		}
		if t.entry.applyCommit(l.streams[p.Shard], it.rec, usage, keep) {
			l.dirty[name] = t
		}
	}
	l.sessions.evict()
	return nil
}

// writeEntries writes the changed entries of tenants with budgets or limits, which services read. If all is set, it
// writes all changed entries, and then the checkpoint.
func (l *leaderFold) writeEntries(ctx context.Context, all bool) error {
	if all {
		// An entry of an earlier version is replaced too. A later call of readEntries would find one without shards again,
		// and executors take one without positions for complete.
		for name, t := range l.tenants {
			if t.revision > 0 && (t.entry.Shards == nil || t.published && t.entry.Counted == nil) {
				l.dirty[name] = t
			}
		}
	}
	now := l.cfg.Now()
	var written []*tenantState
	g, within := errgroup.WithContext(ctx)
	g.SetLimit(maxConcurrentWrites)
	for _, t := range l.dirty {
		if !all && !t.published && !t.entry.hasLimits() {
			continue
		}
		t.entry.computeFigures(l.streams, l.positions, now)
		written = append(written, t)
		g.Go(func() error {
			within, cancel := context.WithTimeout(within, writeTimeout)
			defer cancel()
			revision, err := putValue(within, l.kv, t.name, t.entry, t.revision)
			if err == nil {
				t.revision = revision
			}
			return err
		})
	}
	if err := g.Wait(); err != nil {
		return err
	}
	for _, t := range written {
		t.published = !t.entry.IsEmpty()
		delete(l.dirty, t.name)
	}
	l.oldest.Store(0)
	if !all {
		return nil
	}
	return l.writeCheckpoint(ctx)
}

// writeCheckpoint writes the checkpoint to the bucket budgets, if its positions have changed.
func (l *leaderFold) writeCheckpoint(ctx context.Context) error {
	if slices.Equal(l.positions, l.stored) {
		return nil
	}
	c := checkpoint{Positions: map[string]uint64{}}
	for shard, id := range l.streams {
		c.Positions[id] = l.positions[shard]
	}
	ctx, cancel := context.WithTimeout(ctx, writeTimeout)
	defer cancel()
	revision, err := putValue(ctx, l.kv, checkpointKey, c, l.revision)
	if err != nil {
		return err
	}
	l.revision, l.stored = revision, slices.Clone(l.positions)
	return nil
}
