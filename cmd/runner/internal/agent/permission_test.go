package agent_test

import (
	"bytes"
	"encoding/json"
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/redact"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// asking is a turn whose policy asks about every call of Bash, and the answers to its requests by key.
type asking struct {
	*agent.Turn
	t       *testing.T
	journal *agenttest.Journal
	answers map[string]agent.PermissionAnswer
}

func newAsking(t *testing.T, change ...func(*agent.TurnConfig)) *asking {
	t.Helper()
	policy, err := permission.New(events.Permissions{Rules: []events.PermissionRule{{Tool: "Bash", Then: events.PermissionAsk}}, TimeoutMs: 5000}, events.ExecutionPermissions{})
	if err != nil {
		t.Fatal(err)
	}
	a := &asking{t: t, journal: &agenttest.Journal{}, answers: map[string]agent.PermissionAnswer{}}
	cfg := agent.TurnConfig{Journal: a.journal, ExecutionID: "exe_1", Policy: policy}
	for _, c := range change {
		c(&cfg)
	}
	a.Turn = agent.NewTurn(t.Context(), cfg)
	return a
}

// ask makes a request to run a command.
func (a *asking) ask(key, command string) {
	input, err := json.Marshal(map[string]string{"command": command})
	if err != nil {
		a.t.Fatal(err)
	}
	a.RequestPermission(events.MainConversation, agent.PermissionRequest{
		Key: key, Call: permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: command}, ToolUseID: "use-" + key,
		Title: command, Preview: events.ApprovalPreview{Command: command}, Input: input, Editable: true,
	}, func(answer agent.PermissionAnswer) {
		if _, twice := a.answers[key]; twice {
			a.t.Errorf("the request %s got two answers", key)
		}
		a.answers[key] = answer
	})
}

// requested returns the request with an index, in the order in which they were recorded, and its id in the log.
func (a *asking) requested(i int) (events.ApprovalRequested, string) {
	a.t.Helper()
	for _, l := range a.journal.Lines() {
		if l.Type != (events.ApprovalRequested{}).EventType() {
			continue
		}
		if i--; i < 0 {
			r := data[events.ApprovalRequested](a.t, l)
			return r, runner.ApprovalID(l.ExecutionID, a.journal.Name(), r.ApprovalID)
		}
	}
	a.t.Fatal("there are fewer requests")
	return events.ApprovalRequested{}, ""
}

func (a *asking) decide(id, decision string, change ...func(*runner.ApprovalDecision)) {
	v := runner.ApprovalDecision{ApprovalDecided: events.ApprovalDecided{ApprovalID: id, Decision: decision}}
	for _, c := range change {
		c(&v)
	}
	a.ApplyVerdict(v)
}

// A request waits until a person decides it; a decision that arrives twice, and one on an unknown request, have no effect.
func TestPermit_WaitsForAVerdict(t *testing.T) {
	t.Parallel()
	for decision, want := range map[string]string{
		events.DecisionApprove: events.OutcomeApproved, events.DecisionReject: events.OutcomeRejected, events.DecisionSkip: events.OutcomeSkipped,
		"something else": events.OutcomeRejected, "": events.OutcomeRejected,
	} {
		a := newAsking(t)
		a.ask("a", "ls")
		r, id := a.requested(0)
		if len(a.answers) != 0 || !a.HasOpenRequest() || r.Kind != events.ApprovalTool || r.TimeoutMs != 5000 || r.ToolUseID != "use-a" || r.Preview.Command != "ls" {
			t.Fatalf("%d answers, request %+v", len(a.answers), r)
		}
		a.decide("apr_unknown", events.DecisionApprove)
		a.decide(id, decision, func(v *runner.ApprovalDecision) { v.Comment, v.Arguments = "why", json.RawMessage(`{}`) })
		a.decide(id, events.DecisionApprove)
		got := a.answers["a"]
		if got.Outcome != want || got.IsAllowed() != (want == events.OutcomeApproved) || a.HasOpenRequest() {
			t.Errorf("%q: answer %+v, want %s", decision, got, want)
		}
		if want == events.OutcomeRejected && got.Message != "The user rejected this call: why" {
			t.Errorf("%q: message %q", decision, got.Message)
		}
		if got := types(a.journal.Lines()); got != "approval_requested approval_resolved" {
			t.Errorf("%q: journal %s", decision, got)
		}
	}
}

