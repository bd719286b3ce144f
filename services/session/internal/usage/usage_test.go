package usage_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"math/rand/v2"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"go.uber.org/goleak"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session/internal/usage"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	within = 2 * time.Minute
	pause  = 10 * time.Millisecond
	shards = 2
)

// today is the day of every event.
var today = time.Date(2026, 5, 6, 12, 0, 0, 0, time.UTC)

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// world holds a log and the bucket of budgets.
type world struct {
	t   *testing.T
	srv *natsserver.Server
	js  jetstream.JetStream
	kv  jetstream.KeyValue
	log eventlog.Log

	mu    sync.Mutex
	heads map[events.Subject]eventlog.Head
	spent map[string]events.BudgetUsage // by tenant, as counted from the events
	n     int
}

func newWorld(t *testing.T) *world {
	w := &world{t: t, srv: natstest.Run(t), heads: map[events.Subject]eventlog.Head{}, spent: map[string]events.BudgetUsage{}}
	var err error
	w.js, err = jetstream.New(natstest.Conn(t, w.srv))
	must(t, err)
	must(t, topology.Provision(t.Context(), w.js, topology.ProvisionConfig{Shards: shards}))
	w.log, err = jslog.New(jslog.Config{JetStream: w.js, Shards: shards, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}})
	must(t, err)
	w.kv, err = w.js.KeyValue(t.Context(), topology.BucketBudgets)
	must(t, err)
	return w
}

// append stores a commit with events of an execution; "" means no execution.
func (w *world) append(s events.Subject, execution string, list ...events.Payload) uint64 {
	w.t.Helper()
	w.mu.Lock()
	defer w.mu.Unlock()
	w.n++
	m := events.NewEventList(events.CommandMeta{CommandID: events.DeriveID(events.KindCommand, s.String(), fmt.Sprint(w.n)), Now: today})
	for _, data := range list {
		m.Add(execution, data)
	}
	head, known := w.heads[s]
	if !known {
		head.Subject = s
	}
	head, err := w.log.Append(w.t.Context(), head, events.Draft{
		ID: events.DeriveID(events.KindCommit, s.String(), fmt.Sprint(w.n)), Actor: events.Actor{Kind: "service", ID: "test"}, Epoch: 1, Events: m.Events(),
	})
	must(w.t, err)
	w.heads[s] = head
	return head.Seq
}

func (w *world) setBudget(tenant string, p events.Period, limit events.Budget) {
	w.append(events.BudgetSubject(tenant, p), "", events.TenantBudgetSet{Tenant: tenant, Period: p, Budget: limit})
}

// session returns the id of a tenant's session.
func session(tenant string, n int) string {
	return events.DeriveID(events.KindSession, tenant, fmt.Sprint(n))
}

func (w *world) create(tenant, id string) {
	w.append(events.LifeSubject(tenant, id), "", events.SessionCreated{Agent: "a"})
}

// turn runs an execution in several commits. between is called after each of them.
func (w *world) turn(tenant, id string, n int, between func()) {
	execution := events.DeriveID(events.KindExecution, id, fmt.Sprint(n))
	run := events.RunSubject(tenant, id)
	call := events.ModelCalled{Provider: "p", Model: "m", Status: 200, Usage: events.Usage{InputTokens: 7, OutputTokens: 3}, CostUSD: 0.5}
	told := events.Usage{InputTokens: 20, OutputTokens: 10}
	metered := n%2 == 0
	w.append(run, execution, events.ExecutionClaimed{Executor: "x", Epoch: 1})
	between()
	w.append(run, execution, events.ExecutionStarted{Attempt: 1})
	between()
	if metered {
		w.append(run, execution, call)
		between()
	}
	w.append(run, execution, events.MetadataUpdate{Usage: told, CostUSD: 0.25}, events.ExecutionStarted{Attempt: 2})
	between()
	w.append(run, execution, events.ExecutionFailed{Code: "X", DurationMs: 1000, Usage: told})
	between()
	w.append(run, execution, call) // after the end, so it counts if the execution was metered
	took := events.BudgetUsage{Turns: 1, Tokens: 30, CostUSD: 0.25, TimeMs: 1000}
	if metered {
		took.Tokens, took.CostUSD = 20, 1
	}
	w.mu.Lock()
	w.spent[tenant] = w.spent[tenant].Plus(took)
	w.mu.Unlock()
}

// copyOf is a running Aggregator.
type copyOf struct {
	stop func() // ends it regularly
	cut  func() // closes its connection at any moment
}

