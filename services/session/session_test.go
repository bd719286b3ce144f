package session_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"reflect"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session"
)

// TestMain fails if a test leaves a goroutine running.
func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// stack holds a log and the connections with which tests use it.
type stack struct {
	t   *testing.T
	srv *natsserver.Server
	nc  *nats.Conn
	js  jetstream.JetStream
	log *jslog.Log
	ses eventlog.Sessions
}

func newStack(t *testing.T) *stack { return newStackOn(t, natstest.Run(t)) }

func newStackOn(t *testing.T, srv *natsserver.Server) *stack {
	nc := natstest.Conn(t, srv)
	js, err := jetstream.New(nc)
	must(t, err)
	must(t, topology.Provision(t.Context(), js, topology.ProvisionConfig{Partitions: topology.DefaultPartitions}))
	log, err := jslog.New(jslog.Config{JetStream: js, Partitions: topology.DefaultPartitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}})
	must(t, err)
	return &stack{t, srv, nc, js, log, eventlog.Sessions{Log: log}}
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// awaitReady waits until a service is ready. It fails the test if the service ends instead.
func awaitReady(t *testing.T, ready <-chan struct{}, done chan error) {
	t.Helper()
	select {
	case <-ready:
	case err := <-done:
		done <- nil // for the cleanup that stops the service
		t.Fatalf("the service ended before it was ready: %v", err)
	}
}

// runningCopy is a copy of the service on its own connection.
type runningCopy struct {
	nc     *nats.Conn
	cancel context.CancelFunc
	done   chan error
	once   sync.Once
	t      *testing.T
}

// startCopy starts a copy of the service.
func (s *stack) startCopy(name string, cfg session.Config) *runningCopy {
	return s.startCopyWith(name, cfg, func(log eventlog.Log) eventlog.Log { return log })
}

// startCopyWith is like copy; between may replace the log of the service.
func (s *stack) startCopyWith(name string, cfg session.Config, between func(eventlog.Log) eventlog.Log) *runningCopy {
	nc := natstest.Conn(s.t, s.srv)
	js, err := jetstream.New(nc)
	must(s.t, err)
	log, err := jslog.New(jslog.Config{JetStream: js, Partitions: topology.DefaultPartitions, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}})
	must(s.t, err)
	svc, err := session.New(cfg, session.Deps{NATS: nc, Log: between(log), Logger: slog.New(slog.DiscardHandler), Copy: name})
	must(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	r := &runningCopy{nc: nc, cancel: cancel, done: make(chan error, 1), t: s.t}
	go func() { r.done <- svc.Run(ctx) }()
	awaitReady(s.t, svc.Ready(), r.done)
	s.t.Cleanup(r.stop)
	return r
}

// stop ends a copy regularly and waits for its end.
func (r *runningCopy) stop() { r.end(false) }

// kill cuts a copy off at any moment: it finishes, acknowledges and answers nothing more.
func (r *runningCopy) kill() { r.end(true) }

func (r *runningCopy) end(cut bool) {
	r.once.Do(func() {
		if cut {
			r.nc.Close()
		}
		r.cancel()
		if err := <-r.done; err != nil && !cut {
			r.t.Errorf("a copy ended with %v", err)
		}
	})
}

func id(kind events.IDKind) string { return events.DeriveID(kind, fmt.Sprint(rand.Uint64())) }

// send sends a command through COMMANDS and returns its answer.
func (s *stack) send(typ command.Type, sid, exe string, body any) command.Answer {
	s.t.Helper()
	answer, err := s.trySend(id(events.KindCommand), typ, sid, exe, body)
	must(s.t, err)
	return answer
}

func (s *stack) trySend(cmd string, typ command.Type, sid, exe string, body any) (command.Answer, error) {
	raw, err := json.Marshal(body)
	if err != nil {
		return command.Answer{}, err
	}
	c := command.Command{Type: typ, ID: cmd, Tenant: "default", SessionID: sid, ExecutionID: exe, Actor: events.Actor{Kind: "user"}, Body: raw}
	target := sid
	if target == "" {
		target = "key"
	}
	return s.request(c, target)
}

