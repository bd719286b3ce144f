package pool_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/agents/agentstest"
	"github.com/spoolhq/spool/services/executor/internal/pool"
)

// engine creates boxes and records which of them were ended.
type engine struct {
	mu    sync.Mutex
	err   error // of Create
	boxes map[string]*agentstest.FakeSandbox
	ended []string
	specs []sandbox.Spec
}

func (e *engine) Create(_ context.Context, spec *sandbox.Spec, _ []string, _ *[]string) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	spec.EgressToken = "token-of-" + spec.ID
	e.specs = append(e.specs, *spec)
	if e.err != nil {
		return nil, e.err
	}
	b := agentstest.NewFakeSandbox(spec.ID, 1)
	e.boxes[spec.ID] = b
	return b, nil
}

func (e *engine) Terminate(_ context.Context, id string, wipe bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	if !wipe {
		return fmt.Errorf("the workspace of %s is kept", id)
	}
	e.ended = append(e.ended, id)
	if b := e.boxes[id]; b != nil {
		b.CloseStreams()
	}
	return nil
}

// endedIDs returns the ids of the sandboxes that were ended, sorted.
func (e *engine) endedIDs() []string {
	e.mu.Lock()
	defer e.mu.Unlock()
	return slices.Sorted(slices.Values(e.ended))
}

// box returns a sandbox that was created.
func (e *engine) box(id string) *agentstest.FakeSandbox {
	e.mu.Lock()
	defer e.mu.Unlock()
	return e.boxes[id]
}

// newPool returns a pool of two sandboxes, whose ids are box-1, box-2, …, on an engine.
func newPool(change func(*pool.Config)) (*pool.Pool, *engine) {
	e := &engine{boxes: map[string]*agentstest.FakeSandbox{}}
	log, n := slog.New(slog.DiscardHandler), 0
	cfg := pool.Config{
		Executor: "xtr_me", Provider: "fake", Engine: "here", Sizes: map[string]int{"spool": 2}, Every: time.Minute, Adoptable: true,
		Sandboxes: e, Agents: &agents.Dialer{Logger: log},
		Query:   func(architecture string) *runner.Query { return &runner.Query{Architecture: architecture} },
		NewID:   func() (string, error) { n++; return fmt.Sprintf("box-%d", n), nil },
		IsAlive: func(_ context.Context, executor string) (bool, error) { return executor == "xtr_alive", nil },
		Now:     time.Now, Logger: log,
	}
	if change != nil {
		change(&cfg)
	}
	return pool.New(cfg), e
}

// running runs a pool until the test ends.
func running(t *testing.T, p *pool.Pool) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	done := make(chan struct{})
	go func() { p.Run(ctx); close(done) }()
	synctest.Wait()
	return func() { cancel(); <-done }
}

// TestPool_FillsAndDrains: the pool is filled again after each TakeSandbox, and the sandboxes that are left end with it.
func TestPool_FillsAndDrains(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, e := newPool(nil)
		stop := running(t, p)
		if n := p.ReadyCount("spool"); n != 2 || !slices.Equal(e.box("box-1").ReceivedOps(), []runner.Op{runner.OpWarm}) {
			t.Fatalf("%d are ready, commands %v", n, e.box("box-1").ReceivedOps())
		}
		a := p.TakeSandbox(t.Context(), "spool")
		if a == nil || a.Sandbox != "box-1" || p.TakeSandbox(t.Context(), "codex") != nil {
			t.Fatalf("took %+v", a)
		}
		synctest.Wait()
		if n := p.ReadyCount("spool"); n != 2 {
			t.Errorf("%d are ready after one was taken", n)
		}
		p.ForgetSandbox(a.Sandbox)
		stop()
		if got := e.endedIDs(); !slices.Equal(got, []string{"box-2", "box-3"}) {
			t.Errorf("ended %v", e.endedIDs())
		}
		a.Link.Close()
	})
}

// TestPool_TakeSkipsDeadSandboxes: a sandbox whose stream has ended is discarded.
func TestPool_TakeSkipsDeadSandboxes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, e := newPool(nil)
		stop := running(t, p)
		e.box("box-1").CloseStreams()
		synctest.Wait()
		a := p.TakeSandbox(t.Context(), "spool")
		if a == nil || a.Sandbox != "box-2" || !slices.Equal(e.endedIDs(), []string{"box-1"}) {
			t.Errorf("took %+v, ended %v", a, e.endedIDs())
		}
		p.DiscardSandbox(t.Context(), a)
		stop()
	})
}

