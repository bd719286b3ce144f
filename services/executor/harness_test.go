package executor_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/lease"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/executor/internal/references"
)

func TestMain(m *testing.M) {
	goleak.VerifyTestMain(m, goleak.Cleanup(func(code int) {
		if err := os.RemoveAll(binariesDir); err != nil {
			panic(err)
		}
		os.Exit(code)
	}))
}

// within limits every wait of these tests that names no other limit.
const within = 45 * time.Second

// benchLimit limits the duration of one test: a test may wait several times, and may begin with a thousand sessions on a busy machine.
const benchLimit = 10 * time.Minute

// bench is a log with jobs. The test acts as the session service.
type bench struct {
	t        *testing.T
	ctx      context.Context
	url      string
	nc       *nats.Conn
	js       jetstream.JetStream
	log      eventlog.Log
	sessions eventlog.Sessions
	provider *fakeProvider
	engine   string
	sandbox  string                 // value of Config.Sandbox
	local    func(*executor.Config) // settings for real sandboxes
	store    *fakeStore             // nil for none
	egress   *fakeEgress            // nil for none
	skills   references.Skills      // nil for none
	secrets  references.Secrets     // nil for none
	pausable bool                   // the provider supports pause and the pool
	wrap     func(sandbox.Provider) sandbox.Provider
	metrics  *prometheus.Registry // nil for none
	logger   *slog.Logger         // nil for the test's
	off      time.Duration        // clock offset of the hosts of executors that start from now on
	now      func() time.Time     // clock of executors that start from now on; nil for the streams' clock
	stored   func(events.Draft)   // called after each commit that an executor stores; nil for none

	mu     sync.Mutex
	deltas []events.Delta
}

func newBench(t *testing.T, s script) *bench {
	t.Helper()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort, Relaxed: true})
	return newBenchOn(t, s, srv.ClientURL(), natstest.Conn(t, srv))
}

func newBenchOn(t *testing.T, s script, url string, nc *nats.Conn) *bench {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), benchLimit)
	t.Cleanup(cancel)
	b := &bench{t: t, ctx: ctx, url: url, nc: nc, provider: newFakeProvider(s), engine: "here", sandbox: executor.ProviderLocal}
	t.Cleanup(b.provider.close)
	var err error
	if b.js, err = jetstream.New(b.nc); err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(ctx, b.js, topology.ProvisionConfig{Shards: 1}); err != nil {
		t.Fatal(err)
	}
	b.log = openLog(t, b.js)
	b.sessions = eventlog.Sessions{Log: b.log}
	sub, err := b.nc.Subscribe(topology.FrameFilter, func(m *nats.Msg) {
		b.mu.Lock()
		defer b.mu.Unlock()
		for in, err := range events.FrameDeltas(m.Data) {
			var d events.Delta
			if err == nil {
				d, err = events.DecodeDelta(in.JSON)
			}
			if err != nil {
				t.Error(err)
			}
			b.deltas = append(b.deltas, d)
		}
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Unsubscribe() })
	return b
}

func openLog(t *testing.T, js jetstream.JetStream) eventlog.Log {
	t.Helper()
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: 1, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}, Logger: natstest.Logger(t)})
	if err != nil {
		t.Fatal(err)
	}
	return log
}

// runningExecutor is a running executor.
type runningExecutor struct {
	*executor.Executor
	nc   *nats.Conn
	wire *wire
	log  *watchedLog
	stop func() error // stops it as SIGTERM does
}