// request sends a command about a target and returns its answer.
func (s *stack) request(c command.Command, target string) (command.Answer, error) {
	payload, err := json.Marshal(c)
	if err != nil {
		return command.Answer{}, err
	}
	// Like a gateway, send a command again under its id if no answer arrives. The deadline grows, because a slow machine may
	// never meet the first one.
	for tries := 0; ; tries++ {
		ctx, cancel := context.WithTimeout(context.Background(), 3*time.Second<<min(tries, 4))
		reply, err := bus.Request(ctx, s.js, bus.Command{Subject: topology.CommandSubject(topology.ServiceSession, c.Tenant, target), ID: c.ID, Payload: payload})
		cancel()
		if err == nil {
			var a command.Answer
			return a, json.Unmarshal(reply.Payload, &a)
		}
		if tries == 10 || !errors.Is(err, bus.ErrOutcomeUnknown) {
			return command.Answer{}, err
		}
	}
}

func (s *stack) create(o events.Options) string {
	s.t.Helper()
	sid := id(events.KindSession)
	if a := s.send(command.TypeCreateSession, sid, "", command.CreateSession{Options: o}); a.Error != nil {
		s.t.Fatal(a.Error)
	}
	return sid
}

func (s *stack) post(sid string) string {
	s.t.Helper()
	exe := id(events.KindExecution)
	if a := s.send(command.TypePostMessage, sid, exe, command.PostMessage{Content: "hello"}); a.Error != nil {
		s.t.Fatal(a.Error)
	}
	return exe
}

// executors runs n workers that take jobs, claim executions and complete them, until the test ends.
func (s *stack) executors(n int) {
	c, err := s.js.CreateOrUpdateConsumer(s.t.Context(), topology.StreamJobs, topology.ProviderJobsConsumer("local").Config)
	must(s.t, err)
	ctx, cancel := context.WithCancel(context.Background())
	var wg sync.WaitGroup
	for i := range n {
		wg.Go(func() {
			for ctx.Err() == nil {
				msg, err := c.Next(jetstream.FetchMaxWait(200 * time.Millisecond))
				if err != nil {
					continue
				}
				s.execute(ctx, fmt.Sprint("x", i), msg.Data())
				if err := msg.Ack(); err != nil && ctx.Err() == nil {
					s.t.Error(err)
				}
			}
		})
	}
	s.t.Cleanup(func() { cancel(); wg.Wait() })
}

