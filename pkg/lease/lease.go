// Package lease reads and follows the leases of executors.
package lease

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/kvwatch"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	leasesStream       = "KV_" + topology.BucketLeases
	leaseSubjectPrefix = "$KV." + topology.BucketLeases + "."
	// operationHeader is the header that JetStream sets on a message that deletes a key of a bucket.
	operationHeader = "KV-Operation"
)

// EngineTimeoutSettings is the setting of the time after which an engine without a live executor counts as gone. The
// session service and executors embed it in their Config.
type EngineTimeoutSettings struct {
	EngineGone time.Duration `default:"30s" env:"SPOOL_ENGINE_GONE" help:"How long an engine may have no live executor before the session service offers the jobs of its sessions to executors of other engines of its provider, which then take the sessions over. Executions also wait this long for an engine, or an egress proxy, that does not answer."`
}

// FindLease returns the lease of an executor, and reports whether the executor has one. The leader of the bucket's
// stream responds, because a replica that lags may not have a lease yet, or may have let it expire, and an executor
// without a lease may be replaced.
func FindLease(ctx context.Context, js jetstream.JetStream, executor string) (l topology.Lease, found bool, err error) {
	leader, err := leaderAPI(js)
	if err != nil {
		return l, false, fmt.Errorf("lease of %s: %w", executor, err)
	}
	msg, err := leader.GetLastMsg(leasesStream, leaseSubjectPrefix+executor, nats.Context(ctx))
	if errors.Is(err, nats.ErrMsgNotFound) {
		return l, false, nil
	}
	if err != nil {
		return l, false, fmt.Errorf("lease of %s: %w", executor, err)
	}
	if msg.Header.Get(operationHeader) != "" || msg.Header.Get(jetstream.MarkerReasonHeader) != "" {
		return l, false, nil // the executor has deleted its lease, or the server has
	}
	if err := json.Unmarshal(msg.Data, &l); err != nil {
		return l, false, fmt.Errorf("lease of %s: %w", executor, err)
	}
	return l, true, nil
}

// leaderAPI returns the JetStream API of nats.go whose get requests go to a stream's leader. Get requests of package
// jetstream may be answered by any replica.
func leaderAPI(js jetstream.JetStream) (nats.JetStreamContext, error) {
	opts := []nats.JSOpt{}
	if o := js.Options(); o.Domain != "" {
		opts = append(opts, nats.Domain(o.Domain))
	} else if o.APIPrefix != "" {
		opts = append(opts, nats.APIPrefix(o.APIPrefix))
	}
	return js.Conn().JetStream(opts...)
}

// ListLeases returns the leases of all executors. It lists the subjects of the bucket, because listing the keys uses a
// watch, which omits a key that is written while the watch begins.
func ListLeases(ctx context.Context, js jetstream.JetStream) ([]topology.Lease, error) {
	bucket, err := js.Stream(ctx, leasesStream)
	if err != nil {
		return nil, fmt.Errorf("list the leases: %w", err)
	}
	info, err := bucket.Info(ctx, jetstream.WithSubjectFilter(leaseSubjectPrefix+">"))
	if err != nil {
		return nil, fmt.Errorf("list the leases: %w", err)
	}
	var out []topology.Lease
	for subject := range info.State.Subjects {
		l, found, err := FindLease(ctx, js, strings.TrimPrefix(subject, leaseSubjectPrefix))
		if err != nil {
			return nil, err
		}
		if found { // otherwise it has ended since
			out = append(out, l)
		}
	}
	return out, nil
}

// EngineWatcher records when an executor of each engine last renewed its lease. It is safe for concurrent use.
type EngineWatcher struct {
	js     jetstream.JetStream
	now    func() time.Time
	logger *slog.Logger

	mu      sync.Mutex
	since   time.Time               // start of the watch
	renewed map[engineKey]time.Time // when a lease of the engine was last renewed
}

// engineKey identifies an engine.
type engineKey struct{ provider, name string }

// NewWatcher returns an EngineWatcher, which records nothing before Run.
func NewWatcher(js jetstream.JetStream, now func() time.Time, logger *slog.Logger) *EngineWatcher {
	return &EngineWatcher{js: js, now: now, logger: logger, since: now(), renewed: map[engineKey]time.Time{}}
}

// Run watches the leases until ctx ends, which is not an error. While NATS is not reachable, all engines seem to be
// gone.
func (w *EngineWatcher) Run(ctx context.Context) error {
	w.mu.Lock()
	w.since = w.now()
	w.mu.Unlock()
	return kvwatch.WatchBucket(ctx, w.js, topology.BucketLeases, w.logger, func() func(jetstream.KeyValueEntry) { return w.addRenewal })
}

// addRenewal records the renewal of a lease. Deletions of leases are ignored: only the time of the last renewal counts.
func (w *EngineWatcher) addRenewal(entry jetstream.KeyValueEntry) {
	if entry == nil || entry.Operation() != jetstream.KeyValuePut {
		return
	}
	var l topology.Lease
	if err := json.Unmarshal(entry.Value(), &l); err != nil {
		w.logger.Warn("decode a lease", "executor", entry.Key(), "error", err)
		return
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	w.renewed[engineKey{l.Provider, l.Engine}] = w.now()
}

// HasLease reports whether an executor has a lease now, that is, whether the executor is alive.
func (w *EngineWatcher) HasLease(ctx context.Context, executor string) (bool, error) {
	_, found, err := FindLease(ctx, w.js, executor)
	return found, err
}

// EngineGoneFor returns how long no executor of an engine has renewed a lease. If there was no renewal since Run began,
// the time counts from the start of Run, and before Run from NewWatcher.
func (w *EngineWatcher) EngineGoneFor(provider, name string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	last, ok := w.renewed[engineKey{provider, name}]
	if !ok {
		last = w.since
	}
	return w.now().Sub(last)
}
