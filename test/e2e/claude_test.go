package e2e

import (
	"fmt"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestClaudeCode_AgainstAScriptedModel tests the real command line against a scripted model, through the API of
// clients.
func TestClaudeCode_AgainstAScriptedModel(t *testing.T) {
	t.Parallel()
	needClaude(t)
	c := newClaude(t, harness.Options{Sessions: 2, Executors: 2})
	for name, test := range map[string]func(*testing.T, *harness.Cluster){
		"two turns":      claudeTwoTurns,
		"edit":           claudeEdit,
		"alike":          claudeAlike,
		"plan and skill": claudePlanAndSkill,
		"denied":         claudeDenied,
		"interrupt":      claudeInterrupt,
		"cancel":         claudeCancel,
		"bad request":    claudeBadRequest,
		"unknown model":  claudeUnknownModel,
		"overloaded":     claudeOverloaded,
		"killed":         claudeKilled,
		"deleted":        claudeDeleted,
		"deleted midway": claudeDeletedMidway,
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			test(t, c)
		})
	}
}

// claudeTwoTurns checks that one process answers two turns, and that the second turn knows the first.
func claudeTwoTurns(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	first := k.mustComplete("Remember the number 4711", "I will remember 4711. Ça va, 世界.")
	if s := first.started(); s.Warm || s.Attempt != 1 || s.Policy != "workspace" {
		t.Errorf("the first start was %+v", s)
	}
	second := k.mustComplete("which number was it?", "You asked me to remember 4711.")
	second.checkSameProcess(first)
	if a, b := ended[events.ExecutionCompleted](first), ended[events.ExecutionCompleted](second); b.Usage.InputTokens > 2*a.Usage.InputTokens || b.CostUSD > 2*a.CostUSD {
		t.Errorf("the second turn includes the usage of the first: %+v after %+v", b, a)
	}
	for _, x := range []turn{first, second} {
		said, end := x.kind(events.KindAssistantText), ended[events.ExecutionCompleted](x)
		if len(said) != 1 || said[0].Content != end.Result || said[0].Model != "known-model" {
			t.Errorf("blocks %+v, result %q", said, end.Result)
		}
		var shown struct {
			Usage  events.Usage
			Result string
			Model  string
		}
		k.get("/api/executions/"+x.execution, &shown)
		if shown.Usage != end.Usage || shown.Result != end.Result || shown.Model != "known-model" {
			t.Errorf("the execution shows %+v, its end %+v", shown, end)
		}
	}
}

// claudeAlike checks that the comparison of two sessions with the same query shows no difference except ids, times
// and costs, and that it shows a further turn of one of them. The diff between the first event and the last one shows
// the file that was written.
func claudeAlike(t *testing.T, c *harness.Cluster) {
	one, two := newTalk(t, c, nil), newTalk(t, c, nil)
	for _, k := range []*talk{one, two} {
		k.mustComplete("write and edit a file", "The file is edited.")
	}
	var d struct {
		Equal     bool
		Summary   string
		Event     *events.WireEvent
		WithEvent struct{ Seq uint32 }
	}
	if one.get("/api/sessions/"+one.session+"/compare?with="+two.session, &d); !d.Equal {
		t.Errorf("two runs of one query: %+v", d)
	}
	before := two.s.Cursor
	two.mustComplete("Remember the number 4711", "I will remember 4711.")
	if one.get("/api/sessions/"+one.session+"/compare?with="+two.session, &d); d.Equal || d.Event != nil || d.WithEvent.Seq <= before {
		t.Errorf("after a further turn of one session: %+v", d)
	}
	var diff struct {
		Files struct {
			Summary string
			Files   []struct{ Path, Change, Text string }
		}
	}
	one.get("/api/sessions/"+one.session+"/files", new(any)) // the request waits for the snapshot of the turn
	var state harness.SessionState
	one.get("/api/sessions/"+one.session+"/state", &state)
	one.get(fmt.Sprintf("/api/sessions/%s/diff?from=1&to=%d", one.session, state.Seq), &diff)
	if f := diff.Files.Files; len(f) != 1 || f[0].Path != "hello.txt" || f[0].Change != "added" || !strings.HasSuffix(f[0].Text, "+hello, spool\n") {
		t.Errorf("files: %+v", diff.Files)
	}
}

