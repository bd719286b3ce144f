package run_test

import (
	"fmt"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
)

var rate = run.SandboxRate{Provider: "modal", USDPerSecond: 0.5}

// after returns an event at the given time after t0.
func after(d time.Duration, execution string, data events.Payload) events.Event {
	e := fact(execution, 0, data)
	e.Time, e.ID = t0.Add(d), fmt.Sprint("e", d, data.EventType())
	return e
}

// describeUsage lists the events of a decision, and usage with its execution, milliseconds and dollars.
func describeUsage(d run.Decision) string {
	var out []string
	for _, e := range d.Events {
		text := string(e.Type())
		if u, ok := e.Data.(events.SandboxUsage); ok {
			text = fmt.Sprintf("%s[%s %d $%g]", u.SandboxID, e.ExecutionID, u.DurationMs, u.CostUSD)
		}
		out = append(out, text)
	}
	return strings.Join(out, " ")
}

func TestAddSandboxUsage_RecordsTheTimeSinceTheLastRecord(t *testing.T) {
	t.Parallel()
	ready := after(time.Second, "A", events.SandboxReady{SandboxID: "sbx", Provider: "modal", Journal: "jnl"})
	claim := func(at time.Duration, x string) events.Event {
		return after(at, x, events.ExecutionClaimed{Epoch: 1, Executor: "x1"})
	}
	used := func(at, d time.Duration, x string) events.Event {
		return after(at, x, events.SandboxUsage{SandboxID: "sbx", Provider: "modal", DurationMs: uint64(d.Milliseconds())})
	}
	ended := func(at time.Duration, x string) events.Event { return after(at, x, events.ExecutionCompleted{}) }
	gone := func(at time.Duration, x string) events.Event {
		return after(at, x, events.SandboxTerminated{SandboxID: "sbx"})
	}
	running := []events.Event{claim(0, "A"), ready}
	rested := append(running[:2:2], used(3*time.Second, 2*time.Second, "A"), ended(3*time.Second, "A"))
	for _, c := range []struct {
		name  string
		given []events.Event
		when  []events.Event
		whole int
		then  string
	}{
		{"an execution ends: the time since the sandbox was ready", running, []events.Event{ended(3*time.Second, "A")}, 1, "sbx[A 2000 $1] execution_completed"},
		{"the next one ends: the rest before it is the session's", append(rested[:4:4], claim(7*time.Second, "B")), []events.Event{ended(9*time.Second, "B")}, 1,
			"sbx[ 4000 $2] sbx[B 2000 $1] execution_completed"},
		{"a sandbox ends between executions", rested, []events.Event{gone(4*time.Second, "")}, 0, "sbx[ 1000 $0.5] sandbox_terminated"},
		{"a sandbox ends with its execution", running, []events.Event{gone(4*time.Second, "A"), ended(4*time.Second, "A")}, 2, "sbx[A 3000 $1.5] sandbox_terminated execution_completed"},
		{"a sandbox is replaced during an execution", running, []events.Event{after(2*time.Second, "A", events.SandboxReplaced{SandboxID: "sbx"})}, 0, "sbx[A 1000 $0.5] sandbox_replaced"},
		{"nothing ends", running, []events.Event{after(2*time.Second, "A", events.Log{})}, 0, "log"},
		{"all time is already recorded", rested, []events.Event{gone(3*time.Second, "")}, 0, "sandbox_terminated"},
		{"the clock of the end is behind", append(rested[:4:4], claim(7*time.Second, "B")), []events.Event{ended(5*time.Second, "B")}, 1, "sbx[ 2000 $1] execution_completed"},
		{"no sandbox is ready", running[:1], []events.Event{ended(3*time.Second, "A")}, 1, "execution_completed"},
		{"another provider's sandbox", []events.Event{claim(0, "A"), after(time.Second, "A", events.SandboxReady{SandboxID: "sbx", Provider: "docker"})}, []events.Event{ended(3*time.Second, "A")}, 1, "execution_completed"},
	} {
		d := run.AddSandboxUsage(given(c.given...), run.Decision{Epoch: 1, Events: c.when, Whole: c.whole}, rate)
		if got := describeUsage(d); got != c.then {
			t.Errorf("%s: %s", c.name, got)
		}
		if want := c.whole + len(d.Events) - len(c.when); c.whole > 0 && d.Whole != want {
			t.Errorf("%s: %d events are for one commit, not %d", c.name, d.Whole, want)
		}
		if again := run.AddSandboxUsage(run.Fold(given(c.given...), 1, d.Events[:len(d.Events)-1]), run.Decision{Epoch: 1, Events: c.when[len(c.when)-1:]}, rate); len(again.Events) != 1 {
			t.Errorf("%s: once more: %s", c.name, describeUsage(again))
		}
		if got := run.AddSandboxUsage(given(c.given...), run.Decision{Epoch: 1, Events: c.when}, run.SandboxRate{}); len(got.Events) != len(c.when) {
			t.Errorf("%s: without a rate: %s", c.name, describeUsage(got))
		}
	}
}

