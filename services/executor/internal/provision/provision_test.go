package provision_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"slices"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/pkg/workspace"
	"github.com/spoolhq/spool/services/executor/internal/agents"
	"github.com/spoolhq/spool/services/executor/internal/agents/agentstest"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/handling"
	"github.com/spoolhq/spool/services/executor/internal/idle"
	"github.com/spoolhq/spool/services/executor/internal/metering"
	"github.com/spoolhq/spool/services/executor/internal/openblocks"
	"github.com/spoolhq/spool/services/executor/internal/pool"
	"github.com/spoolhq/spool/services/executor/internal/provision"
	"github.com/spoolhq/spool/services/executor/internal/references"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
	"github.com/spoolhq/spool/services/executor/internal/sandboxes"
	"github.com/spoolhq/spool/services/executor/internal/waits"
)

// engine is a provider of boxes in memory. Its workspaces are empty, and it adopts pooled sandboxes.
type engine struct {
	mu     sync.Mutex
	err    error // of Create
	boxes  map[string]*agentstest.FakeSandbox
	others []sandbox.Info // that List returns
	specs  []sandbox.Spec
	ended  []string
	owner  sandbox.Labels // of the adopted sandbox
	listed func()         // is called by List
}

type emptyBox struct{ *agentstest.FakeSandbox }

func (emptyBox) HasWorkspace() bool { return false }

func (e *engine) Create(_ context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.specs = append(e.specs, spec)
	if e.err != nil {
		return nil, e.err
	}
	e.boxes[spec.ID] = agentstest.NewFakeSandbox(spec.ID, 1)
	return emptyBox{e.boxes[spec.ID]}, nil
}

func (e *engine) Attach(_ context.Context, id string) (sandbox.Sandbox, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	if b := e.boxes[id]; b != nil {
		return emptyBox{b}, nil
	}
	return nil, fmt.Errorf("%s: %w", id, sandbox.ErrNotFound)
}

func (e *engine) List(context.Context) ([]sandbox.Info, error) {
	if e.listed != nil {
		e.listed()
	}
	return e.others, nil
}

func (e *engine) Terminate(_ context.Context, id string, _ bool) error {
	e.mu.Lock()
	defer e.mu.Unlock()
	e.ended = append(e.ended, id)
	if b := e.boxes[id]; b != nil {
		b.CloseStreams()
		delete(e.boxes, id)
	}
	return nil
}

func (e *engine) Adopt(_ context.Context, _ string, l sandbox.Labels) error {
	e.owner = l
	return nil
}

// layers builds one layer, or fails.
type layers struct {
	*engine
	err   error
	block bool // until ctx ends
}

func (l layers) Layer(ctx context.Context, want sandbox.LayerPackages, use sandbox.LayerBuilder) (string, error) {
	use.Begun()
	if l.block {
		<-ctx.Done()
		return "", ctx.Err()
	}
	return "layer of " + want.String(), l.err
}

// servers runs MCP servers, except for one image.
type servers struct {
	*engine
	broken string
}

func (s servers) StartServer(_ context.Context, _ string, n int, server sandbox.MCPServer) (string, error) {
	if server.Image == s.broken {
		return "", &sandbox.Error{Code: sandbox.CodeImageNotFound, Message: "no such image"}
	}
	return fmt.Sprintf("/run/%d-%s", n, server.Image), nil
}

// store restores snapshots.
type store struct {
	contents.Store
	restored []string
}

func (s *store) Restore(_ context.Context, _ sandbox.Sandbox, _ topology.SessionRef, id string, _ ...workspace.TreeName) (uint32, error) {
	s.restored = append(s.restored, id)
	return 1, nil
}

// texts has no text.
type texts struct{}

func (texts) ReadTexts(context.Context, string, string, deltas.StartPosition) (map[string]string, error) {
	return nil, nil
}

// A bed is a Provisioner for the execution of a runlogtest.Fixture.
type bed struct {
	*runlogtest.Fixture
	engine *engine
	agents *agents.Registry
	pool   *pool.Pool
	*provision.Provisioner
}