// execute does the work that is due in a session, as fast as the log allows.
func (s *stack) execute(ctx context.Context, name string, job []byte) {
	ref, err := topology.DecodeSessionRef(job)
	if err != nil {
		s.t.Error(err)
		return
	}
	ended := false
	for ctx.Err() == nil {
		l, err := s.ses.Load(ctx, ref.Tenant, ref.Session, eventlog.LeaderOnly)
		if err != nil {
			continue
		}
		var d run.Decision
		meta := events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()}
		switch l.DueWork() {
		case run.NoWork, run.EndUnstarted:
			return
		case run.ReleaseSandbox:
			d, err = run.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch + 1, Events: []events.Event{{
				ID: id(events.KindEvent), Time: time.Now(), Source: events.FromServer,
				Data: events.SandboxTerminated{SandboxID: l.Run.Sandbox.ID, Reason: run.ReleaseReason(&l.Life)},
			}}})
		case run.SyncWorkspace:
			d, err = run.Decide(l.Run, run.RecordEvents{Epoch: l.Run.Epoch + 1, Events: []events.Event{{
				ID: id(events.KindEvent), Time: time.Now(), Source: events.FromServer, Data: events.FilesApplied{N: l.Life.Changes},
			}, {
				ID: id(events.KindEvent), Time: time.Now(), Source: events.FromServer,
				Data: events.WorkspaceSynced{Snapshot: "snp", Applied: l.Life.Changes, Request: l.Life.Syncs},
			}}})
		case run.ExecuteTurn:
			if l.Run.Execution != l.Life.Active.ExecutionID {
				// An executor checks the budgets before it claims an execution. The next one has a job of its own.
				if ended || budget.CheckStart(l, budget.Tenant{}, meta.Now) != nil {
					return
				}
				d, err = run.Decide(l.Run, run.ClaimExecution{CommandMeta: meta, ExecutionID: l.Life.Active.ExecutionID, Turn: l.Life.Active.Turn, Executor: name})
				break
			}
			ended = true
			d, err = run.Decide(l.Run, run.EndExecution{CommandMeta: meta, Epoch: l.Run.Epoch, ExecutionID: l.Run.Execution, Outcome: events.ExecutionCompleted{}, Before: []events.Event{{
				ID: id(events.KindEvent), Time: time.Now(), ExecutionID: l.Run.Execution, Source: events.FromServer, Data: events.ExecutionStarted{Attempt: 1},
			}, {
				ID: id(events.KindEvent), Time: time.Now(), Source: events.FromServer, Data: events.SandboxReady{SandboxID: "sbx", Provider: "local", Journal: "jnl"},
			}}})
		}
		if err != nil {
			s.t.Error(err)
			return
		}
		err = s.ses.AppendRun(ctx, l, events.Actor{Kind: "executor", ID: name}, id(events.KindCommit), d)
		var conflict *eventlog.ConflictError
		if err != nil && !errors.As(err, &conflict) && ctx.Err() == nil {
			s.t.Error(err)
			return
		}
	}
}

// within is the time limit of every wait in these tests. A slow machine under the race detector may need this long
// for the largest commits.
const within = 2 * time.Minute

// pause is the time between two polls. It leaves CPU to the service, which runs in this process.
const pause = 5 * time.Millisecond

// await loads a session until ok accepts its state. The state must persist, because two loads can miss a state that
// another one follows. Use ended for the end of an execution that others follow.
func (s *stack) await(sid, what string, ok func(*eventlog.SessionState) bool) *eventlog.SessionState {
	s.t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(pause) {
		l, err := s.ses.Load(s.t.Context(), "default", sid, eventlog.LeaderOnly)
		must(s.t, err)
		if ok(l) {
			return l
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("session %s: timed out waiting for: %s; life %+v, run %+v", sid, what, l.Life, l.Run)
		}
	}
}

// awaitEnd waits until the log has the end of an execution, and returns the history up to this end.
func (s *stack) awaitEnd(sid, exe string) []events.Event {
	s.t.Helper()
	for deadline := time.Now().Add(within); ; time.Sleep(pause) {
		list := s.history(sid)
		for i, e := range list {
			if e.ExecutionID == exe && events.IsTerminal(e.Type()) {
				return list[:i+1]
			}
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("session %s: %s has no end; history %v", sid, exe, list)
		}
	}
}

func (s *stack) history(sid string) []events.Event {
	var list []events.Event
	for n, err := range eventlog.SessionEvents(s.t.Context(), s.log, "default", sid) {
		must(s.t, err)
		list = append(list, n.Event)
	}
	return list
}

func count[P events.Payload](list []events.Event) (n int) {
	for _, e := range list {
		if _, ok := e.Data.(P); ok {
			n++
		}
	}
	return n
}

