package command

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

const (
	apr1 = "apr_01ARZ3NDEKTSV4RRFFQ69G5FAV"
	apr2 = "apr_01ARZ3NDEKTSV4RRFFQ69G5FAW"
)

// bash is a request to run a command.
func bash(id string) events.ApprovalRequested {
	return events.ApprovalRequested{
		ApprovalID: id, Kind: events.ApprovalTool, ToolName: "Bash", Title: "List\x1b[2J files", Editable: true, Class: "commands that begin with `ls`",
		Preview: events.ApprovalPreview{Command: "ls -l\x1b[2J"}, Input: json.RawMessage(`{"command":"ls -l"}`),
	}
}

func asksTwo(id string) events.ApprovalRequested {
	return events.ApprovalRequested{ApprovalID: id, Kind: events.ApprovalQuestion, Questions: []events.Question{
		{ID: "color", Question: "Which color?", Options: []events.QuestionOption{{Label: "Blue"}, {Label: "Red"}}},
		{ID: "a=b", Question: "Which token?", Secret: true},
	}}
}

// approvalJSON returns an approval request as the API does.
func approvalJSON(t *testing.T, status string, r events.ApprovalRequested) string {
	t.Helper()
	request, err := json.Marshal(r)
	if err != nil {
		t.Fatal(err)
	}
	return fmt.Sprintf(`{"approvalId":%q,"sessionId":%q,"executionId":%q,"conversationId":"main","kind":%q,"toolName":%q,"title":"List\u001b[2J files","status":%q,"requestedSeq":3,"requestedAt":"2026-01-02T03:04:05Z","request":%s}`,
		r.ApprovalID, ses, exe, r.Kind, r.ToolName, status, request)
}

func TestApprovals_SendDecisions(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "args.json")
	if err := os.WriteFile(file, []byte("{\"command\":\"pwd\"}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, c := range []struct {
		args []string
		body string // "" for a usage error
		says string
	}{
		{[]string{"approve", apr1}, `{"decision":"approve"}`, "approved " + apr1},
		{[]string{"approve", apr1, "--all"}, `{"decision":"approve_all"}`, "approved " + apr1},
		{[]string{"approve", apr1, "--arguments", `{"command":"pwd"}`}, `{"decision":"approve","arguments":{"command":"pwd"}}`, "approved " + apr1},
		{[]string{"approve", apr1, "--arguments", "@" + file}, `{"decision":"approve","arguments":{"command":"pwd"}}`, "approved " + apr1},
		{[]string{"approve", apr1, "--arguments", `{`}, "", "arguments: the text is not valid JSON"},
		{[]string{"approve", apr1, "--arguments", "@" + file + ".none"}, "", "arguments: open"},
		{[]string{"approve", apr1, "--all", "--arguments", `{}`}, "", "leave out --all"},
		{[]string{"approve", "exe_1"}, "", "approval"},
		{[]string{"reject", apr1, "--comment", "use rg"}, `{"decision":"reject","comment":"use rg"}`, "rejected " + apr1},
		{[]string{"skip", apr1}, `{"decision":"skip"}`, "skipped " + apr1},
		{[]string{"answer", apr2, "--answer", "color=2", "--answer", "a=b=x=y"}, `{"decision":"answer","answers":{"a=b":["x=y"],"color":["Red"]}}`, "answered " + apr2},
		{[]string{"answer", apr2, "--answer", "1=Blue", "--answer-file", "2=-"}, `{"decision":"answer","answers":{"a=b":["from a pipe"],"color":["Blue"]}}`, "answered " + apr2},
		{[]string{"answer", apr2, "--answer", "color=Green"}, "", "is not one of the options"},
		{[]string{"answer", apr2, "--answer", "shape=2"}, "", "question"},
		{[]string{"answer", apr1, "--answer", "1=2"}, "", "asks no questions"},
		{[]string{"answer", apr1, "--content", `{"n":1}`}, `{"decision":"answer","content":{"n":1}}`, "answered " + apr1},
		{[]string{"answer", apr1}, "", "give --answer"},
		{[]string{"answer", apr1, "--content", `{}`, "--answer", "1=2"}, "", "give --answer"},
	} {
		f := serve(t)
		f.approvals = map[string]string{apr1: approvalJSON(t, "pending", bash(apr1)), apr2: approvalJSON(t, "pending", asksTwo(apr2))}
		w := testIO(t)
		w.In = strings.NewReader("from a pipe\r\nsecond line")
		got := spool(t, w, append([]string{"approvals", c.args[0], "--url", f.URL}, c.args[1:]...)...)
		switch {
		case c.body == "":
			if got.code != ExitUsage || !strings.Contains(got.err, c.says) || f.wasRequested("POST /api/approvals/"+c.args[1]+"/decide") {
				t.Errorf("%v: %+v", c.args, got)
			}
		case got.code != ExitDone || strings.TrimSpace(got.out) != c.says || !f.wasSent(c.body) || !f.wasRequested("POST /api/approvals/"+c.args[1]+"/decide"):
			t.Errorf("%v: %+v, sent %q", c.args, got, f.bodies)
		}
	}
}

