package builtin_test

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// asking makes a person decide every call of a query.
func asking(q *runner.Query) { q.Permissions = events.Permissions{Default: events.PermissionAsk} }

// write is a call that writes a file.
func write(path, content string) agenttest.ScriptToolCall {
	return agenttest.ScriptToolCall{Name: "write_file", Input: map[string]string{"path": path, "content": content}}
}

// newApprovalBench returns a bench whose model calls the tools in turn.
func newApprovalBench(t *testing.T, tools ...agenttest.ScriptToolCall) *agenttest.Harness {
	t.Helper()
	return agenttest.NewHarnessWithScript(t, subject(), agenttest.ScriptOfRules(t, agenttest.ScriptRule("go", tools...)))
}

// isMissing fails the test if the file exists in the workspace.
func isMissing(t *testing.T, b *agenttest.Harness, name string) {
	t.Helper()
	if _, err := os.Lstat(filepath.Join(b.Folders.Workspace, name)); !os.IsNotExist(err) {
		t.Errorf("%s exists, or %v", name, err)
	}
}

func TestApproval_ApprovedCallRuns(t *testing.T) {
	t.Parallel()
	b := newApprovalBench(t, write("a.txt", "new\n"))
	b.WriteFile("a.txt", "old\n")
	x := b.RunTurnDeciding("go", asking, func(events.ApprovalRequested) events.ApprovalDecided {
		if got := b.ReadFile("a.txt"); got != "old\n" {
			t.Errorf("the file has %q before the decision", got)
		}
		return events.ApprovalDecided{Decision: events.DecisionApprove}
	})
	if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || b.ReadFile("a.txt") != "new\n" {
		t.Fatalf("ended %+v, file %q%s", e, b.ReadFile("a.txt"), x)
	}
	r := x.ApprovalRequests()[0]
	if r.Kind != events.ApprovalTool || r.ToolName != "write_file" || r.ToolUseID == "" || !r.Editable || r.Title != "Write a.txt" || r.Rule != "default" {
		t.Errorf("request %+v", r)
	}
	if !strings.Contains(r.Preview.Diff, "-old\n+new\n") || len(r.Preview.Paths) != 1 || !strings.Contains(string(r.Schema), `"encoding"`) {
		t.Errorf("preview %+v, schema %s", r.Preview, r.Schema)
	}
	var input map[string]string
	if err := json.Unmarshal(r.Input, &input); err != nil || input["path"] != "a.txt" || input["content"] != "new\n" {
		t.Errorf("input %s, %v", r.Input, err)
	}
	if got := x.ApprovalResolutions(); len(got) != 1 || got[0].Outcome != events.OutcomeApproved || len(x.PermissionDecisions()) != 0 {
		t.Errorf("resolutions %+v, decisions of the policy %+v", got, x.PermissionDecisions())
	}
	x.CheckErrorCodes()
}

func TestApproval_DeniedCallDoesNotRun(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct {
		decision events.ApprovalDecided
		outcome  string
		says     string
	}{
		"reject with a comment": {events.ApprovalDecided{Decision: events.DecisionReject, Comment: "use b.txt"}, events.OutcomeRejected, "PERMISSION_DENIED: The user rejected this call: use b.txt"},
		"skip":                  {events.ApprovalDecided{Decision: events.DecisionSkip}, events.OutcomeSkipped, "PERMISSION_DENIED: The user skipped this call"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newApprovalBench(t, write("a.txt", "x"))
			x := b.RunTurnDeciding("go", asking, agenttest.AlwaysDecide(tc.decision))
			isMissing(t, b, "a.txt")
			if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || !strings.Contains(e.Result, tc.says) {
				t.Errorf("ended %+v", e)
			}
			if r := x.FinishedBlocks(events.KindToolResult); len(r) != 1 || !r[0].IsError || !strings.HasPrefix(r[0].Output, tc.says) {
				t.Errorf("results %+v", r)
			}
			if got := x.ApprovalResolutions(); len(got) != 1 || got[0].Outcome != tc.outcome {
				t.Errorf("resolutions %+v", got)
			}
		})
	}
}

