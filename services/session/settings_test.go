package session_test

import (
	"context"
	"log/slog"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/imagepolicy"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/services/session"
)

// TestSettingLimits tests that a session gets the installation's limits unless it sets its own.
func TestSettingLimits(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{IdleTimeout: 7 * time.Minute, TurnLimit: 8 * time.Minute, SessionLimit: 9 * time.Hour})
	for _, c := range []struct{ given, want events.Options }{
		{events.Options{}, events.Options{IdleTimeoutMs: 420_000, TurnLimitMs: 480_000, SessionLimitMs: 32_400_000}},
		{events.Options{TurnLimitMs: 1000}, events.Options{IdleTimeoutMs: 420_000, TurnLimitMs: 1000, SessionLimitMs: 32_400_000}},
	} {
		l, err := s.ses.Load(t.Context(), "default", s.create(c.given), eventlog.LeaderOnly)
		must(t, err)
		if o := l.Life.Options; o.IdleTimeoutMs != c.want.IdleTimeoutMs || o.TurnLimitMs != c.want.TurnLimitMs || o.SessionLimitMs != c.want.SessionLimitMs {
			t.Errorf("with %+v the session has %+v, want %+v", c.given, o, c.want)
		}
	}
}

// TestSettingProviders tests that a session can choose an offered provider, gets the first one by default, and that
// every other provider is refused.
func TestSettingProviders(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		offered         []string
		unnamed, chosen string
		refused         string
	}{
		{[]string{"docker"}, "docker", "docker", "local"},
		{[]string{"local"}, "local", "local", "docker"},
		{[]string{"docker", "local"}, "docker", "local", "moon"},
	} {
		s := newStack(t)
		s.startCopy("one", session.Config{Providers: c.offered})
		provider := func(asked string) (string, *command.Error) {
			sid := id(events.KindSession)
			a := s.send(command.TypeCreateSession, sid, "", command.CreateSession{Provider: asked})
			l, err := s.ses.Load(t.Context(), "default", sid, eventlog.LeaderOnly)
			must(t, err)
			return l.Life.Provider, a.Error
		}
		if got, err := provider(""); got != c.unnamed || err != nil {
			t.Errorf("%v: the default provider is %q, %v", c.offered, got, err)
		}
		if got, err := provider(c.chosen); got != c.chosen || err != nil {
			t.Errorf("%v: provider %s: got %q, %v", c.offered, c.chosen, got, err)
		}
		if got, err := provider(c.refused); got != "" || err == nil {
			t.Errorf("%v: refused provider %s: got %q", c.offered, c.refused, got)
		}
	}
}

// TestSettingSandboxImages tests that sessions and definitions may name the installation's image and the images of
// the list, and that other images are refused with their field.
func TestSettingSandboxImages(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{Providers: []string{"docker", "local"}, ImageSettings: imagepolicy.ImageSettings{SandboxImage: "acme/box:3", SandboxImages: []string{"registry.example.com/agents/*"}}})
	code := func(e *command.Error) string {
		if e == nil {
			return ""
		}
		return e.Code + " " + e.Field
	}
	create := func(provider, image string) string {
		return code(s.send(command.TypeCreateSession, id(events.KindSession), "", command.CreateSession{Provider: provider, Options: events.Options{Image: image}}).Error)
	}
	apply := func(change func(*events.AgentSpec)) string {
		return code(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: reviewer, Spec: agentSpec(change)}).Error)
	}
	update := func(image string) string {
		sid := id(events.KindSession)
		if a := s.send(command.TypeCreateSession, sid, "", command.CreateSession{}); a.Error != nil {
			t.Fatal(a.Error)
		}
		return code(s.send(command.TypeUpdateSession, sid, "", command.UpdateSession{Options: &events.Options{Image: image}}).Error)
	}
	server := func(image string) func(*events.AgentSpec) {
		return func(a *events.AgentSpec) {
			a.Image, a.MCPServers = "", []events.MCPServer{{Name: "m", Type: events.MCPTypeDocker, Image: image}}
		}
	}
	for _, c := range []struct{ name, got, want string }{
		{"a session with the installation's image", create("", "acme/box:3"), ""},
		{"a session with an image of the list", create("docker", "registry.example.com/agents/a:2"), ""},
		{"a session with a host of the network", create("", "10.0.0.7:5000/x"), "IMAGE_NOT_ALLOWED sessionOptions.image"},
		{"a session with another tag", create("", "acme/box:4"), "IMAGE_NOT_ALLOWED sessionOptions.image"},
		{"a local session, which has no image", create("local", "10.0.0.7:5000/x"), ""},
		{"an update with an image of the list", update("registry.example.com/agents/a"), ""},
		{"an update with a host of the network", update("10.0.0.7:5000/x"), "IMAGE_NOT_ALLOWED sessionOptions.image"},
		{"an agent with an image of the list", apply(func(a *events.AgentSpec) { a.Image = "registry.example.com/agents/a" }), ""},
		{"an agent with a host of the network", apply(func(a *events.AgentSpec) { a.Image = "10.0.0.7:5000/x" }), "IMAGE_NOT_ALLOWED spec.image"},
		{"a server with an image of the list", apply(server("registry.example.com/agents/m")), ""},
		{"a server with a host of the network", apply(server("10.0.0.7:5000/x")), "IMAGE_NOT_ALLOWED spec.mcpServers[0].image"},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %q, want %q", c.name, c.got, c.want)
		}
	}
	if _, err := session.New(session.Config{ImageSettings: imagepolicy.ImageSettings{SandboxImages: []string{"A B"}}}, session.Deps{}); err == nil || !strings.Contains(err.Error(), "sandbox-images: ") {
		t.Errorf("got %v", err)
	}
}

