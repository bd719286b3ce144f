package admission_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/executor/internal/admission"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/agents/agentstest"
	"github.com/spoolhq/spool/services/executor/internal/lease"
	"github.com/spoolhq/spool/services/executor/internal/permits"
	"github.com/spoolhq/spool/services/executor/internal/waits"
)

// leases answers for other executors.
type leases struct {
	answer  topology.CtlResponse
	err     error
	running int
	renewed int
}

func (l *leases) Ask(context.Context, string, topology.SessionRef) (topology.CtlResponse, error) {
	return l.answer, l.err
}

func (l *leases) RunningExecutions(context.Context, string) (int, error) { return l.running, nil }
func (l *leases) Renew(context.Context)                                  { l.renewed++ }

// unused is a session whose sandbox nobody uses.
type unused struct{}

func (unused) CheckReachable(run.Sandbox) error                          { return nil }
func (unused) CheckUnused(context.Context, *eventlog.SessionState) error { return nil }

// engine has one sandbox, or is unavailable.
type engine struct {
	sandbox.Provider
	box *agentstest.FakeSandbox
	err error
}

func (e *engine) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	switch {
	case e.err != nil:
		return nil, e.err
	case e.box == nil || e.box.Name != id:
		return nil, fmt.Errorf("%s: %w", id, sandbox.ErrNotFound)
	}
	return e.box, nil
}

// limits are the own limits of every tenant.
type limits events.TenantLimits

func (limits) Get(context.Context, string) (budget.Tenant, error)           { return budget.Tenant{}, nil }
func (limits) AwaitCounted(context.Context, string, budget.Positions) error { return nil }
func (l limits) Limits(string) events.TenantLimits                          { return events.TenantLimits(l) }

func newController(change func(*admission.Config)) *admission.Controller {
	log, e := slog.New(slog.DiscardHandler), &engine{}
	cfg := admission.Config{
		Executor: "xtr_me", Provider: "fake", Engine: "here", Slots: 1, Leases: &leases{}, Idle: unused{}, Waits: (*waits.Recorder)(nil), Sandbox: e, Logger: log, Now: time.Now,
	}
	if change != nil {
		change(&cfg)
	}
	cfg.Dialer = &agents.Dialer{Sandboxes: cfg.Sandbox, Provider: "fake", Engine: "here", Logger: log}
	return admission.New(cfg)
}

// claimed returns a session whose execution another executor has claimed and started in sandbox a.
func claimed() *eventlog.SessionState {
	l := &eventlog.SessionState{Tenant: "acme", ID: "ses_1"}
	l.Life.Active.ExecutionID = "exe_1"
	l.Run.Execution, l.Run.Phase, l.Run.Holder = "exe_1", run.Starting, "xtr_other"
	l.Run.Sandbox = run.Sandbox{ID: "a", Journal: "jnl_a", Provider: "fake", Engine: "here"}
	return l
}

// queued returns a session of a tenant whose execution no executor has claimed.
func queued(tenant string) *eventlog.SessionState {
	l := &eventlog.SessionState{Tenant: tenant, ID: "ses_" + tenant}
	l.Life.Active.ExecutionID = "exe_" + tenant
	return l
}

// TestCheck: an execution is claimed unless its executor runs it, its engine is away, or its next attempt waits.
func TestCheck(t *testing.T) {
	t.Parallel()
	away := &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Message: "away"}
	for name, c := range map[string]struct {
		change func(*eventlog.SessionState)
		leases leases
		engine error
		want   bool
	}{
		"queued": {change: func(l *eventlog.SessionState) { *l = *queued("acme") }, want: true},
		"turns left": {change: func(l *eventlog.SessionState) {
			*l = *queued("acme")
			l.Life.Options.Budget.Turns, l.Run.Before.Turns = 2, 1
		}, want: true},
		"turns used up": {change: func(l *eventlog.SessionState) {
			*l = *queued("acme")
			l.Life.Options.Budget.Turns, l.Run.Before.Turns = 1, 1
		}},
		"turns used up by itself":   {change: func(l *eventlog.SessionState) { l.Life.Options.Budget.Turns, l.Run.Before.Turns = 1, 1 }, leases: leases{err: lease.ErrNoLease}, want: true},
		"its executor runs it":      {leases: leases{answer: topology.CtlResponse{Running: "exe_1"}}},
		"its executor runs another": {leases: leases{answer: topology.CtlResponse{Running: "exe_2"}}, want: true},
		"its executor is gone":      {leases: leases{err: lease.ErrNoLease}, want: true},
		"its executor is silent":    {leases: leases{err: lease.ErrNoAnswer}},
		"claimed here":              {change: func(l *eventlog.SessionState) { l.Run.Holder = "xtr_me" }, leases: leases{answer: topology.CtlResponse{Running: "exe_1"}}, want: true},
		"engine unavailable":        {engine: away},
		"sandbox gone":              {engine: sandbox.ErrNotFound, want: true},
		"next attempt waits":        {change: func(l *eventlog.SessionState) { l.Run.NotBefore = time.Now().Add(time.Hour) }},
		"next attempt waits, and is cancelled": {change: func(l *eventlog.SessionState) {
			l.Run.NotBefore, l.Life.Control = time.Now().Add(time.Hour), session.Control{N: 1, ExecutionID: "exe_1"}
		}, want: true},
	} {
		l := claimed()
		if c.change != nil {
			c.change(l)
		}
		ctl := newController(func(cfg *admission.Config) { cfg.Leases, cfg.Sandbox = &c.leases, &engine{err: c.engine} })
		if err := ctl.CheckClaim(t.Context(), l); (err == nil) != c.want {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// TestAcquire_Full: a job waits for a slot in vain; a cancelled execution needs none, and takes one only when it is free.
func TestAcquire_Full(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		c := newController(nil)
		first, err := c.AcquireSlot(t.Context(), queued("acme"))
		if err != nil || !first.IsHeld() {
			t.Fatal(err)
		}
		if _, err := c.AcquireSlot(t.Context(), queued("other")); !errors.Is(err, permits.ErrNoPermit) {
			t.Errorf("a second execution: %v", err)
		}
		l := queued("other")
		l.Life.Control = session.Control{N: 1, ExecutionID: l.Life.Active.ExecutionID}
		second, err := c.AcquireSlot(t.Context(), l)
		if err != nil || second.IsHeld() || second.TryAcquire() {
			t.Fatalf("a cancelled execution: %v", err)
		}
		if w := c.RunningByTenant(); w["acme"] != 1 || w["other"] != 1 {
			t.Errorf("working: %v", w)
		}
		first.Close()
		if !second.TryAcquire() || !second.IsHeld() {
			t.Error("the free slot is not taken")
		}
		second.Close()
		if w := c.RunningByTenant(); len(w) > 0 {
			t.Errorf("working at the end: %v", w)
		}
	})
}