func TestApproval_ApproveAllCoversTheClass(t *testing.T) {
	t.Parallel()
	b := newApprovalBench(t, write("a.txt", "1"), write("b.txt", "2"))
	x := b.RunTurnDeciding("go", asking, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApproveAll}))
	if b.ReadFile("a.txt") != "1" || b.ReadFile("b.txt") != "2" {
		t.Errorf("files %q, %q", b.ReadFile("a.txt"), b.ReadFile("b.txt"))
	}
	if n, d := len(x.ApprovalRequests()), x.PermissionDecisions(); n != 1 || len(d) != 1 || d[0].Decision != events.PermissionAllow {
		t.Errorf("%d requests, decisions of the policy %+v", n, d)
	}
}

func TestApproval_ChangedArguments(t *testing.T) {
	t.Parallel()
	for name, tc := range map[string]struct{ arguments, says, written string }{
		"valid":         {`{"path":"b.txt","content":"changed"}`, `[the user changed the arguments of this call to {"path":"b.txt","content":"changed"}]`, "b.txt"},
		"outside":       {`{"path":"../b.txt","content":"x"}`, "PERMISSION_DENIED: [the user changed", ""},
		"through link":  {`{"path":"out/b.txt","content":"x"}`, "PERMISSION_DENIED: [the user changed", ""},
		"unknown field": {`{"file":"b.txt"}`, "EXECUTION_ERROR: [the user changed", ""},
		"not an object": {`[]`, "EXECUTION_ERROR: [the user changed", ""},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newApprovalBench(t, write("a.txt", "asked"))
			away := t.TempDir()
			if err := os.Symlink(away, filepath.Join(b.Folders.Workspace, "out")); err != nil {
				t.Fatal(err)
			}
			x := b.RunTurnDeciding("go", asking, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApprove, Arguments: json.RawMessage(tc.arguments)}))
			isMissing(t, b, "a.txt")
			if r := x.FinishedBlocks(events.KindToolResult); len(r) != 1 || !strings.HasPrefix(r[0].Output, tc.says) || r[0].IsError != (tc.written == "") {
				t.Errorf("results %+v, want %q", r, tc.says)
			}
			if use := x.FinishedBlocks(events.KindToolUse); len(use) != 1 || !strings.Contains(string(use[0].Input), "asked") {
				t.Errorf("tool_use %+v", use)
			}
			if tc.written != "" && b.ReadFile(tc.written) != "changed" {
				t.Errorf("%s has %q", tc.written, b.ReadFile(tc.written))
			}
			isMissing(t, b, "../b.txt")
			if left, err := os.ReadDir(away); err != nil || len(left) > 0 {
				t.Errorf("outside are %v, %v", left, err)
			}
		})
	}
}

func TestApproval_UnattendedExecutionAsksNobody(t *testing.T) {
	t.Parallel()
	for unattended, says := range map[string]string{
		"": "PERMISSION_DENIED: A person would have to approve", events.UnattendedDeny: "PERMISSION_DENIED: A person would have to approve",
		events.UnattendedSkip: "PERMISSION_DENIED: The user skipped this call",
	} {
		t.Run("unattended "+unattended, func(t *testing.T) {
			t.Parallel()
			b := newApprovalBench(t, write("a.txt", "x"))
			x := b.RunTurnOK("go", says, func(q *runner.Query) {
				asking(q)
				q.Permissions.Unattended, q.ExecutionPermissions.Unattended = unattended, true
			})
			isMissing(t, b, "a.txt")
			if d := x.PermissionDecisions(); len(x.ApprovalRequests()) != 0 || len(d) != 1 || d[0].Decision != events.PermissionDeny || d[0].Rule != "unattended" {
				t.Errorf("requests %+v, decisions %+v", x.ApprovalRequests(), d)
			}
		})
	}
}