// TestTwoCopies_EndEveryQueryOnce tests two copies that share the load. One is killed at any moment. Every accepted
// query ends exactly once, in order.
func TestTwoCopies_EndEveryQueryOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	one := s.startCopy("one", session.Config{})
	s.startCopy("two", session.Config{})
	s.executors(4)
	const sessions, messages = 12, 15
	var wg sync.WaitGroup
	for i := range sessions {
		wg.Go(func() {
			sid := s.create(events.Options{})
			var sent []string
			for j := range messages {
				if i == 0 && j == messages/2 {
					one.kill()
				}
				sent = append(sent, s.post(sid))
			}
			last := sent[len(sent)-1]
			s.await(sid, "at the end of its last execution", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(last) && len(l.Life.Queue) == 0 })
			s.checkOrder(sid, sent)
		})
	}
	wg.Wait()
	if t.Failed() {
		return
	}
	copies := map[string]int{}
	for rec, err := range s.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		must(t, err)
		if name, ok := strings.CutPrefix(rec.Commit.Actor.ID, "session/"); ok {
			copies[name]++
		}
	}
	if copies["one"] == 0 || copies["two"] == 0 {
		t.Fatalf("dispatches by copy: %v; want some by each", copies)
	}
	report, err := eventlog.Verify(t.Context(), s.log, eventlog.VerifyScope{})
	if err != nil || report.Problem != nil || len(report.Open) > 0 {
		t.Fatalf("verify: %v, open %v, %v", report.Problem, report.Open, err)
	}
}

// checkOrder checks that the messages of a session were executed in the order in which they were posted, each with
// one end.
func (s *stack) checkOrder(sid string, sent []string) {
	var ends []string
	for _, e := range s.history(sid) {
		if events.IsTerminal(e.Type()) {
			ends = append(ends, e.ExecutionID)
		}
	}
	if got, want := strings.Join(ends, " "), strings.Join(sent, " "); got != want {
		s.t.Errorf("session %s ended\n%s\nposted\n%s", sid, got, want)
	}
}

// TestRedeliveredCommand_IsOneMessage tests that a command that is delivered twice adds one message and returns the
// same answer.
func TestRedeliveredCommand_IsOneMessage(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := s.create(events.Options{})
	cmd, exe := id(events.KindCommand), id(events.KindExecution)
	first, err := s.trySend(cmd, command.TypePostMessage, sid, exe, command.PostMessage{Content: "once"})
	must(t, err)
	again, err := s.trySend(cmd, command.TypePostMessage, sid, exe, command.PostMessage{Content: "once"})
	must(t, err)
	if !reflect.DeepEqual(first, again) || first.Error != nil || first.Position == "" {
		t.Fatalf("first %+v, again %+v", first, again)
	}
	if n := count[events.MessageAccepted](s.history(sid)); n != 1 {
		t.Fatalf("%d messages", n)
	}
}

// TestControls_EndUnclaimedExecutions tests that the service itself ends an execution that no executor has claimed.
func TestControls_EndUnclaimedExecutions(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := s.create(events.Options{})
	first, second, third := s.post(sid), s.post(sid), s.post(sid)
	s.send(command.TypeCancel, sid, second, nil) // queued, so it is withdrawn
	s.send(command.TypeCancel, sid, first, nil)  // dispatched, but never claimed
	s.await(sid, "dispatched the third", func(l *eventlog.SessionState) bool { return l.Life.Active.ExecutionID == third })
	s.send(command.TypeInterrupt, sid, "", nil)
	s.await(sid, "idle", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(third) })
	list := s.history(sid)
	if count[events.ExecutionWithdrawn](list) != 1 || count[events.ExecutionCancelled](list) != 2 {
		t.Fatalf("history %v", list)
	}
	for _, exe := range []string{first, second, third, id(events.KindExecution)} {
		if a := s.send(command.TypeCancel, sid, exe, nil); a.Error != nil {
			t.Fatalf("cancel after the end: %v", a.Error)
		}
	}
	if after := s.history(sid); len(after) != len(list) {
		t.Fatalf("a control after the end wrote %v", after[len(list):])
	}
}

// TestIdleTimeout_FiresOnce tests that the idle timeout fires once, although every turn armed it and although the
// service was stopped when it was due.
func TestIdleTimeout_FiresOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	one := s.startCopy("one", session.Config{})
	s.executors(1)
	sid := s.create(events.Options{IdleTimeoutMs: 5000})
	for range 3 {
		s.awaitEnd(sid, s.post(sid))
	}
	one.stop()
	l := s.await(sid, "with its sandbox and not idle", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID != "" && !l.Life.Idle })
	at, _ := l.Life.NextDeadline(l.RunView())
	<-time.After(time.Until(at))
	s.startCopy("two", session.Config{})
	s.startCopy("three", session.Config{})
	s.await(sid, "idle with its sandbox gone", func(l *eventlog.SessionState) bool { return l.Life.Idle && l.Run.Sandbox.ID == "" })
	if n := count[events.SessionIdle](s.awaitEnd(sid, s.post(sid))); n != 1 {
		t.Fatalf("idle %d times", n)
	}
}