func TestApprovals_AreListedAndShown(t *testing.T) {
	t.Parallel()
	f := serve(t)
	f.approvals = map[string]string{apr1: approvalJSON(t, "pending", bash(apr1))}
	got := spool(t, testIO(t), "approvals", "ls", "--url", f.URL, "--session", ses)
	if got.code != ExitDone || !strings.Contains(got.out, apr1) || !strings.Contains(got.out, `List\u{1b}[2J files`) || strings.Contains(got.out, "\x1b") || !f.wasRequested("GET /api/approvals?sessionId="+ses+"&status=open") {
		t.Errorf("%+v, requested %q", got, f.requests)
	}
	if got := spool(t, testIO(t), "approvals", "ls", "--url", f.URL, "--all"); got.code != ExitDone || !f.wasRequested("GET /api/approvals") {
		t.Errorf("%+v, requested %q", got, f.requests)
	}
	got = spool(t, testIO(t), "approvals", "show", "--url", f.URL, apr1)
	for _, want := range []string{"pending", "Bash asks for approval\n", `command: ls -l\u{1b}[2J`, "class: commands that begin with `ls`", `arguments: {"command":"ls -l"}`} {
		if got.code != ExitDone || !strings.Contains(got.out, want) || strings.Contains(got.out, "\x1b") {
			t.Errorf("show lacks %q: %+v", want, got)
		}
	}
	if got := spool(t, testIO(t), "approvals", "show", "--url", f.URL, "--json", apr1); got.code != ExitDone || strings.TrimSpace(got.out) != f.approvals[apr1] {
		t.Errorf("%+v", got)
	}
}

// keyboard is a terminal's input: each element is typed at once. The end of the channel is the end of the input.
type keyboard chan string

func (k keyboard) Read(b []byte) (int, error) {
	s, ok := <-k
	if !ok {
		return 0, io.EOF
	}
	return copy(b, s), nil
}

// screen is a terminal's output.
type screen struct {
	mu   sync.Mutex
	grew *sync.Cond
	text bytes.Buffer
	late bool
}

func newScreen(t *testing.T) *screen {
	s := &screen{}
	s.grew = sync.NewCond(&s.mu)
	timer := time.AfterFunc(20*time.Second, func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		s.late = true
		s.grew.Broadcast()
	})
	t.Cleanup(func() { timer.Stop() })
	return s
}

func (s *screen) Write(b []byte) (int, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.grew.Broadcast()
	return s.text.Write(b)
}

// shows waits until the screen has a text after the former one.
func (s *screen) shows(t *testing.T, text string) {
	t.Helper()
	s.mu.Lock()
	defer s.mu.Unlock()
	for {
		if _, rest, ok := strings.Cut(s.text.String(), text); ok {
			s.text.Reset()
			s.text.WriteString(rest)
			return
		}
		if s.late {
			t.Errorf("the screen does not show %q: %q", text, s.text.String())
			return
		}
		s.grew.Wait()
	}
}

// terminalRun is a run of a command on a fake terminal.
type terminalRun struct {
	t    *testing.T
	f    *fakeServer
	keys keyboard
	*screen
	endInput func()
	signals  chan os.Signal
	raw      sync.Mutex // locked while the terminal is in raw mode
	err      bytes.Buffer
	edit     func(ctx context.Context, text []byte) ([]byte, error)
	columns  int // of the terminal; 0 means 200
}