// start runs an Aggregator on a separate connection. between may replace its JetStream.
func (w *world) start(between func(jetstream.JetStream) jetstream.JetStream) copyOf {
	w.t.Helper()
	nc := natstest.Conn(w.t, w.srv)
	js, err := jetstream.New(nc)
	must(w.t, err)
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: shards, Signing: topology.SigningSettings{CommitVersion: events.CommitVersion}, Logger: slog.New(slog.DiscardHandler)})
	must(w.t, err)
	if between != nil {
		js = between(js)
	}
	f := usage.New(usage.Config{Log: log, JetStream: js, Now: func() time.Time { return today }, Logger: slog.New(slog.DiscardHandler)})
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- f.Run(ctx) }()
	stop := sync.OnceFunc(func() {
		cancel()
		if err := <-done; err != nil {
			w.t.Error(err)
		}
	})
	w.t.Cleanup(stop)
	return copyOf{stop, func() { nc.Close(); stop() }}
}

// entry returns the entry that services read about a tenant.
func (w *world) entry(tenant string) (t budget.Tenant) {
	w.t.Helper()
	e, err := w.kv.Get(w.t.Context(), tenant)
	if errors.Is(err, jetstream.ErrKeyNotFound) {
		return t
	}
	must(w.t, err)
	must(w.t, json.Unmarshal(e.Value(), &t))
	return t
}

// spentOf returns the usage that an entry holds for a budget.
func spentOf(t budget.Tenant, p events.Period) (s events.BudgetUsage) {
	for _, b := range t.Budgets {
		if b.Period == p {
			s = b.Spent
		}
	}
	return s
}

func (w *world) until(what string, check func() bool) {
	w.t.Helper()
	for deadline := time.Now().Add(within); !check(); time.Sleep(pause) {
		if time.Now().After(deadline) {
			w.t.Fatalf("timed out waiting until %s", what)
		}
	}
}

// awaitCounted waits until the whole log is counted.
func (w *world) awaitCounted() {
	w.t.Helper()
	for shard := range shards {
		s, err := w.js.Stream(w.t.Context(), topology.EventsStreamName(shard))
		must(w.t, err)
		w.until(fmt.Sprintf("shard %d is counted", shard), func() bool {
			ok, err := usage.HasFolded(w.t.Context(), w.js, shard, s.CachedInfo().State.LastSeq)
			must(w.t, err)
			return ok
		})
	}
}

// checkCounted waits until the whole log is counted, and checks that the usage of each tenant is that of its events.
func (w *world) checkCounted(p events.Period) {
	w.t.Helper()
	w.awaitCounted()
	for tenant, want := range w.spent {
		if have := spentOf(w.entry(tenant), p); have != want {
			w.t.Errorf("tenant %s: counted %+v, want %+v", tenant, have, want)
		}
	}
}

// flakyJetStream is a JetStream whose bucket loses writes and acknowledgements of writes.
type flakyJetStream struct {
	jetstream.JetStream
	random func(n int) int
}

func (f flakyJetStream) KeyValue(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	kv, err := f.JetStream.KeyValue(ctx, bucket)
	return flakyKV{kv, f.random}, err
}

type flakyKV struct {
	jetstream.KeyValue
	random func(n int) int
}

var errLost = errors.New("lost on the way")

func (f flakyKV) Update(ctx context.Context, key string, value []byte, last uint64) (uint64, error) {
	switch f.random(12) {
	case 0:
		return 0, errLost
	case 1:
		if _, err := f.KeyValue.Update(ctx, key, value, last); err != nil {
			return 0, err
		}
		return 0, errLost
	}
	return f.KeyValue.Update(ctx, key, value, last)
}

// TestFolder_CountsOnceThroughCrashesAndCopies tests that each event counts once, although copies of the service run
// concurrently, are cut off during writes, lose writes and acknowledgements, and read the log again from its
// beginning.
func TestFolder_CountsOnceThroughCrashesAndCopies(t *testing.T) {
	t.Parallel()
	seed := rand.Uint64()
	t.Logf("seed %d", seed)
	random := rand.New(rand.NewPCG(seed, 0))
	var mu sync.Mutex
	pick := func(n int) int {
		mu.Lock()
		defer mu.Unlock()
		return random.IntN(n)
	}
	w := newWorld(t)
	tenants := []string{"a", "b", "c"}
	var running [2]copyOf
	lossy := func(js jetstream.JetStream) jetstream.JetStream { return flakyJetStream{js, pick} }
	for i := range running {
		running[i] = w.start(lossy)
	}
	for _, tenant := range tenants[:2] { // tenant c has no budget while it uses something
		w.setBudget(tenant, events.PeriodTotal, events.Budget{Turns: 1000})
	}
	for n := range 3 {
		for _, tenant := range tenants {
			w.create(tenant, session(tenant, n))
		}
	}
	for n := range 8 {
		var writers sync.WaitGroup
		for _, tenant := range tenants {
			id := session(tenant, pick(3))
			writers.Go(func() {
				w.turn(tenant, id, n, func() { time.Sleep(time.Duration(pick(20)) * time.Millisecond) })
			})
		}
		if i := pick(4); i < len(running) {
			running[i].cut()
			running[i] = w.start(lossy)
		}
		writers.Wait()
	}
	w.setBudget("c", events.PeriodTotal, events.Budget{Turns: 1000})
	w.checkCounted(events.PeriodTotal)

	// The copy that did not fold takes over when the other one has stopped.
	for _, r := range running {
		r.stop()
	}
	first, _ := w.start(nil), w.start(nil)
	w.turn("a", session("a", 0), 8, func() {})
	w.checkCounted(events.PeriodTotal)
	first.cut()
	w.turn("b", session("b", 0), 9, func() {})
	w.checkCounted(events.PeriodTotal)
}