// run starts an executor with its own connection.
func (b *bench) run(change ...func(*executor.Config)) *runningExecutor {
	b.t.Helper()
	cfg := executor.Config{
		Engine: b.engine, Sandbox: b.sandbox, Slots: 4, WarmMemory: 1 << 40, Beat: 20 * time.Millisecond, KillAfter: 200 * time.Millisecond,
		WarmEvery: time.Hour, SweepEvery: time.Hour, EngineTimeoutSettings: lease.EngineTimeoutSettings{EngineGone: 4 * time.Second},
	}
	deps := executor.Deps{Provider: b.provider, Logger: natstest.Logger(b.t), Skills: b.skills, Secrets: b.secrets}
	if b.sandbox == executor.ProviderModal {
		cfg.ModalTokenID, cfg.ModalTokenSecret, cfg.ModalImage = "ak-test", "as-test", "debian"
		cfg.EgressServer, cfg.EgressAuthority, cfg.EgressAdmin = "192.0.2.1:443", authority(b.t), "admin.sock"
	}
	if b.pausable {
		deps.Provider = pausable{b.provider}
	}
	if b.wrap != nil {
		deps.Provider = b.wrap(deps.Provider)
	}
	if b.store != nil {
		deps.Workspaces = b.store
	}
	if b.egress != nil {
		deps.Egress = b.egress
	}
	if b.logger != nil {
		deps.Logger = b.logger
	}
	if b.metrics != nil {
		deps.Metrics = b.metrics
	}
	if b.local != nil {
		b.local(&cfg)
		deps.Provider = nil
	}
	for _, c := range change {
		c(&cfg)
	}
	w := &wire{}
	nc, err := nats.Connect(b.url, nats.SetCustomDialer(w), nats.MaxReconnects(-1), nats.PingInterval(time.Hour))
	if err != nil {
		b.t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		b.t.Fatal(err)
	}
	log := &watchedLog{Log: openLog(b.t, js), after: b.stored}
	deps.NATS, deps.Log = nc, log
	off := b.off
	deps.Clock = bus.NewClock(bus.ClockConfig{JetStream: js, Stream: topology.StreamJobs, Host: func() time.Time { return time.Now().Add(off) }})
	deps.Now = b.now
	e, err := executor.New(cfg, deps)
	if err != nil {
		b.t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	ended := make(chan error, 1)
	go func() { ended <- e.Run(ctx) }()
	c := &runningExecutor{Executor: e, nc: nc, wire: w, log: log}
	c.stop = sync.OnceValue(func() error {
		cancel()
		err := <-ended
		nc.Close()
		return err
	})
	b.t.Cleanup(func() {
		w.thaw()
		if err := c.stop(); err != nil && !w.wasCut() {
			b.t.Errorf("executor: %v", err)
		}
	})
	select {
	case <-e.Ready():
	case <-time.After(within):
		b.t.Fatal("the executor is not ready")
	}
	return c
}

// wire is the network of one executor. It can be frozen, and cut permanently.
type wire struct {
	mu     sync.Mutex
	frozen chan struct{}
	cut    bool
	conns  []net.Conn
}

func (w *wire) Dial(network, address string) (net.Conn, error) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.cut {
		return nil, errors.New("cut")
	}
	c, err := net.Dial(network, address)
	if err != nil {
		return nil, err
	}
	w.conns = append(w.conns, c)
	return &wiredConn{c, w}, nil
}

func (w *wire) freeze() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.frozen = make(chan struct{})
}

func (w *wire) thaw() {
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.frozen != nil {
		close(w.frozen)
		w.frozen = nil
	}
}

// kill cuts the network as kill -9 of the executor would.
func (w *wire) kill() {
	w.mu.Lock()
	defer w.mu.Unlock()
	w.cut = true
	for _, c := range w.conns {
		_ = c.Close()
	}
}

func (w *wire) wasCut() bool {
	w.mu.Lock()
	defer w.mu.Unlock()
	return w.cut
}

func (w *wire) pass() {
	w.mu.Lock()
	frozen := w.frozen
	w.mu.Unlock()
	if frozen != nil {
		<-frozen
	}
}

type wiredConn struct {
	net.Conn
	w *wire
}

func (c *wiredConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.w.pass()
	return n, err
}

func (c *wiredConn) Write(p []byte) (int, error) {
	c.w.pass()
	return c.Conn.Write(p)
}