// Nobody who decides in time is a rejection, whatever else the verdict says.
func TestPermit_RejectsAfterATimeout(t *testing.T) {
	t.Parallel()
	a := newAsking(t)
	a.ask("a", "ls")
	_, id := a.requested(0)
	a.decide(id, events.DecisionApproveAll, func(v *runner.ApprovalDecision) { v.Timeout = true })
	if got := a.answers["a"]; got.Outcome != events.OutcomeRejected {
		t.Errorf("answer %+v", got)
	}
	a.ask("b", "ls")
	if _, ok := a.answers["b"]; ok {
		t.Error("the timeout approved the class")
	}
}

// Requests are decided one by one. After approve_all the open and the later requests of the class are approved, and no others.
func TestPermit_ApprovesAClass(t *testing.T) {
	t.Parallel()
	a := newAsking(t)
	a.ask("a", "ls a")
	a.ask("b", "ls b")
	a.ask("c", "rm c")
	_, b := a.requested(1)
	a.decide(b, events.DecisionApproveAll)
	a.ask("d", "ls d")
	for key, want := range map[string]bool{"a": true, "b": true, "d": true} {
		if a.answers[key].IsAllowed() != want {
			t.Errorf("%s: %+v", key, a.answers[key])
		}
	}
	if _, ok := a.answers["c"]; ok {
		t.Errorf("a request of another class has the answer %+v", a.answers["c"])
	}
	next := newAsking(t, func(c *agent.TurnConfig) {
		r, _ := a.requested(0)
		c.Approved = []string{r.Class}
	})
	next.ask("a", "ls again")
	if !next.answers["a"].IsAllowed() {
		t.Error("the class is not approved in the next attempt")
	}
}

// The end of a turn retracts the open requests before its last line, and their agents get an answer that does not allow anything.
func TestPermit_RetractsAtTheEnd(t *testing.T) {
	t.Parallel()
	a := newAsking(t)
	a.ask("a", "ls")
	a.ask("b", "ls")
	_, id := a.requested(0)
	a.End(runner.TurnEnd{Outcome: runner.OutcomeInterrupted})
	a.decide(id, events.DecisionApprove)
	a.ask("c", "ls")
	for _, key := range []string{"a", "b", "c"} {
		if got, ok := a.answers[key]; !ok || got.IsAllowed() || got.Message == "" {
			t.Errorf("%s: %+v, %v", key, got, ok)
		}
	}
	if got := types(a.journal.Lines()); got != "approval_requested approval_requested approval_retracted approval_retracted turn_ended" {
		t.Errorf("journal %s", got)
	}
}

// A request that the agent withdraws gets no answer, and a decision on it has no effect.
func TestWithdraw(t *testing.T) {
	t.Parallel()
	a := newAsking(t)
	a.ask("a", "ls")
	_, id := a.requested(0)
	a.WithdrawRequest("unknown")
	a.WithdrawRequest("a")
	a.decide(id, events.DecisionApprove)
	if len(a.answers) != 0 || a.HasOpenRequest() {
		t.Errorf("answers %+v", a.answers)
	}
	if got := types(a.journal.Lines()); got != "approval_requested approval_retracted" {
		t.Errorf("journal %s", got)
	}
}

// Of many requests at once only so many are recorded that clients can show them; the others follow, and none is lost or allowed.
func TestPermit_ManyRequests(t *testing.T) {
	t.Parallel()
	const n = 3000
	a := newAsking(t)
	for i := range n {
		a.ask(fmt.Sprint(i), fmt.Sprint("command-", i))
	}
	count := func(typ events.Type) (c int) {
		for _, l := range a.journal.Lines() {
			if l.Type == typ {
				c++
			}
		}
		return c
	}
	if open := count("approval_requested"); open != events.MaxOpenApprovals {
		t.Fatalf("%d open requests, want %d", open, events.MaxOpenApprovals)
	}
	for i := 0; a.HasOpenRequest(); i++ {
		_, id := a.requested(i)
		a.decide(id, events.DecisionReject)
	}
	if len(a.answers) != n {
		t.Errorf("%d answers, want %d", len(a.answers), n)
	}
	for key, got := range a.answers {
		if got.IsAllowed() {
			t.Errorf("%s is allowed", key)
		}
	}
	if requested, resolved := count("approval_requested"), count("approval_resolved"); requested != resolved || requested != 2100 {
		t.Errorf("%d requested, %d resolved", requested, resolved)
	}
}