// TestSettingSandboxImages_OfAnOlderAgent tests that an agent with an image that is no longer in the list is refused
// when a session is created from it.
func TestSettingSandboxImages_OfAnOlderAgent(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	before := s.startCopy("one", session.Config{Providers: []string{"docker"}, ImageSettings: imagepolicy.ImageSettings{SandboxImages: []string{"*"}}})
	for slug, change := range map[string]func(*events.AgentSpec){
		"imaged": func(a *events.AgentSpec) { a.Image = "old:1" },
		"served": func(a *events.AgentSpec) {
			a.Image, a.MCPServers = "", []events.MCPServer{{Name: "m", Type: events.MCPTypeDocker, Image: "old:1"}}
		},
	} {
		s.mustApply(s.send(command.TypeApplyAgent, "", "", command.ApplyAgent{Ref: events.Reference{Slug: slug}, Spec: agentSpec(change)}))
	}
	before.stop()
	s.startCopy("two", session.Config{Providers: []string{"docker"}})
	for slug, field := range map[string]string{"imaged": "sessionOptions.image", "served": "agent.mcpServers[0].image"} {
		a := s.send(command.TypeCreateSession, id(events.KindSession), "", command.CreateSession{Agent: slug})
		if a.Error == nil || a.Error.Code != "IMAGE_NOT_ALLOWED" || a.Error.Field != field {
			t.Errorf("%s: got %+v", slug, a.Error)
		}
	}
}

// blockingLog blocks all callers of Last with one freshness, and counts them.
type blockingLog struct {
	eventlog.Log
	at   eventlog.Freshness
	full chan struct{} // closed when limit callers wait
	pass chan struct{} // closed to release them

	mu                     sync.Mutex
	limit, inside, maximum int
}

func (l *blockingLog) Last(ctx context.Context, subject events.Subject, f eventlog.Freshness) (eventlog.Head, error) {
	if f != l.at {
		return l.Log.Last(ctx, subject, f)
	}
	l.mu.Lock()
	l.inside++
	l.maximum = max(l.maximum, l.inside)
	if l.maximum == l.limit && l.inside == l.limit {
		select {
		case <-l.full:
		default:
			close(l.full)
		}
	}
	l.mu.Unlock()
	select {
	case <-l.pass:
	case <-ctx.Done():
	}
	h, err := l.Log.Last(ctx, subject, f)
	l.mu.Lock()
	l.inside--
	l.mu.Unlock()
	return h, err
}

