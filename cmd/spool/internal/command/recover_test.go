package command

import (
	"bytes"
	"fmt"
	"os"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// Executions of the fake server that can, and cannot, be recovered.
var (
	failedExe    = events.DeriveID(events.KindExecution, "failed")
	completedExe = events.DeriveID(events.KindExecution, "completed")
)

// TestRecover_ShowsTheNewExecution tests that recover sends the variables, shows the new execution until its end, and
// exits as run does.
func TestRecover_ShowsTheNewExecution(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  events.Payload
		code int
		says string
	}{
		"completed": {events.ExecutionCompleted{}, ExitDone, ""},
		"failed":    {events.ExecutionFailed{Code: "MODEL_ERROR", Message: "no"}, ExitFailed, "the query failed: no (MODEL_ERROR)"},
		"cancelled": {events.ExecutionCancelled{Reason: "cancelled"}, ExitCancelled, ""},
	} {
		f := serve(t, accepted, dispatched, answered, c.end)
		w := testIO(t)
		w.LookupEnv = func(name string) (string, bool) { return "some-secret", name == "TOKEN" }
		got := spool(t, w, "executions", "recover", "--url", f.URL, "--var", "A=1", "--secret", "TOKEN", failedExe)
		if got.code != c.code || !strings.Contains(got.out, "hi there") || !strings.Contains(got.err, fmt.Sprintf("execution %s continues %s", exe, failedExe)) || !strings.Contains(got.err, c.says) {
			t.Errorf("%s: %+v", name, got)
		}
		if !f.wasRequested("POST /api/executions/"+failedExe+"/recover") || !slices.Contains(f.bodies, `{"environment":{"A":{"value":"1"},"TOKEN":{"value":"some-secret","secret":true}}}`) {
			t.Errorf("%s: requests %v with %v", name, f.requests, f.bodies)
		}
	}
}

func TestRecover_DetachPrintsIDs(t *testing.T) {
	t.Parallel()
	f := serve(t)
	if got := spool(t, testIO(t), "executions", "recover", "--url", f.URL, "--detach", failedExe); got.code != ExitDone || !strings.Contains(got.out, "execution "+exe) {
		t.Errorf("got %+v", got)
	}
	got := spool(t, testIO(t), "executions", "recover", "--url", f.URL, "--detach", "--json", failedExe)
	if want := fmt.Sprintf(`{"sessionId":%q,"executionId":%q,"position":"0-3"}`+"\n", ses, exe); got != (result{ExitDone, want, ""}) {
		t.Errorf("got %+v", got)
	}
	if got := spool(t, testIO(t), "executions", "show", "--url", f.URL, failedExe); !strings.Contains(got.out, "exe_earlier") {
		t.Errorf("show does not name the recovered execution: %+v", got)
	}
}

// TestRecover_ReportsRefusals tests bad arguments, an unknown execution, and an execution that has not failed.
func TestRecover_ReportsRefusals(t *testing.T) {
	t.Parallel()
	f := serve(t)
	for name, c := range map[string]struct {
		args []string
		code int
		says string
	}{
		"no execution":             {nil, ExitUsage, "execution"},
		"not an id":                {[]string{"exe_1"}, ExitUsage, "execution: "},
		"not a variable":           {[]string{"--var", "A", failedExe}, ExitUsage, "is not NAME=VALUE"},
		"unknown execution":        {[]string{events.DeriveID(events.KindExecution, "unknown")}, ExitFailed, "NOT_FOUND"},
		"a completed execution":    {[]string{completedExe}, ExitFailed, "EXECUTION_NOT_FAILED"},
		"secret that has no value": {[]string{"--secret", "NONE", failedExe}, ExitUsage, "is not set"},
	} {
		got := spool(t, testIO(t), slices.Concat([]string{"executions", "recover", "--url", f.URL}, c.args)...)
		if got.code != c.code || !strings.Contains(got.err, c.says) || got.out != "" {
			t.Errorf("%s: %+v", name, got)
		}
	}
}

// TestRecover_SignalDetaches tests that Ctrl-C ends the command and not the execution.
func TestRecover_SignalDetaches(t *testing.T) {
	t.Parallel()
	f := serve(t, accepted, dispatched)
	signals, out, errs := make(chan os.Signal), &watched{lines: 2, full: make(chan struct{})}, &bytes.Buffer{}
	w := testIO(t)
	w.Signals, w.Out, w.Err = signals, out, errs
	var sending sync.WaitGroup
	sending.Go(func() { <-out.full; signals <- os.Interrupt })
	code := Run(t.Context(), []string{"executions", "recover", "--url", f.URL, "--json", failedExe}, w)
	sending.Wait()
	if code != ExitCancelled || errs.String() != "spool: detached; follow it with `spool attach "+ses+"`\n" || f.wasRequested("POST /api/executions/"+exe+"/cancel") {
		t.Errorf("left with %d %q; requests %v", code, errs, f.requests)
	}
}
