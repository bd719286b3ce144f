// Package lease renews an executor's own lease and knows those of the others.
package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	leases "github.com/spoolhq/spool/pkg/lease"
	"github.com/spoolhq/spool/pkg/topology"
)

// Every is the interval at which a lease is renewed.
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

// Keeper renews the lease of one executor, and watches the leases of all. It is safe for concurrent use.
type Keeper struct {
	*leases.Watcher

	js    jetstream.JetStream
	nc    *nats.Conn
	kv    jetstream.KeyValue // set by Open
	lease topology.Lease
	disk  func() string
	log   *slog.Logger
	count func() map[string]int // what the executor runs, by tenant; nil for nothing

	announcing sync.Mutex // so that a lease never says what an older one said
}

// New returns a Keeper. Open creates the lease and Run renews it. disk returns the lease's DiskLimit,
// which may change.
func New(js jetstream.JetStream, lease topology.Lease, disk func() string, log *slog.Logger) *Keeper {
	return &Keeper{Watcher: leases.NewWatcher(js, time.Now, log), js: js, nc: js.Conn(), lease: lease, disk: disk, log: log}
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
	all, err := leases.All(ctx, k.js)
	n := 0
	for _, l := range all {
		n += l.Tenants[tenant]
	}
	return n, err
}

// Renew announces the executor at once, because it runs less than its lease says.
func (k *Keeper) Renew(ctx context.Context) {
	if err := k.announce(ctx); err != nil {
		k.log.Warn("the lease could not be renewed; it is at the next second", "error", err)
	}
}

// Run renews the lease and watches the leases of all executors until ctx ends. Then it deletes the lease, so that
// others need not wait for its end.
func (k *Keeper) Run(ctx context.Context) error {
	var watching errgroup.Group
	watching.Go(func() error { return k.Watcher.Run(ctx) })
	tick := time.NewTicker(Every)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			k.release(context.WithoutCancel(ctx))
			return watching.Wait()
		case <-tick.C:
			if err := k.announce(ctx); err != nil && ctx.Err() == nil {
				k.log.Warn("the lease could not be renewed", "error", err)
			}
		}
	}
}

func (k *Keeper) release(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, Every)
	defer cancel()
	if err := k.kv.Delete(ctx, k.lease.Executor); err != nil {
		k.log.Warn("the lease was not taken back; it ends by itself", "error", err)
	}
}

// Others reports whether another executor of the same engine has a lease.
func (k *Keeper) Others(ctx context.Context) (bool, error) {
	all, err := leases.All(ctx, k.js)
	return slices.ContainsFunc(all, func(l topology.Lease) bool {
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
