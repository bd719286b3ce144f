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
	bucketStream  = "KV_" + topology.BucketLeases
	subjectPrefix = "$KV." + topology.BucketLeases + "."
	// operationHeader is set on a message that deletes a key.
	operationHeader = "KV-Operation"
)

// EngineSettings is the setting after which time without a live executor an engine counts as gone. The session service
// and executors embed it in their Config.
type EngineSettings struct {
	EngineGone time.Duration `default:"30s" env:"SPOOL_ENGINE_GONE" help:"How long an engine may have no live executor before the session service offers the jobs of its sessions to executors of other engines of its provider, which then take the sessions over. Executions also wait this long for an engine, or an egress proxy, that does not answer."`
}

// Find returns the lease of an executor, and reports whether it has one. The leader of the bucket answers: a replica
// that lags may not have a lease yet, or may have let it expire, and an executor without a lease may be replaced.
func Find(ctx context.Context, js jetstream.JetStream, executor string) (l topology.Lease, found bool, err error) {
	leader, err := leaderAPI(js)
	if err != nil {
		return l, false, fmt.Errorf("lease of %s: %w", executor, err)
	}
	msg, err := leader.GetLastMsg(bucketStream, subjectPrefix+executor, nats.Context(ctx))
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

// leaderAPI returns the API of nats.go whose get requests go to a stream's leader. Those of package jetstream may be
// answered by any replica.
func leaderAPI(js jetstream.JetStream) (nats.JetStreamContext, error) {
	opts := []nats.JSOpt{}
	if o := js.Options(); o.Domain != "" {
		opts = append(opts, nats.Domain(o.Domain))
	} else if o.APIPrefix != "" {
		opts = append(opts, nats.APIPrefix(o.APIPrefix))
	}
	return js.Conn().JetStream(opts...)
}

// All returns the leases of all executors. It lists the subjects of the bucket: a list of its keys is a watch, which
// omits a key that is written while the watch begins.
func All(ctx context.Context, js jetstream.JetStream) ([]topology.Lease, error) {
	bucket, err := js.Stream(ctx, bucketStream)
	if err != nil {
		return nil, fmt.Errorf("list the leases: %w", err)
	}
	info, err := bucket.Info(ctx, jetstream.WithSubjectFilter(subjectPrefix+">"))
	if err != nil {
		return nil, fmt.Errorf("list the leases: %w", err)
	}
	var out []topology.Lease
	for subject := range info.State.Subjects {
		l, found, err := Find(ctx, js, strings.TrimPrefix(subject, subjectPrefix))
		if err != nil {
			return nil, err
		}
		if found { // otherwise it has ended since
			out = append(out, l)
		}
	}
	return out, nil
}

// Watcher records when the leases of each engine were renewed. It is safe for concurrent use.
type Watcher struct {
	js     jetstream.JetStream
	now    func() time.Time
	logger *slog.Logger

	mu      sync.Mutex
	since   time.Time            // start of the watch
	renewed map[engine]time.Time // when a lease of the engine was last renewed
}

type engine struct{ provider, name string }

// NewWatcher returns a Watcher, which records nothing before Run.
func NewWatcher(js jetstream.JetStream, now func() time.Time, logger *slog.Logger) *Watcher {
	return &Watcher{js: js, now: now, logger: logger, since: now(), renewed: map[engine]time.Time{}}
}

// Run follows the leases until ctx ends, which is not an error. While NATS is not reachable, engines seem to be gone.
func (w *Watcher) Run(ctx context.Context) error {
	w.mu.Lock()
	w.since = w.now()
	w.mu.Unlock()
	return kvwatch.Run(ctx, w.js, topology.BucketLeases, w.logger, func() func(jetstream.KeyValueEntry) { return w.addRenewal })
}

// addRenewal records a renewal. Deletions are ignored: only the time of the last renewal counts.
func (w *Watcher) addRenewal(entry jetstream.KeyValueEntry) {
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
	w.renewed[engine{l.Provider, l.Engine}] = w.now()
}

// Lives reports whether an executor has a lease now.
func (w *Watcher) Lives(ctx context.Context, executor string) (bool, error) {
	_, found, err := Find(ctx, w.js, executor)
	return found, err
}

// EngineGone returns the time for which no executor of an engine has renewed a lease. If none has a lease since Run
// began, or before Run since NewWatcher, the time counts from then on.
func (w *Watcher) EngineGone(provider, name string) time.Duration {
	w.mu.Lock()
	defer w.mu.Unlock()
	last, ok := w.renewed[engine{provider, name}]
	if !ok {
		last = w.since
	}
	return w.now().Sub(last)
}
