// Package usage folds the usage of sessions from the log into the bucket budgets, from which dispatch and executors
// read tenants' limits and usage (docs/adr/0064). Any number of copies of the service may run a Folder: one of them
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
	// batchCommits is the number of commits that are folded before the bucket is written.
	batchCommits = 1000
	// batchPause is the pause between two writes of the entries of tenants that have budgets or limits.
	batchPause = 25 * time.Millisecond
	// checkpointEvery is the interval at which the entries of the other tenants, and the checkpoint, are written.
	checkpointEvery = time.Second
	// standByTime is the interval at which a copy on standby checks the checkpoint. The copy starts to fold if the
	// checkpoint was not written since the last check and is behind the log.
	standByTime = 3 * time.Second
	// entryWriters is the number of tenants' entries that are written to the bucket at once.
	entryWriters = 16
	// writeTime is the timeout of each write to the bucket budgets.
	writeTime = 10 * time.Second

	firstWait = 50 * time.Millisecond
	maxWait   = 2 * time.Second
)

// Config configures a Folder. Every field is required.
type Config struct {
	Log       eventlog.Log
	JetStream jetstream.JetStream
	Now       func() time.Time
	Logger    *slog.Logger
}

// Folder folds the log into the bucket budgets. Run is called once.
type Folder struct {
	cfg      Config
	revision uint64       // of the checkpoint that this copy wrote last
	oldest   atomic.Int64 // when the log stored the oldest commit that was read and is not in the bucket yet, in Unix milliseconds; 0 for none
}

// New returns a Folder.
func New(cfg Config) *Folder { return &Folder{cfg: cfg} }

