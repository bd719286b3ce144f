// Package lease renews the lease of this executor, and reads the leases of all executors.
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

// RenewInterval is the interval at which an executor renews its lease.
const RenewInterval = time.Second

// askTimeout is the time limit of a request to another executor.
const askTimeout = time.Second

// Errors of Ask.
var (
	// ErrNoLease is returned by Ask if the other executor has no lease, because it has ended.
	ErrNoLease = errors.New("the executor has no lease")
	// ErrNoAnswer is returned by Ask if the other executor has a lease but does not answer.
	ErrNoAnswer = errors.New("the executor does not answer")
)

// A Keeper renews the lease of this executor, and watches the leases of all executors. It is safe for concurrent use.
type Keeper struct {
	*leases.EngineWatcher

	js    jetstream.JetStream
	nc    *nats.Conn
	kv    jetstream.KeyValue // set by Open
	lease topology.Lease
	disk  func() string
	log   *slog.Logger
	count func() map[string]int // returns the number of running executions by tenant; nil if the lease does not state it

	announcing sync.Mutex // held while the lease is written, so that an older state never replaces a newer one
}

// New returns a Keeper, which does nothing yet: Open creates the lease and Run renews it. disk returns the value of
// the lease's field DiskLimit, which may change.
func New(js jetstream.JetStream, lease topology.Lease, disk func() string, log *slog.Logger) *Keeper {
	return &Keeper{EngineWatcher: leases.NewWatcher(js, time.Now, log), js: js, nc: js.Conn(), lease: lease, disk: disk, log: log}
}

// SetCounter sets the function that returns the number of running executions by tenant, which the lease then contains.
// It must be called before Open.
func (k *Keeper) SetCounter(count func() map[string]int) { k.count = count }

// Open opens the bucket of leases and writes the executor's lease. It must be called before Run and Ask.
func (k *Keeper) Open(ctx context.Context) error {
	kv, err := k.js.KeyValue(ctx, topology.BucketLeases)
	if err != nil {
		return fmt.Errorf("open bucket %s: %w", topology.BucketLeases, err)
	}
	k.kv = kv
	return k.writeLease(ctx)
}

// writeLease writes the executor's lease to the bucket, with the present number of executions.
func (k *Keeper) writeLease(ctx context.Context) error {
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
	ctx, cancel := context.WithTimeout(ctx, RenewInterval)
	defer cancel()
	if _, err := k.kv.Put(ctx, k.lease.Executor, raw); err != nil {
		return fmt.Errorf("write the lease: %w", err)
	}
	return nil
}

// RunningExecutions first writes this executor's lease, and then returns the number of executions of a tenant that all
// executors run, according to their leases. So if two executors start an execution at the same time, at least one of
// them counts the execution of the other.
func (k *Keeper) RunningExecutions(ctx context.Context, tenant string) (int, error) {
	if err := k.writeLease(ctx); err != nil {
		return 0, err
	}
	all, err := leases.ListLeases(ctx, k.js)
	n := 0
	for _, l := range all {
		n += l.Tenants[tenant]
	}
	return n, err
}

// Renew writes the executor's lease at once. It is called after an execution has ended, so that other executors do not
// count it any more.
func (k *Keeper) Renew(ctx context.Context) {
	if err := k.writeLease(ctx); err != nil {
		k.log.Warn("the lease could not be renewed; the next attempt follows within a second", "error", err)
	}
}

// Run renews the lease and watches the leases of all executors until ctx ends. Then it deletes the lease, so that
// other executors do not wait until it expires.
func (k *Keeper) Run(ctx context.Context) error {
	var watching errgroup.Group
	watching.Go(func() error { return k.EngineWatcher.Run(ctx) })
	tick := time.NewTicker(RenewInterval)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			k.deleteLease(context.WithoutCancel(ctx))
			return watching.Wait()
		case <-tick.C:
			if err := k.writeLease(ctx); err != nil && ctx.Err() == nil {
				k.log.Warn("the lease could not be renewed", "error", err)
			}
		}
	}
}

// deleteLease deletes the executor's lease.
func (k *Keeper) deleteLease(ctx context.Context) {
	ctx, cancel := context.WithTimeout(ctx, RenewInterval)
	defer cancel()
	if err := k.kv.Delete(ctx, k.lease.Executor); err != nil {
		k.log.Warn("the lease could not be deleted; it expires by itself", "error", err)
	}
}

// HasOtherExecutor reports whether another executor of the same engine has a lease.
func (k *Keeper) HasOtherExecutor(ctx context.Context) (bool, error) {
	all, err := leases.ListLeases(ctx, k.js)
	return slices.ContainsFunc(all, func(l topology.Lease) bool {
		return l.Executor != k.lease.Executor && l.Provider == k.lease.Provider && l.Engine == k.lease.Engine
	}), err
}

// Ask asks another executor what it does for a session. The error wraps ErrNoLease if the executor has ended, and
// ErrNoAnswer if it does not answer.
func (k *Keeper) Ask(ctx context.Context, executor string, ref topology.SessionRef) (topology.CtlResponse, error) {
	var a topology.CtlResponse
	lives, err := k.HasLease(ctx, executor)
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
	ctx, cancel := context.WithTimeout(ctx, askTimeout)
	defer cancel()
	msg, err := k.nc.RequestWithContext(ctx, topology.ExecutorCtlSubject(executor), raw)
	if err != nil {
		return a, fmt.Errorf("ask %s: %w: %w", executor, ErrNoAnswer, err)
	}
	if err := json.Unmarshal(msg.Data, &a); err != nil {
		return a, fmt.Errorf("ask %s: decode its answer: %w", executor, err)
	}
	return a, nil
}