// TestAddSandboxUsage_RecordsAllTimeOnce tests that the recorded time equals the time in which sandboxes were ready, for any
// order of turns, idle times and lost sandboxes.
func TestAddSandboxUsage_RecordsAllTimeOnce(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		var s run.State
		now, readyAt := t0, time.Time{}
		var want, got time.Duration
		var last time.Time // end of the last recorded period
		do := func(x string, data ...events.Payload) {
			m := events.NewEventList(events.CommandMeta{CommandID: fmt.Sprint(now.UnixNano(), data), Now: now})
			for _, p := range data {
				m.Add(x, p)
			}
			d := run.AddSandboxUsage(s, run.Decision{Epoch: s.Epoch, Events: m.Events()}, rate)
			for _, e := range d.Events {
				u, ok := e.Data.(events.SandboxUsage)
				if !ok {
					continue
				}
				took := time.Duration(u.DurationMs) * time.Millisecond
				if begin := e.Time.Add(-took); begin.Before(last) || begin.Before(readyAt) {
					t.Fatalf("%s of %s begins before the end of the one before it, %s", took, e.Time, last)
				}
				got, last = got+took, e.Time
			}
			s = run.Fold(s, s.Epoch, d.Events)
		}
		for i := range rapid.IntRange(1, 30).Draw(t, "steps") {
			now = now.Add(time.Duration(rapid.IntRange(0, 5000).Draw(t, "ms")) * time.Millisecond)
			running, boxed := !s.IsIdle(), s.Sandbox.ID != ""
			switch step := rapid.IntRange(0, 3).Draw(t, "step"); {
			case step == 0 && !running:
				do(fmt.Sprint("exe", i), events.ExecutionClaimed{Epoch: s.Epoch + 1, Executor: "x"})
			case step == 1 && !boxed:
				readyAt = now
				do(s.Execution, events.SandboxReady{SandboxID: fmt.Sprint("sbx", i), Provider: "modal", Journal: "j"})
			case step == 2 && boxed:
				want += now.Sub(readyAt)
				do("", events.SandboxReplaced{SandboxID: s.Sandbox.ID})
			case step == 3 && running:
				do(s.Execution, events.ExecutionCompleted{})
			}
		}
		if s.Sandbox.ID != "" {
			want += now.Sub(readyAt)
			do("", events.SandboxTerminated{SandboxID: s.Sandbox.ID})
		}
		if got != want {
			t.Fatalf("%s of %s were recorded", got, want)
		}
		if cost := want.Seconds() * rate.USDPerSecond; s.Before.CostUSD < cost-1e-6 || s.Before.CostUSD > cost+1e-6 {
			t.Fatalf("the session has cost $%g, not $%g", s.Before.CostUSD, cost)
		}
	})
}