// The first two of three calls wait, the third is allowed. The second is decided first.
func TestApproval_WaitingCallsDoNotHoldUpOthers(t *testing.T) {
	t.Parallel()
	b := agenttest.NewHarnessWithScript(t, subject(), agenttest.ScriptOfRules(t, `  - match: {user: go}
    steps:
      - tools:
          - {name: write_file, input: {path: one, content: "1"}}
          - {name: run_code, input: {language: bash, code: "echo 2 > two"}}
          - {name: list_directory, input: {path: .}}
      - text: 'Results: {{range results}}[{{.}}]{{end}}'
`))
	x := b.MustStartTurn("go", func(q *runner.Query) {
		asking(q)
		q.Permissions.Tools = map[string]string{"list_directory": events.PermissionAllow}
	})
	x = b.ReadUntilRequests(2, x)
	finished := func(n int) func(runner.JournalLine) bool {
		return func(l runner.JournalLine) bool {
			if l.Type == (events.BlockComplete{}).EventType() && decode[events.BlockComplete](t, l).Block.Kind == events.KindToolResult {
				n--
			}
			return n == 0
		}
	}
	x = b.ReadUntil("result of the allowed call", finished(1), x)
	isMissing(t, b, "one")
	isMissing(t, b, "two")
	requests := x.ApprovalRequests()
	b.DecideRequest(requests[1], events.ApprovalDecided{Decision: events.DecisionApprove})
	x = b.ReadUntil("result of the second call", finished(1), x)
	isMissing(t, b, "one")
	if b.ReadFile("two") != "2\n" {
		t.Errorf("the second call wrote %q", b.ReadFile("two"))
	}
	b.DecideRequest(requests[0], events.ApprovalDecided{Decision: events.DecisionReject, Comment: "not one"})
	x = b.ReadToEnd(x)
	isMissing(t, b, "one")
	if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || !strings.Contains(e.Result, "not one") || !strings.Contains(e.Result, "[exit status 0]") {
		t.Errorf("ended %+v", e)
	}
	var order []string
	for _, r := range x.FinishedBlocks(events.KindToolResult) {
		order = append(order, r.ToolUseID)
	}
	uses := x.FinishedBlocks(events.KindToolUse)
	if want := []string{uses[2].ToolUseID, uses[1].ToolUseID, uses[0].ToolUseID}; strings.Join(order, " ") != strings.Join(want, " ") {
		t.Errorf("results of %v, want %v", order, want)
	}
	agenttest.CheckAnchors(t, x.Lines, events.KindToolResult)
	agenttest.CheckJournal(t, x.Lines)
}

func TestApproval_InterruptWhileWaiting(t *testing.T) {
	t.Parallel()
	b := newApprovalBench(t, write("a.txt", "x"))
	x := b.ReadUntilRequests(1, b.MustStartTurn("go", asking))
	b.Supervisor.Interrupt()
	x = b.ReadToEnd(x)
	isMissing(t, b, "a.txt")
	if e := x.Ended(); e.Outcome != runner.OutcomeInterrupted {
		t.Errorf("ended %+v", e)
	}
	if got := x.ApprovalRetractions(); len(got) != 1 || got[0].ApprovalID != x.ApprovalRequests()[0].ApprovalID || len(x.ApprovalResolutions()) != 0 {
		t.Errorf("retractions %+v, resolutions %+v", got, x.ApprovalResolutions())
	}
	if r := x.FinishedBlocks(events.KindToolResult); len(r) != 1 || !strings.Contains(r[0].Output, "interrupted by the user before the call was run") {
		t.Errorf("results %+v", r)
	}
	// A late decision has no effect, and the same process asks again.
	b.DecideRequest(x.ApprovalRequests()[0], events.ApprovalDecided{Decision: events.DecisionApprove})
	x = b.RunTurnDeciding("go", asking, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApprove}))
	if !x.Started().Warm || len(x.ApprovalRequests()) != 1 || b.ReadFile("a.txt") != "x" {
		t.Errorf("the turn after the interrupt: %s", x)
	}
}

