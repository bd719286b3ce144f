package executor_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/sandbox"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/executor"
)

// The lease has the values of the settings.
func TestSettingLease(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.engine = "harbour"
	a := b.run(func(c *executor.Config) { c.Address, c.Slots = "pier-7", 3 })
	kv, err := b.js.KeyValue(b.ctx, topology.BucketLeases)
	if err != nil {
		t.Fatal(err)
	}
	entry, err := kv.Get(b.ctx, a.ID())
	if err != nil {
		t.Fatal(err)
	}
	var l topology.Lease
	if err := json.Unmarshal(entry.Value(), &l); err != nil {
		t.Fatal(err)
	}
	if l.Engine != "harbour" || l.Address != "pier-7" || l.Slots != 3 || l.Provider != executor.ProviderLocal { // Engine, Address, Slots, Sandbox
		t.Errorf("lease %+v", l)
	}
}

// As many executions run concurrently as there are slots; further ones wait.
func TestSettingSlots(t *testing.T) {
	t.Parallel()
	for _, slots := range []int{1, 2} {
		b := newBench(t, polite)
		b.run(func(c *executor.Config) { c.Slots = slots })
		first, second := b.session(), b.session()
		one := first.post("x")
		first.untilStarted()
		two := second.post("x")
		if slots == 2 {
			second.untilStarted()
		}
		first.interrupt()
		first.untilEnded(one)
		second.untilStarted()
		second.interrupt()
		second.untilEnded(two)
		ended, claimed := first.events(), second.events()
		if together := claimed[0].Time.Before(ended[len(ended)-1].Time); together != (slots == 2) {
			t.Errorf("%d slots: the second was claimed before the first ended: %v", slots, together)
		}
	}
}

// After a failure to fill the pool, the next attempt follows after the configured interval.
func TestSettingPoolEvery(t *testing.T) {
	t.Parallel()
	for _, every := range []time.Duration{20 * time.Millisecond, time.Hour} {
		b := newStoreBench(t, quick)
		b.provider.mu.Lock()
		b.provider.createErr = errors.New("no room")
		b.provider.mu.Unlock()
		tries := make(chan struct{}, 1)
		b.wrap = func(p sandbox.Provider) sandbox.Provider { return countingProvider{p.(pausable), tries} }
		b.run(func(c *executor.Config) { c.Pool, c.PoolEvery = []string{"claude-code=1"}, every })
		<-tries
		again := false
		select {
		case <-tries:
			again = true
		case <-time.After(time.Second):
		}
		if again != (every < time.Second) {
			t.Errorf("every %s: tried again within a second: %v", every, again)
		}
	}
}

// countingProvider reports each sandbox that is to be created.
type countingProvider struct {
	pausable
	tries chan struct{}
}

func (p countingProvider) Create(ctx context.Context, spec sandbox.Spec) (sandbox.Sandbox, error) {
	select {
	case p.tries <- struct{}{}:
	default:
	}
	return p.pausable.Create(ctx, spec)
}

// The time between commits of an execution is at least the setting.
func TestSettingCommitWindow(t *testing.T) {
	t.Parallel()
	const lines, apart = 5, 400 * time.Millisecond
	for _, window := range []time.Duration{time.Millisecond, apart} {
		var said atomic.Pointer[talk]
		b := newBench(t, func(t *fakeTurn) {
			t.Start()
			for n := range lines { // each line is in the log before the agent writes the next
				t.Say("log", events.Log{Level: "info", Message: fmt.Sprint("line ", n)})
				for said.Load().load().Run.Sandbox.N < uint64(n+2) {
					time.Sleep(time.Millisecond)
				}
			}
			t.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
		})
		b.run(func(c *executor.Config) { c.CommitWindow = window })
		s := b.session()
		said.Store(s)
		s.untilEnded(s.post("x"))
		var at []time.Time
		for rec, err := range b.log.Read(b.ctx, eventlog.Position{}, eventlog.Filter{Subject: events.Subject{Tenant: tenant, ID: s.id}}) {
			if err != nil {
				t.Fatal(err)
			}
			for _, e := range rec.Events {
				if _, ok := e.Data.(events.Log); ok {
					at = append(at, rec.Time)
				}
			}
		}
		if len(at) != lines {
			t.Fatalf("window %s: %d commits with lines", window, len(at))
		}
		if took := at[lines-1].Sub(at[0]); (took > (lines-1)*apart*9/10) != (window == apart) {
			t.Errorf("window %s: %d commits took %s", window, lines, took)
		}
	}
}