func newBed(t *testing.T, change func(*provision.Config)) *bed {
	t.Helper()
	log := slog.New(slog.DiscardHandler)
	b := &bed{Fixture: runlogtest.New(t), engine: &engine{boxes: map[string]*agentstest.FakeSandbox{}}, agents: agents.NewRegistry(1<<30, time.Now, log)}
	cfg := provision.Config{
		ProviderName: "fake", Engine: "here", Beat: 5 * time.Millisecond, MaxSandboxes: func(string) int { return 0 }, Provider: b.engine, Agents: b.agents,
		Contents:   &contents.Manager{Sessions: b.Writer.Sessions, Now: time.Now},
		OpenBlocks: &openblocks.Reader{Sessions: b.Writer.Sessions, Deltas: texts{}, Now: time.Now, Logger: log},
		Waits:      (*waits.Recorder)(nil), NewWait: func(*eventlog.SessionState) waiting.Entry { return waiting.Entry{} },
		NewID: func() (string, error) { return b.Writer.NewID(events.KindSandbox) }, Pooled: func() {}, Now: time.Now,
	}
	if change != nil {
		change(&cfg)
	}
	switch p := cfg.Provider.(type) { // they share the boxes
	case layers:
		p.engine = b.engine
		cfg.Provider = p
	case quickLayers:
		p.engine = b.engine
		cfg.Provider = p
	case servers:
		p.engine = b.engine
		cfg.Provider = p
	}
	cfg.Sandboxes = &sandboxes.Manager{Provider: cfg.Provider, Patience: time.Minute, Logger: log, Created: func(context.Context, time.Duration, error) {}}
	cfg.Dialer = &agents.Dialer{Sandboxes: cfg.Provider, Provider: "fake", Engine: "here", Patience: time.Minute, Logger: log}
	b.pool = pool.New(pool.Config{
		Executor: b.Writer.Executor, Provider: "fake", Engine: "here", Sizes: map[string]int{"spool": 1}, Every: time.Hour, Adoptable: true, Sandboxes: cfg.Sandboxes, Agents: cfg.Dialer,
		Query: func(architecture string) *runner.Query { return &runner.Query{Architecture: architecture} }, NewID: cfg.NewID, Now: time.Now, Logger: log,
	})
	cfg.Pool = b.pool
	cfg.Idle = idle.New(idle.Config{
		Executor: b.Writer.Executor, ProviderName: "fake", Engine: "here", Provider: cfg.Provider, Sessions: b.Writer.Sessions, Handling: handling.NewSessionSet(), Runs: b.Writer,
		Contents: cfg.Contents, Sandboxes: cfg.Sandboxes, Dialer: cfg.Dialer, Agents: b.agents, Pool: b.pool, Logger: log, Now: time.Now,
	})
	b.Provisioner = provision.New(cfg)
	return b
}

// request returns a request for a claimed execution of an agent.
func (b *bed) request(x *runlog.Execution, agent events.AgentSpec) provision.Request {
	r := &references.Resolved{Definition: agent}
	m := metering.New(&metering.Proxy{Engine: "here", Now: time.Now}, nil, x)
	m.SetResolved(r)
	return provision.Request{Execution: x, Resolved: r, Meter: m}
}

// attach returns what Attach does for an agent without references; the stream ends with the test.
func (b *bed) attach(t *testing.T, x *runlog.Execution) (provision.ReadySandbox, error) {
	t.Helper()
	ready, err := b.Attach(t.Context(), b.request(x, events.AgentSpec{}))
	if ready.Agent != nil {
		t.Cleanup(ready.Agent.Link.Close)
	}
	return ready, err
}

func (b *bed) mustAttach(t *testing.T, x *runlog.Execution) provision.ReadySandbox {
	t.Helper()
	ready, err := b.attach(t, x)
	if err != nil {
		t.Fatal(err)
	}
	return ready
}

// TestAttach_Creates: the log names the sandbox before it exists, and has its journal before the stream is returned.
func TestAttach_Creates(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	x := b.ClaimExecution()
	ready := b.mustAttach(t, x)
	sb := b.LoadSession().Run.Sandbox
	if sb.ID == "" || ready.Agent.Sandbox != sb.ID || ready.Agent.Journal != sb.Journal || !sb.Empty || b.engine.specs[0].Labels.Epoch != x.Epoch {
		t.Errorf("agent %+v of sandbox %+v", ready.Agent, sb)
	}
	if types := b.StoredTypes(); !slices.Equal(types[len(types)-2:], []events.Type{(events.SandboxCreating{}).EventType(), (events.SandboxReady{}).EventType()}) {
		t.Errorf("stored %v", types)
	}
}

