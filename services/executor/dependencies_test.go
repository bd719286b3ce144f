package executor_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/services/executor"
)

// layered is a provider that creates layers, once for each set.
type layered struct {
	pausable
	build bool          // build in a sandbox from the caller's Build function
	hold  chan struct{} // if not nil, Layer blocks until it is closed

	mu    sync.Mutex
	there map[string]bool
	asked []sandbox.LayerPackages
	fails []error // errors of the next calls, in order
	made  int
	ended int // calls whose context had ended
}

func (l *layered) Layer(ctx context.Context, want sandbox.LayerPackages, use sandbox.LayerBuilder) (string, error) {
	l.mu.Lock()
	l.asked = append(l.asked, want)
	digest := want.LayerDigest(want.Image, "fake")
	if l.there[digest] {
		l.mu.Unlock()
		return "layer-" + digest, nil
	}
	l.made++
	var err error
	if len(l.fails) > 0 {
		err, l.fails = l.fails[0], l.fails[1:]
	}
	l.mu.Unlock()
	if err != nil && !l.build {
		return "", err
	}
	use.Begun()
	if l.hold != nil {
		select {
		case <-l.hold:
		case <-ctx.Done():
			l.mu.Lock()
			defer l.mu.Unlock()
			l.ended++
			return "", ctx.Err()
		}
	}
	if l.build {
		if err := use.Build(ctx, sandbox.Spec{Image: want.Image, LayerTarget: digest}, func(_ context.Context, box sandbox.Sandbox) error {
			if err != nil {
				return &sandbox.Error{Code: sandbox.CodeDependenciesFailed, Message: "it said " + box.(*fakeBox).spec.EgressToken + "\nand ended"}
			}
			return nil
		}); err != nil {
			return "", err
		}
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	l.there[digest] = true
	return "layer-" + digest, nil
}

func (l *layered) count() (made, ended int) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.made, l.ended
}

func newLayered(t *testing.T, s script) (*bench, *layered) {
	t.Helper()
	b := newStoreBench(t, s)
	l := &layered{pausable: pausable{b.provider}, there: map[string]bool{}}
	b.wrap = func(sandbox.Provider) sandbox.Provider { return l }
	return b, l
}

var depends = events.AgentSpec{
	Architecture: "claude-code", Instructions: "You do things.",
	Dependencies: events.Dependencies{NPM: []string{"b@1.0.0", "a@1.0.0"}, PIP: []string{"C_d==1"}},
}

// logMessages returns the messages of a session's log events.
func logMessages(s *talk) (out []string) {
	for _, l := range of[events.Log](s) {
		out = append(out, l.Message)
	}
	return out
}

// An agent's dependencies are installed before its sandbox is created, as a layer from a sandbox without a session,
// which can reach only the registries. The pool has no sandbox for such an agent.
func TestDependencies_AreInstalledBeforeTheSandbox(t *testing.T) {
	t.Parallel()
	b, l := newLayered(t, quick)
	l.build, b.egress = true, &fakeEgress{}
	a := b.run(func(c *executor.Config) {
		c.Pool, c.NPMRegistry, c.PIPIndexURL, c.DependenciesHosts = []string{"claude-code=1"}, "https://npm.example.com", "http://127.0.0.1:7070/pypi/simple", []string{"*.example.org", ""}
	})
	b.until("the pool is full", func() bool { return b.provider.count() == 1 })
	agent := b.agent("a", 2, depends)
	s := b.session(of1(agent))
	s.untilEnded(s.post("one"))
	ready := of[events.SandboxReady](s)
	if len(ready) != 1 || ready[0].Pooled {
		t.Fatalf("ready %+v", ready)
	}
	set := dependency.PackageSet{NPM: []string{"a@1.0.0", "b@1.0.0"}, PIP: []string{"c-d==1"}}
	digest := set.LayerDigest("", "fake")
	b.provider.mu.Lock()
	var builder sandbox.Spec
	for _, spec := range b.provider.specs {
		if spec.LayerTarget == digest {
			builder = spec
		}
	}
	seen := b.provider.specs[ready[0].SandboxID]
	b.provider.mu.Unlock()
	if seen.Layer != "layer-"+digest || seen.LayerTarget != "" {
		t.Errorf("the sandbox has %+v", seen)
	}
	if builder.ID == "" || builder.Layer != "" || builder.EgressToken == "" || builder.Labels != (sandbox.Labels{Engine: b.engine, Executor: a.ID()}) {
		t.Errorf("it was made in %+v", builder)
	}
	if wiped, ended := b.provider.wiped(builder.ID); !wiped || !ended {
		t.Error("the sandbox that it was made in is there, or its workspace")
	}
	b.egress.mu.Lock()
	for _, g := range b.egress.grants {
		if g.Sandbox != builder.ID && g.Routes != nil {
			t.Errorf("a sandbox for an agent may %+v", g)
		}
		if g.Sandbox == builder.ID && (!slices.Equal(g.Allow, []string{"*.example.org", "npm.example.com:443"}) || g.Routes == nil || !slices.Equal(*g.Routes, []string{"pypi"}) || g.Session != "" || g.Token != builder.EgressToken) {
			t.Errorf("an installation may %+v", g)
		}
	}
	if !slices.Contains(b.egress.released, builder.ID) {
		t.Error("its registration at the proxy is not released")
	}
	b.egress.mu.Unlock()
	if got := logMessages(s); len(got) != 2 || got[0] != "dependencies are being installed, for the first time on this engine: 2 of npm and 1 of pip" || !strings.HasPrefix(got[1], "dependencies are installed, after ") {
		t.Errorf("the log says %q", got)
	}
	s.untilEnded(s.post("two")) // in the same sandbox
	l.mu.Lock()
	if len(l.asked) != 1 {
		t.Errorf("asked for %+v", l.asked)
	}
	l.mu.Unlock()
	other := b.session(of1(agent), func(c *events.SessionCreated) { c.Options.Image = "mine" })
	other.untilEnded(other.post("one"))
	again := b.session(of1(agent))
	again.untilEnded(again.post("one"))
	if made, _ := l.count(); made != 2 || len(logMessages(again)) != 0 || len(logMessages(other)) != 2 {
		t.Errorf("made %d times; the log says %q", made, logMessages(again))
	}
	plain := b.session(short(events.Options{}))
	plain.untilEnded(plain.post("one"))
	if r := of[events.SandboxReady](plain); len(r) != 1 || !r[0].Pooled {
		t.Errorf("an agent that depends on nothing is given %+v", r)
	}
}

