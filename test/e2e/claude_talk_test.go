package e2e

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// talk is a session and a client's stream of it.
type talk struct {
	t           *testing.T
	c           *harness.Cluster
	session     string
	s           *harness.Stream
	reportsCost bool // the agent reports the cost of a turn
}

// newTalk creates a session of Claude Code. At the end of the test, the stream is compared with REST.
func newTalk(t *testing.T, c *harness.Cluster, more map[string]any) *talk {
	t.Helper()
	return newTalkWith(t, c, "claude-code", more)
}

// newTalkWith is like newTalk for any architecture.
func newTalkWith(t *testing.T, c *harness.Cluster, architecture string, more map[string]any) *talk {
	t.Helper()
	c = c.ForSubtest(t)
	k := &talk{t: t, c: c, session: c.CreateSession(architecture, more), reportsCost: architecture == "claude-code"}
	t.Cleanup(k.audit)
	return k
}

// inSubtest returns the same talk for a subtest.
func (k *talk) inSubtest(t *testing.T) *talk {
	return &talk{t: t, c: k.c.ForSubtest(t), session: k.session, s: k.s, reportsCost: k.reportsCost}
}

// turn is a query with everything that the stream showed of it.
type turn struct {
	t         *testing.T
	execution string
	end       events.WireEvent
	events    []events.WireEvent
	blocks    []events.Block
}

// post posts a message, and reads the stream as long as more returns true.
func (k *talk) post(text string, more func(events.WireEvent) bool) string {
	k.t.Helper()
	s, err := k.c.JoinSocket(0, k.session, k.s)
	if err != nil {
		k.t.Fatal(err)
	}
	if k.s = s; more == nil {
		more = func(events.WireEvent) bool { return false }
	}
	execution := k.c.PostMessage(k.session, text)
	for wanted := true; wanted; {
		w, err := s.Next()
		if err != nil {
			k.t.Fatalf("%s: %v; %s", text, err, k.c.DescribeStoppedStream(k.session, s))
		}
		if w.ExecutionID == execution && events.IsTerminal(w.Type) {
			k.t.Fatalf("%s: ended too early with %s %s\n%s", text, w.Type, w.Data, s.View)
		}
		wanted = w.ExecutionID != execution || more(w)
	}
	return execution
}

// until reads the stream until the end of an execution. The end must leave no block open.
func (k *talk) until(execution string) turn {
	k.t.Helper()
	end, err := k.s.ReadUntilEnd(execution)
	if err != nil {
		k.t.Fatalf("%v; %s", err, k.c.DescribeStoppedStream(k.session, k.s))
	}
	k.s.Close()
	x := turn{t: k.t, execution: execution, end: end}
	for _, e := range k.s.Events {
		if e.ExecutionID == execution {
			x.events = append(x.events, e)
		}
	}
	for _, b := range k.s.View.Blocks() {
		if b.ExecutionID == execution {
			x.blocks = append(x.blocks, b)
		}
		if b.Status != events.StatusComplete && b.Status != events.StatusError {
			k.t.Errorf("block %s (%s) is %q after the end", b.ID, b.Kind, b.Status)
		}
	}
	return x
}

func (k *talk) ask(text string) turn {
	k.t.Helper()
	return k.until(k.post(text, nil))
}

// mustComplete posts a text, and checks that the answer contains want and that the turn has its usage.
func (k *talk) mustComplete(text, want string) turn {
	k.t.Helper()
	x := k.ask(text)
	end := ended[events.ExecutionCompleted](x)
	if !strings.Contains(end.Result, want) {
		k.t.Fatalf("%s: answered %q, want %q in it", text, end.Result, want)
	}
	if end.Usage.InputTokens == 0 || end.Usage.OutputTokens == 0 || k.reportsCost && end.CostUSD == 0 {
		k.t.Errorf("%s: usage %+v, cost %v", text, end.Usage, end.CostUSD)
	}
	return x
}

// mustFail posts a text, and checks that the turn fails with a code and a message that contains words.
func (k *talk) mustFail(text, code, words string) turn {
	k.t.Helper()
	x := k.ask(text)
	if end := ended[events.ExecutionFailed](x); end.Code != code || !strings.Contains(end.Message, words) {
		k.t.Errorf("%s: failed with %s: %s; want %s with %q", text, end.Code, end.Message, code, words)
	}
	return x
}

// ended returns the last event of a turn, which must be a T.
func ended[T events.Payload](x turn) T {
	x.t.Helper()
	all := of[T](x)
	if len(all) != 1 || x.end.Type != all[0].EventType() {
		var want T
		x.t.Fatalf("ended with %s %s, want one %s", x.end.Type, x.end.Data, want.EventType())
	}
	return all[0]
}

// of returns the events of type T of a turn.
func of[T events.Payload](x turn) (all []T) {
	x.t.Helper()
	var want T
	for _, e := range x.events {
		if e.Type != want.EventType() {
			continue
		}
		p, ok := e.Event().Data.(T)
		if !ok {
			x.t.Fatalf("%s cannot be decoded: %s", e.Type, e.Data)
		}
		all = append(all, p)
	}
	return all
}

