package executor_test

import (
	"encoding/json"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/pkg/waiting"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/executor/internal/waits"
)

// wait returns the wait that executors report for an execution, and false if they report none.
func (b *bench) wait(execution string) (waiting.Entry, bool) {
	b.t.Helper()
	found, err := waiting.NewBucket(b.js).Find(b.ctx, execution)
	if err != nil {
		b.t.Fatal(err)
	}
	return found.Entry, found.Revision > 0
}

// untilWait waits until executors report a reason for an execution, and returns the report.
func (b *bench) untilWait(execution string, reason waiting.Reason) (e waiting.Entry) {
	b.t.Helper()
	b.until(fmt.Sprintf("%s waits for %s", execution, reason), func() bool {
		var found bool
		e, found = b.wait(execution)
		return found && e.Reason == reason
	})
	if e.Seen.Before(e.Since) || e.Detail == "" {
		b.t.Errorf("report: %+v", e)
	}
	return e
}

// untilNoWait waits until executors report no wait for an execution.
func (b *bench) untilNoWait(execution string) {
	b.t.Helper()
	b.until(execution+" does not wait", func() bool { _, found := b.wait(execution); return !found })
}

// wasReported reports whether the bucket ever had an entry, or the mark of a deleted one, for an execution.
func (b *bench) wasReported(execution string) bool {
	b.t.Helper()
	stream, err := b.js.Stream(b.ctx, "KV_"+topology.BucketWaits)
	if err != nil {
		b.t.Fatal(err)
	}
	_, err = stream.GetLastMsgForSubject(b.ctx, "$KV."+topology.BucketWaits+"."+execution)
	if err != nil && !errors.Is(err, jetstream.ErrMsgNotFound) {
		b.t.Fatal(err)
	}
	return err == nil
}

// An execution without a slot is reported until it has one. An execution that starts at once is never reported, although the
// other one waits.
func TestWaits_Slot(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run(func(c *executor.Config) { c.Slots, c.Reserved = 1, -1 })
	s, other := b.session(), b.sessionOf("other")
	first := s.post("go")
	s.untilStarted()
	began := time.Now()
	second := other.post("go")
	e := b.untilWait(second, waiting.Slot)
	if e.Limit != 1 || e.Holder != "" || e.Attempt != 0 || e.Used != 0 || e.Since.Before(began.Add(-time.Minute)) || e.Since.After(time.Now().Add(time.Minute)) {
		t.Errorf("report: %+v", e)
	}
	for _, foreign := range []string{tenant, s.id, first} {
		if strings.Contains(e.Detail, foreign) {
			t.Errorf("the report contains %s of another tenant: %q", foreign, e.Detail)
		}
	}
	s.interrupt()
	other.untilStarted()
	b.untilNoWait(second)
	if b.wasReported(first) {
		t.Error("the execution that started at once was reported")
	}
	other.interrupt()
	other.untilEnded(second)
}

// An execution of a tenant at its limit is reported with the limit, by the executor that runs the tenant's other execution, or by
// another one.
func TestWaits_TenantLimit(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		own       events.TenantLimits
		elsewhere bool
		detail    string
	}{
		"executions on this executor":    {events.TenantLimits{Slots: 1}, false, "The tenant uses 1 of at most 1 executions."},
		"executions on another executor": {events.TenantLimits{Slots: 1}, true, "The tenant uses 1 of at most 1 executions."},
		"sandboxes":                      {events.TenantLimits{Sandboxes: 1}, false, "The tenant uses 1 of at most 1 sandboxes on this engine."},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, polite)
			b.limits(tenant, c.own)
			b.run()
			s, next := b.session(), b.session()
			s.post("go")
			s.untilStarted()
			if c.elsewhere {
				b.engine = "there"
				b.run()
			}
			second := mint(t, events.KindExecution)
			next.life(func(base session.CommandBase, _ *eventlog.SessionState) session.Command {
				return session.PostQuery{CommandBase: base, ExecutionID: second, Content: "go"}
			})
			next.jobAt(topology.EngineJobSubject(b.sandbox, b.engine))
			if e := b.untilWait(second, waiting.TenantLimit); e.Limit != 1 || e.Used != 1 || e.Detail != c.detail {
				t.Errorf("report: %+v", e)
			}
			s.interrupt()
			next.untilStarted()
			b.untilNoWait(second)
			next.interrupt()
			next.untilEnded(second)
		})
	}
}