// watchedLog counts refused appends, and can simulate a log without a leader.
type watchedLog struct {
	eventlog.Log
	mu      sync.Mutex
	refused int
	away    bool
	asked   int                // number of reads while it was away
	at      int                // number of reads of a single commit
	after   func(events.Draft) // called after each stored commit; nil for none
}

// afterAppend makes the log call f after each commit that is stored from now on, before AppendDecision returns.
func (l *watchedLog) afterAppend(f func(events.Draft)) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.after = f
}

func (l *watchedLog) setAway(away bool) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.away = away
}

func (l *watchedLog) askedInVain() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.asked
}

func (l *watchedLog) CommitAt(ctx context.Context, p eventlog.Position) (eventlog.Record, error) {
	l.mu.Lock()
	l.at++
	l.mu.Unlock()
	return l.Log.CommitAt(ctx, p)
}

// readsOfCommits returns how often a single commit was read.
func (l *watchedLog) readsOfCommits() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.at
}

func (l *watchedLog) Last(ctx context.Context, s events.Subject, fresh eventlog.Freshness) (eventlog.Head, error) {
	l.mu.Lock()
	away := l.away && fresh == eventlog.LeaderOnly
	if away {
		l.asked++
	}
	l.mu.Unlock()
	if away {
		return eventlog.Head{}, eventlog.ErrUnavailable
	}
	return l.Log.Last(ctx, s, fresh)
}

func (l *watchedLog) Append(ctx context.Context, head eventlog.Head, d events.Draft) (eventlog.Head, error) {
	next, err := l.Log.Append(ctx, head, d)
	l.mu.Lock()
	after := l.after
	l.mu.Unlock()
	if err == nil && after != nil {
		after(d)
	}
	var conflict *eventlog.ConflictError
	if errors.As(err, &conflict) {
		l.mu.Lock()
		l.refused++
		l.mu.Unlock()
	}
	return next, err
}

// runs reports whether the executor runs an execution of the session. An executor that does not answer may.
func (c *runningExecutor) runs(s *talk) bool {
	ref, err := topology.SessionRef{Tenant: s.tenant, Session: s.id}.Encode()
	if err != nil {
		s.b.t.Fatal(err)
	}
	var answer topology.CtlResponse
	msg, err := s.b.nc.Request(topology.ExecutorCtlSubject(c.ID()), ref, time.Second)
	return err != nil || json.Unmarshal(msg.Data, &answer) != nil || answer.Running != ""
}

func (l *watchedLog) refusals() int {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.refused
}

func mint(t testing.TB, kind events.IDKind) string {
	id, err := events.NewID(kind, time.Now(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return id
}

const tenant = "default"

// talk is one session.
type talk struct {
	b      *bench
	id     string
	tenant string
}

func (b *bench) session(change ...func(*events.SessionCreated)) *talk {
	b.t.Helper()
	return b.sessionOf(tenant, change...)
}

// sessionOf creates a session of a tenant.
func (b *bench) sessionOf(tenant string, change ...func(*events.SessionCreated)) *talk {
	b.t.Helper()
	s := &talk{b, mint(b.t, events.KindSession), tenant}
	c := events.SessionCreated{
		Agent: "default", AgentVersion: "1", Architecture: "claude-code", Provider: b.sandbox,
		Options: events.Options{IdleTimeoutMs: 3600_000, TurnLimitMs: 3600_000, SessionLimitMs: 3600_000},
	}
	for _, f := range change {
		f(&c)
	}
	s.life(func(base session.CommandBase, _ *eventlog.SessionState) session.Command {
		return session.CreateSession{CommandBase: base, SessionCreated: c}
	})
	return s
}

// life decides and appends a command, as the session service does.
func (s *talk) life(command func(session.CommandBase, *eventlog.SessionState) session.Command) {
	s.b.t.Helper()
	l := s.load()
	id := mint(s.b.t, events.KindCommand)
	list, err := session.Decide(l.Life, command(session.CommandBase{CommandMeta: events.CommandMeta{CommandID: id, Now: time.Now().UTC()}}, l))
	if err != nil {
		s.b.t.Fatal(err)
	}
	if len(list) == 0 {
		return
	}
	if err := s.b.sessions.AppendLife(s.b.ctx, l, events.Actor{Kind: "service", ID: "session"}, id, list); err != nil {
		s.b.t.Fatal(err)
	}
}

func (s *talk) load() *eventlog.SessionState {
	s.b.t.Helper()
	l, err := s.b.sessions.Load(s.b.ctx, s.tenant, s.id, eventlog.LeaderOnly)
	if err != nil {
		s.b.t.Fatal(err)
	}
	return l
}

// post accepts a message and publishes the job.
func (s *talk) post(text string) (execution string) {
	s.b.t.Helper()
	execution = mint(s.b.t, events.KindExecution)
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.PostQuery{CommandBase: base, ExecutionID: execution, Content: text, ActiveEnded: l.RunView().ActiveEnded}
	})
	s.job()
	return execution
}