// TestAttach_Again: the next turn uses the stream of the resting agent, or opens one to the same runner.
func TestAttach_Again(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	x := b.ClaimExecution()
	first := b.mustAttach(t, x)
	b.agents.AddResting(first.Agent, 0)
	if again := b.mustAttach(t, x); again.Agent != first.Agent || again.Agent.Hello != nil {
		t.Errorf("agent %+v in place of the resting one", again.Agent)
	}
	b.agents.Remove(first.Agent)
	if again := b.mustAttach(t, x); again.Agent == first.Agent || again.Agent.Journal != first.Agent.Journal || again.Agent.Hello == nil {
		t.Errorf("agent %+v in place of a new stream to the runner", again.Agent)
	}
	if len(b.engine.specs) != 1 {
		t.Errorf("%d sandboxes were created", len(b.engine.specs))
	}
}

// TestAttach_Lost: a lost sandbox is replaced, unless the execution runs in it.
func TestAttach_Lost(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	x := b.ClaimExecution()
	first := b.mustAttach(t, x).Agent.Sandbox
	b.agents.Close()
	delete(b.engine.boxes, first)
	x.Session.Run.Phase = run.Running
	if _, err := b.attach(t, x); !errors.Is(err, agents.ErrLost) {
		t.Fatalf("while the execution runs: %v", err)
	}
	x.Session.Run.Phase = run.Starting
	second := b.mustAttach(t, x).Agent.Sandbox
	if second == first || b.LoadSession().Run.Sandbox.ID != second || !slices.Contains(b.engine.ended, first) || !slices.Contains(b.StoredTypes(), (events.SandboxReplaced{}).EventType()) {
		t.Errorf("sandbox %s after %s; ended %v", second, first, b.engine.ended)
	}
}

// TestAttach_Crashed: a sandbox that a crashed executor began to create is created anew under its id, with a token that is known.
func TestAttach_Crashed(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	x := b.ClaimExecution()
	id, err := b.Writer.NewID(events.KindSandbox)
	if err != nil {
		t.Fatal(err)
	}
	if err := x.AppendFacts(t.Context(), events.SandboxCreating{SandboxID: id, Provider: "fake", Engine: "here"}); err != nil {
		t.Fatal(err)
	}
	if got := b.mustAttach(t, x).Agent.Sandbox; got != id || !slices.Equal(b.engine.ended, []string{id}) {
		t.Errorf("sandbox %s, want %s; ended %v", got, id, b.engine.ended)
	}
}

// TestAttach_CreateFails: what exists of the sandbox is ended, and the error has its id and code.
func TestAttach_CreateFails(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	b.engine.err = &sandbox.Error{Code: sandbox.CodeImageNotFound, Message: "no such image"}
	_, err := b.attach(t, b.ClaimExecution())
	var failed *provision.Error
	if !errors.As(err, &failed) || failed.Code() != sandbox.CodeImageNotFound || failed.Remains || !slices.Equal(b.engine.ended, []string{failed.SandboxID}) {
		t.Errorf("%v; ended %v", err, b.engine.ended)
	}
}

// TestAttach_Pooled: a session takes the sandbox of the pool, and one with an image of its own does not.
func TestAttach_Pooled(t *testing.T) {
	t.Parallel()
	for image, want := range map[string]bool{"": true, "alpine": false} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, nil)
			ctx, cancel := context.WithCancel(t.Context())
			var all sync.WaitGroup
			all.Go(func() { b.pool.Run(ctx) })
			synctest.Wait()
			b.AppendLife(events.SessionCreated{Architecture: "spool", Options: events.Options{Image: image}})
			x := b.ClaimExecution()
			ready := b.mustAttach(t, x)
			if pooled := b.engine.owner.Session == x.Session.ID; pooled != want || ready.Agent.Session != x.SessionRef() {
				t.Errorf("image %q: pooled %v, agent of %+v", image, pooled, ready.Agent.Session)
			}
			cancel()
			all.Wait()
		})
	}
}

// TestAttach_Restores: a new workspace is filled from the last snapshot, once.
func TestAttach_Restores(t *testing.T) {
	t.Parallel()
	s := &store{}
	b := newBed(t, func(c *provision.Config) { c.Contents.Store = s })
	x := b.ClaimExecution()
	if err := x.AppendFacts(t.Context(), events.WorkspaceSynced{Snapshot: "snp_1"}); err != nil {
		t.Fatal(err)
	}
	b.mustAttach(t, x)
	b.mustAttach(t, x)
	if l := b.LoadSession(); !slices.Equal(s.restored, []string{"snp_1"}) || l.Run.Sandbox.Empty {
		t.Errorf("restored %v, sandbox %+v", s.restored, l.Run.Sandbox)
	}
}