// TestSettingWorkers tests that the service handles as many commands, and as many commits, at once as the setting
// allows, and no more.
func TestSettingWorkers(t *testing.T) {
	t.Parallel()
	const sessions = 6
	for _, c := range []struct {
		name string
		at   eventlog.Freshness
		cfg  func(int) session.Config
	}{
		{"CommandWorkers", eventlog.AnyReplica, func(n int) session.Config { return session.Config{CommandWorkers: n} }},
		{"ReactorWorkers", eventlog.LeaderOnly, func(n int) session.Config { return session.Config{ReactorWorkers: n} }},
	} {
		for _, workers := range []int{1, 3} {
			t.Run(c.name+" "+strconv.Itoa(workers), func(t *testing.T) {
				t.Parallel()
				s := newStack(t)
				nc := natstest.Conn(t, s.srv)
				js, err := jetstream.New(nc)
				must(t, err)
				log, err := jslog.New(jslog.Config{JetStream: js, Partitions: s.log.Partitioning()})
				must(t, err)
				blocked := &blockingLog{Log: log, at: c.at, limit: workers, full: make(chan struct{}), pass: make(chan struct{})}
				svc, err := session.New(c.cfg(workers), session.Deps{NATS: nc, Log: blocked, Logger: slog.New(slog.DiscardHandler), Copy: "one"})
				must(t, err)
				ctx, cancel := context.WithCancel(context.Background())
				done := make(chan error, 1)
				go func() { done <- svc.Run(ctx) }()
				awaitReady(t, svc.Ready(), done)
				var all sync.WaitGroup
				for range sessions {
					all.Go(func() {
						if _, err := s.trySend(id(events.KindCommand), command.TypeCreateSession, id(events.KindSession), "", command.CreateSession{}); err != nil {
							t.Error(err)
						}
					})
				}
				select {
				case <-blocked.full:
				case <-time.After(20 * time.Second):
					t.Error("the configured number of commands is never reached")
				}
				close(blocked.pass)
				all.Wait()
				cancel()
				must(t, <-done)
				if blocked.maximum != workers {
					t.Errorf("%d at once, want %d", blocked.maximum, workers)
				}
			})
		}
	}
}

// TestMetrics_CountCommandsReactionsAndJobs tests that commands by outcome, reactions and jobs are counted.
func TestMetrics_CountCommandsReactionsAndJobs(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	registry := prometheus.NewRegistry()
	svc, err := session.New(session.Config{}, session.Deps{NATS: s.nc, Log: s.log, Logger: slog.New(slog.DiscardHandler), Copy: "one", Metrics: registry})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	defer func() { cancel(); must(t, <-done) }()
	awaitReady(t, svc.Ready(), done)
	s.executors(1)
	sid := s.create(events.Options{})
	exe := s.post(sid)
	s.await(sid, "at the end", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(exe) })
	s.send(command.TypePostMessage, id(events.KindSession), id(events.KindExecution), command.PostMessage{Content: "x"})
	s.send("nonsense", sid, "", nil)
	count := func(name string, labels ...string) float64 { return metricValue(t, registry, name, labels...) }
	for want, got := range map[string]float64{
		"created":   count("spool_session_commands_total", "create_session", "ok"),
		"posted":    count("spool_session_commands_total", "post_message", "ok"),
		"refused":   count("spool_session_commands_total", "post_message", "SESSION_NOT_FOUND"),
		"no type":   count("spool_session_commands_total", "unknown", "INVALID_REQUEST"),
		"job":       count("spool_session_jobs_total"),
		"reactions": count("spool_session_reaction_lag_seconds"),
	} {
		if got < 1 {
			t.Errorf("%s: %v", want, got)
		}
	}
}

// metricValue returns the value of a counter, or the number of samples of a histogram, by the values of its labels.
func metricValue(t *testing.T, registry *prometheus.Registry, name string, labels ...string) float64 {
	t.Helper()
	list, err := registry.Gather()
	must(t, err)
	for _, family := range list {
		if family.GetName() != name {
			continue
		}
	metrics:
		for _, m := range family.GetMetric() {
			have := map[string]bool{}
			for _, l := range m.GetLabel() {
				have[l.GetValue()] = true
			}
			for _, l := range labels {
				if !have[l] {
					continue metrics
				}
			}
			if h := m.GetHistogram(); h != nil {
				return float64(h.GetSampleCount())
			}
			return m.GetCounter().GetValue() + m.GetGauge().GetValue()
		}
	}
	return 0
}

