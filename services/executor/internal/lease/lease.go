// Package lease keeps an executor's own lease and knows those of the others.
package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/topology"
)

// Every is how often a lease is renewed.
const Every = time.Second

// askWithin bounds a question to another executor.
const askWithin = time.Second

// Errors of Ask.
var (
	// ErrNoLease is an executor that lives no more.
	ErrNoLease = errors.New("the executor has no lease")
	// ErrSilent is one that has a lease and does not answer.
	ErrSilent = errors.New("the executor does not answer")
)

// Keeper renews one lease. It is safe for concurrent use.
type Keeper struct {
	js    jetstream.JetStream
	nc    *nats.Conn
	kv    jetstream.KeyValue // set by Open
	lease topology.Lease
	disk  func() string
	log   *slog.Logger
	count func() map[string]int // what the executor runs, by tenant; nil for nothing

	announcing sync.Mutex // so that a lease never says what an older one said

	mu      sync.Mutex
	since   time.Time            // when it began to watch
	engines map[string]time.Time // when an engine's lease was last seen
}

// New makes a keeper; Open and Run make it work. disk returns the lease's DiskLimit,
// which may change.
func New(js jetstream.JetStream, lease topology.Lease, disk func() string, log *slog.Logger) *Keeper {
	return &Keeper{js: js, nc: js.Conn(), lease: lease, disk: disk, log: log, since: time.Now(), engines: map[string]time.Time{}}
}

// Count has the lease tell what the executor runs, by tenant. It comes before Open.
func (k *Keeper) Count(count func() map[string]int) { k.count = count }

// Open announces the executor. It comes before Run and Ask.
func (k *Keeper) Open(ctx context.Context) error {
	kv, err := k.js.KeyValue(ctx, topology.BucketLeases)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", topology.BucketLeases, err)
	}
	k.kv = kv
	k.mu.Lock()
	k.since = time.Now()
	k.mu.Unlock()
	return k.announce(ctx)
}

// announce writes the lease once.
func (k *Keeper) announce(ctx context.Context) error {
	k.announcing.Lock()
	defer k.announcing.Unlock()
	lease := k.lease
	lease.DiskLimit = k.disk()
	if k.count != nil {
		lease.Tenants = k.count()
	}
	raw, err := json.Marshal(lease)
	if err != nil {
		return err
	}
	ctx, cancel := context.WithTimeout(ctx, Every)
	defer cancel()
	if _, err := k.kv.Put(ctx, k.lease.Executor, raw); err != nil {
		return fmt.Errorf("write the lease: %w", err)
	}
	return nil
}

// Running announces what this executor runs, and then returns how many executions of a tenant all executors run by their
// leases. Of two executors that start one at the same time, at least one sees the other's.
func (k *Keeper) Running(ctx context.Context, tenant string) (int, error) {
	if err := k.announce(ctx); err != nil {
		return 0, err
	}
	leases, err := k.all(ctx)
	n := 0
	for _, l := range leases {
		n += l.Tenants[tenant]
	}
	return n, err
}

// all returns the leases that there are. It lists the subjects of the bucket: a list of its keys is a watch, which leaves out a key
// that is written while it begins.
func (k *Keeper) all(ctx context.Context) ([]topology.Lease, error) {
	stream, err := k.js.Stream(ctx, "KV_"+topology.BucketLeases)
	if err != nil {
		return nil, fmt.Errorf("list the leases: %w", err)
	}
	prefix := "$KV." + topology.BucketLeases + "."
	info, err := stream.Info(ctx, jetstream.WithSubjectFilter(prefix+">"))
	if err != nil {
		return nil, fmt.Errorf("list the leases: %w", err)
	}
	var out []topology.Lease
	for subject := range info.State.Subjects {
		e, err := k.kv.Get(ctx, strings.TrimPrefix(subject, prefix))
		if errors.Is(err, jetstream.ErrKeyNotFound) {
			continue // it has ended
		}
		if err != nil {
			return nil, fmt.Errorf("read the lease %s: %w", subject, err)
		}
		var l topology.Lease
		if err := json.Unmarshal(e.Value(), &l); err != nil {
			return nil, fmt.Errorf("the lease %s: %w", e.Key(), err)
		}
		out = append(out, l)
	}
	return out, nil
}