// TestAcquire_Running: an execution that its runner runs already is followed without a slot, although all are taken.
func TestAcquire_Running(t *testing.T) {
	t.Parallel()
	for running, want := range map[string]error{"exe_1": nil, "exe_0": permits.ErrNoPermit} {
		synctest.Test(t, func(t *testing.T) {
			box := agentstest.NewFakeSandbox("a", 1)
			box.SetStatus(runner.Status{ExecutionID: running})
			c := newController(func(cfg *admission.Config) { cfg.Sandbox = &engine{box: box} })
			first, err := c.AcquireSlot(t.Context(), queued("other"))
			if err != nil {
				t.Fatal(err)
			}
			defer first.Close()
			second, err := c.AcquireSlot(t.Context(), claimed())
			if !errors.Is(err, want) || err == nil && second.IsHeld() {
				t.Errorf("the runner runs %s: %v", running, err)
			}
			if second != nil {
				second.Close()
			}
		})
	}
}

// TestAcquire_TenantSlots: an execution over its tenant's limit of all executors gives its slot back, and publishes that.
func TestAcquire_TenantSlots(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &leases{running: 3}
		c := newController(func(cfg *admission.Config) { cfg.TenantSlots, cfg.Leases = 2, l })
		if _, err := c.AcquireSlot(t.Context(), queued("acme")); err == nil || l.renewed != 1 || len(c.RunningByTenant()) > 0 {
			t.Errorf("%v; renewed %d times, working %v", err, l.renewed, c.RunningByTenant())
		}
		l.running = 2
		time.Sleep(time.Second) // of the bubble: the tenant is refused for a short time
		s, err := c.AcquireSlot(t.Context(), queued("acme"))
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
	})
}

// TestAcquireBlocking_TenantSlots: an execution that waited for a person without a slot gets one only within its tenant's limit of all executors.
func TestAcquireBlocking_TenantSlots(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		l := &leases{running: 1}
		c := newController(func(cfg *admission.Config) { cfg.TenantSlots, cfg.Leases = 2, l })
		s, err := c.AcquireSlot(t.Context(), queued("acme"))
		if err != nil {
			t.Fatal(err)
		}
		s.Close()
		if s.TryAcquire() {
			t.Error("a turn whose slot was closed started an agent without being admitted again")
		}
		l.running = 3
		ctx, cancel := context.WithTimeout(t.Context(), time.Minute)
		defer cancel()
		if _, err := s.AcquireBlocking(ctx, waiting.Entry{}); !errors.Is(err, context.DeadlineExceeded) || l.renewed == 0 || len(c.RunningByTenant()) > 0 {
			t.Errorf("over the limit: %v; renewed %d times, working %v", err, l.renewed, c.RunningByTenant())
		}
		l.running = 2
		release, err := s.AcquireBlocking(t.Context(), waiting.Entry{})
		if err != nil {
			t.Fatal(err)
		}
		s.SetPermit(release)
		if !s.IsHeld() {
			t.Error("the slot is not held")
		}
		s.Close()
	})
}

// TestMaxSandboxes: a tenant's own limit replaces the one of the settings.
func TestMaxSandboxes(t *testing.T) {
	t.Parallel()
	for own, want := range map[uint32]int{0: 5, 9: 9, 2: 2} {
		c := newController(func(cfg *admission.Config) { cfg.TenantSandboxes, cfg.Budgets = 5, limits{Sandboxes: own} })
		if got := c.MaxSandboxes("acme"); got != want {
			t.Errorf("own limit %d: %d", own, got)
		}
	}
}
