package command

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/events"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

const (
	ses = "ses_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	exe = "exe_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	key = "key_01ARZ3NDEKTSV4RRFFQ69G5FAV"
)

// result is the exit code and the output of a command line.
type result struct {
	code     int
	out, err string
}

// testIO returns an IO without a terminal, on a machine where no server runs.
func testIO(t *testing.T) IO {
	return IO{In: strings.NewReader(""), Signals: make(chan os.Signal), Local: &fakeLocal{dir: t.TempDir()}, DefaultURL: nowhere}
}

func spool(t *testing.T, w IO, args ...string) result {
	t.Helper()
	var out, err bytes.Buffer
	w.Out, w.Err = &out, &err
	ctx, cancel := context.WithTimeout(t.Context(), 30*time.Second)
	defer cancel()
	code := Run(ctx, args, w)
	return result{code, out.String(), err.String()}
}

var (
	accepted   = events.MessageAccepted{BlockID: "blk_q", Content: "hello"}
	dispatched = events.ExecutionDispatched{}
	answered   = events.BlockComplete{Block: events.Block{ID: "blk_a", Kind: events.KindAssistantText, Status: events.StatusComplete, Content: "hi there"}}
)

func TestRun_RefusesInvalidArguments(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		args []string
		says string
	}{
		{[]string{"nonsense"}, "nonsense"},
		{[]string{"run", "--nonsense", "q"}, "--nonsense"},
		{[]string{"run", ""}, "query: empty"},
		{[]string{"run", "  \n"}, "query: empty"},
		{[]string{"run", "-"}, "query: empty"},
		{[]string{"run", "bad \xff"}, "argument 2 is not valid UTF-8"},
		{[]string{"run", strings.Repeat("x", maxQueryBytes+1)}, "query: larger than 1 MiB"},
		{[]string{"run", "--session", "ses_*", "q"}, "session: "},
		{[]string{"run", "--session", ses, "--model", "m", "q"}, "leave them out with --session"},
		{[]string{"run", "--session", ses, "--model-provider", "nvidia", "q"}, "leave them out with --session"},
		{[]string{"run", "--session", ses, "--model-preset", "qwen", "q"}, "leave them out with --session"},
		{[]string{"run", "--url", "nonsense", "q"}, "url: "},
		{[]string{"run", "--url", nowhere, "--key", "a b", "q"}, "key: "},
		{[]string{"attach"}, "session"},
		{[]string{"attach", "ses_>"}, "session: "},
		{[]string{"attach", exe}, "session: "},
		{[]string{"events", ses, "--after", "-1"}, "--after"},
		{[]string{"events", ses, "--after", "x"}, "--after"},
		{[]string{"sessions"}, "expected"},
		{[]string{"sessions", "ls", "--status", "half"}, "--status"},
		{[]string{"sessions", "ls", "--limit=-1"}, "limit: "},
		{[]string{"sessions", "rm"}, "session"},
		{[]string{"executions", "cancel", "exe_1"}, "execution: "},
		{[]string{"executions", "ls", "--phase", "asleep"}, "--phase"},
		{[]string{"keys", "revoke", "nonsense"}, "key: "},
		{[]string{"keys", "create", "ci", "--tenant", "A.B"}, "tenant: "},
		{[]string{"keys", "ls", "--tenant", "A.B"}, "tenant: "},
		{[]string{"keys", "revoke", "--tenant", "A.B", key}, "tenant: "},
		{[]string{"verify", "nonsense"}, "session: "},
		{[]string{"verify", ses, "--tenant", "*"}, "tenant: "},
		{[]string{"rebuild", "--database-url", "://"}, "database-url: "},
		{[]string{"rebuild", "--nats-url", "nats://127.0.0.1:1"}, "database-url: "},
		{[]string{"gc", "--database-url", "://"}, "database-url: "},
		{[]string{"gc", "--nats-url", "nats://127.0.0.1:1"}, "database-url: "},
		{[]string{"gc", "--grace", "0s"}, "grace: "},
		{[]string{"up", "--listen", "nonsense"}, "listen: "},
		{[]string{"up", "--sandbox", "moon"}, "--sandbox"},
		{[]string{"up", "--mock-script", "/nonsense"}, "--mock-script"},
	} {
		t.Run(strings.Join(c.args, " ")[:min(40, len(strings.Join(c.args, " ")))], func(t *testing.T) {
			t.Parallel()
			got := spool(t, testIO(t), c.args...)
			if got.code != ExitUsage || !strings.Contains(got.err, c.says) || strings.Count(got.err, "\n") != 1 || got.out != "" {
				t.Errorf("got %d %q %q, want one line with %q", got.code, got.out, got.err, c.says)
			}
		})
	}
}