// If dependencies cannot be installed, the execution fails before a sandbox is created.
func TestDependencies_FailureEndsTheExecution(t *testing.T) {
	t.Parallel()
	failed := func(code string) error { return &sandbox.Error{Code: code, Message: "the first line\nthe last line"} }
	for name, c := range map[string]struct {
		fails []error
		build bool
		plain bool // the provider cannot have layers
		code  string
		says  string
	}{
		"failed":          {fails: []error{failed(sandbox.CodeDependenciesFailed)}, code: "DEPENDENCIES_FAILED", says: "the first line; the last line"},
		"no way out":      {fails: []error{failed(sandbox.CodeDependenciesUnavailable)}, code: "DEPENDENCIES_UNAVAILABLE", says: "the last line"},
		"no such image":   {fails: []error{failed(sandbox.CodeImageNotFound)}, code: "IMAGE_NOT_FOUND", says: "the last line"},
		"without a code":  {fails: []error{errors.New("hm")}, code: "DEPENDENCIES_FAILED", says: "hm"},
		"other sandboxes": {plain: true, code: "DEPENDENCIES_UNAVAILABLE", says: "provider local cannot have dependencies"},
		"a script talks":  {fails: []error{failed("")}, build: true, code: "DEPENDENCIES_FAILED", says: "it said ***; and ended"},
		"away":            {fails: slices.Repeat([]error{failed(sandbox.CodeEngineUnavailable)}, 20), code: "ENGINE_UNAVAILABLE", says: "the last line"},
		"away for a time": {fails: []error{failed(sandbox.CodeEgressUnavailable)}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b, l := newLayered(t, quick)
			l.fails, l.build, b.egress = c.fails, c.build, &fakeEgress{}
			if c.plain {
				b.wrap = nil
			}
			b.run(func(cfg *executor.Config) { cfg.EngineGone = 1500 * time.Millisecond })
			s := b.session(of1(b.agent("a", 2, depends)))
			execution := s.post("one")
			s.untilEnded(execution)
			if c.code == "" {
				if _, ok := s.last(execution).(events.ExecutionCompleted); !ok {
					t.Errorf("ended with %+v", s.last(execution))
				}
				return
			}
			end, ok := s.last(execution).(events.ExecutionFailed)
			if !ok || end.Code != c.code || !strings.Contains(end.Message, c.says) {
				t.Errorf("ended with %+v", s.last(execution))
			}
			if got := of[events.SandboxCreating](s); len(got) > 0 || b.provider.count() > 0 {
				t.Errorf("a sandbox was made: %+v", got)
			}
			next := s.post("two")
			s.untilEnded(next) // the session goes on
		})
	}
}

// An execution that waits for its dependencies can be cancelled like any other.
func TestDependencies_WaitCanBeCancelled(t *testing.T) {
	t.Parallel()
	b, l := newLayered(t, quick)
	l.hold = make(chan struct{})
	b.run()
	s := b.session(of1(b.agent("a", 2, depends)))
	execution := s.post("one")
	b.until("it is waited for", func() bool { made, _ := l.count(); return made == 1 })
	s.cancel(execution)
	s.untilEnded(execution)
	if _, ok := s.last(execution).(events.ExecutionCancelled); !ok {
		t.Errorf("ended with %+v", s.last(execution))
	}
	if _, ended := l.count(); ended != 1 {
		t.Error("what it waited for goes on")
	}
}

// If an executor stops while dependencies are installed, the next executor continues.
func TestDependencies_AreContinuedByTheNextExecutor(t *testing.T) {
	t.Parallel()
	b, l := newLayered(t, quick)
	l.hold = make(chan struct{})
	a := b.run()
	s := b.session(of1(b.agent("a", 2, depends)))
	execution := s.post("one")
	b.until("it is waited for", func() bool { made, _ := l.count(); return made == 1 })
	if err := a.stop(); err != nil {
		t.Fatal(err)
	}
	b.run()
	s.until("the other has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
	close(l.hold)
	s.untilEnded(execution)
	if _, ok := s.last(execution).(events.ExecutionCompleted); !ok {
		t.Errorf("ended with %+v", s.last(execution))
	}
}
