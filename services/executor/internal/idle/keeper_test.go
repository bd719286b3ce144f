package idle_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/lease"
)

// leases answers for other executors and engines.
type leases struct {
	answer topology.CtlResponse
	err    error
	gone   time.Duration
}

func (l leases) Ask(context.Context, string, topology.SessionRef) (topology.CtlResponse, error) {
	return l.answer, l.err
}

func (l leases) EngineGoneFor(string, string) time.Duration { return l.gone }

// provider lists sandboxes.
type provider struct {
	sandbox.Provider
	list []sandbox.Info
}

func (p *provider) List(context.Context) ([]sandbox.Info, error) { return p.list, nil }

func newKeeper(t *testing.T, l leases, list ...sandbox.Info) *idle.Keeper {
	t.Helper()
	log, err := memlog.New(memlog.Config{})
	if err != nil {
		t.Fatal(err)
	}
	return idle.New(idle.Config{
		Executor: "xtr_me", ProviderName: "fake", Engine: "here", Abandoned: time.Minute, SandboxLife: time.Hour,
		Provider: &provider{list: list}, Sessions: eventlog.Sessions{Log: log}, Leases: l, Handling: handling.NewSessionSet(), Logger: slog.New(slog.DiscardHandler), Now: time.Now,
	})
}

// Sandboxes of another engine are left to its executors, until the engine has been gone for long.
func TestCheckReachable(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		sb        run.Sandbox
		gone      time.Duration
		elsewhere bool
	}{
		"no sandbox":          {},
		"this engine":         {sb: run.Sandbox{ID: "sbx", Provider: "fake", Engine: "here"}},
		"another engine":      {sb: run.Sandbox{ID: "sbx", Provider: "fake", Engine: "there"}, gone: time.Second, elsewhere: true},
		"another provider":    {sb: run.Sandbox{ID: "sbx", Provider: "docker", Engine: "here"}, elsewhere: true},
		"an abandoned engine": {sb: run.Sandbox{ID: "sbx", Provider: "fake", Engine: "there"}, gone: time.Minute},
	} {
		var e *idle.OtherEngineError
		if err := newKeeper(t, leases{gone: c.gone}).CheckReachable(c.sb); errors.As(err, &e) != c.elsewhere || (err == nil) == c.elsewhere {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A sandbox is in use while the executor that has begun to work on it confirms that, or does not answer.
func TestCheckUnused(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		syncing string
		leases  leases
		used    bool
	}{
		"no executor":                  {},
		"this executor":                {syncing: "xtr_me", leases: leases{answer: topology.CtlResponse{Syncing: true}}},
		"another that works on it":     {syncing: "xtr_other", leases: leases{answer: topology.CtlResponse{Syncing: true}}, used: true},
		"another that has ended":       {syncing: "xtr_other"},
		"another that is gone":         {syncing: "xtr_other", leases: leases{err: lease.ErrNoLease}},
		"another that does not answer": {syncing: "xtr_other", leases: leases{err: lease.ErrNoAnswer}, used: true},
	} {
		l := &eventlog.SessionState{Tenant: "default", ID: "ses_1"}
		l.Run.Syncing = c.syncing
		if err := newKeeper(t, c.leases).CheckUnused(t.Context(), l); (err != nil) != c.used {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A session gets room while its tenant has fewer sandboxes than its limit, counting those that are being created.
func TestReserve(t *testing.T) {
	t.Parallel()
	session := func(name string) string { return events.DeriveID(events.KindSession, name) }
	info := func(tenant, name string) sandbox.Info {
		return sandbox.Info{ID: "sbx_" + name, Labels: sandbox.Labels{Tenant: tenant, Session: session(name)}}
	}
	k := newKeeper(t, leases{}, info("acme", "a"), info("other", "b"), sandbox.Info{ID: "sbx_pool", Labels: sandbox.Labels{Tenant: "acme"}})
	reserve := func(name string, want bool) {
		t.Helper()
		if ok, err := k.ReserveSandbox(t.Context(), "acme", session(name), 2); err != nil || ok != want {
			t.Errorf("room for %s: %v, %v; want %v", name, ok, err, want)
		}
	}
	reserve("a", true) // which has one already
	k.UnreserveSandbox("acme", session("a"))
	reserve("c", true)
	reserve("d", false)
	k.UnreserveSandbox("acme", session("c"))
	reserve("d", true)
}

// TestNearsEnd: four fifths of the sandbox's life are over.
func TestNearsEnd(t *testing.T) {
	t.Parallel()
	k := newKeeper(t, leases{})
	for age, want := range map[time.Duration]bool{47 * time.Minute: false, 49 * time.Minute: true} {
		if got := k.NearsEndOfLife(run.Sandbox{ReadyAt: time.Now().Add(-age)}); got != want {
			t.Errorf("after %s: %v", age, got)
		}
	}
	if k.NearsEndOfLife(run.Sandbox{}) {
		t.Error("a sandbox that is not ready")
	}
}