// claudePlanAndSkill checks that the agent's tasks are one plan, whose items the state has as todos, and that a skill of the workspace is shown when
// the agent has read it.
func claudePlanAndSkill(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, map[string]any{"workspaceFiles": []map[string]any{{"path": ".claude/skills/greet/SKILL.md", "content": "---\nname: greet\ndescription: Greets people\n---\nSay hello.\n"}}})
	x := k.mustComplete("make a plan", "Planned and read.")
	if p := x.kind(events.KindPlan); len(p) != 1 || p[0].Status != events.StatusComplete || !slices.Equal(p[0].Plan.Items, []events.PlanItem{{ItemID: "1", Content: "First step", Status: events.PlanCompleted}}) {
		t.Errorf("plans %+v", p)
	}
	if l := x.kind(events.KindSkillLoad); len(l) != 1 || l[0].Skill.Name != "greet" || !strings.HasSuffix(l[0].Skill.Path, "/.claude/skills/greet") || l[0].ToolUseID == "" {
		t.Errorf("loaded skills %+v", l)
	}
	var state harness.SessionState
	k.get("/api/sessions/"+k.session+"/state", &state)
	if l := state.Todos; len(l) != 1 || !slices.Equal(l[0].Items, []events.TodoItem{{Content: "First step", Status: "completed"}}) {
		t.Errorf("todos %+v", l)
	}
}

// TestClaudeCode_FailsBelowTheLimitOfSubagents tests that an execution fails when a sub-agent below the agent's limit is started, that this
// sub-agent does nothing, and that sub-agents of all allowed levels have a conversation.
func TestClaudeCode_FailsBelowTheLimitOfSubagents(t *testing.T) {
	t.Parallel()
	needClaude(t)
	c := newClaude(t, harness.Options{})
	for limit, levels := range map[int]int{2: 3, 0: 5} { // 0 is the default limit
		apply(c, "agents", fmt.Sprintf("digger-%d", limit), map[string]any{
			"architecture": "claude-code", "model": "known-model", "instructions": "You dig holes.", "limits": map[string]any{"subagentDepth": limit},
		})
		k := newTalkWith(t, c, "", map[string]any{"agent": fmt.Sprintf("digger-%d", limit)})
		var x turn
		if limit > 0 {
			x = k.mustFail("dig a hole", "RECURSION_LIMIT", "3 levels below the agent; the limit is 2")
		} else {
			x = k.mustComplete("dig a hole", "The hole: dug 1")
		}
		spawned := of[events.SubagentSpawned](x)
		if len(spawned) != levels {
			t.Fatalf("limit %d: sub-agents %+v", limit, spawned)
		}
		for i, s := range spawned {
			_, err := os.Stat(filepath.Join(c.WorkspaceFolder(k.session), fmt.Sprintf("level-%d", i+1)))
			ran := slices.ContainsFunc(k.transcript(s.Conversation), func(b events.Block) bool { return b.Kind == events.KindToolResult })
			if allowed := limit == 0 || i < limit; s.Depth != uint32(i+1) || (err == nil) != allowed || ran != allowed { //nolint:gosec // a small number
				t.Errorf("limit %d: sub-agent %+v: its file %v, its call recorded %v", limit, s, err, ran)
			}
		}
		if list := k.conversations(); len(list) != levels+1 || slices.ContainsFunc(list[1:], func(c conversation) bool { return c.Status == "running" }) {
			t.Errorf("limit %d: conversations %+v", limit, list)
		}
	}
}

