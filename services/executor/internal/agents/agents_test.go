package agents_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/agents/agentstest"
)

// provider finds sandboxes by id.
type provider struct {
	sandbox.Provider
	boxes map[string]*agentstest.FakeSandbox
	err   error // of the next Attach
}

func (p *provider) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	if err := p.err; err != nil {
		p.err = nil
		return nil, err
	}
	if b, ok := p.boxes[id]; ok {
		return b, nil
	}
	return nil, fmt.Errorf("%s: %w", id, sandbox.ErrNotFound)
}

var log = slog.New(slog.DiscardHandler)

func newDialer(boxes ...*agentstest.FakeSandbox) (*agents.Dialer, *provider) {
	p := &provider{boxes: map[string]*agentstest.FakeSandbox{}}
	for _, b := range boxes {
		p.boxes[b.Name] = b
	}
	return &agents.Dialer{Sandboxes: p, Provider: "fake", Engine: "here", Patience: time.Minute, Logger: log}, p
}

func open(t *testing.T, d *agents.Dialer, b *agentstest.FakeSandbox) *agents.Agent {
	t.Helper()
	a, err := d.Open(t.Context(), b, topology.SessionRef{Tenant: "default", Session: "ses_" + b.Name}, runner.Attach{Epoch: 1})
	if err != nil {
		t.Fatal(err)
	}
	return a
}

// TestDial: a runner that is gone, or has another journal, is lost; an unavailable engine is waited for.
func TestDial(t *testing.T) {
	t.Parallel()
	away := &sandbox.Error{Code: sandbox.CodeEngineUnavailable, Message: "away"}
	for name, c := range map[string]struct {
		sb   run.Sandbox
		err  error
		want error
	}{
		"present":            {sb: run.Sandbox{ID: "a", Journal: "jnl_a"}},
		"engine unavailable": {sb: run.Sandbox{ID: "a", Journal: "jnl_a"}, err: away},
		"gone":               {sb: run.Sandbox{ID: "b", Journal: "jnl_b"}, want: agents.ErrLost},
		"another journal":    {sb: run.Sandbox{ID: "a", Journal: "jnl_x"}, want: agents.ErrLost},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			synctest.Test(t, func(t *testing.T) {
				d, p := newDialer(agentstest.NewFakeSandbox("a", 1))
				p.err = c.err
				a, err := d.Dial(t.Context(), c.sb, topology.SessionRef{}, runner.Attach{})
				if !errors.Is(err, c.want) {
					t.Errorf("error %v, want %v", err, c.want)
				}
				if err == nil {
					a.Link.Close()
				}
			})
		})
	}
}

// An execution that the runner has is killed, and a runner without one is left alone.
func TestStop_KillsTheExecution(t *testing.T) {
	t.Parallel()
	busy, calm := agentstest.NewFakeSandbox("busy", 1), agentstest.NewFakeSandbox("calm", 1)
	busy.SetStatus(runner.Status{ExecutionID: "exe_1", AgentPID: 42})
	d, _ := newDialer(busy, calm)
	stop := func(sb run.Sandbox) error { return d.StopAgent(t.Context(), sb, topology.SessionRef{}, 3) }
	if err := stop(run.Sandbox{ID: "busy", Journal: "jnl_busy", Engine: "here", Provider: "fake"}); err != nil || !slices.Equal(busy.ReceivedOps(), []runner.Op{runner.OpKill}) {
		t.Errorf("%v, commands %v", err, busy.ReceivedOps())
	}
	if err := stop(run.Sandbox{ID: "calm", Journal: "jnl_calm", Engine: "here", Provider: "fake"}); err != nil || len(calm.ReceivedOps()) > 0 {
		t.Errorf("%v, commands %v", err, calm.ReceivedOps())
	}
	if err := stop(run.Sandbox{ID: "none", Journal: "jnl_none", Engine: "here", Provider: "fake"}); err != nil {
		t.Errorf("a sandbox that is gone: %v", err)
	}
	if err := stop(run.Sandbox{ID: "calm", Journal: "jnl_calm", Engine: "elsewhere", Provider: "fake"}); err == nil {
		t.Error("stopped on an engine that is gone")
	}
}