// TestPool_ReplacesOldSandboxes: sandboxes past MaxAge are replaced.
func TestPool_ReplacesOldSandboxes(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, e := newPool(func(c *pool.Config) { c.MaxAge = 90 * time.Second })
		stop := running(t, p)
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if len(e.endedIDs()) != 0 {
			t.Errorf("ended %v before their age", e.endedIDs())
		}
		time.Sleep(time.Minute)
		synctest.Wait()
		if !slices.Equal(e.endedIDs(), []string{"box-1", "box-2"}) || p.ReadyCount("spool") != 2 {
			t.Errorf("ended %v, %d are ready", e.endedIDs(), p.ReadyCount("spool"))
		}
		stop()
	})
}

// TestPool_NotAdoptable: the pool of a provider that cannot give a sandbox to a session stays empty.
func TestPool_NotAdoptable(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, e := newPool(func(c *pool.Config) { c.Adoptable = false })
		running(t, p)()
		if len(e.specs) != 0 {
			t.Errorf("created %v", e.specs)
		}
	})
}

// TestPool_RetriesAfterAFailure: what there is of a sandbox that could not be created is ended, and the next pass tries again.
func TestPool_RetriesAfterAFailure(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, e := newPool(nil)
		e.err = errors.New("no memory")
		stop := running(t, p)
		if !slices.Equal(e.endedIDs(), []string{"box-1"}) || p.ReadyCount("spool") != 0 {
			t.Errorf("ended %v, %d are ready", e.endedIDs(), p.ReadyCount("spool"))
		}
		e.mu.Lock()
		e.err = nil
		e.mu.Unlock()
		time.Sleep(61 * time.Second)
		synctest.Wait()
		if n := p.ReadyCount("spool"); n != 2 {
			t.Errorf("%d are ready after the next pass", n)
		}
		stop()
	})
}

// TestPool_Sweep: a sandbox without a session is spared while it is in the pool, or its executor is alive.
func TestPool_Sweep(t *testing.T) {
	t.Parallel()
	synctest.Test(t, func(t *testing.T) {
		p, e := newPool(nil)
		stop := running(t, p)
		for _, c := range []struct {
			id, executor string
			ended        bool
		}{{"box-1", "xtr_me", false}, {"box-9", "xtr_me", true}, {"box-8", "xtr_alive", false}, {"box-7", "xtr_dead", true}} {
			if err := p.SweepSandbox(t.Context(), sandbox.Info{ID: c.id, Labels: sandbox.Labels{Executor: c.executor}}); err != nil {
				t.Fatal(err)
			}
			if slices.Contains(e.endedIDs(), c.id) != c.ended {
				t.Errorf("%s of %s: ended %v, want %v", c.id, c.executor, !c.ended, c.ended)
			}
		}
		stop()
	})
}

// TestPool_Build: the sandbox of a build is spared by the sweep while it works, ends with it, and its token is not in the error.
func TestPool_Build(t *testing.T) {
	t.Parallel()
	p, e := newPool(nil)
	err := p.RunInBuildSandbox(t.Context(), sandbox.Spec{}, nil, nil, func(ctx context.Context, box sandbox.Sandbox) error {
		if err := p.SweepSandbox(ctx, sandbox.Info{ID: box.ID(), Labels: sandbox.Labels{Executor: "xtr_me"}}); err != nil || len(e.endedIDs()) > 0 {
			t.Errorf("swept while it works: %v, %v", e.endedIDs(), err)
		}
		return &sandbox.Error{Code: sandbox.CodeDependenciesFailed, Message: "npm said " + e.specs[0].EgressToken}
	})
	var typed *sandbox.Error
	if !errors.As(err, &typed) || typed.Code != sandbox.CodeDependenciesFailed || strings.Contains(err.Error(), "token-of") {
		t.Errorf("error %v", err)
	}
	if !slices.Equal(e.endedIDs(), []string{"box-1"}) || e.specs[0].Labels.Session != "" || e.specs[0].Labels.Executor != "xtr_me" {
		t.Errorf("ended %v, labels %+v", e.endedIDs(), e.specs[0].Labels)
	}
}