// claudeEdit checks that tools change files in the workspace, and that a recorded rule allowed each of them.
func claudeEdit(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	x := k.mustComplete("write and edit a file", "The file is edited.")
	content, err := os.ReadFile(filepath.Join(c.WorkspaceFolder(k.session), "hello.txt"))
	if err != nil || string(content) != "hello, spool\n" {
		t.Errorf("hello.txt: %q, %v", content, err)
	}
	uses, results, decided := x.kind(events.KindToolUse), x.kind(events.KindToolResult), of[events.PermissionDecided](x)
	if len(uses) != 2 || len(results) != 2 || len(decided) != 2 {
		t.Fatalf("%d tool uses, %d results, %d decisions\n%s", len(uses), len(results), len(decided), k.s.View)
	}
	for i, tool := range []string{"Write", "Edit"} {
		if d := decided[i]; d.Decision != "allow" || d.Rule != "workspace-path" || d.ToolName != tool || d.ToolUseID != uses[i].ToolUseID {
			t.Errorf("decision %+v of %s", d, uses[i].ToolUseID)
		}
		if u := uses[i]; u.Status != events.StatusComplete || u.ToolName != tool || !strings.Contains(string(u.Input), "hello.txt") {
			t.Errorf("tool use %+v", u)
		}
		if r := results[i]; r.Status != events.StatusComplete || r.IsError || r.ToolUseID != uses[i].ToolUseID || r.Output == "" {
			t.Errorf("tool result %+v", r)
		}
	}
}

// claudeDenied checks that an action that the policy denies is not performed, is reported to the agent and is
// recorded, and that the turn continues.
func claudeDenied(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	path := filepath.Join(t.TempDir(), "outside.txt")
	x := k.mustComplete("write to the path "+path, "outside of the workspace")
	if _, err := os.Stat(path); err == nil {
		t.Errorf("%s was written", path)
	}
	if d := of[events.PermissionDecided](x); len(d) != 1 || d[0].Decision != "deny" || d[0].Rule != "outside-workspace" || d[0].ToolName != "Write" || !strings.Contains(d[0].Reason, path) {
		t.Errorf("decisions %+v", d)
	}
	if r := x.kind(events.KindToolResult); len(r) != 1 || !r[0].IsError || !strings.Contains(r[0].Output, "outside of the workspace") {
		t.Errorf("results %+v", r)
	}
}

// claudeInterrupt checks that an interrupted answer keeps its text, and that the same process continues.
func claudeInterrupt(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	var shown strings.Builder
	execution := k.post("talk for ever", func(w events.WireEvent) bool {
		if w.Type == events.TextDelta {
			shown.Write(w.Data)
		}
		return w.Type != events.TextDelta
	})
	k.c.Call(0, "POST", "/api/sessions/"+k.session+"/interrupt", map[string]any{}, nil)
	first := k.until(execution)
	if end := ended[events.ExecutionCancelled](first); end.Reason != "interrupted" {
		t.Errorf("ended with %+v", end)
	}
	said := first.kind(events.KindAssistantText)
	if len(said) != 1 || !strings.HasPrefix(said[0].Content, "and on") || !strings.Contains(shown.String(), "and on") {
		t.Errorf("blocks %+v after the text %s", said, shown.String())
	}
	k.mustComplete("hello again", "You said: hello again").checkSameProcess(first)
}