// TestSessionLimit_ClosesTheSession tests that the limit closes the session and cancels its executions.
func TestSessionLimit_ClosesTheSession(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := s.create(events.Options{SessionLimitMs: 3000})
	first, second := s.post(sid), s.post(sid)
	s.await(sid, "closed", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(first) && l.Life.Status == "closed" })
	if n := count[events.ExecutionWithdrawn](s.history(sid)); n != 1 {
		t.Fatalf("%s: withdrawn %d times", second, n)
	}
	if a := s.send(command.TypePostMessage, sid, id(events.KindExecution), command.PostMessage{Content: "x"}); a.Error == nil || a.Error.Code != "SESSION_CLOSED" {
		t.Fatalf("post to a closed session: %+v", a)
	}
}

// TestExecutorLost_FailsAfterTurnLimitAndGrace tests that an execution that was never claimed, or whose holder is
// gone, fails after its turn limit and a grace period. An execution whose holder is alive continues.
func TestExecutorLost_FailsAfterTurnLimitAndGrace(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	var mu sync.Mutex
	ahead := time.Duration(0)
	clock := func() time.Time { mu.Lock(); defer mu.Unlock(); return time.Now().Add(ahead) }
	svc, err := session.New(session.Config{TurnLimit: time.Minute}, session.Deps{NATS: s.nc, Log: s.log, Logger: slog.New(slog.DiscardHandler), Now: clock, Copy: "one"})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	awaitReady(t, svc.Ready(), done)
	never, gone, alive := s.create(events.Options{}), s.create(events.Options{}), s.create(events.Options{})
	s.lease("xtr_alive")
	for _, c := range []struct{ sid, holder string }{{gone, "xtr_gone"}, {alive, "xtr_alive"}} {
		exe := s.post(c.sid)
		l := s.await(c.sid, "dispatched", func(l *eventlog.SessionState) bool { return l.Life.Active.ExecutionID == exe })
		d, err := run.Decide(l.Run, run.ClaimExecution{CommandMeta: events.CommandMeta{CommandID: id(events.KindCommand), Now: time.Now()}, ExecutionID: exe, Turn: l.Life.Active.Turn, Executor: c.holder})
		must(t, err)
		must(t, s.ses.AppendRun(t.Context(), l, events.Actor{Kind: "executor"}, id(events.KindCommit), d))
	}
	s.post(never)
	mu.Lock()
	ahead = 2 * time.Minute
	mu.Unlock()
	for _, sid := range []string{never, gone, alive} {
		s.fireTimer(sid)
	}
	for _, sid := range []string{never, gone} {
		l := s.await(sid, "failed", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Failed })
		if f := last[events.ExecutionFailed](s.history(l.ID)); f.Code != "EXECUTOR_LOST" {
			t.Fatalf("failed with %+v", f)
		}
	}
	if l := s.await(alive, "there", func(*eventlog.SessionState) bool { return true }); l.Run.Phase.IsTerminal() {
		t.Fatal("an execution whose holder is alive was ended")
	}
}

// lease renews the lease of an executor until the test ends.
func (s *stack) lease(executor string) {
	s.t.Helper()
	kv, err := s.js.KeyValue(s.t.Context(), topology.BucketLeases)
	must(s.t, err)
	renew := func(ctx context.Context) error {
		_, err := kv.Put(ctx, executor, []byte(`{"executor":"`+executor+`","provider":"local","engine":"m"}`))
		return err
	}
	must(s.t, renew(s.t.Context()))
	ctx, cancel := context.WithCancel(context.Background())
	var renewals sync.WaitGroup
	renewals.Go(func() {
		for tick := time.NewTicker(250 * time.Millisecond); ; {
			select {
			case <-ctx.Done():
				tick.Stop()
				return
			case <-tick.C:
			}
			if err := renew(ctx); err != nil && ctx.Err() == nil {
				s.t.Error(err)
			}
		}
	})
	s.t.Cleanup(func() { cancel(); renewals.Wait() })
}

