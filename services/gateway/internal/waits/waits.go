// Package waits finds out why executions wait.
package waits

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/lease"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

const (
	// natsTimeout is the time limit of the requests to NATS for one execution. Without their result the reason is not known.
	natsTimeout = time.Second
	// leasesMaxAge is the maximum age of the list of leases that a Finder uses.
	leasesMaxAge = time.Second
	// maxDetailBytes is the maximum length of a detail that an executor wrote.
	maxDetailBytes = 1024
)

// Phases of executions.
const (
	phaseQueued  = "queued"
	phasePaused  = "paused"
	phaseWaiting = "waiting_for_approval"
)

// ReadModels reads the read models.
type ReadModels interface {
	// ExecutionWait returns what the read models contain about the wait of an execution that has not ended.
	ExecutionWait(ctx context.Context, tenant, execution string) (reads.Wait, error)
}

// Config configures a Finder. Every field is required.
type Config struct {
	ReadModels ReadModels
	JetStream  jetstream.JetStream
	Logger     *slog.Logger
}

// A Finder finds the present reason of an execution's wait, from what executors report, the read models and the leases. It is
// safe for concurrent use.
type Finder struct {
	cfg    Config
	bucket *waiting.Bucket

	mu       sync.Mutex // held while the leases are read, so that one request reads them for all
	leases   []topology.Lease
	leasesAt time.Time
}

// New returns a Finder, which sends nothing to NATS before its first use.
func New(cfg Config) *Finder { return &Finder{cfg: cfg, bucket: waiting.NewBucket(cfg.JetStream)} }

// Find returns why an execution of a tenant waits, or nil if it does not wait or the reason is not known. If NATS does not
// answer, only reasons in the read models are known.
func (f *Finder) Find(ctx context.Context, tenant string, e *spoolv1.Execution) (*spoolv1.Waiting, error) {
	if e.GetEndedAt() != nil {
		return nil, nil
	}
	w, err := f.cfg.ReadModels.ExecutionWait(ctx, tenant, e.GetExecutionId())
	if err != nil {
		return nil, err
	}
	if e.GetPhase() == phaseQueued && w.ActiveExecution != e.GetExecutionId() {
		return findEarlier(e, w), nil
	}
	ctx, cancel := context.WithTimeout(ctx, natsTimeout)
	defer cancel()
	if found := f.findReported(ctx, e); found != nil {
		return found, nil
	}
	switch {
	case e.GetPhase() == phasePaused:
		return newWaiting(waiting.Paused, w.PausedAt, "The execution is paused; its processes keep their memory."), nil
	case e.GetPhase() == phaseWaiting && w.Approval != "":
		found := newWaiting(waiting.Approval, w.ApprovalRequestedAt, "Approval request "+w.Approval+" is not decided.")
		found.ApprovalId = &w.Approval
		return found, nil
	}
	return f.findGone(ctx, e, w), nil
}

// newWaiting returns the message for a reason. The zero time means that since is not known.
func newWaiting(r waiting.Reason, since time.Time, detail string) *spoolv1.Waiting {
	d, _ := waiting.Describe(r)
	return &spoolv1.Waiting{Reason: string(r), Since: wirejson.TimestampOf(since), Detail: detail, Remedy: d.Remedy}
}

// findEarlier returns the wait of an execution that the session has not dispatched for another execution, or nil if there
// is no other one.
func findEarlier(e *spoolv1.Execution, w reads.Wait) *spoolv1.Waiting {
	if w.ActiveExecution == "" {
		return nil
	}
	found := newWaiting(waiting.EarlierExecution, e.GetQueuedAt().AsTime(), fmt.Sprintf("Execution %s of the session has phase %s.", w.ActiveExecution, w.ActivePhase))
	found.ExecutionId = &w.ActiveExecution
	return found
}

// findReported returns the wait of an execution as an executor reports it, or nil. A report about an earlier claim or an
// earlier attempt no longer applies.
func (f *Finder) findReported(ctx context.Context, e *spoolv1.Execution) *spoolv1.Waiting {
	r, err := f.bucket.Find(ctx, e.GetExecutionId())
	if err != nil && !errors.Is(err, waiting.ErrNoBucket) {
		f.cfg.Logger.Warn("the wait that an executor reports cannot be read", "execution", e.GetExecutionId(), "error", err)
	}
	if r.Reason == "" || r.Holder != e.GetExecutor() || r.Attempt != e.GetAttempt() {
		return nil
	}
	w := newWaiting(r.Reason, r.Since, truncate.ValidText(r.Detail, maxDetailBytes))
	w.Until = wirejson.TimestampOf(r.Until)
	if r.Limit > 0 {
		w.Limit = &r.Limit
	}
	if r.Reason == waiting.TenantLimit {
		w.Used = &r.Used
	}
	return w
}

// findGone returns the wait of an execution for an executor, if none is alive that can run it, and nil otherwise.
func (f *Finder) findGone(ctx context.Context, e *spoolv1.Execution, w reads.Wait) *spoolv1.Waiting {
	leases, err := f.listLeases(ctx)
	if err != nil {
		f.cfg.Logger.Warn("the leases of executors cannot be read", "error", err)
		return nil
	}
	lives := func(is func(topology.Lease) bool) bool { return slices.ContainsFunc(leases, is) }
	if holder := e.GetExecutor(); holder != "" && lives(func(l topology.Lease) bool { return l.Executor == holder }) {
		return nil
	}
	since := time.Time{} // when the last executor ended is not known
	if e.GetPhase() == phaseQueued && e.GetDispatchedAt() != nil {
		since = e.GetDispatchedAt().AsTime()
	}
	provider := cmp.Or(w.SandboxProvider, w.Provider)
	switch {
	case provider == "":
	case w.SandboxEngine != "" && !lives(func(l topology.Lease) bool { return l.Provider == provider && l.Engine == w.SandboxEngine }):
		return newWaiting(waiting.EngineGone, since, fmt.Sprintf("The sandbox of the session is on engine %s of provider %s, for which no executor is alive.", w.SandboxEngine, provider))
	case !lives(func(l topology.Lease) bool { return l.Provider == provider }):
		return newWaiting(waiting.EngineGone, since, fmt.Sprintf("No executor of provider %s is alive.", provider))
	}
	return nil
}

// listLeases returns the leases of all executors, at most leasesMaxAge old.
func (f *Finder) listLeases(ctx context.Context) ([]topology.Lease, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if !f.leasesAt.IsZero() && time.Since(f.leasesAt) < leasesMaxAge {
		return f.leases, nil
	}
	if err := ctx.Err(); err != nil {
		return nil, err
	}
	list, err := lease.ListLeases(ctx, f.cfg.JetStream)
	if err != nil {
		return nil, err
	}
	f.leases, f.leasesAt = list, time.Now()
	return list, nil
}