// A turn that ignores a cancel is killed after the configured time, and not before.
func TestSettingKillAfter(t *testing.T) {
	t.Parallel()
	for _, after := range []time.Duration{50 * time.Millisecond, 700 * time.Millisecond} {
		b := newBench(t, stubborn)
		b.run(func(c *executor.Config) { c.KillAfter = after })
		s := b.session()
		execution := s.post("go")
		s.untilStarted()
		began := time.Now()
		s.cancel(execution)
		s.untilEnded(execution)
		if took := time.Since(began); took < after {
			t.Errorf("KillAfter %s: killed after %s", after, took)
		}
		if k := b.provider.onlyBox(); k == nil {
			t.Errorf("KillAfter %s: the sandbox was ended too", after)
		}
	}
}

// An execution whose sandbox is lost each time is started as often as the setting allows.
func TestSettingMaxAttempts(t *testing.T) {
	t.Parallel()
	for _, attempts := range []int{1, 2} {
		b := newBench(t, func(t *fakeTurn) {
			t.Start()
			go t.r.die()
			<-t.killed
		})
		b.run(func(c *executor.Config) { c.MaxAttempts = attempts })
		s := b.session()
		s.untilEnded(s.post("go"))
		if b.provider.made != attempts {
			t.Errorf("MaxAttempts %d: %d sandboxes", attempts, b.provider.made)
		}
	}
}

// Without a hint a control is found at the next beat.
func TestSettingBeat(t *testing.T) {
	t.Parallel()
	for _, beat := range []time.Duration{20 * time.Millisecond, time.Hour} {
		b := newBench(t, polite)
		b.run(func(c *executor.Config) { c.Beat = beat })
		s := b.session()
		execution := s.post("go")
		s.untilStarted()
		s.interrupt() // without a hint
		if beat < time.Second {
			s.untilEnded(execution)
			continue
		}
		if s.load().Run.HasEnded(execution) {
			t.Error("it was found without a beat")
		}
		s.job() // which ends the wait
		s.untilEnded(execution)
	}
}

// The metrics count the executor's work.
func TestMetrics_CountTheExecutorsWork(t *testing.T) {
	t.Parallel()
	b := newStoreBench(t, polite)
	b.metrics = prometheus.NewRegistry()
	b.run(func(c *executor.Config) {
		c.Slots, c.WarmEvery, c.Pool = 3, 20*time.Millisecond, []string{"claude-code=1"}
	})
	want := func(name, label string, value float64) {
		t.Helper()
		b.until(name+" "+label+" is right", func() bool {
			return metricValue(t, b.metrics, "spool_executor_"+name, label) == value
		})
	}
	want("slots", "", 3)
	want("pool_sandboxes", "claude-code", 1)
	want("sandboxes_total", "created", 1)
	s := b.session(func(c *events.SessionCreated) { c.Options.Image = "another" })
	execution := s.post("x")
	s.untilStarted()
	want("executions", "", 1)
	want("agents", "working", 1)
	want("sandboxes_total", "created", 2)
	s.interrupt()
	s.untilEnded(execution)
	want("executions", "", 0)
	want("agents", "resting", 1)
	want("agent_memory_bytes", "resting", 100)
	want("executions_ended_total", outcome(s.last(execution)), 1)
	want("snapshots_total", "stored", 1)
	want("snapshot_seconds", "", 1)
	other := b.session()
	execution = other.post("x")
	other.untilStarted()
	want("sandboxes_total", "pooled", 1)
	other.interrupt()
	other.untilEnded(execution)
	b.provider.mu.Lock()
	b.provider.createErr = &sandbox.Error{Code: sandbox.CodeSandboxFailed, Message: "no"}
	b.provider.mu.Unlock()
	third := b.session(func(c *events.SessionCreated) { c.Options.Image = "third" })
	third.untilEnded(third.post("x"))
	b.until("a failure is counted", func() bool { return metricValue(t, b.metrics, "spool_executor_sandboxes_total", "failed") >= 1 })
	want("executions_ended_total", "failed", 1)
}

func outcome(end events.Payload) string {
	return strings.TrimPrefix(string(end.EventType()), "execution_")
}

