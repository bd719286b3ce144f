package command

import (
	"encoding/json"
	"os"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// TestRun_WaitPrintsTheResult tests that --json --wait prints one object in the form of a gateway's response, and the
// exit code of each end.
func TestRun_WaitPrintsTheResult(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end       events.Payload
		execution string
		flag      string
		code      int
		says      string
	}{
		"completed":             {events.ExecutionCompleted{}, `"phase":"completed","result":"done"`, "--wait", ExitDone, ""},
		"completed in time":     {events.ExecutionCompleted{}, `"phase":"completed","result":"done"`, "--wait=10m", ExitDone, ""},
		"failed":                {events.ExecutionFailed{}, `"phase":"failed","code":"MODEL_ERROR","message":"no model"`, "--wait", ExitFailed, "spool: the query failed: no model (MODEL_ERROR)\n"},
		"cancelled":             {events.ExecutionCancelled{}, `"phase":"cancelled","reason":"interrupted"`, "--wait", ExitCancelled, ""},
		"withdrawn":             {events.ExecutionWithdrawn{}, `"phase":"cancelled","reason":"cancelled"`, "--wait", ExitCancelled, ""},
		"still running":         {nil, `"phase":"running"`, "--wait=100ms", ExitTimeout, "spool: wait: the query has not ended within 100ms; follow it with `spool attach " + ses + "`\n"},
		"ended after the limit": {nil, `"phase":"completed"`, "--wait=100ms", ExitDone, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := serve(t, accepted, dispatched, answered)
			cursor := "3"
			if c.end != nil {
				f.begin = append(f.begin, c.end)
				cursor = "4"
			}
			f.execution = `{"executionId":"` + exe + `",` + c.execution + `}`
			got := spool(t, testIO(t), "run", "--url", f.URL, "--json", c.flag, "hello")
			if got.code != c.code || got.err != c.says {
				t.Errorf("got %+v, want exit code %d and %q", got, c.code, c.says)
			}
			var result struct {
				SessionID, ExecutionID, Position string
				Execution                        json.RawMessage
				Cursor                           json.Number
			}
			if err := json.Unmarshal([]byte(got.out), &result); err != nil || strings.Count(got.out, "\n") != 1 {
				t.Fatalf("the output is not one object on one line: %v\n%s", err, got.out)
			}
			if result.SessionID != ses || result.ExecutionID != exe || result.Position != "0-3" || string(result.Cursor) != cursor || !strings.Contains(string(result.Execution), c.execution[:strings.Index(c.execution, ",")+1]) {
				t.Errorf("got %s, want the execution %s and cursor %s", got.out, c.execution, cursor)
			}
			if want := "GET /api/executions/" + exe + "?minPosition=0-" + cursor; !f.wasRequested(want) {
				t.Errorf("%s was not requested: %q", want, f.requests)
			}
		})
	}
}

// TestRun_WaitTurnsSignalsIntoControls tests that a signal stops the query while --wait waits, and that its end is
// printed.
func TestRun_WaitTurnsSignalsIntoControls(t *testing.T) {
	t.Parallel()
	f := serve(t, accepted, events.ExecutionQueued{Ahead: 1})
	cancel := "POST /api/executions/" + exe + "/cancel"
	f.controls[cancel] = []events.Payload{events.ExecutionWithdrawn{Reason: "cancelled"}}
	f.execution = `{"executionId":"` + exe + `","phase":"cancelled","reason":"cancelled"}`
	w := testIO(t)
	signals := make(chan os.Signal)
	w.Signals = signals
	var sending sync.WaitGroup
	sending.Go(func() {
		for !f.wasRequested("POST /api/sessions/" + ses + "/messages") { // an earlier signal ends the program without a control
			time.Sleep(time.Millisecond)
		}
		signals <- os.Interrupt
	})
	got := spool(t, w, "run", "--url", f.URL, "--session", ses, "--json", "--wait", "hello")
	sending.Wait()
	if got.code != ExitCancelled || !strings.Contains(got.out, `"phase":"cancelled"`) || strings.Count(got.out, "\n") != 1 || !f.wasRequested(cancel) {
		t.Errorf("got %+v after requests %q", got, f.requests)
	}
}

// TestRun_WaitRefusesOtherFlags tests the flags and values with which --wait has no meaning.
func TestRun_WaitRefusesOtherFlags(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		code int
		says string
	}{
		{[]string{"--wait"}, ExitUsage, "wait: use it with --json"},
		{[]string{"--wait=30s"}, ExitUsage, "wait: use it with --json"},
		{[]string{"--json", "--wait", "--detach"}, ExitUsage, "wait: --wait and --detach exclude each other"},
		{[]string{"--json", "--wait=soon"}, ExitUsage, "--wait: "},
		{[]string{"--json", "--wait=0s"}, ExitUsage, "--wait: "},
		{[]string{"--json", "--wait=-5s"}, ExitUsage, "--wait: "},
		{[]string{"--json", "--wait=30s"}, ExitFailed, "needs a server that stays"},
	} {
		got := spool(t, testIO(t), append([]string{"run"}, append(c.args, "q")...)...)
		if got.code != c.code || !strings.Contains(got.err, c.says) || got.out != "" {
			t.Errorf("%v: got %+v, want exit code %d and %q", c.args, got, c.code, c.says)
		}
	}
}