const prompt = "[?] whole request: "

// run runs a command until its end, while steps run. It returns the exit code.
func (r *terminalRun) run(steps func(), args ...string) int {
	r.t.Helper()
	w := testIO(r.t)
	w.In, w.InTTY, w.Out, w.OutTTY, w.Err, w.Signals, w.Edit = r.keys, true, r.screen, true, &r.err, r.signals, r.edit
	w.Width = func() int { return cmp.Or(r.columns, 200) }
	w.Raw = func() (func() error, error) {
		r.raw.Lock()
		return func() error { r.raw.Unlock(); return nil }, nil
	}
	ctx, cancel := context.WithTimeout(r.t.Context(), 30*time.Second)
	defer cancel()
	code := make(chan int)
	go func() { code <- Run(ctx, append(args, "--url", r.f.URL), w) }()
	steps()
	got := <-code
	if !r.raw.TryLock() {
		r.t.Error("the terminal is left in raw mode")
	}
	return got
}

func newTerminalRun(t *testing.T, begin ...events.Payload) *terminalRun {
	t.Helper()
	f := serve(t, append([]events.Payload{accepted, dispatched, events.ExecutionStarted{Attempt: 1}}, begin...)...)
	f.approvals = map[string]string{apr1: approvalJSON(t, "pending", bash(apr1)), apr2: approvalJSON(t, "pending", bash(apr2))}
	r := &terminalRun{t: t, f: f, keys: make(keyboard, 16), screen: newScreen(t), signals: make(chan os.Signal)}
	r.endInput = sync.OnceFunc(func() { close(r.keys) })
	t.Cleanup(r.endInput) // a read that no prompt needs any more ends with the input
	return r
}

// decided makes a decision on a request end the execution.
func (r *terminalRun) decided(id string) {
	r.f.controls["POST /api/approvals/"+id+"/decide"] = []events.Payload{
		events.ApprovalDecided{ApprovalID: id, Decision: events.DecisionApprove},
		events.ApprovalResolved{ApprovalID: id, Outcome: events.OutcomeApproved, Cause: events.ResolvedByPerson}, events.ExecutionCompleted{},
	}
}