// Collectors returns the metrics of the Folder.
func (f *Folder) Collectors() []prometheus.Collector {
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

// Run folds until ctx ends. After a failure it starts again at the checkpoint. While another copy folds, it is on
// standby.
func (f *Folder) Run(ctx context.Context) error {
	pauses := retry.NewDoubling(firstWait, maxWait)
	for ctx.Err() == nil {
		err := f.lead(ctx, pauses.Reset)
		if ctx.Err() != nil {
			break
		}
		if errors.Is(err, errMoved) && !f.isLeading(ctx) {
			f.oldest.Store(0)
			f.standBy(ctx)
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

// isLeading reports whether this copy wrote the checkpoint last.
func (f *Folder) isLeading(ctx context.Context) bool {
	kv, err := f.cfg.JetStream.KeyValue(ctx, topology.BucketBudgets)
	if err != nil {
		return false
	}
	_, revision, err := readCheckpoint(ctx, kv)
	return err == nil && revision == f.revision
}

// standBy blocks until no other copy folds, although there is something to fold, or until ctx ends.
func (f *Folder) standBy(ctx context.Context) {
	for last := uint64(0); ; {
		if retry.Pause(ctx, standByTime) != nil {
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
func (f *Folder) readProgress(ctx context.Context) (revision uint64, behind bool, err error) {
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
	*Folder
	kv       jetstream.KeyValue
	streams  []string // ids of the streams, by shard
	tenants  map[string]*tenant
	dirty    map[string]*tenant // tenants whose changed entry is not written yet
	sessions *sessions
	// positions are the last commits read, by shard. stored are those of the checkpoint, or nil if it has to be
	// written.
	positions, stored []uint64
	// fresh are the shards that are read from the beginning. Nothing is written until the end of each of them was
	// reached, so that services use the figures of an earlier version until the whole log is counted.
	fresh map[int]bool
	ends  []uint64 // last sequences of the streams when the reading began
}

// tenant is the entry of one tenant, as the leader holds it in memory.
type tenant struct {
	name     string
	entry    entry
	revision uint64 // 0 if the bucket has none
	// published reports whether the entry in the bucket has budgets or limits, which services read.
	published bool
}

// item is a commit that a leader has read, or the information that it has reached the end of a shard.
type item struct {
	rec eventlog.Record
	end bool
}

// lead writes the checkpoint, after which the writes of other copies fail, and folds the log until a failure, which it returns. The
// error wraps errMoved if another copy has taken over. lead calls progressed after each write to the bucket.
func (f *Folder) lead(ctx context.Context, progressed func()) error {
	l, err := f.begin(ctx)
	if err != nil {
		return err
	}
	g, ctx := errgroup.WithContext(ctx)
	items := make(chan item, batchCommits)
	for shard, after := range l.positions {
		fresh := l.fresh[shard]
		g.Go(func() error { return l.read(ctx, eventlog.Position{Shard: shard, Seq: after}, fresh, items) })
	}
	g.Go(func() error { return l.fold(ctx, items, progressed) })
	return g.Wait()
}

// begin writes the checkpoint again, after which no other copy can write it, and then reads the entries.
func (f *Folder) begin(ctx context.Context) (*leaderFold, error) {
	l := &leaderFold{
		Folder: f, tenants: map[string]*tenant{}, dirty: map[string]*tenant{}, sessions: newSessions(f.cfg.Log, maxPresent), fresh: map[int]bool{},
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
	earlier, err := l.scan(ctx)
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

// scan reads all entries, and reports whether the projector of an earlier version wrote one of them.
func (l *leaderFold) scan(ctx context.Context) (earlier bool, err error) {
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
			t := &tenant{name: e.Key(), revision: e.Revision()}
			if e.Operation() == jetstream.KeyValuePut {
				if err := json.Unmarshal(e.Value(), &t.entry); err != nil {
					l.cfg.Logger.Error("the entry of a tenant does not decode; its usage is counted from the beginning of the log", "tenant", e.Key(), "error", err)
					t.entry = entry{}
				}
			}
			t.published = !t.entry.IsEmpty()
			earlier = earlier || t.entry.Shards == nil
			l.tenants[t.name] = t
		}
	}
}

// read sends the commits of a shard after a position until ctx ends. If fresh is set, it also sends an item when it
// reaches the end of the shard.
func (l *leaderFold) read(ctx context.Context, after eventlog.Position, fresh bool, items chan<- item) error {
	push := func(it item) bool {
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
				return fmt.Errorf("read %s: %w", topology.EventsStream(after.Shard), err)
			}
			after = rec.Position
			if !push(item{rec: rec}) {
				break
			}
		}
		return ctx.Err()
	}
	filter := eventlog.Filter{Foreign: true}
	if fresh {
		err := pass(commits(ctx, after, func(p eventlog.Position) iter.Seq2[eventlog.Record, error] { return l.cfg.Log.Read(ctx, p, filter) }))
		if err != nil {
			return err
		}
		// The last commit may have been erased.
		after.Seq = max(after.Seq, l.ends[after.Shard])
		push(item{rec: eventlog.Record{Position: after}, end: true})
	}
	return pass(commits(ctx, after, func(p eventlog.Position) iter.Seq2[eventlog.Record, error] { return l.cfg.Log.Tail(ctx, p, filter) }))
}

// fold applies items, and writes the entries and the checkpoint.
func (l *leaderFold) fold(ctx context.Context, items <-chan item, progressed func()) error {
	tick := time.NewTicker(checkpointEvery)
	defer tick.Stop()
	var last time.Time // time of the last write of all entries
	for {
		var batch []item
		select {
		case <-ctx.Done():
			return ctx.Err()
		case it := <-items:
			batch = takeBatch(it, items)
		case <-tick.C:
		}
		all := time.Since(last) >= checkpointEvery
		caughtUp := len(l.fresh) == 0
		if err := l.apply(ctx, batch); err != nil {
			return err
		}
		if len(l.fresh) > 0 {
			continue
		}
		if !caughtUp {
			l.cfg.Logger.Info("the usage of tenants is counted up to the end of the log", "tenants", len(l.tenants))
			all, l.stored = true, nil
		}
		if err := l.write(ctx, all); err != nil {
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

// takeBatch returns an item and the items that already wait behind it, up to a batch.
func takeBatch(it item, items <-chan item) []item {
	batch := []item{it}
	for len(batch) < batchCommits {
		select {
		case it := <-items:
			batch = append(batch, it)
		default:
			return batch
		}
	}
	return batch
}

// apply folds a batch of commits into the tenants' entries in memory.
func (l *leaderFold) apply(ctx context.Context, batch []item) error {
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
	if err := l.sessions.load(ctx, records); err != nil {
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
		usage := l.sessions.add(it.rec)
		t := l.tenants[name]
		if t == nil {
			t = &tenant{name: name}
			l.tenants[name] = t
		}
		if t.entry.add(l.streams[p.Shard], it.rec, usage, keep) {
			l.dirty[name] = t
		}
	}
	l.sessions.trim()
	return nil
}

// write writes the changed entries that services read or, with all, every changed entry and then the checkpoint.
func (l *leaderFold) write(ctx context.Context, all bool) error {
	if all {
		// An entry of an earlier version whose tenant has no commits is replaced too: a later scan would find it again.
		for name, t := range l.tenants {
			if t.revision > 0 && t.entry.Shards == nil {
				l.dirty[name] = t
			}
		}
	}
	now := l.cfg.Now()
	var written []*tenant
	g, within := errgroup.WithContext(ctx)
	g.SetLimit(entryWriters)
	for _, t := range l.dirty {
		if !all && !t.published && !t.entry.hasLimits() {
			continue
		}
		t.entry.publish(l.streams, now)
		written = append(written, t)
		g.Go(func() error {
			within, cancel := context.WithTimeout(within, writeTime)
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

// writeCheckpoint writes the checkpoint if its positions changed.
func (l *leaderFold) writeCheckpoint(ctx context.Context) error {
	if slices.Equal(l.positions, l.stored) {
		return nil
	}
	c := checkpoint{Positions: map[string]uint64{}}
	for shard, id := range l.streams {
		c.Positions[id] = l.positions[shard]
	}
	ctx, cancel := context.WithTimeout(ctx, writeTime)
	defer cancel()
	revision, err := putValue(ctx, l.kv, checkpointKey, c, l.revision)
	if err != nil {
		return err
	}
	l.revision, l.stored = revision, slices.Clone(l.positions)
	return nil
}
