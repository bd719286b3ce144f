package maintenance_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/agents/agentstest"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/maintenance"
	"github.com/spoolhq/spool/services/executor/internal/metering"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
)

const (
	beat     = 100 * time.Millisecond
	interval = 10 * time.Second // between two snapshots, and two health checks
)

// engine has one sandbox.
type engine struct {
	sandbox.Provider
	box *agentstest.FakeSandbox
}

func (e engine) Attach(context.Context, string) (sandbox.Sandbox, error) { return e.box, nil }

// store takes snapshots, and fails with err.
type store struct {
	contents.Store
	err error
}

func (s *store) Snapshot(context.Context, sandbox.Sandbox, topology.SessionRef, string, bool) (contents.Snapshot, error) {
	return contents.Snapshot{ID: "snp_1"}, s.err
}

// egress has one line, and fails with err to register.
type egress struct {
	metering.EgressClient
	err error
}

func (e *egress) Register(context.Context, string, api.Registration) (string, error) {
	return "", e.err
}

func (e *egress) Lines(context.Context, string, run.JournalPosition, bool) ([]metering.JournalLine, error) {
	return []metering.JournalLine{{Data: events.ModelCalled{}}}, nil
}

// tenants is a source of budgets that knows a single tenant.
type tenants struct{ budget.Tenant }

func (t *tenants) Get(context.Context, string) (budget.Tenant, error) { return t.Tenant, nil }

// A bed is a Maintainer of a turn whose clock the test sets.
type bed struct {
	*maintenance.Maintainer
	now     time.Time
	turn    maintenance.TurnState
	box     *agentstest.FakeSandbox
	store   *store
	egress  *egress
	meter   *metering.Meter
	tenants *tenants
}

func newBed(t *testing.T) *bed {
	t.Helper()
	b := &bed{now: time.Now(), box: agentstest.NewFakeSandbox("sbx_1", 7), store: &store{}, egress: &egress{}, tenants: &tenants{}}
	log := runlogtest.New(t)
	x := log.ClaimExecution()
	if err := x.AppendFacts(t.Context(), events.SandboxReady{SandboxID: "sbx_1", Journal: "jnl_1"}); err != nil {
		t.Fatal(err)
	}
	l, err := link.Open(t.Context(), b.box, runner.Attach{Epoch: x.Epoch}, slog.New(slog.DiscardHandler))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(l.Close)
	clock := func() time.Time { return b.now }
	b.turn = maintenance.TurnState{Session: x.Session, Life: &x.Session.Life, Epoch: x.Epoch, Link: l, Accepted: true}
	b.turn.Session.Life.Options = events.Options{SyncIntervalMs: uint32(interval.Milliseconds()), HealthIntervalMs: uint32(interval.Milliseconds())}
	proxy := &metering.Proxy{Egress: b.egress, Now: clock}
	b.meter = metering.New(proxy, b.tenants, x)
	b.Maintainer = maintenance.New(maintenance.Config{
		Beat: beat, Sandbox: engine{box: b.box}, Proxy: proxy, Now: clock,
		Contents: &contents.Manager{Store: b.store, Sessions: log.Writer.Sessions, Now: clock, Measured: func(context.Context, time.Duration, contents.Snapshot, error) {}},
	}, b.meter)
	t.Cleanup(b.Close)
	return b
}

// pass returns the next pass, which must be due.
func (b *bed) pass(t *testing.T) maintenance.PassResult {
	t.Helper()
	b.StartPass(t.Context(), b.turn)
	p := <-b.Done()
	b.FinishPass(p)
	return p
}

// isIdle reports whether no pass is due.
func (b *bed) isIdle(t *testing.T) bool {
	t.Helper()
	b.StartPass(t.Context(), b.turn)
	b.Close()
	select {
	case p := <-b.Done():
		b.FinishPass(p)
		return false
	default:
		return true
	}
}

// TestMaintainer_Intervals: the journal is read with each beat, and a snapshot is taken with each interval of the session, once the
// runner has accepted the query.
func TestMaintainer_Intervals(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	if p := b.pass(t); len(p.Lines) != 1 || len(p.Facts) != 0 || p.Err != nil {
		t.Errorf("the first pass: %+v", p)
	}
	if !b.isIdle(t) {
		t.Error("a second pass within a beat")
	}
	b.turn.Accepted = false
	b.now = b.now.Add(interval)
	if p := b.pass(t); len(p.Facts) != 0 || p.Err != nil {
		t.Errorf("before the query is accepted: %+v", p)
	}
	b.turn.Accepted = true
	b.now = b.now.Add(beat)
	p := b.pass(t)
	if len(p.Facts) != 1 || p.Err != nil {
		t.Fatalf("after the interval: %+v", p)
	}
	if s, ok := p.Facts[0].(events.WorkspaceSynced); !ok || s.Snapshot != "snp_1" || s.Reason != "interval" {
		t.Errorf("the snapshot: %+v", p.Facts[0])
	}
	b.now = b.now.Add(beat)
	if p := b.pass(t); len(p.Facts) != 0 {
		t.Errorf("directly after the snapshot: %+v", p)
	}
}

// TestMaintainer_Health: a runner that does not answer makes the sandbox unhealthy.
func TestMaintainer_Health(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.turn.Session.Life.Options.SyncIntervalMs = 0
	b.box.CloseStreams()
	b.now = b.now.Add(interval)
	p := b.pass(t)
	if len(p.Facts) != 1 {
		t.Fatalf("%+v", p)
	}
	if h, ok := p.Facts[0].(events.SandboxHealth); !ok || h.Status != events.Unhealthy {
		t.Errorf("%+v", p.Facts[0])
	}
}

// TestMaintainer_Failure: a step that fails does not lose the results of the steps before it.
func TestMaintainer_Failure(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.store.err = errors.New("the store is full")
	b.now = b.now.Add(interval)
	if p := b.pass(t); !errors.Is(p.Err, b.store.err) || len(p.Lines) != 1 {
		t.Errorf("%+v", p)
	}
}

// TestMaintainer_Registers: changed budgets are sent to the proxy until it has them, and nothing is read from a proxy that refuses.
func TestMaintainer_Registers(t *testing.T) {
	t.Parallel()
	b := newBed(t)
	b.AwaitRegistration() // none has begun
	b.tenants.Budgets = []budget.Budget{{Period: events.PeriodMonth, Limit: events.Budget{Tokens: 5}}}
	if err := b.meter.UpdateLimits(t.Context(), events.Budget{}); err != nil {
		t.Fatal(err)
	}
	b.egress.err = errors.New("away")
	if p := b.pass(t); !errors.Is(p.Err, b.egress.err) || len(p.Lines) != 0 || b.meter.PendingChange("sbx_1") == nil {
		t.Errorf("while the proxy is away: %+v", p)
	}
	b.AwaitRegistration()
	b.egress.err = nil
	b.now = b.now.Add(beat)
	if p := b.pass(t); p.Err != nil || len(p.Lines) != 1 || b.meter.PendingChange("sbx_1") != nil {
		t.Errorf("afterwards: %+v", p)
	}
}