func TestRun_PrintsHelp(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{}, {"--help"}, {"run", "--help"}, {"sessions", "--help"}} {
		if got := spool(t, testIO(t), args...); got.code != ExitDone || !strings.Contains(got.out, "Usage: spool") {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

func TestRun_ReportsAnUnreachableServer(t *testing.T) {
	t.Parallel()
	says := "spool: cannot reach " + nowhere + ": connection refused; start it with `spool up` or pass --url\n"
	for _, args := range [][]string{
		{"run", "--url", nowhere, "q"}, {"attach", ses}, {"events", ses}, {"events", ses, "--url", nowhere}, {"sessions", "ls"}, {"sessions", "show", ses},
		{"executions", "show", exe}, {"keys", "ls"},
	} {
		if got := spool(t, testIO(t), args...); got != (result{ExitFailed, "", says}) {
			t.Errorf("%v: %+v", args, got)
		}
	}
}

// TestRun_ExitCodeShowsHowTheQueryEnded tests the exit code of each end, with text and with JSON as output.
func TestRun_ExitCodeShowsHowTheQueryEnded(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		end  events.Payload
		code int
		says string
	}{
		"completed": {events.ExecutionCompleted{DurationMs: 5}, ExitDone, ""},
		"failed":    {events.ExecutionFailed{Code: "MODEL_ERROR", Message: "no model"}, ExitFailed, "spool: the query failed: no model (MODEL_ERROR)\n"},
		"cancelled": {events.ExecutionCancelled{Reason: "cancelled"}, ExitCancelled, ""},
		"withdrawn": {events.ExecutionWithdrawn{Reason: "cancelled"}, ExitCancelled, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := serve(t, accepted, dispatched, answered, c.end)
			got := spool(t, testIO(t), "run", "--url", f.URL, "--architecture", "spool", "hello")
			if got.code != c.code || !strings.Contains(got.out, "> hello\n\nhi there\n") || !strings.HasSuffix(got.err, c.says) || !strings.Contains(got.err, "continue with `spool run --session "+ses) {
				t.Errorf("text: %+v", got)
			}
			if f.bodies[0] != `{"architecture":"spool","content":"hello","permissions":{"unattended":true}}` {
				t.Errorf("posted %s", f.bodies[0])
			}

			f = serve(t, accepted, dispatched, answered, c.end)
			got = spool(t, testIO(t), "run", "--url", f.URL, "--session", ses, "--json", "hello")
			lines := strings.Split(strings.TrimSpace(got.out), "\n")
			if got.code != c.code || got.err != c.says || len(lines) != 4 || !strings.Contains(lines[3], `"type":"`+string(c.end.EventType())+`"`) {
				t.Errorf("json: %+v", got)
			}
			for _, l := range lines {
				if !json.Valid([]byte(l)) {
					t.Errorf("line %q is not JSON", l)
				}
			}
		})
	}
}