// An execution that an executor has claimed waits for a sandbox while the tenant's other execution, in another executor, uses the
// only sandbox that the tenant may have on the engine.
func TestWaits_TenantSandboxes(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.limits(tenant, events.TenantLimits{Sandboxes: 1})
	b.run()
	s, next := b.session(), b.session()
	first := s.post("go")
	s.untilStarted()
	other := b.run()
	second := next.post("go")
	b.until("the other executor reports that it waits for a sandbox", func() bool {
		e, found := b.wait(second)
		return found && e.Reason == waiting.TenantLimit && e.Holder == other.ID() && e.Limit == 1 && e.Used == 1 && strings.Contains(e.Detail, "sandboxes")
	})
	s.interrupt()
	s.untilEnded(first)
	s.remove()
	s.job()
	next.untilStarted()
	b.untilNoWait(second)
	next.interrupt()
	next.untilEnded(second)
}

// An execution whose attempt failed is reported with the time of the next one.
func TestWaits_NotBefore(t *testing.T) {
	t.Parallel()
	b := newBench(t, exits(9))
	x := b.run()
	s := b.retryingSession(events.Retries{Attempts: 2, BackoffMs: 60_000})
	execution := s.post("go")
	e := b.untilWait(execution, waiting.NotBefore)
	if due := s.load().Run.NotBefore; !e.Until.Equal(due) || e.Holder != x.ID() || e.Attempt != 1 || !strings.Contains(e.Detail, due.UTC().Format(time.RFC3339)) {
		t.Errorf("report: %+v, due at %s", e, due)
	}
	s.cancel(execution)
	s.untilEnded(execution)
}

func TestWaits_Budget(t *testing.T) {
	t.Parallel()
	b := newBench(t, spender)
	entry := budget.Tenant{Budgets: []budget.Budget{{Period: events.PeriodTotal, Limit: events.Budget{Turns: 2}}}}
	entry.Counted = everything
	b.setTenant(entry)
	b.run()
	s := b.session()
	s.untilEnded(s.post("go"))
	entry.Counted = budget.Positions{0: 1}
	b.setTenant(entry)
	second := s.post("again")
	if e := b.untilWait(second, waiting.Budget); !strings.Contains(e.Detail, "not counted") || e.Holder != "" {
		t.Errorf("report: %+v", e)
	}
	entry.Budgets[0].Spent.Turns, entry.Counted = 1, everything
	b.setTenant(entry)
	s.untilEnded(second)
	b.untilNoWait(second)
}

// While only the reserve of the store is left, a new execution and the output of a running one are reported.
func TestWaits_Disk(t *testing.T) {
	t.Parallel()
	srv := natstest.RunWithMinStore(t)
	say := make(chan string)
	b := newBenchOn(t, func(x *fakeTurn) {
		x.Start()
		x.Open("b")
		for going := true; going; {
			select {
			case text := <-say:
				x.Say("log", events.Log{Level: "info", Message: text})
			case <-x.interrupted:
				going = false
			}
		}
		x.End(runner.TurnEnd{Outcome: runner.OutcomeInterrupted})
	}, srv.ClientURL(), natstest.Conn(t, srv))
	x := b.run(func(c *executor.Config) { c.StoreReserve = 80 })
	running, late := b.session(), b.session()
	first := running.post("go")
	running.untilStarted()
	empty := natstest.FillStore(t, b.nc, 21)
	second := late.post("go")
	if e := b.untilWait(second, waiting.Disk); e.Holder != "" {
		t.Errorf("report: %+v", e)
	}
	b.until("the output waits", func() bool {
		say <- "early"
		e, found := b.wait(first)
		return found && e.Reason == waiting.Disk && e.Holder == x.ID() && e.Attempt == 1
	})
	empty()
	late.untilStarted()
	b.untilNoWait(second)
	b.untilNoWait(first)
	for _, s := range []*talk{running, late} {
		s.interrupt()
	}
	running.untilEnded(first)
	late.untilEnded(second)
}

