package main

import (
	"context"
	"fmt"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"
)

// TestProcess_RecordsEndsThatWereNotInjected tests that a real process that fails by itself is recorded with its exit
// status and its last lines, without those of the process before it. A process that a fault killed, and one that is
// stopped at the end, are not recorded.
func TestProcess_RecordsEndsThatWereNotInjected(t *testing.T) {
	t.Parallel()
	c := &cluster{dir: t.TempDir()}
	starts := 0
	if err := c.startFaultTarget("session-0", func() *exec.Cmd {
		starts++
		if starts == 1 {
			return exec.Command("sh", "-c", "echo first life; exec sleep 600")
		}
		if starts == 2 {
			return exec.Command("sh", "-c", "for i in 1 2 3 4 5; do echo reason $i; done; exit 3")
		}
		return exec.Command("sleep", "600")
	}); err != nil {
		t.Fatal(err)
	}
	p := c.parts[0]
	t.Cleanup(func() {
		ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
		defer cancel()
		if err := p.stop(ctx, syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		if n := len(c.unexpectedEnds()); n != 1 {
			t.Errorf("after the stop there are %d ends", n)
		}
	})
	f := injectedFault{time.Now(), []string{"session-0"}, plannedFault{length: time.Millisecond}}
	if err := p.kill(f.length); err != nil {
		t.Fatal(err)
	}
	deadline := time.Now().Add(time.Minute)
	for len(c.unexpectedEnds()) == 0 {
		if time.Now().After(deadline) {
			t.Fatal("the end was not recorded")
		}
		time.Sleep(time.Millisecond)
	}
	var out strings.Builder
	writeUnexpectedEnds(&out, c.unexpectedEnds(), []injectedFault{f})
	for _, want := range []string{"not injected (each was started again): 1 [session-0 1]", "session-0: exit status 3", "after: kill of session-0 for 1ms", "log: reason 3\n    log: reason 4\n    log: reason 5\n"} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "first life") || strings.Contains(out.String(), "reason 2") {
		t.Errorf("the report has more lines than the last of that process:\n%s", &out)
	}
}

// TestWriteEnds_NamesCauses tests that faults of the process itself, of NATS and of Postgres are named as causes, and
// not those of other parts, later ones or ones long before.
func TestWriteEnds_NamesCauses(t *testing.T) {
	t.Parallel()
	at := time.Now()
	before := func(d time.Duration, part string, kind faultKind) injectedFault {
		return injectedFault{at.Add(-d), []string{part}, plannedFault{kind: kind, length: 5 * time.Second}}
	}
	faults := []injectedFault{
		before(time.Minute, "nats", faultKill), before(4*time.Second, "nats", faultFreeze), before(3*time.Second, "session-1", faultKill),
		before(time.Second, "session-0", faultKill), before(-time.Second, "nats", faultKill),
	}
	var out strings.Builder
	same := func(n int) unexpectedEnd {
		return unexpectedEnd{part: "session-0", at: at, lived: time.Second, status: "exit status 1", lines: []string{fmt.Sprintf("no answer after %d ms", n)}}
	}
	writeUnexpectedEnds(&out, []unexpectedEnd{same(1), same(22), {part: "gateway-0", at: at.Add(time.Hour), status: "signal: killed"}}, faults)
	for _, want := range []string{
		"after: kill of session-0 for 5s (1.0 s before), freeze of nats for 5s (4.0 s before)\n    log: no answer after 1 ms\n", "log: as above",
		"gateway-0: signal: killed", "after: no fault of it, NATS or Postgres within 30s",
	} {
		if !strings.Contains(out.String(), want) {
			t.Errorf("the report lacks %q:\n%s", want, &out)
		}
	}
	if strings.Contains(out.String(), "22 ms") {
		t.Errorf("the report repeats lines:\n%s", &out)
	}
}

// TestUnexplainedEnds_FailTheRun tests that only an end of Postgres shortly after a kill of Postgres is explained by a
// fault: services wait for NATS and Postgres, also after a kill of their own.
func TestUnexplainedEnds_FailTheRun(t *testing.T) {
	t.Parallel()
	at := time.Now()
	kill := func(part string, before time.Duration) injectedFault {
		return injectedFault{at.Add(-before), []string{part}, plannedFault{kind: faultKill}}
	}
	faults := []injectedFault{
		kill("postgres", time.Second), kill("session-0", time.Second),
		{at.Add(-time.Second), []string{"executor-0", "nats"}, plannedFault{kind: faultStalledStart}},
		{at.Add(-time.Second), []string{"session-0", "session-1"}, plannedFault{kind: faultFrozenSessions}},
	}
	for part, explained := range map[string]bool{"postgres": true, "session-0": false, "executor-0": false, "nats": false, "gateway-0": false, "mockllm": false} {
		if err := unexplainedEnds([]unexpectedEnd{{part: part, at: at, status: "exit status 1"}}, faults); (err == nil) != explained {
			t.Errorf("an end of %s: %v, want explained %v", part, err, explained)
		}
	}
	if err := unexplainedEnds([]unexpectedEnd{{part: "postgres", at: at}}, []injectedFault{kill("postgres", time.Hour)}); err == nil {
		t.Error("an end of Postgres an hour after the last fault is explained")
	}
}
