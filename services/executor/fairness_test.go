package executor_test

import (
	"encoding/json"
	"fmt"
	"strconv"
	"sync/atomic"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
)

// TestFairness_OneTenantInAllSlotsDoesNotHoldUpAnother: turns of one tenant that sleep in all slots, with more of them
// waiting, do not hold up another tenant's turn.
func TestFairness_OneTenantInAllSlotsDoesNotHoldUpAnother(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run(func(c *executor.Config) { c.Slots = 2 })
	sleeping := []*talk{b.session(), b.session()}
	for _, s := range sleeping {
		s.post("sleep")
	}
	for _, s := range sleeping {
		s.untilStarted()
	}
	var waiting []*talk
	for range 8 {
		s := b.session()
		s.post("wait")
		waiting = append(waiting, s)
	}
	other := b.sessionOf("other")
	execution := other.post("go")
	other.untilStarted()
	for i, s := range sleeping {
		if l := s.load(); l.Run.Phase != run.Running {
			t.Errorf("turn %d of the first tenant is %s", i, l.Run.Phase)
		}
	}
	for i, s := range waiting {
		if n := len(s.events()); n != 0 {
			t.Errorf("turn %d of the first tenant did not wait", i)
		}
	}
	other.interrupt()
	other.untilEnded(execution)
}

// TestFairness_ManyJobsOfOneTenantDoNotHoldUpAnother: one tenant has a thousand jobs that wait for the only slot. Another
// tenant's job is delivered all the same, and has the slot soon after it is free.
func TestFairness_ManyJobsOfOneTenantDoNotHoldUpAnother(t *testing.T) {
	t.Parallel()
	started := make(chan string, 1100)
	b := newBench(t, func(f *fakeTurn) {
		started <- f.Query.Content
		polite(f)
	})
	b.run(func(c *executor.Config) { c.Slots, c.Reserved = 1, -1 })
	const jobs = 1000
	var talks []*talk
	for i := range jobs {
		s := b.session()
		s.post(strconv.Itoa(i))
		talks = append(talks, s)
	}
	other := b.sessionOf("other")
	other.post("other")
	// The consumer delivers every job before the other tenant's.
	b.untilWithin(within+jobs*200*time.Millisecond, "the other tenant's job was delivered", func() bool {
		c, err := b.js.Consumer(b.ctx, topology.StreamJobs, topology.ProviderJobsDurable("local"))
		if err != nil {
			t.Fatal(err)
		}
		return c.CachedInfo().NumPending == 0
	})
	// Each second, a waiting job is returned for a moment, so that another executor may take it.
	const most = 5
	for n := 1; ; n++ {
		content := <-started
		if content == "other" {
			break
		}
		if n > most {
			t.Fatalf("%d turns of the first tenant started before the other's", n)
		}
		i, err := strconv.Atoi(content)
		if err != nil {
			t.Fatal(err)
		}
		talks[i].interrupt()
	}
	other.interrupt()
}

// TestFairness_ASlotGoesToTheTenantThatRunsLeast: of the tenants that wait, the one with the fewest running turns has the next slot.
func TestFairness_ASlotGoesToTheTenantThatRunsLeast(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run(func(c *executor.Config) { c.Slots, c.Reserved = 3, -1 })
	first := []*talk{b.session(), b.session(), b.session()}
	var executions []string
	for _, s := range first {
		executions = append(executions, s.post("sleep"))
		s.untilStarted()
	}
	for range 5 {
		b.session().post("wait")
	}
	others := []*talk{b.sessionOf("b"), b.sessionOf("c")}
	for _, s := range others {
		s.post("go")
	}
	b.until("every job was delivered", func() bool {
		c, err := b.js.Consumer(b.ctx, topology.StreamJobs, topology.ProviderJobsDurable("local"))
		if err != nil {
			t.Fatal(err)
		}
		return c.CachedInfo().NumPending == 0
	})
	for i, s := range first {
		s.interrupt()
		s.untilEnded(executions[i])
	}
	for _, s := range others {
		s.untilStarted()
	}
}

// limits sets a tenant's limits where executors read them.
func (b *bench) limits(tenant string, l events.TenantLimits) {
	b.t.Helper()
	kv, err := b.js.KeyValue(b.ctx, topology.BucketBudgets)
	if err != nil {
		b.t.Fatal(err)
	}
	raw, err := json.Marshal(budget.Tenant{Limits: l})
	if err == nil {
		_, err = kv.Put(b.ctx, tenant, raw)
	}
	if err != nil {
		b.t.Fatal(err)
	}
}

// TestTenantSlots_HoldOverAllExecutors: a tenant's turns on three executors are never more than its limit, by the setting
// or of its own, and all come to their end.
func TestTenantSlots_HoldOverAllExecutors(t *testing.T) {
	t.Parallel()
	for name, test := range map[string]struct {
		setting int
		own     events.TenantLimits
	}{
		"setting": {setting: 2},
		"own":     {setting: 1, own: events.TenantLimits{Slots: 2}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var running, most atomic.Int64
			b := newBench(t, func(f *fakeTurn) {
				if n := running.Add(1); n > most.Load() {
					most.Store(n)
				}
				time.Sleep(100 * time.Millisecond) // so that turns that may run concurrently do
				running.Add(-1)
				answers(f)
			})
			if test.own != (events.TenantLimits{}) {
				b.limits(tenant, test.own)
			}
			for i := range 3 {
				b.engine = fmt.Sprintf("e%d", i)
				b.run(func(c *executor.Config) { c.TenantSlots = test.setting })
			}
			executions := map[*talk]string{}
			for range 12 {
				s := b.session()
				executions[s] = s.post("go")
			}
			for s, execution := range executions {
				s.until("the turn has ended", func(l *eventlog.SessionState) bool { return l.Run.HasEnded(execution) })
			}
			if n := most.Load(); n != 2 {
				t.Errorf("%d turns of the tenant ran at once, its limit is 2", n)
			}
		})
	}
}