func TestRun_ReadsStandardInput(t *testing.T) {
	t.Parallel()
	for _, args := range [][]string{{"-"}, {}} {
		f := serve(t, accepted, events.ExecutionCompleted{})
		w := testIO(t)
		w.In = strings.NewReader("from a pipe\n")
		got := spool(t, w, append([]string{"run", "--url", f.URL}, args...)...)
		if got.code != ExitDone || f.bodies[0] != `{"content":"from a pipe","permissions":{"unattended":true}}` {
			t.Errorf("%v: %+v, posted %v", args, got, f.bodies)
		}
	}
	w := testIO(t)
	w.In = strings.NewReader("bad \xff")
	if got := spool(t, w, "run", "-"); got.code != ExitUsage || !strings.Contains(got.err, "query: not valid UTF-8") {
		t.Errorf("not UTF-8: %+v", got)
	}
	w = testIO(t)
	w.InTTY = true
	if got := spool(t, w, "run"); got.code != ExitUsage || !strings.Contains(got.err, "query: state what to do") {
		t.Errorf("on a terminal: %+v", got)
	}
}

func TestRun_ReportsARefusedQuery(t *testing.T) {
	t.Parallel()
	f := serve(t)
	got := spool(t, testIO(t), "run", "--url", f.URL, "--architecture", "nonsense", "q")
	if want := "spool: architecture: \"nonsense\" is none of claude-code, spool (INVALID_REQUEST)\n"; got != (result{ExitUsage, "", want}) {
		t.Errorf("got %+v", got)
	}
}

func TestRun_DetachPrintsIDs(t *testing.T) {
	t.Parallel()
	f := serve(t)
	if got := spool(t, testIO(t), "run", "--url", f.URL, "--detach", "q"); got.code != ExitDone || !strings.Contains(got.out, exe) {
		t.Errorf("got %+v", got)
	}
	got := spool(t, testIO(t), "run", "--url", f.URL, "--detach", "--json", "q")
	if want := fmt.Sprintf(`{"sessionId":%q,"executionId":%q,"position":"0-3"}`+"\n", ses, exe); got != (result{ExitDone, want, ""}) {
		t.Errorf("got %+v", got)
	}
	if got := spool(t, testIO(t), "run", "--detach", "q"); got.code != ExitFailed || !strings.Contains(got.err, "needs a server that stays") {
		t.Errorf("without a server: %+v", got)
	}
}

// TestRun_TurnsSignalsIntoControls tests which requests the signals of a running query cause.
func TestRun_TurnsSignalsIntoControls(t *testing.T) {
	t.Parallel()
	interrupt, cancel := "POST /api/sessions/"+ses+"/interrupt", "POST /api/executions/"+exe+"/cancel"
	stopped := []events.Payload{events.ExecutionCancelled{Reason: "interrupted"}}
	for name, c := range map[string]struct {
		begin     []events.Payload
		signals   []os.Signal
		controls  map[string][]events.Payload
		requested []string
		not       string
	}{
		"once":        {[]events.Payload{accepted, dispatched}, []os.Signal{os.Interrupt}, map[string][]events.Payload{interrupt: stopped}, []string{interrupt}, cancel},
		"twice":       {[]events.Payload{accepted, dispatched}, []os.Signal{os.Interrupt, os.Interrupt}, map[string][]events.Payload{cancel: stopped}, []string{interrupt, cancel}, ""},
		"queued":      {[]events.Payload{accepted, events.ExecutionQueued{Ahead: 1}}, []os.Signal{os.Interrupt}, map[string][]events.Payload{cancel: {events.ExecutionWithdrawn{Reason: "cancelled"}}}, []string{cancel}, interrupt},
		"terminated":  {[]events.Payload{accepted, dispatched}, []os.Signal{syscall.SIGTERM}, map[string][]events.Payload{cancel: stopped}, []string{cancel}, interrupt},
		"three times": {[]events.Payload{accepted, dispatched}, []os.Signal{os.Interrupt, os.Interrupt, os.Interrupt}, nil, []string{interrupt, cancel}, ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := serve(t, c.begin...)
			f.controls = c.controls
			signals := make(chan os.Signal)
			w := testIO(t)
			w.Signals = signals
			out := &watched{lines: len(c.begin), full: make(chan struct{})}
			w.Out, w.Err = out, &bytes.Buffer{}
			var sending sync.WaitGroup
			sending.Go(func() {
				<-out.full
				for _, s := range c.signals {
					signals <- s
				}
			})
			code := Run(t.Context(), []string{"run", "--url", f.URL, "--json", "hello"}, w)
			sending.Wait()
			if code != ExitCancelled {
				t.Errorf("exit code %d", code)
			}
			for _, a := range c.requested {
				if !f.wasRequested(a) {
					t.Errorf("no request %s; requests: %v", a, f.requests)
				}
			}
			if c.not != "" && f.wasRequested(c.not) {
				t.Errorf("unexpected request %s", c.not)
			}
		})
	}
}