func TestWaits_EngineGone(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{})
	b := newBench(t, steps(2, allow))
	b.extendTimeout(8 * time.Minute)
	o := b.outOf(sandbox.CodeEngineUnavailable)
	x := b.run(impatient)
	s := b.session()
	execution := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	o.begin()
	if e := b.untilWait(execution, waiting.EngineGone); e.Holder != x.ID() || e.Attempt != 1 || !strings.Contains(e.Detail, "Engine here") {
		t.Errorf("report: %+v", e)
	}
	o.away.Store(false)
	allow <- struct{}{}
	s.untilEnded(execution)
	b.untilNoWait(execution)
}

// An execution whose approval request is decided while all slots are in use waits for a slot.
func TestWaits_SlotAfterAnApproval(t *testing.T) {
	t.Parallel()
	b := newBench(t, func(t *fakeTurn) {
		if t.Query.Content == "ask" {
			cautious(t)
			return
		}
		polite(t)
	})
	x := b.run(func(c *executor.Config) { c.Slots, c.Reserved = 1, -1 })
	s, other := b.session(), b.session()
	execution := s.post("ask")
	open := s.untilWaiting(1)
	other.post("go")
	other.untilStarted()
	s.life(decision(execution, open[0].ID, events.DecisionApprove))
	if e := b.untilWait(execution, waiting.Slot); e.Holder != x.ID() || e.Attempt != 1 {
		t.Errorf("report: %+v", e)
	}
	other.interrupt()
	s.untilEnded(execution)
	b.untilNoWait(execution)
}

// The report of an executor that was killed expires. The clock of its host is wrong by an hour, which the report does not show.
func TestWaits_ExpireAfterTheExecutorIsKilled(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.off = time.Hour
	x := b.run(func(c *executor.Config) { c.Slots, c.Reserved = 1, -1 })
	s, next := b.session(), b.session()
	first := s.post("go")
	s.untilStarted()
	second := next.post("go")
	if e := b.untilWait(second, waiting.Slot); e.Since.After(time.Now().Add(time.Minute)) || e.Seen.After(time.Now().Add(time.Minute)) {
		t.Errorf("report: %+v at %s", e, time.Now())
	}
	x.wire.kill()
	b.untilWithin(topology.WaitTTL+within, "the report has expired", func() bool { _, found := b.wait(second); return !found })
	b.off = 0
	b.run(func(c *executor.Config) { c.Slots = 2 })
	for name, s := range map[string]*talk{first: s, second: next} {
		s.until("it is claimed again", func(l *eventlog.SessionState) bool { return l.Run.Execution == name })
		s.interrupt()
		s.untilEnded(name)
	}
}

// Of a thousand executions of a tenant at its limit, each is written at most once per refresh and reason, by two executors together.
func TestWaits_ManyAreWrittenOncePerRefresh(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	var mu sync.Mutex
	writes := map[string]int{} // by execution
	sub, err := b.nc.Subscribe("$KV."+topology.BucketWaits+".>", func(m *nats.Msg) {
		var e waiting.Entry
		if err := json.Unmarshal(m.Data, &e); err != nil {
			t.Errorf("%s: %v", m.Data, err)
		}
		mu.Lock()
		defer mu.Unlock()
		writes[e.Execution]++
	})
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = sub.Unsubscribe() })
	// One tenant may run one execution, so that the executors refuse the others alternately.
	b.limits(tenant, events.TenantLimits{Slots: 1})
	b.run()
	b.run()
	s := b.session()
	s.post("go")
	s.untilStarted()
	const jobs = 1000
	began := time.Now()
	for range jobs {
		b.session().post("wait")
	}
	reported := func() int {
		mu.Lock()
		defer mu.Unlock()
		return len(writes)
	}
	b.untilWithin(within+jobs*100*time.Millisecond, "every execution is reported", func() bool { return reported() == jobs })
	// Each of the two executors may find another reason each time.
	most := 2 * (int(time.Since(began)/waits.ChangeInterval) + 1)
	mu.Lock()
	defer mu.Unlock()
	for execution, n := range writes {
		if n > most {
			t.Errorf("%s was written %d times in %s, want at most %d", execution, n, time.Since(began), most)
		}
	}
}
