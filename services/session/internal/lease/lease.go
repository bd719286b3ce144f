// Package lease knows which executors live, by their leases.
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
	Gone      time.Duration // how long an engine without a lease is still waited for
}

// Watch follows the leases bucket.
type Watch struct {
	cfg Config

	mu      sync.Mutex
	started time.Time
	engines map[string]time.Time // engine to when a lease of its was last seen
}

// New makes a Watch; Run feeds it.
func New(cfg Config) *Watch {
	return &Watch{cfg: cfg, started: cfg.Now(), engines: map[string]time.Time{}}
}

// rewatch is the pause before the bucket is watched again after a failure.
const rewatch = time.Second

// Run follows the leases until ctx ends. While NATS is away nothing is seen, so
// what then looks gone is only ever offered to others, never ended for it.
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

// follow watches the bucket until the watch ends, which it says why.
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

// see notes a renewal; an entry's end needs no note, since what counts is when it was last renewed.
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

// EngineLives tells whether an engine's executors are to be waited for: one held
// a lease not long ago. A copy that has just started gives every engine that long.
func (w *Watch) EngineLives(engine string) bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	seen, ok := w.engines[engine]
	if !ok {
		seen = w.started
	}
	return w.cfg.Now().Sub(seen) < w.cfg.Gone
}

// ExecutorLives asks the bucket itself whether an executor holds a lease.
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