func TestApproval_NextAttemptAsksAgain(t *testing.T) {
	t.Parallel()
	b := newApprovalBench(t, write("a.txt", "x"))
	x := b.ReadUntilRequests(1, b.MustStartTurn("go", asking))
	session := x.TranscriptWritten().AgentSessionID
	b.Supervisor.Kill(t.Context())
	x = b.ReadToEnd(x)
	if e := x.Ended(); e.Outcome != runner.OutcomeKilled || len(x.ApprovalRetractions()) != 1 || len(x.ApprovalResolutions()) != 0 {
		t.Errorf("ended %+v, retractions %+v, resolutions %+v", e, x.ApprovalRetractions(), x.ApprovalResolutions())
	}
	checkNoResult(t, x.TranscriptWritten().Path)
	x = b.RunTurnDeciding("go", func(q *runner.Query) {
		asking(q)
		q.Attempt, q.Resume = 2, session
	}, agenttest.AlwaysDecide(events.ApprovalDecided{Decision: events.DecisionApprove}))
	if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || len(x.ApprovalRequests()) != 1 || b.ReadFile("a.txt") != "x" {
		t.Errorf("the next attempt ended %+v, file %q%s", e, b.ReadFile("a.txt"), x)
	}
}

// checkNoResult checks that the transcript has a call and no result of it.
func checkNoResult(t *testing.T, transcript string) {
	t.Helper()
	raw, err := os.ReadFile(transcript)
	if err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(string(raw), `"calls"`) || strings.Contains(string(raw), `"role":"tool"`) {
		t.Errorf("transcript %s", raw)
	}
}

// A process whose stdin ends while a call waits has got no decision.
func TestApproval_EndOfStdinIsNoDecision(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, calls("call_1", "write_file", `{"path":"a.txt","content":"x"}`), says("never"))
	place := newPlace(t)
	s := startSpool(t, e, place, "", nil)
	asking(&s.query)
	lines := s.turn("go", func(report string) {
		if strings.Contains(report, `"op":"permission"`) {
			if err := s.orders.Close(); err != nil {
				t.Error(err)
			}
		}
	})
	if end := ended(t, lines); end.Outcome != runner.OutcomeInterrupted || len(e.seen()) != 1 {
		t.Errorf("ended %+v after %d requests to the model", end, len(e.seen()))
	}
	if _, err := os.Lstat(filepath.Join(place.Workspace, "a.txt")); !os.IsNotExist(err) {
		t.Errorf("the call was run: %v", err)
	}
	for _, l := range lines {
		if l.Type == (events.TranscriptWritten{}).EventType() {
			checkNoResult(t, decode[events.TranscriptWritten](t, l).Path)
			return
		}
	}
	t.Error("no transcript_written")
}

// A reply to another request, or to one of an earlier turn, allows nothing.
func TestApproval_UnknownReplyIsIgnored(t *testing.T) {
	t.Parallel()
	e := newEndpoint(t, calls("call_1", "write_file", `{"path":"a.txt","content":"x"}`), says("never"))
	place := newPlace(t)
	s := startSpool(t, e, place, "", nil)
	asking(&s.query)
	lines := s.turn("go", func(report string) {
		if !strings.Contains(report, `"op":"permission"`) {
			return
		}
		for _, id := range []string{"", "p0.1", "p1.2"} {
			if _, err := fmt.Fprintf(s.orders, `{"op":"permission","permission":{"id":%q,"allowed":true}}`+"\n", id); err != nil {
				t.Error(err)
			}
		}
		if err := s.session.Interrupt(); err != nil {
			t.Error(err)
		}
	})
	if end := ended(t, lines); end.Outcome != runner.OutcomeInterrupted {
		t.Errorf("ended %+v", end)
	}
	if _, err := os.Lstat(filepath.Join(place.Workspace, "a.txt")); !os.IsNotExist(err) {
		t.Errorf("the call was run: %v", err)
	}
}

// The tools refuse paths outside the workspace, so nobody is asked about them.
func TestApproval_OutsideIsDeniedUnderEveryPolicy(t *testing.T) {
	t.Parallel()
	for name, p := range map[string]events.Permissions{
		"asks":   {Default: events.PermissionAsk},
		"allows": {Rules: []events.PermissionRule{{Then: events.PermissionAllow}}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := newApprovalBench(t, agenttest.ScriptToolCall{Name: "read_file", Input: map[string]string{"path": "/etc/hostname"}})
			x := b.RunTurnOK("go", "PERMISSION_DENIED: /etc/hostname is outside the workspace", func(q *runner.Query) { q.Permissions = p })
			if d := x.PermissionDecisions(); len(d) != 1 || d[0].Rule != "workspace.outside" || d[0].Decision != events.PermissionDeny {
				t.Errorf("decisions %+v", d)
			}
		})
	}
}

