// Package controls watches the lives of the sessions whose executions this executor runs. A control, such as a cancel,
// is an event in the session's life. The executor receives a hint about it, which may be lost; this package finds it in
// the log.
package controls

import (
	"context"
	"log/slog"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
)

// checkTimeout is the time limit of one request to the log for the sessions of a shard that have changed.
const checkTimeout = 10 * time.Second

// Config configures a Watcher. All fields are required.
type Config struct {
	Log    eventlog.Log
	Every  time.Duration // interval at which the lives of all watched sessions are checked
	Logger *slog.Logger
}

// A Watcher finds out which of the watched sessions have a new event in their life, such as a control. It needs one request
// for each shard of the log, and not one for each session. It is safe for concurrent use.
type Watcher struct {
	cfg Config

	mu      sync.Mutex
	watches map[*Watch]struct{}
}

// A Watch reports when one session's life has new events, which may be controls.
type Watch struct {
	watcher *Watcher
	life    events.Subject
	moved   chan struct{}

	// Guarded by Watcher.mu.
	through uint64 // the life has been checked up to this position
	checked bool   // the session has been part of a check
}

// New returns a Watcher without watched sessions.
func New(cfg Config) *Watcher {
	return &Watcher{cfg: cfg, watches: map[*Watch]struct{}{}}
}

// Watch begins to watch a session's life for events after the given head, until Close of the returned Watch is called.
func (w *Watcher) Watch(life eventlog.Head) *Watch {
	x := &Watch{watcher: w, life: life.Subject, moved: make(chan struct{}, 1), through: life.Seq}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.watches[x] = struct{}{}
	return x
}

// Close ends the watch. Afterwards the channel of Changed receives nothing.
func (x *Watch) Close() {
	x.watcher.mu.Lock()
	defer x.watcher.mu.Unlock()
	delete(x.watcher.watches, x)
}

// Changed returns a channel that receives a value when the session's life has a new event. Replicas that lag may not have the
// event yet, so the caller has to read the session from the leader.
func (x *Watch) Changed() <-chan struct{} { return x.moved }

// Run checks all watched sessions at an interval until ctx ends. A shard that does not answer does not delay the other
// shards.
func (w *Watcher) Run(ctx context.Context) {
	var all sync.WaitGroup
	defer all.Wait()
	for shard := range w.cfg.Log.Shards() {
		all.Go(func() {
			tick := time.NewTicker(w.cfg.Every)
			defer tick.Stop()
			for {
				select {
				case <-ctx.Done():
					return
				case <-tick.C:
				}
				w.checkShard(ctx, shard)
			}
		})
	}
}

// checkShard checks the watched sessions of a shard. It checks sessions that were not checked before by a separate request,
// because they may have changed long before the position that the check of the others has reached.
func (w *Watcher) checkShard(ctx context.Context, shard int) {
	for _, checked := range []bool{true, false} {
		watches, after := w.watchesOfShard(shard, checked)
		if len(watches) == 0 {
			continue
		}
		subjects := make([]events.Subject, len(watches))
		for i, x := range watches {
			subjects[i] = x.life
		}
		try, cancel := context.WithTimeout(ctx, checkTimeout)
		c, err := w.cfg.Log.ChangedAmong(try, eventlog.Position{Shard: shard, Seq: after}, subjects)
		cancel()
		if err != nil {
			if ctx.Err() == nil {
				w.cfg.Logger.Warn("the controls of running executions cannot be read, trying again", "shard", shard, "executions", len(watches), "error", err)
			}
			continue
		}
		w.recordChecked(watches, c)
	}
}

// watchesOfShard returns the watches of a shard that were checked before or, if checked is false, those that were not. after
// is the position up to which all of them were checked.
func (w *Watcher) watchesOfShard(shard int, checked bool) (watches []*Watch, after uint64) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for x := range w.watches {
		if x.checked != checked || x.life.Partition()%w.cfg.Log.Shards() != shard {
			continue
		}
		if len(watches) == 0 || x.through < after {
			after = x.through
		}
		watches = append(watches, x)
	}
	return watches, after
}

// recordChecked records the position up to which sessions were checked, and signals the watches of the sessions that have changed.
func (w *Watcher) recordChecked(watches []*Watch, c eventlog.Changes) {
	w.mu.Lock()
	defer w.mu.Unlock()
	for _, x := range watches {
		if c.Last[x.life.String()] > x.through {
			select {
			case x.moved <- struct{}{}:
			default:
			}
		}
		x.through, x.checked = max(x.through, c.Through.Seq), true
	}
}