// claudeCancel cancels a turn whose tool sleeps, and checks that no process of the tool is left.
func claudeCancel(t *testing.T, c *harness.Cluster) {
	needProc(t)
	k := newTalk(t, c, nil)
	mark := "mark" + strings.ReplaceAll(k.session, "_", "")
	execution := k.post("sleep with the mark "+mark, func(w events.WireEvent) bool {
		return w.Type != (events.PermissionDecided{}).EventType()
	})
	sleeping := func() bool {
		return slices.ContainsFunc(harness.FindProcesses("MARK="+mark), func(p harness.Process) bool { return strings.HasPrefix(p.Command, "sleep 600") })
	}
	harness.Eventually(t, "the command sleeps", sleeping)
	k.c.Call(0, "POST", "/api/executions/"+execution+"/cancel", map[string]any{}, nil)
	first := k.until(execution)
	if end := ended[events.ExecutionCancelled](first); end.Reason != "cancelled" {
		t.Errorf("ended with %+v", end)
	}
	harness.Eventually(t, "no process of the command is left", func() bool { return len(harness.FindProcesses(mark)) == 0 })
	if r := first.kind(events.KindToolUse); len(r) != 1 || !strings.Contains(string(r[0].Input), "sleep 600") {
		t.Errorf("tool uses %+v", r)
	}
	k.mustComplete("hello again", "You said: hello again")
}

// claudeBadRequest checks that an execution fails if the model refuses a request, and that the session continues in
// the same process.
func claudeBadRequest(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	first := k.mustFail("bad request", "MODEL_ERROR", "scripted refusal")
	k.mustComplete("hello again", "You said: hello again").checkSameProcess(first)
}

// claudeUnknownModel checks that an execution fails if the session's model is unknown, and that the next one
// completes after the session got another model.
func claudeUnknownModel(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, map[string]any{"model": "unknown-model"})
	k.mustFail("hello", "MODEL_NOT_FOUND", "unknown-model")
	var s struct{ Detail string }
	if code := k.c.Call(0, "PATCH", "/api/sessions/"+k.session, map[string]any{"sessionOptions": map[string]any{"model": "known-model"}}, &s); code != http.StatusOK && code != http.StatusAccepted {
		t.Fatalf("PATCH answered %d %s", code, s.Detail)
	}
	k.mustComplete("hello again", "You said: hello again")
}

// claudeOverloaded tests a model that is overloaded for longer than the command line retries.
func claudeOverloaded(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	first := k.mustFail("always overloaded", "MODEL_ERROR", "verloaded")
	k.mustComplete("hello again", "You said: hello again").checkSameProcess(first)
}