func TestPrompt_SendsWhatTheUserDecides(t *testing.T) {
	t.Parallel()
	type step struct{ shows, keys string }
	elicitation := events.ApprovalRequested{ApprovalID: apr1, Kind: events.ApprovalElicitation, Title: "Your name", Schema: json.RawMessage(`{"type":"object"}`)}
	for name, c := range map[string]struct {
		asked events.ApprovalRequested
		steps []step
		body  string
	}{
		"yes":                    {bash(apr1), []step{{prompt, "y\r"}}, `{"decision":"approve"}`},
		"typed one by one":       {bash(apr1), []step{{prompt, "x"}, {prompt + "x", "\x7f"}, {prompt, "ye"}, {prompt + "ye", "s"}, {prompt + "yes", "\n"}}, `{"decision":"approve"}`},
		"nothing, then yes":      {bash(apr1), []step{{prompt, "\r"}, {prompt, "perhaps\r"}, {prompt, "\x1b[A"}, {prompt, "Y\r"}}, `{"decision":"approve"}`},
		"keys after the line":    {bash(apr1), []step{{prompt, "n\ryes please\r"}, {"what to tell", "use rg\r"}}, `{"decision":"reject","comment":"use rg"}`},
		"no":                     {bash(apr1), []step{{prompt, "n\r"}, {"what to tell", "\r"}}, `{"decision":"reject"}`},
		"all":                    {bash(apr1), []step{{"[a]ll also approves later: commands that begin with `ls`", ""}, {prompt, "a\r"}}, `{"decision":"approve_all"}`},
		"skip":                   {bash(apr1), []step{{prompt, "s\r"}}, `{"decision":"skip"}`},
		"the whole request":      {bash(apr1), []step{{prompt, "?\r"}, {"class: commands", ""}, {prompt, "s\r"}}, `{"decision":"skip"}`},
		"edited as a line":       {bash(apr1), []step{{prompt, "e\r"}, {`arguments: {"command":"ls -l"}`, "\x15{\"command\":\"pwd\"}\r"}, {"[y/n]", "y\r"}}, `{"decision":"approve","arguments":{"command":"pwd"}}`},
		"edited, not approved":   {bash(apr1), []step{{prompt, "e\r"}, {"arguments:", "\x15{}\r"}, {"[y/n]", "n\r"}, {prompt, "s\r"}}, `{"decision":"skip"}`},
		"edited, not changed":    {bash(apr1), []step{{prompt, "e\r"}, {"arguments:", "\r"}, {"not changed", ""}, {prompt, "s\r"}}, `{"decision":"skip"}`},
		"edited to no object":    {bash(apr1), []step{{prompt, "e\r"}, {"arguments:", "\x15[1]\r"}, {"not a JSON object", ""}, {prompt, "s\r"}}, `{"decision":"skip"}`},
		"questions":              {asksTwo(apr1), []step{{"Which color?", ""}, {"Which token?", ""}, {"answer 1 (number or text, /skip, /no or ?):", "Green\r"}, {"not one of the options", ""}, {"or ?):", "2\r"}, {"answer 2 (text", "hunter2"}, {"*******", "\r"}}, `{"decision":"answer","answers":{"a=b":["hunter2"],"color":["Red"]}}`},
		"questions are skipped":  {asksTwo(apr1), []step{{"or ?):", "2\r"}, {"answer 2 (text", "/skip\r"}}, `{"decision":"skip"}`},
		"questions are rejected": {asksTwo(apr1), []step{{"or ?):", "/no\r"}, {"what to tell", "later\r"}}, `{"decision":"reject","comment":"later"}`},
		"an elicitation":         {elicitation, []step{{"an MCP server asks: Your name", ""}, {"or ?):", "Ann\r"}, {"not a JSON object", ""}, {"or ?):", "{\"name\":\"Ann\"}\r"}}, `{"decision":"answer","content":{"name":"Ann"}}`},
	} {
		for _, command := range []string{"run", "attach"} {
			t.Run(name+"/"+command, func(t *testing.T) {
				t.Parallel()
				r := newTerminalRun(t, c.asked)
				r.f.approvals[apr1] = approvalJSON(t, "pending", c.asked)
				r.decided(apr1)
				args := []string{"run", "hello"}
				if command == "attach" {
					args = []string{"attach", ses}
					r.f.controls["POST /api/approvals/"+apr1+"/decide"] = append(r.f.controls["POST /api/approvals/"+apr1+"/decide"], events.SessionClosed{})
					r.f.sessions = true
				}
				code := r.run(func() {
					for _, s := range c.steps {
						r.shows(t, s.shows)
						if s.keys != "" {
							r.keys <- s.keys
						}
					}
				}, args...)
				if code != ExitDone || !r.f.wasSent(c.body) {
					t.Errorf("exit code %d, sent %q; %s", code, r.f.bodies, r.err.String())
				}
				if text := r.text.String(); strings.Contains(text, "\x1b[2J") || strings.Contains(text, "hunter2") {
					t.Errorf("the screen has %q", text)
				}
				if n := r.f.count("POST /api/approvals/" + apr1 + "/decide"); n != 1 {
					t.Errorf("%d decisions were sent", n)
				}
			})
		}
	}
}

func TestPrompt_UsesTheEditor(t *testing.T) {
	t.Parallel()
	r := newTerminalRun(t, bash(apr1))
	r.decided(apr1)
	r.edit = func(_ context.Context, text []byte) ([]byte, error) {
		if r.raw.TryLock() {
			r.raw.Unlock()
		} else {
			t.Error("the editor runs in raw mode")
		}
		if string(text) != "{\n  \"command\": \"ls -l\"\n}\n" {
			t.Errorf("the editor got %q", text)
		}
		return []byte("{\"command\": \"pwd\"}\n"), nil
	}
	code := r.run(func() {
		r.shows(t, prompt)
		r.keys <- "e\r"
		r.shows(t, "changed arguments")
		r.shows(t, "[y/n]")
		r.keys <- "y\r"
	}, "run", "hello")
	if code != ExitDone || !r.f.wasSent(`{"decision":"approve","arguments":{"command": "pwd"}}`) {
		t.Errorf("exit code %d, sent %q", code, r.f.bodies)
	}
}