func (s *talk) interrupt() {
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestInterrupt{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded}
	})
}

func (s *talk) cancel(execution string) {
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.RequestCancel{CommandBase: base, ExecutionID: execution, ActiveEnded: l.RunView().ActiveEnded}
	})
}

func (s *talk) remove() {
	s.life(func(base session.CommandBase, l *eventlog.SessionState) session.Command {
		return session.DeleteSession{CommandBase: base, ActiveEnded: l.RunView().ActiveEnded}
	})
}

// job publishes the job that the reactor would publish, to the engine of the session's sandbox.
func (s *talk) job() {
	s.b.t.Helper()
	subject := topology.ProviderJobSubject(s.b.sandbox)
	if sb := s.load().Run.Sandbox; sb.ID != "" {
		subject = topology.EngineJobSubject(s.b.sandbox, sb.Engine)
	}
	s.jobAt(subject)
}

func (s *talk) jobAt(subject string) {
	s.b.t.Helper()
	raw, err := topology.SessionRef{Tenant: s.tenant, Session: s.id}.Encode()
	if err != nil {
		s.b.t.Fatal(err)
	}
	if _, err := s.b.js.Publish(s.b.ctx, subject, raw); err != nil {
		s.b.t.Fatal(err)
	}
}

// events returns all events of the session's run subject, in order.
func (s *talk) events() []events.Event {
	s.b.t.Helper()
	var out []events.Event
	for n, err := range eventlog.SessionEvents(s.b.ctx, s.b.log, s.tenant, s.id) {
		if err != nil {
			s.b.t.Fatal(err)
		}
		if n.Aspect == events.Run {
			out = append(out, n.Event)
		}
	}
	return out
}

// types returns the types of events, separated by spaces.
func types(list []events.Event) string {
	var out []string
	for _, e := range list {
		out = append(out, string(e.Type()))
	}
	return strings.Join(out, " ")
}

// until polls the session's state.
func (s *talk) until(what string, ok func(*eventlog.SessionState) bool) *eventlog.SessionState {
	s.b.t.Helper()
	var last *eventlog.SessionState
	s.b.until(what, func() bool {
		last = s.load()
		return ok(last)
	})
	return last
}

func (s *talk) untilEnded(execution string) *eventlog.SessionState {
	s.b.t.Helper()
	l := s.until("execution "+execution+" has ended", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(execution) })
	s.check()
	return l
}

// until polls a condition, because other processes are involved: NATS, and executors that share no state with the test.
func (b *bench) until(what string, ok func() bool) {
	b.t.Helper()
	b.untilWithin(within, what, ok)
}