func TestAttach_ShowsTheSession(t *testing.T) {
	t.Parallel()
	f := serve(t, accepted, dispatched, answered, events.ExecutionCompleted{}, events.SessionDeleted{})
	if got := spool(t, testIO(t), "attach", "--url", f.URL, ses); got.code != ExitDone || !strings.Contains(got.out, "hi there") || !strings.Contains(got.out, "the session was deleted") {
		t.Errorf("got %+v", got)
	}
	f = serve(t, accepted, dispatched, answered, events.ExecutionCompleted{}, events.SessionClosed{Reason: "limit"})
	if got := spool(t, testIO(t), "attach", "--url", f.URL, ses); got.code != ExitDone {
		t.Errorf("closed: %+v", got)
	}
	other := strings.Replace(ses, "V", "W", 1)
	if got := spool(t, testIO(t), "attach", "--url", f.URL, other); got != (result{ExitFailed, "", "spool: sessionId: there is no such session (SESSION_NOT_FOUND)\n"}) {
		t.Errorf("unknown session: %+v", got)
	}

	f = serve(t, accepted, dispatched)
	signals, out, errs := make(chan os.Signal), &watched{lines: 1, full: make(chan struct{})}, &bytes.Buffer{}
	w := testIO(t)
	w.Signals, w.Out, w.Err = signals, out, errs
	var sending sync.WaitGroup
	sending.Go(func() { <-out.full; signals <- os.Interrupt })
	if code := Run(t.Context(), []string{"attach", "--url", f.URL, ses}, w); code != ExitCancelled || errs.String() != "spool: detached; the session continues\n" {
		t.Errorf("left with %d %q", code, errs)
	}
	sending.Wait()
}

func TestLists_PrintTablesAndJSON(t *testing.T) {
	t.Parallel()
	f := serve(t)
	got := spool(t, testIO(t), "sessions", "ls", "--url", f.URL)
	if got.code != ExitDone || !strings.Contains(got.out, ses+"  open") || strings.Contains(got.out, "\x1b") {
		t.Errorf("table: %+v", got)
	}
	got = spool(t, testIO(t), "sessions", "ls", "--url", f.URL, "--json")
	if want := `{"sessionId":"` + ses + `","status":"open","architecture":"spool\u001b[2J","extra":7}` + "\n"; got.out != want {
		t.Errorf("json: %q", got.out)
	}
	got = spool(t, testIO(t), "sessions", "rm", "--url", f.URL, ses)
	if got.code != ExitDone || !f.wasRequested("DELETE /api/sessions/"+ses) {
		t.Errorf("rm: %+v", got)
	}
	got = spool(t, testIO(t), "keys", "create", "ci", "--url", f.URL, "--tenant", "acme", "--role", "use", "--agents", "a,b", "--expires", "720h")
	if want := `{"name":"ci","tenant":"acme","role":"use","agents":["a","b"],"expires":"720h"}`; got.code != ExitDone || got.out != "spool_sk_x\n" || !f.wasSent(want) {
		t.Errorf("create: %+v", got)
	}
	got = spool(t, testIO(t), "keys", "ls", "--url", f.URL)
	if got.code != ExitDone || !strings.Contains(got.out, "use") || !strings.Contains(got.out, "a,b") || !strings.Contains(got.out, "key_maker") || !strings.Contains(got.out, "2026-01-0") {
		t.Errorf("ls: %+v", got)
	}
	got = spool(t, testIO(t), "keys", "ls", "--url", f.URL, "--tenant", "acme")
	if got.code != ExitDone || !f.wasRequested("GET /api/keys?tenant=acme") {
		t.Errorf("ls of a tenant: %+v", got)
	}
	got = spool(t, testIO(t), "keys", "revoke", "--url", f.URL, key)
	if got.code != ExitDone || !f.wasRequested("DELETE /api/keys/"+key) {
		t.Errorf("revoke: %+v", got)
	}
	got = spool(t, testIO(t), "keys", "revoke", "--url", f.URL, "--tenant", "acme", key)
	if got.code != ExitDone || !f.wasRequested("DELETE /api/keys/"+key+"?tenant=acme") {
		t.Errorf("revoke of a tenant: %+v", got)
	}
}

