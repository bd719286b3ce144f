package executor_test

import (
	"encoding/pem"
	"math"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
	"github.com/spoolhq/spool/services/executor"
)

// newMeteredBench returns a bench whose sandboxes are metered.
func newMeteredBench(t *testing.T, s script) *bench {
	b := newBench(t, s)
	b.sandbox = executor.ProviderModal
	return b
}

// authority returns the path of a PEM file with a certificate.
func authority(t *testing.T) string {
	t.Helper()
	s := httptest.NewTLSServer(nil)
	defer s.Close()
	path := filepath.Join(t.TempDir(), "authority.pem")
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func withPrice(c *executor.Config) { c.ModalSandboxPrice = 0.25 }

// giveUp ends the session's sandbox.
func (s *talk) giveUp() {
	s.terminate()
	s.job()
	s.until("the sandbox is given up", func(l *eventlog.SessionState) bool { return l.Run.Sandbox.ID == "" })
}

// checkUsage compares the session's sandbox_usage with the times at which its sandboxes were ready and ended, and returns the
// milliseconds of each execution.
func (s *talk) checkUsage(price float64) map[string]uint64 {
	s.b.t.Helper()
	var ready, last time.Time
	var ran, recorded time.Duration
	of, stretches := map[string]uint64{}, 0
	for _, e := range s.events() {
		switch d := e.Data.(type) {
		case events.SandboxReady:
			ready = e.Time
		case events.SandboxReplaced, events.SandboxTerminated:
			ran += e.Time.Sub(ready)
		case events.SandboxUsage:
			stretches++
			took := time.Duration(d.DurationMs) * time.Millisecond
			if begin := e.Time.Add(-took); begin.Before(ready) || begin.Before(last) {
				s.b.t.Errorf("%s from %s overlaps what is recorded up to %s, or begins before the sandbox at %s", took, begin, last, ready)
			}
			if want := price * took.Seconds(); math.Abs(d.CostUSD-want) > 1e-9 || d.Provider != executor.ProviderModal {
				s.b.t.Errorf("%+v has cost $%g", d, want)
			}
			recorded, last = recorded+took, e.Time
			of[e.ExecutionID] += d.DurationMs
		}
	}
	if lost := ran - recorded; lost < 0 || lost > time.Duration(stretches)*time.Millisecond {
		s.b.t.Errorf("%s are recorded in %d stretches, sandboxes ran for %s", recorded, stretches, ran)
	}
	return of
}

// An executor is killed during a turn, and another one ends the turn: the log has the sandbox's whole time once.
func TestSandboxUsage_OfAKilledExecutorIsRecordedOnce(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{}, 1)
	b := newMeteredBench(t, steps(2, allow))
	a := b.run(withPrice)
	s := b.session()
	first := s.post("go")
	allow <- struct{}{}
	s.untilBlocks(1)
	a.wire.kill()
	b.run(withPrice)
	s.until("the other has claimed", func(l *eventlog.SessionState) bool { return l.Run.Epoch == 2 })
	allow <- struct{}{}
	s.untilEnded(first)
	allow <- struct{}{}
	second := s.post("go on")
	allow <- struct{}{}
	s.untilEnded(second)
	s.giveUp()
	of := s.checkUsage(0.25)
	if of[first] == 0 {
		t.Errorf("by executions: %v", of)
	}
	var total uint64
	for _, ms := range of {
		total += ms
	}
	if got, want := s.load().Run.SessionUsage().CostUSD, 0.25*float64(total)/1000; math.Abs(got-want) > 1e-9 {
		t.Errorf("the session has cost $%g, its sandbox $%g", got, want)
	}
}

// The time of a sandbox that is lost during a turn is charged, and so is the time of its replacement.
func TestSandboxUsage_OfALostSandbox(t *testing.T) {
	t.Parallel()
	allow := make(chan struct{}, 1)
	b := newMeteredBench(t, steps(1, allow))
	b.run()
	s := b.session()
	execution := s.post("go")
	s.until("it runs", func(l *eventlog.SessionState) bool { return l.Run.Phase == run.Running })
	b.provider.onlyBox().runner.die()
	s.until("another attempt runs", func(l *eventlog.SessionState) bool { return l.Run.Attempt == 2 && l.Run.Phase == run.Running })
	allow <- struct{}{}
	s.untilEnded(execution)
	s.giveUp()
	if of := s.checkUsage(0); of[execution] == 0 { // without a price only the time is recorded
		t.Errorf("by executions: %v", of)
	}
	if n := len(of[events.SandboxReplaced](s)); n != 1 {
		t.Errorf("%d sandboxes were replaced", n)
	}
}

// Sandboxes of other providers are not metered, also if a price is set.
func TestSandboxUsage_OfModalAlone(t *testing.T) {
	t.Parallel()
	b := newBench(t, answers)
	b.run(withPrice)
	s := b.session()
	s.untilEnded(s.post("go"))
	s.giveUp()
	if got := types(s.events()); strings.Contains(got, "sandbox_usage") {
		t.Errorf("events: %s", got)
	}
}

// The cost of a session's sandbox counts against its budget.
func TestSandboxUsage_CountsAgainstTheBudget(t *testing.T) {
	t.Parallel()
	b := newMeteredBench(t, polite)
	b.run(func(c *executor.Config) { c.ModalSandboxPrice = 1e6 })
	s := b.session(withBudget(events.Budget{CostUSD: 1}))
	first := s.post("go")
	s.untilStarted()
	s.interrupt()
	s.untilEnded(first)
	second := s.post("go on")
	s.untilEnded(second)
	failed := of[events.ExecutionFailed](s)
	if len(failed) != 1 || failed[0].Code != "BUDGET_EXCEEDED" || !strings.Contains(failed[0].Message, "the session has cost $") {
		t.Errorf("it failed with %+v", failed)
	}
}