// TestAttach_Room: an execution that waits for room among its tenant's sandboxes ends with its control, and with a later claim.
func TestAttach_Room(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  func(*bed)
		want error
	}{
		"control":     {func(b *bed) { b.CancelExecution() }, provision.ErrCancelled},
		"later claim": {func(b *bed) { b.ClaimExecution() }, run.ErrFenced},
	} {
		b := newBed(t, func(c *provision.Config) { c.MaxSandboxes = func(string) int { return 1 } })
		other := events.DeriveID(events.KindSession, "another session")
		b.engine.others = []sandbox.Info{{ID: "sbx_other", Labels: sandbox.Labels{Tenant: runlogtest.Tenant, Session: other}}}
		x := b.ClaimExecution()
		// The other session is new in the log, so that its sandbox counts as idle, and cannot be ended: it is not the one in the log.
		c.end(b)
		if _, err := b.attach(t, x); !errors.Is(err, c.want) || len(b.engine.specs) > 0 {
			t.Errorf("%s: %v; %d sandboxes were created", name, err, len(b.engine.specs))
		}
	}
}

// TestAttach_CancelledInRoom: an execution that is cancelled while it gets room gives the room back.
func TestAttach_CancelledInRoom(t *testing.T) {
	t.Parallel()
	b := newBed(t, func(c *provision.Config) { c.MaxSandboxes, c.Beat = func(string) int { return 1 }, time.Hour })
	changed := make(chan struct{})
	b.engine.listed = func() {
		b.CancelExecution()
		changed <- struct{}{} // the wait for room ends with the control
	}
	r := b.request(b.ClaimExecution(), events.AgentSpec{})
	r.Changed = changed
	if _, err := b.Attach(t.Context(), r); !errors.Is(err, provision.ErrCancelled) {
		t.Fatalf("error %v", err)
	}
	b.engine.listed = nil
	if ok, err := b.Idle.ReserveSandbox(t.Context(), runlogtest.Tenant, events.DeriveID(events.KindSession, "another session"), 1); err != nil || !ok {
		t.Errorf("another session of the tenant has room: %v, %v", ok, err)
	}
}

// TestAttach_Retires: a sandbox that is older than the session allows ends, and another one is created.
func TestAttach_Retires(t *testing.T) {
	t.Parallel()
	b := newBed(t, nil)
	x := b.ClaimExecution()
	first := b.mustAttach(t, x).Agent
	b.agents.AddResting(first, 0)
	x.Session.Life.Options.SandboxMaxAgeMs, x.Session.Run.Sandbox.ReadyAt = 1000, time.Now().Add(-time.Minute)
	second := b.mustAttach(t, x).Agent
	if second.Sandbox == first.Sandbox || !slices.Contains(b.engine.ended, first.Sandbox) || first.IsAlive() {
		t.Errorf("sandbox %s after %s, ended %v", second.Sandbox, first.Sandbox, b.engine.ended)
	}
}

// TestAttach_Dependencies: the log states that a layer is built, an error of the build ends the execution, and a
// control does not wait for the build.
func TestAttach_Dependencies(t *testing.T) {
	t.Parallel()
	agent := events.AgentSpec{Dependencies: events.Dependencies{PIP: []string{"requests==2.32.0"}}}
	for name, c := range map[string]struct {
		provider  sandbox.Provider
		cancelled bool
		code      string // of the *references.Error
		logs      int
		want      error
	}{
		"layer":               {provider: layers{}, logs: 2},
		"package is missing":  {provider: layers{err: errors.New("no such package")}, code: sandbox.CodeDependenciesFailed, logs: 1},
		"provider without":    {code: sandbox.CodeDependenciesUnavailable},
		"cancelled meanwhile": {provider: layers{block: true}, cancelled: true, logs: 1, want: provision.ErrCancelled},
	} {
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, func(cfg *provision.Config) {
				if c.provider != nil {
					cfg.Provider = c.provider
				}
			})
			x := b.ClaimExecution()
			if c.cancelled {
				var all sync.WaitGroup
				defer all.Wait()
				all.Go(func() {
					time.Sleep(time.Second) // of the bubble: the build has begun
					b.CancelExecution()
				})
			}
			ready, err := b.Attach(t.Context(), b.request(x, agent))
			var wrong *references.Error
			switch {
			case c.code != "":
				if !errors.As(err, &wrong) || wrong.Code != c.code {
					t.Errorf("%s: %v", name, err)
				}
			case !errors.Is(err, c.want):
				t.Errorf("%s: %v, want %v", name, err, c.want)
			case err == nil:
				ready.Agent.Link.Close()
				if spec := b.engine.specs[0]; spec.Layer == "" {
					t.Errorf("%s: spec %+v", name, spec)
				}
			}
			logs := 0
			for _, e := range b.StoredEvents() {
				if _, ok := e.Data.(events.Log); ok {
					logs++
				}
			}
			if logs != c.logs {
				t.Errorf("%s: %d log events, want %d", name, logs, c.logs)
			}
		})
	}
}