func TestApproval_PolicyDecidesByRule(t *testing.T) {
	t.Parallel()
	b := newApprovalBench(t, write("a.txt", "x"), agenttest.ScriptToolCall{Name: "run_code", Input: map[string]string{"language": "bash", "code": "touch ran"}})
	x := b.RunTurn("go", func(q *runner.Query) {
		q.Permissions = events.Permissions{Rules: []events.PermissionRule{{Tool: "run_*", Then: events.PermissionDeny}, {Tool: "write_file", Then: events.PermissionAllow}}}
	})
	isMissing(t, b, "ran")
	d := x.PermissionDecisions()
	if len(d) != 2 || d[0].Decision != events.PermissionAllow || d[0].Rule != "rules[1]" || d[1].Decision != events.PermissionDeny || d[1].Rule != "rules[0]" || b.ReadFile("a.txt") != "x" {
		t.Errorf("decisions %+v", d)
	}
	if r := x.FinishedBlocks(events.KindToolResult); len(r) != 2 || !strings.HasPrefix(r[1].Output, "PERMISSION_DENIED: "+d[1].Reason) {
		t.Errorf("results %+v", r)
	}
}

// A tool of an MCP server is destructive if the server says so.
func TestApproval_ServerTools(t *testing.T) {
	t.Parallel()
	server := mcp.NewServer(&mcp.Implementation{Name: "desk", Version: "1"}, nil)
	destroys := true
	run := func(context.Context, *mcp.CallToolRequest, struct{ Drawer string }) (*mcp.CallToolResult, any, error) {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: "emptied"}}}, nil, nil
	}
	mcp.AddTool(server, &mcp.Tool{Name: "empty", Annotations: &mcp.ToolAnnotations{Title: "Empty a drawer", DestructiveHint: &destroys}}, run)
	mcp.AddTool(server, &mcp.Tool{Name: "open"}, run)
	web := httptest.NewServer(mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil))
	t.Cleanup(web.Close)
	for name, want := range map[string]struct {
		title, words string
		destructive  bool
	}{"empty": {"empty (MCP server desk)", "Empty a drawer", true}, "open": {"open (MCP server desk)", "", false}} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			e := newEndpoint(t, calls("call_1", "mcp__desk__"+name, `{"Drawer":"left"}`), says("ok"))
			s := startSpool(t, e, newPlace(t), "", nil)
			asking(&s.query)
			s.query.MCPServers = []runner.MCPServer{{Name: "desk", Type: "http", URL: web.URL, TimeoutMs: 30_000}}
			var destructive, asked bool
			lines := s.turn("go", func(report string) {
				if !strings.Contains(report, `"op":"permission"`) {
					return
				}
				asked, destructive = true, strings.Contains(report, `"destructive":true`)
				if err := s.session.Interrupt(); err != nil {
					t.Error(err)
				}
			})
			r := approvalRequests(t, lines)
			if !asked || destructive != want.destructive || len(r) != 1 {
				t.Fatalf("asked %v, destructive %v, requests %+v", asked, destructive, r)
			}
			if r[0].Title != want.title || r[0].Reason != want.words || r[0].Preview.Text != "{\n  \"Drawer\": \"left\"\n}" || !r[0].Editable || !strings.Contains(string(r[0].Schema), "Drawer") {
				t.Errorf("request %+v", r[0])
			}
		})
	}
}

// approvalRequests returns the requests in the lines.
func approvalRequests(t *testing.T, lines []runner.JournalLine) (requests []events.ApprovalRequested) {
	t.Helper()
	for _, l := range lines {
		if l.Type == (events.ApprovalRequested{}).EventType() {
			requests = append(requests, decode[events.ApprovalRequested](t, l))
		}
	}
	return requests
}