// TestMayBeRunning: an execution may run if the runner's status names it or its journal is longer than the log.
func TestMayBeRunning(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		hello *runner.Hello
		want  bool
	}{
		{nil, false},
		{&runner.Hello{Last: 7}, false},
		{&runner.Hello{Last: 8}, true},
		{&runner.Hello{Last: 7, Status: runner.Status{ExecutionID: "exe_1"}}, true},
		{&runner.Hello{Last: 7, Status: runner.Status{ExecutionID: "exe_2"}}, false},
	} {
		if got := (&agents.Agent{Hello: c.hello}).MayBeRunning("exe_1", 7); got != c.want {
			t.Errorf("%+v: %v", c.hello, got)
		}
	}
}

// health records the checks of a Registry.
type health struct{ checked, gone []string }

func (h *health) CheckHealth(_ context.Context, a *agents.Agent, _ uint64) error {
	h.checked = append(h.checked, a.Sandbox)
	return nil
}

func (h *health) CheckGone(_ context.Context, a *agents.Agent) error {
	h.gone = append(h.gone, a.Sandbox)
	return nil
}

// TestRegistry_TakesRestingAgents: only an agent that rests can be taken, once; a closed registry keeps none.
func TestRegistry_TakesRestingAgents(t *testing.T) {
	t.Parallel()
	b := agentstest.NewFakeSandbox("a", 1)
	d, _ := newDialer(b)
	r := agents.NewRegistry(100, time.Now, log)
	a := open(t, d, b)
	r.AddWorking(a, 1)
	if r.TakeResting("ses_a") != nil {
		t.Error("an agent that works is taken")
	}
	r.AddResting(a, 0)
	if n, _ := r.CountAgents(true); n != 1 {
		t.Errorf("%d agents rest", n)
	}
	if r.TakeResting("ses_a") != a || r.TakeResting("ses_a") != nil {
		t.Error("a resting agent is not taken once")
	}
	r.Close()
	r.AddResting(a, 0)
	if a.IsAlive() {
		t.Error("a closed registry keeps the stream open")
	}
}

// TestRegistry_Run: agents that rested for the longest end when all use too much memory; streams without a process are closed; health
// is checked at its interval.
func TestRegistry_Run(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		old, recent, dead, cut := agentstest.NewFakeSandbox("old", 60), agentstest.NewFakeSandbox("recent", 60), agentstest.NewFakeSandbox("dead", 0), agentstest.NewFakeSandbox("cut", 0)
		dead.SetStatus(runner.Status{})
		d, _ := newDialer(old, recent, dead, cut)
		r := agents.NewRegistry(100, time.Now, log)
		for _, b := range []*agentstest.FakeSandbox{old, recent, dead, cut} {
			every := time.Duration(0)
			if b == recent {
				every = 3 * time.Second
			}
			a := open(t, d, b)
			r.AddWorking(a, 1)
			r.AddResting(a, every)
			time.Sleep(time.Millisecond)
		}
		cut.CloseStreams()
		ctx, stop := context.WithTimeout(t.Context(), 5500*time.Millisecond)
		defer stop()
		var h health
		r.Run(ctx, time.Second, &h)
		if n, bytes := r.CountAgents(true); n != 1 || bytes != 60 || r.TakeResting("ses_old") != nil {
			t.Errorf("%d agents rest, with %d bytes", n, bytes)
		}
		if !slices.Contains(old.ReceivedOps(), runner.OpKill) || slices.Contains(recent.ReceivedOps(), runner.OpKill) {
			t.Errorf("commands to the old agent %v, to the recent one %v", old.ReceivedOps(), recent.ReceivedOps())
		}
		if !slices.Equal(h.gone, []string{"cut"}) || !slices.Equal(h.checked, []string{"recent"}) {
			t.Errorf("gone %v, checked %v", h.gone, h.checked)
		}
		r.Close()
	})
}

// TestRegistry_Shutdown: the runner is shut down over the stream of its resting agent.
func TestRegistry_Shutdown(t *testing.T) {
	t.Parallel()
	b := agentstest.NewFakeSandbox("a", 1)
	d, _ := newDialer(b)
	r := agents.NewRegistry(100, time.Now, log)
	a := open(t, d, b)
	r.AddResting(a, 0)
	r.ShutdownRunner(t.Context(), "ses_a", 2)
	if !slices.Equal(b.ReceivedOps(), []runner.Op{runner.OpShutdown}) || a.IsAlive() {
		t.Errorf("commands %v, alive: %v", b.ReceivedOps(), a.IsAlive())
	}
}