// A preview of any size and content is cut, without secrets and without control characters.
func TestPermit_CleansThePreview(t *testing.T) {
	t.Parallel()
	binary := make([]byte, 50<<20)
	for i := range binary {
		binary[i] = byte(i)
	}
	for name, text := range map[string]string{
		"50 MB of bytes": string(binary), "ANSI": "\x1b[2J\x1b[1;1Hharmless\r\u202emil\u2066", "a secret": strings.Repeat("x", 128<<10-3) + "hunter2hunter2",
	} {
		a := newAsking(t, func(c *agent.TurnConfig) { c.Redact = redact.New("hunter2hunter2") })
		input, err := json.Marshal(map[string]string{"text": text})
		if err != nil {
			t.Fatal(err)
		}
		a.RequestPermission(events.MainConversation, agent.PermissionRequest{Key: "a", Call: permission.Call{Tool: "Bash", Kind: permission.KindShell}, Preview: events.ApprovalPreview{Text: text}, Input: input}, func(agent.PermissionAnswer) {})
		r, _ := a.requested(0)
		p := r.Preview
		if len(p.Text) > 128<<10 || strings.ContainsAny(p.Text, "\x1b\r\x00\u202e\u2066") || strings.Contains(p.Text, "hunter") || bytes.Contains(r.Input, []byte("hunter2")) {
			t.Errorf("%s: %d bytes, %.80q", name, len(p.Text), p.Text)
		}
		if name == "50 MB of bytes" && (!p.Truncated || r.Input != nil || !strings.HasPrefix(p.Text, `\u{0}\u{1}`)) {
			t.Errorf("%s: truncated %v, input of %d bytes, %.40q", name, p.Truncated, len(r.Input), p.Text)
		}
	}
}

// Without a person to decide, a request is denied by the policy, and the log says so.
func TestPermit_Unattended(t *testing.T) {
	t.Parallel()
	for unattended, want := range map[string]string{"": events.OutcomeRejected, events.UnattendedDeny: events.OutcomeRejected, events.UnattendedSkip: events.OutcomeSkipped} {
		policy, err := permission.New(events.Permissions{Unattended: unattended, Rules: []events.PermissionRule{{Then: events.PermissionAsk}}}, events.ExecutionPermissions{Unattended: true})
		if err != nil {
			t.Fatal(err)
		}
		a := newAsking(t, func(c *agent.TurnConfig) { c.Policy = policy })
		a.ask("a", "ls")
		if got := a.answers["a"]; got.Outcome != want || got.Message == "" {
			t.Errorf("%q: %+v", unattended, got)
		}
		lines := a.journal.Lines()
		if d := data[events.PermissionDecided](t, lines[0]); len(lines) != 1 || d.Decision != "deny" || d.Rule != permission.RuleUnattended {
			t.Errorf("%q: %+v", unattended, lines)
		}
	}
}

// A decision of the policy names what the call does, without secrets and within limits.
func TestPermissionDecided_NamesTheCall(t *testing.T) {
	t.Parallel()
	long := json.RawMessage(`"` + strings.Repeat("x", 4<<10) + `"`)
	for name, tc := range map[string]struct {
		call  permission.Call
		input json.RawMessage
		want  events.PermissionDecided
	}{
		"a command":        {permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: "echo hunter2hunter2"}, json.RawMessage(`{"command":"x"}`), events.PermissionDecided{Command: "echo [redacted]"}},
		"files":            {permission.Call{Tool: "Edit", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "a"}, {Path: "b"}}}, nil, events.PermissionDecided{Paths: []string{"a", "b"}}},
		"a host":           {permission.Call{Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: []string{"example.com"}}, nil, events.PermissionDecided{Hosts: []string{"example.com"}}},
		"arguments":        {permission.Call{Tool: "mcp__a__b", Kind: permission.KindMCPTool}, json.RawMessage(`{"a":"hunter2hunter2"}`), events.PermissionDecided{Input: json.RawMessage(`{"a":"[redacted]"}`)}},
		"large arguments":  {permission.Call{Tool: "mcp__a__b", Kind: permission.KindMCPTool}, long, events.PermissionDecided{}},
		"broken arguments": {permission.Call{Tool: "mcp__a__b", Kind: permission.KindMCPTool}, json.RawMessage(`{`), events.PermissionDecided{}},
	} {
		a := newAsking(t, func(c *agent.TurnConfig) {
			c.Policy, c.Redact = &permission.Policy{}, redact.New("hunter2hunter2")
		})
		a.Turn.RequestPermission(events.MainConversation, agent.PermissionRequest{Key: "k", Call: tc.call, Input: tc.input}, func(agent.PermissionAnswer) {})
		got := data[events.PermissionDecided](t, a.journal.Lines()[0])
		if got.Command != tc.want.Command || !slices.Equal(got.Paths, tc.want.Paths) || !slices.Equal(got.Hosts, tc.want.Hosts) || string(got.Input) != string(tc.want.Input) {
			t.Errorf("%s: %+v, want %+v", name, got, tc.want)
		}
	}
}