// TestTenantSlots_LoweredBelowWhatRuns: running turns continue, and others wait until fewer run than the lower limit,
// also on an executor that starts meanwhile. Another tenant is not held up.
func TestTenantSlots_LoweredBelowWhatRuns(t *testing.T) {
	t.Parallel()
	b := newBench(t, polite)
	b.run()
	running := []*talk{b.session(), b.session()}
	var executions []string
	for _, s := range running {
		executions = append(executions, s.post("sleep"))
		s.untilStarted()
	}
	b.limits(tenant, events.TenantLimits{Slots: 1})
	b.engine = "another"
	b.run() // it has read the limit before it starts any turn
	b.until("both leases tell what runs", func() bool { return b.runningByLeases(tenant) == 2 })
	waiting := b.session()
	execution := waiting.post("wait")
	other := b.sessionOf("other")
	other.post("go")
	other.untilStarted()
	running[0].interrupt()
	running[0].untilEnded(executions[0])
	if l := running[1].load(); l.Run.Phase != run.Running {
		t.Errorf("the other turn that ran is %s", l.Run.Phase)
	}
	b.until("the lease tells what runs", func() bool { return b.runningByLeases(tenant) == 1 })
	if n := len(waiting.events()); n != 0 {
		t.Error("a third turn ran with a second")
	}
	running[1].interrupt()
	running[1].untilEnded(executions[1])
	waiting.untilStarted()
	waiting.interrupt()
	waiting.untilEnded(execution)
}

// runningByLeases returns the number of a tenant's turns that run according to all leases.
func (b *bench) runningByLeases(tenant string) (n int) {
	b.t.Helper()
	kv, err := b.js.KeyValue(b.ctx, topology.BucketLeases)
	if err != nil {
		b.t.Fatal(err)
	}
	keys, err := kv.Keys(b.ctx)
	if err != nil {
		b.t.Fatal(err)
	}
	for _, key := range keys {
		e, err := kv.Get(b.ctx, key)
		if err != nil {
			b.t.Fatal(err)
		}
		var l topology.Lease
		if err := json.Unmarshal(e.Value(), &l); err != nil {
			b.t.Fatal(err)
		}
		n += l.Tenants[tenant]
	}
	return n
}

// A turn that needs a sandbox above the tenant's limit ends the sandbox that has been idle for the longest, with a
// snapshot. It waits while all are in use. Another tenant is not delayed.
func TestTenantSandboxes_IdlestGivesWay(t *testing.T) {
	t.Parallel()
	for name, own := range map[string]events.TenantLimits{"setting": {}, "own": {Sandboxes: 2}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newStoreBench(t, func(f *fakeTurn) {
				if f.Query.Content == "long" {
					polite(f)
					return
				}
				answers(f)
			})
			setting := 2
			if own.Sandboxes > 0 {
				b.limits(tenant, own)
				setting = 1
			}
			b.run(func(c *executor.Config) { c.TenantSandboxes = setting })
			first, second, third := b.session(short(events.Options{})), b.session(short(events.Options{})), b.session(short(events.Options{}))
			for _, s := range []*talk{first, second, third} {
				s.untilEnded(s.post("one"))
			}
			if l := first.load(); l.Run.Sandbox.ID != "" {
				t.Error("the sandbox that was idle the longest is there")
			}
			ends := of[events.SandboxTerminated](first)
			if len(ends) != 1 || ends[0].Reason != "tenant_limit" {
				t.Errorf("it ended by %+v", ends)
			}
			if n := len(of[events.WorkspaceSynced](first)); n == 0 {
				t.Error("it has no snapshot")
			}
			if n := len(of[events.SandboxTerminated](second)); n != 0 {
				t.Error("a sandbox ended that was not idle the longest")
			}
			// It comes back with a sandbox of its own.
			if l := first.untilEnded(first.post("two")); l.Run.Phase != run.Completed {
				t.Errorf("its next turn ended as %s", l.Run.Phase)
			}
			for _, s := range []*talk{second, third} {
				execution := s.post("long")
				s.until("the turn runs", func(l *eventlog.SessionState) bool { return l.Run.Execution == execution && l.Run.Phase == run.Running })
			}
			waiting := first.post("three")
			other := b.sessionOf("other", short(events.Options{}))
			other.untilEnded(other.post("one"))
			if l := first.load(); l.Run.HasEnded(waiting) || l.Run.Execution == waiting {
				t.Error("a third turn runs with two sandboxes")
			}
			second.interrupt()
			first.untilEnded(waiting)
			if l := third.load(); l.Run.Phase != run.Running {
				t.Errorf("the turn that ran is %s", l.Run.Phase)
			}
		})
	}
}
