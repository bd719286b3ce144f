// Package idle maintains the sandboxes of sessions in which nothing runs: it applies file changes, takes snapshots, checks their
// health, ends them, and removes those that the log no longer has.
package idle

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/lease"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/pool"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
)

// Delays after which a job is delivered again.
const (
	busyRetryDelay        = 100 * time.Millisecond // another executor works on the sandbox
	unknownRetryDelay     = 2 * time.Second        // another executor does not answer
	otherEngineRetryDelay = time.Second            // the sandbox is on another engine
)

// maxReloads is the maximum number of times that a health check loads a session again because the session has changed during the check.
const maxReloads = 64

// Leases returns which executors are alive and what they do, according to their leases and answers.
type Leases interface {
	// Ask asks an executor what it does for a session. The error wraps lease.ErrNoLease if the executor is gone.
	Ask(ctx context.Context, executor string, ref topology.SessionRef) (topology.CtlResponse, error)
	// EngineGoneFor returns the time for which no executor of an engine has renewed a lease.
	EngineGoneFor(provider, engine string) time.Duration
}

// Config configures a Keeper. Every field is required except Store and SandboxLife.
type Config struct {
	Executor     string        // id of this executor
	ProviderName string        // name of the sandbox provider
	Engine       string        // engine of this executor
	Abandoned    time.Duration // time without a lease after which the sandboxes of an engine are given up
	SandboxLife  time.Duration // age at which the provider ends a sandbox; 0 is never
	Beat         time.Duration // pause between two tries to read the log

	Provider  sandbox.Provider
	Store     contents.Store // nil: no snapshots are taken, and no file changes are applied
	Sessions  eventlog.Sessions
	Leases    Leases
	Permits   *permits.Limiter // limits the work of a Keeper
	Handling  *handling.SessionSet
	Runs      *runlog.Writer
	Contents  *contents.Manager
	Sandboxes *sandboxes.Manager
	Dialer    *agents.Dialer
	Agents    *agents.Registry
	Pool      *pool.Pool

	// EgressEvents returns the events that the egress proxy has recorded about a sandbox and that are not in the log
	// yet.
	EgressEvents func(ctx context.Context, s run.State) []events.Event

	Logger *slog.Logger
	Now    func() time.Time
}

// A Keeper does the work in sandboxes of sessions in which no execution runs: snapshots, releases, health checks and sweeps. It is safe for
// concurrent use.
type Keeper struct {
	Config

	mu       sync.Mutex
	reserved map[string]map[string]bool // by tenant: sessions whose sandbox is being created
}

// New returns a Keeper.
func New(cfg Config) *Keeper {
	return &Keeper{Config: cfg, reserved: map[string]map[string]bool{}}
}

// OtherEngineError is returned for a sandbox on an engine that this executor cannot reach.
type OtherEngineError struct{ Sandbox run.Sandbox }

func (e *OtherEngineError) Error() string {
	return "sandbox " + e.Sandbox.ID + " is on engine " + e.Sandbox.Engine
}

// CheckReachable returns an error that wraps an *OtherEngineError if a sandbox is on another engine. It returns nil if that engine has had
// no executor for so long that its sandboxes count as lost.
func (k *Keeper) CheckReachable(sb run.Sandbox) error {
	if sb.ID == "" || sb.Engine == k.Engine && sb.Provider == k.ProviderName {
		return nil
	}
	if gone := k.Leases.EngineGoneFor(sb.Provider, sb.Engine); gone < k.Abandoned {
		return bus.RetryAfter(&OtherEngineError{sb}, otherEngineRetryDelay)
	}
	return nil
}

// CheckUnused returns an error while another executor works on the sandbox of a session in which no execution runs. It asks that executor,
// which then stops its work. The error contains the delay after which the job is to be delivered again.
func (k *Keeper) CheckUnused(ctx context.Context, l *eventlog.SessionState) error {
	other := l.Run.Syncing
	if other == "" || other == k.Executor || !l.Run.IsIdle() {
		return nil
	}
	answer, err := k.Leases.Ask(ctx, other, topology.SessionRef{Tenant: l.Tenant, Session: l.ID})
	switch {
	case errors.Is(err, lease.ErrNoLease):
		return nil
	case err != nil:
		return bus.RetryAfter(fmt.Errorf("is the sandbox of %s still in use? %w", l.ID, err), unknownRetryDelay)
	case answer.Syncing:
		return bus.RetryAfter(fmt.Errorf("the sandbox of %s is in use by %s", l.ID, other), busyRetryDelay)
	}
	return nil
}

// stopAgent stops the agent of an execution that ended in the log while its runner could not be reached. If the runner does not obey,
// stopAgent terminates the sandbox. It first records that in the log, whose guard ensures that no turn has begun in the sandbox meanwhile.
func (k *Keeper) stopAgent(ctx context.Context, l *eventlog.SessionState) error {
	sb := l.Run.Sandbox
	err := k.Dialer.StopAgent(ctx, sb, topology.SessionRef{Tenant: l.Tenant, Session: l.ID}, l.Run.Epoch)
	if err == nil || errors.Is(err, run.ErrFenced) || sandboxes.IsUnavailable(err) || ctx.Err() != nil {
		return err
	}
	k.Logger.Warn("the runner does not stop its agent: the sandbox is ended", "sandbox", sb.ID, "session", l.ID, "error", err)
	if err := k.Runs.AppendFacts(ctx, l, events.SandboxTerminated{SandboxID: sb.ID, Reason: "unhealthy", Kept: true}); err != nil {
		return err
	}
	return k.Sandboxes.Terminate(ctx, sb.ID, false)
}