// started returns the only start of a turn.
func (x turn) started() events.ExecutionStarted {
	x.t.Helper()
	all := of[events.ExecutionStarted](x)
	if len(all) != 1 || all[0].PID == 0 {
		x.t.Fatalf("starts %+v", all)
	}
	return all[0]
}

// checkSameProcess checks that a turn was answered by the warm process of another turn.
func (x turn) checkSameProcess(before turn) {
	x.t.Helper()
	if a, b := before.started(), x.started(); b.PID != a.PID || !b.Warm {
		x.t.Errorf("start %+v, want the warm process %d", b, a.PID)
	}
}

func (x turn) kind(kind events.BlockKind) (all []events.Block) {
	for _, b := range x.blocks {
		if b.Kind == kind {
			all = append(all, b)
		}
	}
	return all
}

// audit compares the stream with REST: both must have the same events and blocks, and each query must have one end,
// which is that of its execution.
func (k *talk) audit() {
	if k.s == nil || k.t.Failed() {
		return
	}
	var list []events.WireEvent
	for next, tip := uint32(0), uint32(1); next < tip; {
		var page struct {
			Events    []events.WireEvent
			Next, Tip uint32
		}
		k.get(fmt.Sprintf("/api/sessions/%s/events?limit=7&after=%d", k.session, next), &page)
		list, next, tip = append(list, page.Events...), page.Next, page.Tip
	}
	if len(list) < len(k.s.Events) {
		k.t.Fatalf("REST has %d events, the stream had %d", len(list), len(k.s.Events))
	}
	ends := map[string][]events.Type{}
	for i, e := range list {
		if i < len(k.s.Events) && text(k.t, e) != text(k.t, k.s.Events[i]) {
			k.t.Errorf("REST has\n%s\nthe stream had\n%s", text(k.t, e), text(k.t, k.s.Events[i]))
		}
		if e.Type == (events.MessageAccepted{}).EventType() {
			ends[e.ExecutionID] = nil
		}
		if events.IsTerminal(e.Type) {
			ends[e.ExecutionID] = append(ends[e.ExecutionID], e.Type)
		}
	}
	for execution, types := range ends {
		var x struct{ Phase string }
		k.get("/api/executions/"+execution, &x)
		if len(types) != 1 || string(types[0]) != "execution_"+x.Phase {
			k.t.Errorf("execution %s is %s, and ended with %v", execution, x.Phase, types)
		}
	}
	var reload struct{ Blocks []events.Block }
	k.get("/api/sessions/"+k.session+"/blocks", &reload)
	if got, want := text(k.t, reload.Blocks), text(k.t, k.s.View.Blocks()); got != want {
		k.t.Errorf("a reload shows\n%s\nthe stream\n%s", got, want)
	}
	k.states(list)
}

// states compares the state at every event with the fold of the log up to there, and with the view of a client at
// that event.
func (k *talk) states(list []events.WireEvent) {
	k.t.Helper()
	view := blocks.NewBlockView()
	for n, w := range list {
		view.Apply(w.Event())
		state, err := harness.ReadState(func(path string, out any) error { k.get(path, out); return nil }, k.session, w.Seq, 200)
		if err == nil {
			err = harness.CompareState(state, list[:n+1], view.Blocks())
		}
		if err != nil {
			k.t.Fatal(err)
		}
	}
}

func (k *talk) get(path string, out any) {
	k.t.Helper()
	if code := k.c.Call(0, "GET", path, nil, out); code != http.StatusOK {
		k.t.Fatalf("GET %s answered %d", path, code)
	}
}

func text(t *testing.T, v any) string {
	t.Helper()
	b, err := json.Marshal(v)
	if err != nil {
		t.Fatal(err)
	}
	return string(b)
}

// newClaude returns a cluster with the real command line of Claude Code and its script.
func newClaude(t *testing.T, opts harness.Options) *harness.Cluster {
	t.Helper()
	opts.Script = script(t, "claude.yaml")
	opts.Executor = executor.Config{AnthropicModel: "known-model"}
	return harness.New(t, opts)
}

// needClaude returns the path of Claude Code's command line. It skips the test if it is not installed.
func needClaude(t *testing.T) string {
	t.Helper()
	path, err := exec.LookPath("claude")
	switch {
	case err == nil:
		return path
	case os.Getenv("CI") == "true":
		t.Fatalf("no Claude Code: %v; scripts/install tests installs it", err)
	}
	t.Skipf("no Claude Code: %v; install it with `npm i -g @anthropic-ai/claude-code`", err)
	return ""
}

// needProc skips a test that lists processes on a machine without /proc.
func needProc(t *testing.T) {
	t.Helper()
	if len(harness.FindProcesses("")) == 0 {
		t.Skip("the test needs /proc")
	}
}