// claudeKilled kills the agent's process during an answer, and checks that the next process knows the conversation.
func claudeKilled(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	first := k.mustComplete("Remember the number 31", "31")
	execution := k.post("talk for ever", func(w events.WireEvent) bool { return w.Type != events.TextDelta })
	awaitRecord(t, first)
	if err := syscall.Kill(int(first.started().PID), syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	second := k.until(execution)
	second.checkSameProcess(first)
	if end := ended[events.ExecutionFailed](second); end.Code != "AGENT_EXITED" || end.Message == "" {
		t.Errorf("ended with %+v", end)
	}
	if said := second.kind(events.KindAssistantText); len(said) != 1 || said[0].Status != events.StatusError || said[0].Content == "" {
		t.Errorf("blocks %+v", said)
	}
	third := k.mustComplete("which number was it?", "31")
	if s := third.started(); s.PID == first.started().PID || s.Warm {
		t.Errorf("start %+v after the process %d was killed", s, first.started().PID)
	}
}

// awaitRecord waits until the command line's own record has the last line of a turn. The command line writes it about
// 100 ms after it has reported the end of the turn. If it is killed before, it loses the line.
func awaitRecord(t *testing.T, x turn) {
	t.Helper()
	texts, records := x.kind(events.KindAssistantText), of[events.TranscriptWritten](x)
	path, line := records[len(records)-1].Path, texts[len(texts)-1].Anchor
	for deadline := time.Now().Add(harness.WaitTimeout); ; time.Sleep(10 * time.Millisecond) {
		raw, err := os.ReadFile(path)
		if err == nil && line != "" && strings.Contains(string(raw), line) {
			return
		}
		if time.Now().After(deadline) {
			t.Fatalf("the record %s never has the line %q: %v", path, line, err)
		}
	}
}

// claudeDeleted checks that a deleted session ends its sandbox: the runner, the warm agent and the workspace.
func claudeDeleted(t *testing.T, c *harness.Cluster) {
	needProc(t)
	k := newTalk(t, c, nil)
	x := k.mustComplete("hello", "You said: hello")
	k.audit()
	k.s = nil // the deleted session cannot be compared with REST
	before := harness.FindProcesses(c.WorkspaceFolder(k.session), of[events.SandboxReady](x)[0].SandboxID)
	runners := slices.ContainsFunc(before, func(p harness.Process) bool { return strings.HasPrefix(p.Command, "runner serve") })
	agents := slices.ContainsFunc(before, func(p harness.Process) bool { return p.PID == int(x.started().PID) })
	if !runners || !agents {
		t.Fatalf("processes %v before the end, want the runner and the agent %d", before, x.started().PID)
	}
	k.c.DeleteSession(k.session)
	for _, p := range before {
		// An ended process exists until its parent has waited for it.
		harness.Eventually(t, fmt.Sprintf("process %d is gone: %s", p.PID, p.Command), func() bool { return syscall.Kill(p.PID, 0) != nil })
	}
	harness.Eventually(t, "the session is not found", func() bool {
		return k.c.Call(0, "GET", "/api/sessions/"+k.session, nil, &struct{}{}) == http.StatusNotFound
	})
}

// claudeDeletedMidway deletes a session during an answer, which is cancelled with that reason.
func claudeDeletedMidway(t *testing.T, c *harness.Cluster) {
	k := newTalk(t, c, nil)
	execution := k.post("talk for ever", func(w events.WireEvent) bool { return w.Type != events.TextDelta })
	k.s.Close()
	k.s = nil
	k.c.DeleteSession(k.session)
	// The read models of the session are gone, so the test reads the log.
	var ends []events.Payload
	for e, err := range eventlog.SessionEvents(t.Context(), c.Servers.Log, harness.DefaultTenant, k.session) {
		if err != nil {
			t.Fatal(err)
		}
		_, terminated := e.Event.Data.(events.SandboxTerminated)
		if terminated || e.Event.ExecutionID == execution && events.IsTerminal(e.Event.Type()) {
			ends = append(ends, e.Event.Data)
		}
	}
	if len(ends) != 2 {
		t.Fatalf("ends %+v, want the execution's and the sandbox's", ends)
	}
	cancelled, ok := ends[0].(events.ExecutionCancelled)
	terminated, ok2 := ends[1].(events.SandboxTerminated)
	if !ok || cancelled.Reason != "session_deleted" || !ok2 || terminated.Reason != "session_deleted" {
		t.Errorf("ends %+v", ends)
	}
}

// TestClaudeCode_MissingProgramNamesTheRemedy tests that a sandbox without the command line fails with the remedy,
// and that the remedy works.
func TestClaudeCode_MissingProgramNamesTheRemedy(t *testing.T) {
	path := t.TempDir()
	was := os.Getenv("PATH")
	c := newClaude(t, harness.Options{Path: path})
	k := newTalk(t, c, nil)
	for i := range 2 {
		x := k.mustFail(fmt.Sprint("hello ", i), "AGENT_NOT_FOUND", "install it with `npm i -g @anthropic-ai/claude-code`")
		if s := of[events.ExecutionStarted](x); len(s) != 0 {
			t.Errorf("a missing program was started: %+v", s)
		}
	}
	t.Run("installed", func(t *testing.T) {
		t.Setenv("PATH", was)
		program := "#!/bin/sh\nPATH='" + was + "' exec '" + needClaude(t) + "' \"$@\"\n"
		if err := os.WriteFile(filepath.Join(path, "claude"), []byte(program), 0o700); err != nil { //nolint:gosec // an executable script
			t.Fatal(err)
		}
		in := k.inSubtest(t)
		in.mustComplete("hello again", "You said: hello again")
		k.s = in.s
	})
}