// TestSettingHostPaths tests that a session may work in a folder below a configured one, not elsewhere, not with
// Docker, and by default in no folder of the host.
func TestSettingHostPaths(t *testing.T) {
	t.Parallel()
	dir, err := filepath.EvalSymlinks(t.TempDir())
	must(t, err)
	must(t, os.MkdirAll(filepath.Join(dir, "in/project"), 0o755))
	must(t, os.MkdirAll(filepath.Join(dir, "out"), 0o755))
	must(t, os.Symlink(filepath.Join(dir, "in/project"), filepath.Join(dir, "link")))
	for _, c := range []struct {
		roots []string
		ask   command.CreateSession
		want  string // folder of the session
		code  string
	}{
		{nil, command.CreateSession{Options: events.Options{HostPath: filepath.Join(dir, "in")}}, "", "HOST_PATH_REFUSED"},
		{[]string{filepath.Join(dir, "in")}, command.CreateSession{Options: events.Options{HostPath: filepath.Join(dir, "out")}}, "", "HOST_PATH_REFUSED"},
		{[]string{filepath.Join(dir, "in")}, command.CreateSession{Options: events.Options{HostPath: filepath.Join(dir, "in/project")}}, filepath.Join(dir, "in/project"), ""},
		{[]string{filepath.Join(dir, "in")}, command.CreateSession{Options: events.Options{HostPath: filepath.Join(dir, "link")}}, filepath.Join(dir, "in/project"), ""},
		{[]string{"/"}, command.CreateSession{Provider: "docker", Options: events.Options{HostPath: dir}}, "", "HOST_PATH_UNSUPPORTED"},
		{[]string{"/"}, command.CreateSession{Options: events.Options{HostPath: dir}, HostPathIdentity: "of another machine"}, "", "HOST_PATH_REFUSED"},
	} {
		s := newStack(t)
		s.startCopy("one", session.Config{HostPaths: c.roots, Providers: []string{"local", "docker"}})
		sid := id(events.KindSession)
		a := s.send(command.TypeCreateSession, sid, "", c.ask)
		code, field := "", ""
		if a.Error != nil {
			code, field = a.Error.Code, a.Error.Field
		}
		l, err := s.ses.Load(t.Context(), "default", sid, eventlog.LeaderOnly)
		must(t, err)
		if code != c.code || l.Life.Options.HostPath != c.want || code != "" && field != "sessionOptions.hostPath" {
			t.Errorf("%v, %+v: %q of %q, the session has %q", c.roots, c.ask, code, field, l.Life.Options.HostPath)
		}
	}
	if _, err := session.New(session.Config{HostPaths: []string{"relative"}}, session.Deps{}); err == nil || !strings.Contains(err.Error(), "host-paths: ") {
		t.Errorf("a relative root: %v", err)
	}
}

// TestSettingStoreReserve tests that, with less free space than the reserve, a session is refused, and an existing
// one can be deleted.
func TestSettingStoreReserve(t *testing.T) {
	t.Parallel()
	s := newStackOn(t, natstest.RunWithMinStore(t))
	little := s.startCopy("little", session.Config{ReserveSettings: storage.ReserveSettings{StoreReserve: 1}})
	there := s.create(events.Options{})
	little.stop()
	natstest.FillStore(t, s.nc, 21)
	much := s.startCopy("much", session.Config{ReserveSettings: storage.ReserveSettings{StoreReserve: 80}})
	if a := s.send(command.TypeCreateSession, id(events.KindSession), "", command.CreateSession{}); a.Error == nil || a.Error.Code != command.CodeStorageFull {
		t.Errorf("with a reserve of 80 %%: %+v", a)
	}
	if a := s.send(command.TypeDeleteSession, there, "", nil); a.Error != nil {
		t.Errorf("delete: %+v", a.Error)
	}
	much.stop()
	s.startCopy("default", session.Config{})
	s.create(events.Options{})
	if _, err := session.New(session.Config{ReserveSettings: storage.ReserveSettings{StoreReserve: 91}}, session.Deps{}); err == nil || !strings.Contains(err.Error(), "store-reserve") {
		t.Errorf("a reserve of 91 %%: %v", err)
	}
}