// Renew announces the executor at once, because it runs less than its lease says.
func (k *Keeper) Renew(ctx context.Context) {
	if err := k.announce(ctx); err != nil {
		k.log.Warn("the lease could not be renewed; it is at the next second", "error", err)
	}
}

// Run renews the lease and watches the others' until ctx ends; then it takes
// the lease back, so that others need not wait for its end.
func (k *Keeper) Run(ctx context.Context) error {
	var watching sync.WaitGroup
	watching.Go(func() { k.watch(ctx) })
	defer watching.Wait()
	tick := time.NewTicker(Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return k.release(context.WithoutCancel(ctx))
		case <-tick.C:
			if err := k.announce(ctx); err != nil && ctx.Err() == nil {
				k.log.Warn("the lease could not be renewed", "error", err)
			}
		}
	}
}

// watch notes the others' leases, again and again should the watch break off.
func (k *Keeper) watch(ctx context.Context) {
	for ctx.Err() == nil {
		if err := k.watchOnce(ctx); err != nil && ctx.Err() == nil {
			k.log.Warn("leases cannot be watched, trying again", "error", err)
		}
		select {
		case <-ctx.Done():
		case <-time.After(Every):
		}
	}
}

func (k *Keeper) watchOnce(ctx context.Context) error {
	w, err := k.kv.WatchAll(ctx, jetstream.IgnoreDeletes())
	if err != nil {
		return err
	}
	defer w.Stop() //nolint:errcheck // it has ended, or its connection has
	for {
		select {
		case <-ctx.Done():
			return nil
		case e, ok := <-w.Updates():
			if !ok {
				return errors.New("the subscription ended")
			}
			k.seen(e)
		}
	}
}

func (k *Keeper) seen(e jetstream.KeyValueEntry) {
	if e == nil {
		return // the end of what was there already
	}
	var l topology.Lease
	if err := json.Unmarshal(e.Value(), &l); err != nil {
		k.log.Warn("a lease cannot be read", "key", e.Key(), "error", err)
		return
	}
	k.mu.Lock()
	defer k.mu.Unlock()
	k.engines[l.Provider+"/"+l.Engine] = time.Now()
}

// EngineGone is for how long no lease of an engine was seen.
func (k *Keeper) EngineGone(provider, engine string) time.Duration {
	k.mu.Lock()
	defer k.mu.Unlock()
	last, ok := k.engines[provider+"/"+engine]
	if !ok {
		last = k.since
	}
	return time.Since(last)
}

func (k *Keeper) release(ctx context.Context) error {
	ctx, cancel := context.WithTimeout(ctx, Every)
	defer cancel()
	if err := k.kv.Delete(ctx, k.lease.Executor); err != nil {
		k.log.Warn("the lease was not taken back; it ends by itself", "error", err)
	}
	return nil
}

// Lives tells whether an executor has a lease.
func (k *Keeper) Lives(ctx context.Context, executor string) (bool, error) {
	_, err := k.kv.Get(ctx, executor)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return false, nil
	}
	if err != nil {
		return false, fmt.Errorf("look up the lease of %s: %w", executor, err)
	}
	return true, nil
}

// Others tells whether another executor of the same engine has a lease.
func (k *Keeper) Others(ctx context.Context) (bool, error) {
	leases, err := k.all(ctx)
	return slices.ContainsFunc(leases, func(l topology.Lease) bool {
		return l.Executor != k.lease.Executor && l.Provider == k.lease.Provider && l.Engine == k.lease.Engine
	}), err
}

// Ask asks another executor what it does for a session. ErrNoLease and ErrSilent say that there is no answer, and why.
func (k *Keeper) Ask(ctx context.Context, executor string, ref topology.SessionRef) (topology.CtlAnswer, error) {
	var a topology.CtlAnswer
	lives, err := k.Lives(ctx, executor)
	if err != nil {
		return a, err
	}
	if !lives {
		return a, ErrNoLease
	}
	raw, err := ref.Encode()
	if err != nil {
		return a, err
	}
	ctx, cancel := context.WithTimeout(ctx, askWithin)
	defer cancel()
	msg, err := k.nc.RequestWithContext(ctx, topology.Ctl(executor), raw)
	if err != nil {
		return a, fmt.Errorf("ask %s: %w: %w", executor, ErrSilent, err)
	}
	if err := json.Unmarshal(msg.Data, &a); err != nil {
		return a, fmt.Errorf("ask %s: decode its answer: %w", executor, err)
	}
	return a, nil
}