// metricValue returns the sum of a metric, and of one value of its label unless that is "": counters, gauges, or the
// number of a histogram's observations.
func metricValue(t *testing.T, registry *prometheus.Registry, name, label string) (sum float64) {
	t.Helper()
	list, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range list {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			if label == "" || m.GetLabel()[0].GetValue() == label {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// With less room than the reserve an execution is not started. A running one keeps its output in the sandbox until
// there is room, and the log says so. A cancelled one ends.
func TestSettingStoreReserve(t *testing.T) {
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
	b.run(func(c *executor.Config) { c.StoreReserve = 80 })
	quiet, late := b.session(), b.session()
	cancelled := quiet.post("go")
	quiet.untilStarted()
	empty := natstest.FillStore(t, b.nc, 21)
	waiting := late.post("go")
	b.until("the log says that output waits", func() bool {
		say <- "early"
		return slices.ContainsFunc(of[events.Error](quiet), func(e events.Error) bool { return e.Code == "STORAGE_FULL" })
	})
	say <- "last"
	stored := func() bool {
		return slices.ContainsFunc(of[events.Log](quiet), func(l events.Log) bool { return l.Message == "last" })
	}
	for range 20 {
		if stored() {
			t.Fatal("output was stored while only the reserve was left")
		}
		if r := late.load().Run; r.Execution != "" {
			t.Fatalf("an execution was started while only the reserve was left: %+v", r)
		}
		time.Sleep(10 * time.Millisecond)
	}
	empty()
	b.until("what was said is stored", stored)
	late.untilStarted()
	natstest.FillStore(t, b.nc, 21)
	for s, execution := range map[*talk]string{quiet: cancelled, late: waiting} {
		s.cancel(execution)
		s.untilEnded(execution)
	}
	b.noJobs()
}

// chatters writes a line of 1,000 bytes repeatedly until it is stopped.
func chatters(x *fakeTurn) {
	x.Start()
	for range 100_000 {
		select {
		case <-x.interrupted:
			x.End(runner.TurnEnd{Outcome: runner.OutcomeInterrupted})
			return
		case <-x.killed:
			x.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
			return
		default:
			x.Say("log", events.Log{Level: "info", Message: strings.Repeat("x", 1000)})
			time.Sleep(100 * time.Microsecond)
		}
	}
	x.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
}

// An execution ends with OUTPUT_LIMIT at the lowest limit of its executor, its agent and its session, and the log has
// no more of its output.
func TestSettingOutput(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		set    executor.Config
		most   int // of both turns together
		second bool
	}{
		"events":            {executor.Config{OutputEvents: 50}, 100, true},
		"bytes":             {executor.Config{OutputBytes: 50 * 1256}, 100, true},
		"events of session": {executor.Config{OutputEvents: 50, SessionEvents: 70}, 70, true},
		"bytes of session":  {executor.Config{OutputEvents: 50, SessionBytes: 70 * 1256}, 72, true},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newBench(t, chatters)
			b.run(func(to *executor.Config) {
				to.OutputEvents, to.OutputBytes, to.SessionEvents, to.SessionBytes = c.set.OutputEvents, c.set.OutputBytes, c.set.SessionEvents, c.set.SessionBytes
			})
			s := b.session()
			for turn := range 2 {
				s.untilEnded(s.post("go"))
				failed, said := of[events.ExecutionFailed](s), of[events.Log](s)
				if len(failed) != turn+1 || failed[turn].Code != "OUTPUT_LIMIT" {
					t.Fatalf("it failed with %+v", failed)
				}
				if cut := of[events.Error](s); len(cut) != turn+1 || cut[turn].Code != "OUTPUT_LIMIT" {
					t.Errorf("it was cut with %+v", cut)
				}
				if most := c.most * (turn + 1) / 2; turn == 1 && len(said) > c.most || len(said) < most-25 {
					t.Errorf("%d events after turn %d", len(said), turn+1)
				}
			}
			b.noJobs()
		})
	}
}

// Output from before a takeover counts against the limit.
func TestOutputLimit_HoldsOverATakeover(t *testing.T) {
	t.Parallel()
	b := newBench(t, chatters)
	limit := func(c *executor.Config) { c.OutputEvents = 1000 }
	first := b.run(limit)
	s := b.session()
	x := s.post("go")
	b.until("half of it is said", func() bool { return len(of[events.Log](s)) > 500 })
	first.wire.kill()
	b.run(limit)
	s.untilEnded(x)
	failed, said := of[events.ExecutionFailed](s), of[events.Log](s)
	if len(failed) != 1 || failed[0].Code != "OUTPUT_LIMIT" || len(said) > 1000 || len(said) < 990 {
		t.Errorf("it failed with %+v after %d events", failed, len(said))
	}
	b.noJobs()
}

// The runner gets the limit of the output rate.
func TestSettingPace(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		events, bytes int
		want          runner.OutputRate
	}{
		"default": {0, 0, runner.OutputRate{EventsPerSecond: 200, BytesPerSecond: 2 << 20}},
		"set":     {7, 9, runner.OutputRate{EventsPerSecond: 7, BytesPerSecond: 9}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			got := make(chan runner.OutputRate, 1)
			b := newBench(t, func(x *fakeTurn) {
				got <- x.Query.Pace
				x.Start()
				x.End(runner.TurnEnd{Outcome: runner.OutcomeCompleted})
			})
			b.run(func(to *executor.Config) { to.OutputEventsPerSecond, to.OutputBytesPerSecond = c.events, c.bytes })
			s := b.session()
			s.untilEnded(s.post("go"))
			if p := <-got; p != c.want {
				t.Errorf("the runner is told %+v", p)
			}
			b.noJobs()
		})
	}
}