// TestFolder_ContinuesInTheMiddleOfATurn tests that a copy that begins in the middle of an execution counts it like a
// copy that read all of it.
func TestFolder_ContinuesInTheMiddleOfATurn(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.setBudget("a", events.PeriodTotal, events.Budget{Turns: 1000})
	id := session("a", 0)
	w.create("a", id)
	r := w.start(nil)
	for n := range 2 {
		w.turn("a", id, n, func() {
			w.awaitCounted()
			r.stop()
			r = w.start(nil)
		})
	}
	w.checkCounted(events.PeriodTotal)
}

// delayedJetStream is a JetStream whose bucket writes an entry after hold returns, and then calls done.
type delayedJetStream struct {
	jetstream.JetStream
	hold func(ctx context.Context, key string)
	done func(key string, err error)
}

func (d delayedJetStream) KeyValue(ctx context.Context, bucket string) (jetstream.KeyValue, error) {
	kv, err := d.JetStream.KeyValue(ctx, bucket)
	return delayedKV{kv, d}, err
}

type delayedKV struct {
	jetstream.KeyValue
	delayedJetStream
}

func (d delayedKV) Update(ctx context.Context, key string, value []byte, last uint64) (uint64, error) {
	d.hold(ctx, key)
	revision, err := d.KeyValue.Update(ctx, key, value, last)
	d.done(key, err)
	return revision, err
}

// TestFolder_LateWriteIsRefused tests that a copy whose write was delayed does not overwrite what another copy has
// counted meanwhile.
func TestFolder_LateWriteIsRefused(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.setBudget("a", events.PeriodTotal, events.Budget{Turns: 1000})
	id := session("a", 0)
	w.create("a", id)
	closed, reached, open, late := make(chan struct{}), make(chan struct{}), make(chan struct{}), make(chan error, 1)
	var once, end sync.Once
	one := w.start(func(js jetstream.JetStream) jetstream.JetStream {
		isClosed := func(key string) bool {
			select {
			case <-closed:
				return key == "a"
			default:
				return false
			}
		}
		return delayedJetStream{js, func(ctx context.Context, key string) {
			if isClosed(key) {
				once.Do(func() { close(reached) })
				select {
				case <-open:
				case <-ctx.Done():
				}
			}
		}, func(key string, err error) {
			if isClosed(key) {
				end.Do(func() { late <- err })
			}
		}}
	})
	w.turn("a", id, 0, func() {})
	w.checkCounted(events.PeriodTotal)
	close(closed)
	w.turn("a", id, 1, func() {})
	select {
	case <-reached:
	case <-time.After(within):
		t.Fatal("the copy writes nothing")
	}
	two := w.start(nil)
	w.turn("a", id, 2, func() {})
	w.checkCounted(events.PeriodTotal)
	close(open)
	if err := <-late; err == nil {
		t.Error("the late write was stored")
	}
	one.stop()
	two.stop()
	w.start(nil)
	w.turn("a", id, 3, func() {})
	w.checkCounted(events.PeriodTotal)
}

// TestFolder_ReplayChangesNothing tests that reading a log again from its beginning changes no number.
func TestFolder_ReplayChangesNothing(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.setBudget("a", events.PeriodDay, events.Budget{Turns: 1000})
	for n := range 3 {
		w.create("a", session("a", n))
		w.turn("a", session("a", n), n, func() {})
	}
	r := w.start(nil)
	w.checkCounted(events.PeriodDay)
	before := w.entry("a")
	r.stop()
	must(t, w.kv.Delete(t.Context(), "_positions"))
	r = w.start(nil)
	w.checkCounted(events.PeriodDay)
	if after := w.entry("a"); fmt.Sprint(after) != fmt.Sprint(before) {
		t.Errorf("after the replay the entry is %+v, want %+v", after, before)
	}
	w.turn("a", session("a", 1), 5, func() {})
	w.checkCounted(events.PeriodDay)
}