// TestPrompt_KeysForAnEndedRequestDecideNothing tests that a prompt goes away with its request, and that what was typed
// for it does not decide the next request.
func TestPrompt_KeysForAnEndedRequestDecideNothing(t *testing.T) {
	t.Parallel()
	r := newTerminalRun(t, bash(apr1), bash(apr2))
	code := r.run(func() {
		r.shows(t, prompt)
		r.keys <- "y"
		r.shows(t, prompt+"y")
		r.f.more <- []events.Payload{events.ApprovalDecided{ApprovalID: apr1, Decision: events.DecisionSkip}}
		r.shows(t, "decision of a person: skip")
		r.shows(t, prompt)
		r.keys <- "\r" // for the first request
		r.f.more <- []events.Payload{events.ApprovalRetracted{ApprovalID: apr2, Reason: "withdrawn"}, events.ExecutionCompleted{}}
	}, "run", "hello")
	if code != ExitDone || r.f.count("POST /api/approvals/"+apr1+"/decide")+r.f.count("POST /api/approvals/"+apr2+"/decide") != 0 {
		t.Errorf("exit code %d, requested %q", code, r.f.requests)
	}
}

// TestPrompt_DoesNotDecideByItself tests that Ctrl-C, the end of the input and requests that are decided elsewhere
// decide nothing.
func TestPrompt_DoesNotDecideByItself(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		status string
		steps  func(r *terminalRun)
		code   int
	}{
		"Ctrl-C": {"pending", func(r *terminalRun) {
			r.shows(r.t, prompt)
			r.keys <- "y\x03"
		}, ExitCancelled},
		"Ctrl-D": {"pending", func(r *terminalRun) {
			r.shows(r.t, prompt)
			r.keys <- "\x04"
			r.shows(r.t, "the request stays open")
			r.f.more <- []events.Payload{events.ExecutionCompleted{}}
		}, ExitDone},
		"the end of the input": {"pending", func(r *terminalRun) {
			r.shows(r.t, prompt)
			r.endInput()
			r.shows(r.t, "the request stays open")
			r.f.more <- []events.Payload{events.ExecutionCompleted{}}
		}, ExitDone},
		"decided before": {"decided", func(r *terminalRun) {
			r.keys <- "y\r"
			r.shows(r.t, apr1)
			r.f.more <- []events.Payload{events.ApprovalResolved{ApprovalID: apr1, Outcome: events.OutcomeApproved}, events.ExecutionCompleted{}}
		}, ExitDone},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			r := newTerminalRun(t, bash(apr1))
			r.f.approvals[apr1] = approvalJSON(t, c.status, bash(apr1))
			r.f.controls["POST /api/sessions/"+ses+"/interrupt"] = []events.Payload{events.ApprovalRetracted{ApprovalID: apr1, Reason: "turn_ended"}, events.ExecutionCancelled{Reason: "interrupted"}}
			if code := r.run(func() { c.steps(r) }, "run", "hello"); code != c.code || r.f.count("POST /api/approvals/"+apr1+"/decide") != 0 {
				t.Errorf("exit code %d, requested %q", code, r.f.requests)
			}
		})
	}
}

func TestRun_IsUnattendedWithoutATerminal(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		tty  bool
		flag string
		want bool
	}{{false, "", true}, {false, "--attended", false}, {false, "--unattended", true}, {true, "", false}, {true, "--unattended", true}} {
		f := serve(t, accepted, dispatched, answered, events.ExecutionCompleted{})
		w := testIO(t)
		w.InTTY = c.tty
		args := []string{"run", "--url", f.URL, "q"}
		if c.flag != "" {
			args = append(args, c.flag)
		}
		got := spool(t, w, args...)
		want := `{"content":"q"}`
		if c.want {
			want = `{"content":"q","permissions":{"unattended":true}}`
		}
		if got.code != ExitDone || f.bodies[0] != want {
			t.Errorf("%+v: %+v, posted %q", c, got, f.bodies)
		}
	}
	if got := spool(t, testIO(t), "run", "--attended", "--unattended", "q"); got.code != ExitUsage || !strings.Contains(got.err, "exclude each other") {
		t.Errorf("%+v", got)
	}
}