// untilWithin is until for a condition whose work takes longer than other waits of these tests may.
func (b *bench) untilWithin(limit time.Duration, what string, ok func() bool) {
	b.t.Helper()
	deadline := time.Now().Add(limit)
	for !ok() {
		if time.Now().After(deadline) {
			b.t.Fatalf("timed out waiting until %s", what)
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// check checks the log: no event is stored twice, the numbers of each journal ascend, each execution has at most one
// terminal event and no event after it, blocks are opened before they are completed, none is open at the end, and
// epochs ascend.
func (s *talk) check() {
	s.b.t.Helper()
	ids, terminal := map[string]bool{}, map[string]bool{}
	open := map[string]bool{}
	var n, epoch uint64
	for _, e := range s.events() {
		if ids[e.ID] {
			s.b.t.Errorf("event %s is stored twice", e.ID)
		}
		ids[e.ID] = true
		if terminal[e.ExecutionID] && e.ExecutionID != "" {
			s.b.t.Errorf("%s after the end of %s", e.Type(), e.ExecutionID)
		}
		if e.N != 0 {
			if e.N <= n {
				s.b.t.Errorf("%s has number %d after %d", e.Type(), e.N, n)
			}
			n = e.N
		}
		switch d := e.Data.(type) {
		case events.ExecutionClaimed:
			if d.Epoch <= epoch {
				s.b.t.Errorf("epoch %d after %d", d.Epoch, epoch)
			}
			epoch = d.Epoch
		case events.SandboxReady:
			n = 0
		case events.BlockStart:
			open[d.Block.ID] = true
		case events.BlockComplete:
			if !open[d.Block.ID] {
				s.b.t.Errorf("block %s is completed and not open", d.Block.ID)
			}
			delete(open, d.Block.ID)
		}
		if events.IsTerminal(e.Type()) {
			terminal[e.ExecutionID] = true
			if len(open) > 0 {
				s.b.t.Errorf("blocks %v are open at the end of %s", open, e.ExecutionID)
			}
		}
	}
}

// jobs returns the number of jobs that are left.
func (b *bench) jobs() uint64 {
	b.t.Helper()
	stream, err := b.js.Stream(b.ctx, topology.StreamJobs)
	if err != nil {
		b.t.Fatal(err)
	}
	info, err := stream.Info(b.ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	return info.State.Msgs
}

func (b *bench) noJobs() {
	b.t.Helper()
	b.until("no job is left", func() bool { return b.jobs() == 0 })
}

// last returns the terminal event of an execution.
func (s *talk) last(execution string) events.Payload {
	s.b.t.Helper()
	list := s.events()
	for _, e := range slices.Backward(list) {
		if e.ExecutionID == execution && events.IsTerminal(e.Type()) {
			return e.Data
		}
	}
	s.b.t.Fatalf("%s has no terminal event in %s", execution, types(list))
	return nil
}

// claimAs claims as an executor that does not exist any more.
func (s *talk) claimAs(executor string) {
	s.b.t.Helper()
	s.decide(events.Actor{Kind: "executor", ID: executor}, func(l *eventlog.SessionState) run.Command {
		return run.ClaimExecution{
			CommandMeta: events.CommandMeta{CommandID: mint(s.b.t, events.KindCommand), Now: time.Now().UTC()},
			ExecutionID: l.Life.Active.ExecutionID, Turn: l.Life.Active.Turn, Executor: executor,
		}
	})
}

// decide appends the events of a command. Like the services, it decides again if another commit came first: the last
// append of an executor that was cut off may still arrive.
func (s *talk) decide(actor events.Actor, command func(*eventlog.SessionState) run.Command) {
	s.b.t.Helper()
	for {
		l := s.load()
		d, err := run.Decide(l.Run, command(l))
		if err != nil {
			s.b.t.Fatal(err)
		}
		err = s.b.sessions.AppendRun(s.b.ctx, l, actor, mint(s.b.t, events.KindCommit), d)
		if conflict := (*eventlog.ConflictError)(nil); errors.As(err, &conflict) {
			continue
		}
		if err != nil {
			s.b.t.Fatal(err)
		}
		return
	}
}

// wrote returns the texts of the complete assistant blocks.
func wrote(list []events.Event) string {
	var out []string
	for _, e := range list {
		if c, ok := e.Data.(events.BlockComplete); ok && c.Block.Status == events.StatusComplete {
			out = append(out, c.Block.Content)
		}
	}
	return fmt.Sprint(out)
}