// TestFolder_TakesOverFromTheProjector tests that entries that the projector of an earlier release wrote are replaced
// by the same numbers, that services see no lower numbers meanwhile, and that an entry that such a projector writes
// or deletes later is replaced too.
func TestFolder_TakesOverFromTheProjector(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	limit := events.Budget{Turns: 5}
	for _, tenant := range []string{"a", "gone"} {
		w.setBudget(tenant, events.PeriodTotal, limit)
		for n := range 4 {
			w.create(tenant, session(tenant, n))
			w.turn(tenant, session(tenant, n), n, func() {})
		}
	}
	earlier := func(tenant string, limit events.Budget, spent events.BudgetUsage) {
		t.Helper()
		body, err := json.Marshal(struct {
			Budgets []budget.Budget `json:"budgets"`
		}{[]budget.Budget{{Period: events.PeriodTotal, Limit: limit, Spent: spent}}})
		must(t, err)
		_, err = w.kv.Put(t.Context(), tenant, body)
		must(t, err)
	}
	earlier("a", limit, w.spent["a"])
	earlier("unknown", limit, events.BudgetUsage{Turns: 3}) // from another log
	earlier("gone", limit, events.BudgetUsage{})
	must(t, w.kv.Delete(t.Context(), "gone"))
	watch, err := w.kv.Watch(t.Context(), "a", jetstream.UpdatesOnly())
	must(t, err)
	r := w.start(nil)
	w.checkCounted(events.PeriodTotal)
	r.stop()
	must(t, watch.Stop())
	seen := 0
	for e := range watch.Updates() {
		var have budget.Tenant
		must(t, json.Unmarshal(e.Value(), &have))
		if got := spentOf(have, events.PeriodTotal); got != w.spent["a"] {
			t.Errorf("services read %+v, want %+v", got, w.spent["a"])
		}
		seen++
	}
	if seen == 0 {
		t.Error("the entry was not replaced")
	}
	if have := w.entry("unknown"); len(have.Budgets) > 0 {
		t.Errorf("the log has no budget of the tenant, the bucket %+v", have)
	}

	earlier("a", events.Budget{Turns: 7}, events.BudgetUsage{Turns: 70})
	must(t, w.kv.Delete(t.Context(), "gone"))
	w.start(nil)
	w.turn("a", session("a", 0), 6, func() {})
	w.turn("gone", session("gone", 0), 6, func() {})
	w.until("the entry of the earlier version is replaced", func() bool {
		return spentOf(w.entry("a"), events.PeriodTotal) == w.spent["a"] && spentOf(w.entry("gone"), events.PeriodTotal) == w.spent["gone"]
	})
}

// TestFolder_CountsErasedSessions tests that the usage of a deleted session stays, also for a copy that reads the log
// from its beginning after the session's commits were erased.
func TestFolder_CountsErasedSessions(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.setBudget("a", events.PeriodMonth, events.Budget{Turns: 1000})
	w.append(events.LimitsSubject("a"), "", events.TenantLimitsSet{Tenant: "a", Limits: events.TenantLimits{EventsPerDay: 1 << 40}})
	id := session("a", 0)
	w.create("a", id)
	w.turn("a", id, 0, func() {})
	life, run := events.LifeSubject("a", id), events.RunSubject("a", id)
	kept := w.append(life, "", events.SessionDeleted{})
	w.append(run, "", events.SandboxUsage{SandboxID: "s", CostUSD: 4})
	r := w.start(nil)
	took := w.spent["a"]
	took.CostUSD += 4
	w.spent["a"] = took
	w.checkCounted(events.PeriodMonth)
	before := w.entry("a")
	r.stop()

	retired := w.append(run, "", events.RunRetired{Usage: []events.DayUsage{{Day: "2026-05-06", Spent: took, Logged: before.Used.Logged}}})
	stream, err := w.js.Stream(t.Context(), topology.EventsStreamName(life.Partition()%shards))
	must(t, err)
	for rec, err := range w.log.Read(t.Context(), eventlog.Position{Shard: life.Partition() % shards}, eventlog.Filter{Subject: events.Subject{Tenant: "a", ID: id}}) {
		must(t, err)
		if seq := rec.Position.Seq; seq != kept && seq != retired {
			must(t, stream.DeleteMsg(t.Context(), seq))
		}
	}
	for _, key := range []string{"a", "_positions"} {
		must(t, w.kv.Purge(t.Context(), key))
	}
	w.start(nil)
	w.checkCounted(events.PeriodMonth)
	if after := w.entry("a"); after.Used != before.Used {
		t.Errorf("the events of the day are %+v, want %+v", after.Used, before.Used)
	}
}