// fireTimer fires a session's timer now.
func (s *stack) fireTimer(sid string) {
	body, err := topology.SessionRef{Tenant: "default", Session: sid}.Encode()
	must(s.t, err)
	_, err = s.js.Publish(s.t.Context(), topology.TimerDueSubject(sid), body)
	must(s.t, err)
}

func last[P events.Payload](list []events.Event) (out P) {
	for _, e := range list {
		if p, ok := e.Data.(P); ok {
			out = p
		}
	}
	return out
}

// TestCommands_RefusedNameTheirField tests that each invalid request gets a code, names its field, and changes
// nothing.
func TestCommands_RefusedNameTheirField(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	sid := s.create(events.Options{})
	before, sum := len(s.history(sid)), strings.Repeat("ab", 32)
	for _, c := range []struct {
		name, code, field string
		typ               command.Type
		sid               string
		body              any
	}{
		{"unknown session", "SESSION_NOT_FOUND", "sessionId", command.TypePostMessage, id(events.KindSession), command.PostMessage{Content: "x"}},
		{"unknown architecture", "INVALID_REQUEST", "architecture", command.TypeCreateSession, id(events.KindSession), command.CreateSession{Architecture: "eliza"}},
		{"unknown sandbox", "INVALID_REQUEST", "sandbox", command.TypeCreateSession, id(events.KindSession), command.CreateSession{Provider: "sandpit"}},
		{"unknown agent", "AGENT_NOT_FOUND", "agent", command.TypeCreateSession, id(events.KindSession), command.CreateSession{Agent: "smith"}},
		{"empty message", "INVALID_REQUEST", "content", command.TypePostMessage, sid, command.PostMessage{Content: " \n"}},
		{"a part of no kind", "INVALID_REQUEST", "content", command.TypePostMessage, sid, command.PostMessage{Parts: []events.Part{{Type: "smell", Text: "x"}}}},
		{"two megabytes", "PAYLOAD_TOO_LARGE", "content", command.TypePostMessage, sid, nil},
		{"large metadata", "PAYLOAD_TOO_LARGE", "metadata", command.TypePostMessage, sid, command.PostMessage{Content: "x", Metadata: json.RawMessage(`"` + strings.Repeat("m", 20<<10) + `"`)}},
		{"no such command", "INVALID_REQUEST", "type", "dance", sid, nil},
		{"an interval of a millisecond", "INVALID_REQUEST", "sessionOptions.syncIntervalMs", command.TypeUpdateSession, sid, command.UpdateSession{Options: &events.Options{SyncIntervalMs: 1}}},
		{"no reference of an image", "INVALID_REQUEST", "sessionOptions.image", command.TypeCreateSession, id(events.KindSession), command.CreateSession{Options: events.Options{Image: "A B"}}},
		{"a host with a scheme", "INVALID_REQUEST", "sessionOptions.egress[0]", command.TypeCreateSession, id(events.KindSession), command.CreateSession{Options: events.Options{Egress: []string{"http://x"}}}},
		{"acp without a command", "INVALID_REQUEST", "sessionOptions.command", command.TypeCreateSession, id(events.KindSession), command.CreateSession{Architecture: "acp"}},
		{"a command without acp", "INVALID_REQUEST", "sessionOptions.command", command.TypeUpdateSession, sid, command.UpdateSession{Options: &events.Options{Command: []string{"x"}}}},
		{"clearing what is no option", "INVALID_REQUEST", "clear[0]", command.TypeUpdateSession, sid, command.UpdateSession{Clear: []string{"colour"}}},
		{"a file outside", "INVALID_REQUEST", "workspaceFiles[0].path", command.TypePostMessage, sid, command.PostMessage{Content: "x", Files: []command.File{{Path: "../x", SHA256: sum}}}},
		{"another session's object", "INVALID_REQUEST", "file.object", command.TypePutFile, sid, command.PutFile{File: command.File{Path: "x", SHA256: sum, Object: "default/" + id(events.KindSession) + "/f-x"}}},
		{"removing nothing", "INVALID_REQUEST", "path", command.TypeRemoveFile, sid, command.RemoveFile{}},
		{"a file for nobody", "SESSION_NOT_FOUND", "sessionId", command.TypePutFile, id(events.KindSession), command.PutFile{File: command.File{Path: "x", SHA256: sum}}},
		{"a key without a hash", "INVALID_REQUEST", "sha256", command.TypeCreateKey, "", command.CreateKey{KeyID: id(events.KindKey)}},
		{"revoking an unknown key", "KEY_NOT_FOUND", "keyId", command.TypeRevokeKey, "", command.RevokeKey{KeyID: id(events.KindKey)}},
	} {
		if c.name == "two megabytes" {
			// NATS refuses a message above its own limit before it is sent. This one exceeds only Spool's limit.
			c.body = command.PostMessage{Parts: []events.Part{{Type: "text", Text: strings.Repeat("x", 900<<10)}, {Type: "text", Text: strings.Repeat("x", 140<<10)}}}
		}
		a, err := s.trySend(id(events.KindCommand), c.typ, c.sid, id(events.KindExecution), c.body)
		if c.name == "two megabytes" && err != nil {
			continue // the client refuses the message with a typed error
		}
		must(t, err)
		if a.Error == nil || a.Error.Code != c.code || a.Error.Field != c.field || a.Error.Detail == "" {
			t.Errorf("%s: %+v, want %s on %s", c.name, a.Error, c.code, c.field)
		}
	}
	if after := len(s.history(sid)); after != before {
		t.Fatalf("%d events were written by refused commands", after-before)
	}
}