// TestRun_StartsAStack tests that run starts a stack, and stops it at the end, if no server responds on the default
// address and none runs on the data folder.
func TestRun_StartsAStack(t *testing.T) {
	t.Parallel()
	f := serve(t, accepted, dispatched, answered, events.ExecutionCompleted{})
	stack := newFakeStack(f.URL)
	l := &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) { return stack, nil }}
	w := testIO(t)
	w.Local = l
	if got := spool(t, w, "run", "--mock-llm", "q"); got.code != ExitDone || !strings.Contains(got.out, "hi there") {
		t.Fatalf("got %+v", got)
	}
	want := StackOptions{DataDir: l.dir, Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0", MockLLM: true}
	if len(l.started) != 1 || l.started[0] != want || stack.closed != 1 {
		t.Errorf("started %+v, closed %d times", l.started, stack.closed)
	}
}

func TestRun_JoinsARunningStack(t *testing.T) {
	t.Parallel()
	t.Run("the default address", func(t *testing.T) {
		t.Parallel()
		f := serve(t, accepted, events.ExecutionCompleted{})
		w := testIO(t)
		w.DefaultURL = f.URL
		if got := spool(t, w, "run", "q"); got.code != ExitDone {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("the stack on the data folder", func(t *testing.T) {
		t.Parallel()
		f := serve(t, accepted, events.ExecutionCompleted{})
		w := testIO(t)
		w.Local = &fakeLocal{dir: t.TempDir(), found: &StackConnection{URL: f.URL}}
		if got := spool(t, w, "run", "q"); got.code != ExitDone {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a stack that another run started at the same time", func(t *testing.T) {
		t.Parallel()
		f := serve(t, accepted, events.ExecutionCompleted{})
		w := testIO(t)
		l := &fakeLocal{dir: t.TempDir()}
		l.start = func(StackOptions) (Stack, error) {
			l.found = &StackConnection{URL: f.URL}
			return nil, ErrDataFolderLocked
		}
		w.Local = l
		if got := spool(t, w, "run", "q"); got.code != ExitDone {
			t.Errorf("got %+v", got)
		}
	})
	t.Run("a stack that ends with the run that started it", func(t *testing.T) {
		t.Parallel()
		first := serve(t, accepted, dispatched)
		second := serve(t, accepted, dispatched, answered, events.ExecutionCompleted{})
		stack := newFakeStack(second.URL)
		l := &fakeLocal{dir: t.TempDir(), found: &StackConnection{URL: first.URL}}
		l.start = func(StackOptions) (Stack, error) { return stack, nil }
		w := testIO(t)
		out := &watched{lines: 2, full: make(chan struct{})}
		var text, errs bytes.Buffer
		w.Local, w.Out, w.Err = l, io.MultiWriter(&text, out), &errs
		var ending sync.WaitGroup
		ending.Go(func() {
			<-out.full
			l.forget()
			close(first.gone)
			first.Close()
		})
		code := Run(t.Context(), []string{"run", "--json", "q"}, w)
		ending.Wait()
		if code != ExitDone || len(l.started) != 1 || stack.closed != 1 || strings.Count(text.String(), "\n") != 4 || strings.Count(text.String(), "message_accepted") != 1 {
			t.Errorf("got %d, started %d, closed %d:\n%s%s", code, len(l.started), stack.closed, text.String(), errs.String())
		}
	})
	t.Run("its own stack, which fails", func(t *testing.T) {
		t.Parallel()
		f := serve(t, accepted, dispatched)
		stack := newFakeStack(f.URL)
		stack.err = errors.New("the disk is full")
		w := testIO(t)
		w.Local = &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) { return stack, nil }}
		out := &watched{lines: 2, full: make(chan struct{})}
		errs := &bytes.Buffer{}
		w.Out, w.Err = out, errs
		var ending sync.WaitGroup
		ending.Go(func() { <-out.full; _ = stack.Close() })
		if code := Run(t.Context(), []string{"run", "--json", "q"}, w); code != ExitFailed || !strings.Contains(errs.String(), "the disk is full") {
			t.Errorf("got %d %s", code, errs)
		}
		ending.Wait()
	})
}

func TestUp_RunsUntilASignalOrAFailure(t *testing.T) {
	t.Parallel()
	t.Run("until a signal", func(t *testing.T) {
		t.Parallel()
		stack, signals := newFakeStack("http://127.0.0.1:7"), make(chan os.Signal)
		l := &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) { return stack, nil }}
		w, out := testIO(t), &watched{lines: 2, full: make(chan struct{})}
		var text bytes.Buffer
		w.Local, w.Signals, w.Out, w.Err = l, signals, io.MultiWriter(&text, out), &bytes.Buffer{}
		var sending sync.WaitGroup
		sending.Go(func() { <-out.full; signals <- syscall.SIGTERM })
		code := Run(t.Context(), []string{"up", "--data", "/d", "--listen", "127.0.0.1:0", "--grpc-listen", ":0", "--mock-llm", "--auth", "keys", "--root-key", "k"}, w)
		sending.Wait()
		o := l.started[0]
		if code != ExitDone || text.String() != "ready http://127.0.0.1:7\ninspector http://127.0.0.1:7/\n" || stack.closed != 1 {
			t.Errorf("got %d %q, closed %d times", code, text.String(), stack.closed)
		}
		if o.DataDir != "/d" || o.Listen != "127.0.0.1:0" || o.GRPCListen != ":0" || !o.MockLLM || o.Sandbox != "local" || o.Auth != "keys" || o.RootKey != "k" || o.Logger == nil {
			t.Errorf("started with %+v", o)
		}
	})
	for name, c := range map[string]struct {
		stack *fakeStack
		err   error
		says  string
	}{
		"busy":   {nil, ErrDataFolderLocked, "spool: data: another Spool runs on this data folder; `spool run` joins it, or choose another folder with --data\n"},
		"broken": {nil, errors.New("listen: 127.0.0.1:7700 is in use"), "spool: listen: 127.0.0.1:7700 is in use\n"},
		"ended":  {&fakeStack{done: func() chan struct{} { c := make(chan struct{}); close(c); return c }(), err: errors.New("projector: gone"), closed: 1}, nil, "spool: the stack ended: projector: gone\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			w := testIO(t)
			w.Local = &fakeLocal{dir: t.TempDir(), start: func(StackOptions) (Stack, error) {
				if c.stack == nil {
					return nil, c.err
				}
				return c.stack, nil
			}}
			if got := spool(t, w, "up"); got.code != ExitFailed || got.err != c.says {
				t.Errorf("got %+v", got)
			}
		})
	}
}

func TestCursorError_AddsTheRemedy(t *testing.T) {
	t.Parallel()
	tip := uint32(7)
	for _, c := range []struct {
		err  error
		want string
	}{
		{&client.Error{Code: client.CodeCursorAhead, Detail: "x", Tip: &tip}, "after: the session has no event 9 yet; its last is 7 (CURSOR_AHEAD)"},
		{&client.Error{Code: client.CodeCursorExpired, Detail: "x"}, "after: events after 9 are no longer stored; `spool attach SESSION` shows the resulting blocks (CURSOR_EXPIRED)"},
		{errInterrupted, "interrupted"},
	} {
		if got := explainCursorError(c.err, 9).Error(); got != c.want {
			t.Errorf("got %q", got)
		}
	}
}
