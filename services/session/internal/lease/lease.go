// Package lease watches the leases of executors, which show which executors and engines are alive.
package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// Config of a Watch; everything is required.
type Config struct {
	JetStream jetstream.JetStream
	Logger    *slog.Logger
	Now       func() time.Time
	Gone      time.Duration // how long an engine counts as alive after its last lease
}

// Watch follows the leases bucket.
type Watch struct {
	cfg Config

	mu      sync.Mutex
	started time.Time
	engines map[string]time.Time // when an executor of the engine last renewed its lease, by engine
}

// New returns a Watch. It knows no lease before Run.
func New(cfg Config) *Watch {
	return &Watch{cfg: cfg, started: cfg.Now(), engines: map[string]time.Time{}}
}

// rewatch is the pause before the bucket is watched again after a failure.
const rewatch = time.Second

// Run watches the leases until ctx ends. While NATS is unreachable, engines seem to be gone. Their jobs are then
// offered to other executors, but no execution is ended.
func (w *Watch) Run(ctx context.Context) error {
	for {
		err := w.follow(ctx)
		if ctx.Err() != nil {
			return nil
		}
		w.cfg.Logger.Warn("the leases are not watched; trying again", "error", err)
		select {
		case <-ctx.Done():
			return nil
		case <-time.After(rewatch):
		}
	}
}

// follow watches the bucket until ctx ends or the watch fails, and returns the reason.
func (w *Watch) follow(ctx context.Context) error {
	kv, err := w.cfg.JetStream.KeyValue(ctx, topology.BucketLeases)
	if err != nil {
		return fmt.Errorf("open the leases bucket: %w", err)
	}
	watcher, err := kv.WatchAll(ctx)
	if err != nil {
		return fmt.Errorf("watch the leases: %w", err)
	}
	for {
		select {
		case <-ctx.Done():
			return watcher.Stop()
		case entry, ok := <-watcher.Updates():
			if !ok {
				return errors.New("the watch of the leases ended")
			}
			w.see(entry)
		}
	}
}

// see records a renewal. It ignores deletions: only the time of the last renewal counts.
func (w *Watch) see(entry jetstream.KeyValueEntry) {
	if entry == nil || entry.Operation() != jetstream.KeyValuePut {
		return
	}
	var l topology.Lease
	if err := json.Unmarshal(entry.Value(), &l); err != nil {
		w.cfg.Logger.Warn("a lease does not decode", "executor", entry.Key(), "error", err)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.engines[l.Engine] = w.cfg.Now()
}

// EngineLives reports whether an executor of the engine renewed its lease within Config.Gone. For that time after New,
// every engine counts as alive.
func (w *Watch) EngineLives(engine string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen, ok := w.engines[engine]
	if !ok {
		seen = w.started
	}
	return w.cfg.Now().Sub(seen) < w.cfg.Gone
}

// ExecutorLives reports whether an executor has a lease in the bucket now.
func (w *Watch) ExecutorLives(ctx context.Context, executor string) (bool, error) {
	kv, err := w.cfg.JetStream.KeyValue(ctx, topology.BucketLeases)
	if err != nil {
		return false, fmt.Errorf("open the leases bucket: %w", err)
	}
	_, err = kv.Get(ctx, executor)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("lease of %s: %w", executor, err)
	}
	return true, nil
}