// TestKeys_AreCreatedAndRevokedOnce tests that repeated requests create and revoke a key once.
func TestKeys_AreCreatedAndRevokedOnce(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{})
	key := id(events.KindKey)
	for range 2 {
		if a := s.send(command.TypeCreateKey, "", "", command.CreateKey{KeyID: key, Name: "ci", Prefix: "spool_sk_ab", SHA256: strings.Repeat("a", 64)}); a.Error != nil {
			t.Fatal(a.Error)
		}
	}
	for range 2 {
		if a := s.send(command.TypeRevokeKey, "", "", command.RevokeKey{KeyID: key}); a.Error != nil {
			t.Fatal(a.Error)
		}
	}
	var list []events.Event
	for rec, err := range s.log.Read(t.Context(), eventlog.Position{}, eventlog.Filter{}) {
		must(t, err)
		list = append(list, rec.Events...)
	}
	if len(list) != 2 || count[events.KeyCreated](list) != 1 || count[events.KeyRevoked](list) != 1 {
		t.Fatalf("log holds %v", list)
	}
}

func TestNew_RefusesInvalidSettings(t *testing.T) {
	t.Parallel()
	for _, c := range []session.Config{
		{IdleTimeout: -time.Second}, {TurnLimit: 100 * 24 * time.Hour}, {CommandWorkers: -1},
		{MaxKeys: -1}, {MaxKeys: 10_001}, {SyncInterval: time.Millisecond}, {HealthInterval: 25 * time.Hour}, {SandboxMaxAge: -1},
	} {
		if _, err := session.New(c, session.Deps{}); err == nil || !strings.Contains(err.Error(), "between") {
			t.Errorf("%+v: %v", c, err)
		}
	}
	if _, err := session.New(session.Config{Providers: []string{"local", "moon"}}, session.Deps{}); err == nil || !strings.Contains(err.Error(), `providers: there is no sandbox provider "moon"`) {
		t.Errorf("an unknown provider: %v", err)
	}
}
