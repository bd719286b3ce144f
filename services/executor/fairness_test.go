package executor_test

import (
	"strconv"
	"testing"

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
	other.ended(execution)
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
	var crowd []*talk
	for i := range jobs {
		s := b.session()
		s.post(strconv.Itoa(i))
		crowd = append(crowd, s)
	}
	other := b.sessionOf("other")
	other.post("other")
	b.until("the other tenant's job was delivered", func() bool {
		c, err := b.js.Consumer(b.ctx, topology.StreamJobs, topology.JobsAny("local"))
		if err != nil {
			t.Fatal(err)
		}
		return c.CachedInfo().NumPending == 0
	})
	// A job is away for a moment each second, so that another executor may take it.
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
		crowd[i].interrupt()
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
		c, err := b.js.Consumer(b.ctx, topology.StreamJobs, topology.JobsAny("local"))
		if err != nil {
			t.Fatal(err)
		}
		return c.CachedInfo().NumPending == 0
	})
	for i, s := range first {
		s.interrupt()
		s.ended(executions[i])
	}
	for _, s := range others {
		s.untilStarted()
	}
}