// slowLog is a log whose answers take a millisecond.
type slowLog struct{ eventlog.Log }

func (l slowLog) Last(ctx context.Context, s events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	time.Sleep(time.Millisecond)
	return l.Log.Last(ctx, s, f)
}

// quickLayers builds a layer in no time, while the turn reads the log.
type quickLayers struct{ layers }

func (quickLayers) Layer(_ context.Context, _ sandbox.LayerPackages, use sandbox.LayerBuilder) (string, error) {
	time.Sleep(5*time.Millisecond + 500*time.Microsecond) // newBed's beat, and a part of slowLog's answer
	use.Begun()
	return "layer", nil
}

// TestAttach_QuickDependencies: the log also states a build that began and ended while the turn read the log.
func TestAttach_QuickDependencies(t *testing.T) {
	t.Parallel()
	agent := events.AgentSpec{Dependencies: events.Dependencies{PIP: []string{"requests==2.32.0"}}}
	for range 20 { // a select chooses at random
		synctest.Test(t, func(t *testing.T) {
			b := newBed(t, func(cfg *provision.Config) { cfg.Provider = quickLayers{} })
			x := b.ClaimExecution()
			b.Writer.Sessions.Log = slowLog{b.Log}
			ready, err := b.Attach(t.Context(), b.request(x, agent))
			if err != nil {
				t.Fatal(err)
			}
			ready.Agent.Link.Close()
			if types := b.StoredTypes(); !slices.Equal(types[1:3], []events.Type{"log", "log"}) { // after execution_claimed
				t.Errorf("the log has %v", types)
			}
		})
	}
}

// TestAttach_Servers: the sockets are in the order of the definition; the error of a server names its field, and leaves the sandbox.
func TestAttach_Servers(t *testing.T) {
	t.Parallel()
	agent := events.AgentSpec{MCPServers: []events.MCPServer{{Name: "web", Type: events.MCPTypeHTTP}, {Name: "a", Type: events.MCPTypeDocker, Image: "img-a"}, {Name: "b", Type: events.MCPTypeDocker, Image: "img-b"}}}
	b := newBed(t, func(c *provision.Config) { c.Provider = servers{} })
	ready, err := b.Attach(t.Context(), b.request(b.ClaimExecution(), agent))
	if err != nil {
		t.Fatal(err)
	}
	defer ready.Agent.Link.Close()
	if !slices.Equal(ready.Sockets, []string{"/run/0-img-a", "/run/1-img-b"}) || b.engine.specs[0].Servers != 2 {
		t.Errorf("sockets %v, spec %+v", ready.Sockets, b.engine.specs[0])
	}
	b = newBed(t, func(c *provision.Config) { c.Provider = servers{broken: "img-b"} })
	ready, err = b.Attach(t.Context(), b.request(b.ClaimExecution(), agent))
	var failed *provision.Error
	if !errors.As(err, &failed) || !failed.Remains || failed.Code() != sandbox.CodeImageNotFound || failed.Error() != "mcpServers[2].image: server b: no such image" {
		t.Errorf("%v", err)
	}
	if ready.Agent == nil || !ready.Agent.IsAlive() || len(b.engine.ended) > 0 {
		t.Errorf("agent %+v, ended %v", ready.Agent, b.engine.ended)
	} else {
		ready.Agent.Link.Close()
	}
}

// TestConversation: the agent's own session comes first, then that of the fork, then the transcript.
func TestConversation(t *testing.T) {
	t.Parallel()
	l := &eventlog.SessionState{}
	check := func(name, resume string, fork *runner.Fork) {
		t.Helper()
		got, f := provision.ConversationToContinue(l)
		if got != resume || (f == nil) != (fork == nil) || f != nil && *f != *fork {
			t.Errorf("%s: %q, %+v", name, got, f)
		}
	}
	check("a new session", "", nil)
	l.Life.Transcript = &events.Transcript{AgentSessionID: "from-transcript"}
	check("a transcript", "from-transcript", &runner.Fork{Provided: true})
	l.Life.Fork = &events.SessionForked{AgentSessionID: "from-fork", Anchor: "anchor"}
	check("a fork", "from-fork", &runner.Fork{Anchor: "anchor"})
	l.Run.AgentSession = "own"
	check("a session of its own", "own", nil)
}
