package e2e

import (
	"encoding/json"
	"flag"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/test/e2e/harness"
)

var approvalsTable = flag.String("approvals", "", "run TestApprovals for every agent, and write its table to this file")

// asker is an agent that asks before it acts.
type asker struct {
	architecture string
	command      []string // of architecture acp
	preset       string   // of its model settings
	docker       bool
	image        string // of the sandbox; "" for the default
	comment      bool   // the model receives the comment of a rejection in the same turn
	questions    bool   // the agent can ask the user questions
	arguments    string // changed arguments of a call that creates changed.txt; "" if the agent does not take changed arguments
}

// askers returns the agents to test: all of them with -approvals, otherwise the built-in one and Claude Code.
func askers() map[string]asker {
	list := map[string]asker{
		"spool":       {architecture: "spool", comment: true, arguments: `{"language":"bash","code":"touch changed.txt"}`},
		"claude-code": {architecture: "claude-code", comment: true, questions: true, arguments: `{"command":"touch changed.txt","description":"Run it"}`},
	}
	if *approvalsTable == "" {
		return list
	}
	list["codex"] = asker{architecture: "codex", comment: true, questions: true}
	list["opencode"] = asker{architecture: "opencode"}
	list["qwen over acp"] = asker{architecture: "acp", command: []string{"qwen", "--acp"}, preset: "qwen"}
	for name, architecture := range map[string]string{
		"spool in docker": "spool", "claude-code in docker": "claude-code", "codex in docker": "codex", "opencode in docker": "opencode",
	} {
		a := list[architecture]
		a.docker = true
		list[name] = a
	}
	list["claude over acp in docker"] = asker{
		architecture: "acp", command: []string{"/opt/acp/node_modules/.bin/claude-code-acp"}, preset: "claude", docker: true, image: "spool-test/acp:latest",
	}
	list["opencode over acp in docker"] = asker{architecture: "acp", command: []string{"opencode", "acp"}, preset: "opencode", docker: true}
	return list
}

// need skips the test if the agent cannot run on this machine.
func (a asker) need(t *testing.T) {
	t.Helper()
	if a.docker {
		harness.NeedDocker(t)
		return
	}
	if program := map[string]string{"claude-code": "claude", "codex": "codex", "opencode": "opencode"}[a.architecture]; program != "" {
		if _, err := exec.LookPath(program); err != nil {
			t.Skipf("%s is not on the PATH: run scripts/install: %v", program, err)
		}
	}
}

// cautious is a session of an agent that asks about commands.
type cautious struct {
	*talk
	asker
}

// begin applies a version of the agent with a permission policy, and begins a session of it.
func (a asker) begin(t *testing.T, c *harness.Cluster, slug string, permissions map[string]any) cautious {
	t.Helper()
	spec := map[string]any{
		"architecture": a.architecture, "model": architectures()[a.architecture]["model"], "instructions": "You run commands.", "retries": map[string]any{"attempts": 3},
		"permissions": permissions, "loops": map[string]any{"action": "none"},
	}
	if a.image != "" {
		spec["image"] = a.image
	}
	if a.preset == "opencode" { // an agent over ACP asks as its own configuration requires
		spec["files"] = []map[string]any{{"path": "opencode.json", "content": `{"permission": {"bash": "ask"}}`}}
	}
	if a.architecture == "acp" {
		spec["model"], spec["command"], spec["modelSettings"] = "known-model", a.command, map[string]any{"preset": a.preset}
	}
	apply(c, "agents", slug, spec)
	return cautious{&talk{t: t, c: c.ForSubtest(t), session: c.CreateSession("", map[string]any{"agent": slug})}, a}
}

// asks posts a text and reads the stream until the agent asks n times.
func (k cautious) asks(text string, n int) (execution string, list []events.ApprovalRequested) {
	k.t.Helper()
	execution = k.post(text, func(w events.WireEvent) bool {
		if r, ok := w.Event().Data.(events.ApprovalRequested); ok {
			list = append(list, r)
		}
		return len(list) < n
	})
	return execution, list
}

// asksAgain reads the stream until the agent asks again.
func (k cautious) asksAgain() events.ApprovalRequested {
	k.t.Helper()
	for {
		w, err := k.s.Next()
		if err != nil {
			k.t.Fatalf("%v; %s", err, k.c.DescribeStoppedStream(k.session, k.s))
		}
		if r, ok := w.Event().Data.(events.ApprovalRequested); ok {
			return r
		}
		if events.IsTerminal(w.Type) {
			k.t.Fatalf("ended with %s %s", w.Type, w.Data)
		}
	}
}

// decide decides a request, and returns the HTTP status and the error code.
func (k cautious) decide(r events.ApprovalRequested, body map[string]any) (status int, code string) {
	k.t.Helper()
	var answer json.RawMessage
	status = k.c.Call(0, "POST", "/api/approvals/"+r.ApprovalID+"/decide", body, &answer)
	var problem struct{ Code string }
	if err := json.Unmarshal(answer, &problem); err != nil && status >= 300 {
		k.t.Fatalf("decide: %d %s", status, answer)
	}
	return status, problem.Code
}

// mustDecide decides a request.
func (k cautious) mustDecide(r events.ApprovalRequested, body map[string]any) {
	k.t.Helper()
	if status, code := k.decide(r, body); status >= 300 {
		k.t.Fatalf("decide %v: %d %s", body, status, code)
	}
}

// created reports whether a command created a file in the workspace.
func (k cautious) created(name string) bool {
	if k.docker {
		container := k.c.SandboxContainer(k.session)
		return strings.TrimSpace(harness.RunDocker(k.t, "exec", container, "sh", "-c", "cd /workspace; test -e "+name+" && echo yes || echo no")) == "yes"
	}
	_, err := os.Stat(filepath.Join(k.c.WorkspaceFolder(k.session), name))
	return err == nil
}

// killAgent kills the process of the agent.
func (k cautious) killAgent() {
	k.t.Helper()
	pid := uint32(0)
	for _, e := range k.s.Events {
		if s, ok := e.Event().Data.(events.ExecutionStarted); ok {
			pid = s.PID
		}
	}
	if k.docker {
		harness.RunDocker(k.t, "exec", k.c.SandboxContainer(k.session), "sh", "-c", fmt.Sprintf("kill -9 -%d", pid))
		return
	}
	if err := syscall.Kill(-int(pid), syscall.SIGKILL); err != nil {
		k.t.Fatal(err)
	}
}

// mustEnd reads the stream to the end of an execution, which must be completed, and checks that no request is open.
func (k cautious) mustEnd(execution string) turn {
	k.t.Helper()
	x := k.until(execution)
	ended[events.ExecutionCompleted](x)
	open := map[string]bool{}
	for _, w := range x.events {
		switch d := w.Event().Data.(type) {
		case events.ApprovalRequested:
			open[d.ApprovalID] = true
		case events.ApprovalResolved:
			delete(open, d.ApprovalID)
		case events.ApprovalRetracted:
			delete(open, d.ApprovalID)
		}
	}
	if len(open) > 0 {
		k.t.Errorf("open after the end: %v", open)
	}
	return x
}

// TestApprovals tests that a person decides what an agent does: allow, deny with a comment, approve all of the class, change arguments, answer a
// question, time out, unattended, the executor killed while the agent waits, and the agent killed while it waits.
func TestApprovals(t *testing.T) {
	if *approvalsTable == "" {
		t.Parallel() // the PATH of an agent over ACP is set for the whole process
	}
	table := "| agent | allow | deny with comment | all of the class | changed arguments | question | time out | unattended | executor killed | agent killed | decision to next action, ms | seconds |\n| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |\n"
	for name, a := range askers() {
		t.Run(name, func(t *testing.T) {
			a.need(t)
			began := time.Now()
			opts := harness.Options{Script: script(t, "approvals.yaml"), Docker: a.docker, Executor: executor.Config{AnthropicModel: "known-model", Slots: 2}}
			switch {
			case a.image != "":
				opts.Executor.SandboxImages = []string{a.image}
				buildACPImage(t, a.image)
			case a.preset == "qwen":
				opts.Path = acpPath(t)
			}
			c := harness.New(t, opts)
			row := a.scenario(t, c)
			if !t.Failed() {
				table += fmt.Sprintf("| %s | %s | %.0f |\n", name, row, time.Since(began).Seconds())
			}
		})
	}
	if *approvalsTable != "" {
		if err := os.WriteFile(*approvalsTable, []byte(table), 0o600); err != nil {
			t.Error(err)
		}
	}
}

// buildACPImage builds an image of a sandbox with the ACP agents of scripts/install in /opt/acp.
func buildACPImage(t *testing.T, image string) {
	t.Helper()
	modules, err := filepath.EvalSymlinks("../../.tools/acp-agents")
	if err != nil {
		t.Skipf("the ACP agents are not installed: run scripts/install: %v", err)
	}
	file := filepath.Join(t.TempDir(), "Dockerfile")
	if err := os.WriteFile(file, []byte("FROM spool/sandbox\nCOPY node_modules /opt/acp/node_modules\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	harness.RunDocker(t, "build", "-q", "-t", image, "-f", file, modules)
}

// scenario runs the scenario and returns the cells of the table.
func (a asker) scenario(t *testing.T, c *harness.Cluster) string {
	ask := map[string]any{"preset": "ask"}
	k := a.begin(t, c, "asks", ask)

	execution, list := k.asks("run touch allowed.txt", 1)
	if list[0].Preview.Command == "" || !strings.Contains(list[0].Preview.Command, "touch allowed.txt") {
		t.Errorf("preview %+v", list[0])
	}
	if k.created("allowed.txt") {
		t.Error("the command ran before anybody decided")
	}
	k.mustDecide(list[0], map[string]any{"decision": "approve"})
	if status, code := k.decide(list[0], map[string]any{"decision": "reject"}); status != http.StatusConflict || code == "" {
		t.Errorf("a second decision: %d %s", status, code)
	}
	x := k.mustEnd(execution)
	if !k.created("allowed.txt") {
		t.Error("the approved command did not run")
	}
	next := nextAction(x)

	execution, list = k.asks("run touch denied.txt", 1)
	k.mustDecide(list[0], map[string]any{"decision": "reject", "comment": "use the name kestrel"})
	k.mustEnd(execution)
	if k.created("denied.txt") {
		t.Error("the rejected command ran")
	}
	received := false
	for _, r := range c.Model.Requests() {
		received = received || strings.Contains(string(r.Body), "use the name kestrel")
	}
	if a.comment && !received {
		t.Error("the model did not receive the comment")
	}
	denied := "yes"
	if !received {
		denied = "denied; the comment comes later"
	}

	execution, list = k.asks("run touch one.txt, then touch two.txt", 1)
	k.mustDecide(list[0], map[string]any{"decision": "approve_all"})
	x = k.mustEnd(execution)
	if n := len(of[events.ApprovalRequested](x)); n != 1 || !k.created("one.txt") || !k.created("two.txt") {
		t.Errorf("%d requests for two commands of a class, created %v %v", n, k.created("one.txt"), k.created("two.txt"))
	}
	execution, list = k.asks("run touch three.txt", 1) // the approval was for one execution
	k.mustDecide(list[0], map[string]any{"decision": "skip"})
	k.mustEnd(execution)

	arguments, question := k.changesArguments(), k.asksQuestion()
	unattended := k.asksNobody("run touch unattended.txt")
	k.executorKilled(c)
	k.agentKilled()

	slow := a.begin(t, c, "asks-shortly", map[string]any{"preset": "ask", "timeoutMs": 1000})
	execution, _ = slow.asks("run touch late.txt", 1)
	x = slow.mustEnd(execution)
	if r := of[events.ApprovalResolved](x); len(r) != 1 || r[0].Cause != events.ResolvedByTimeout || slow.created("late.txt") {
		t.Errorf("resolved %+v, created %v", r, slow.created("late.txt"))
	}
	c.DeleteSession(k.session) // the executor that was started last ends before the cleanup of sessions
	c.DeleteSession(slow.session)
	return fmt.Sprintf("yes | %s | yes | %s | %s | yes | %s | yes | yes | %d", denied, arguments, question, unattended, next.Milliseconds())
}

// changesArguments approves a call with other arguments, and returns the cell of the table. If the agent does not take them, the decision must be
// refused and the request must stay open.
func (k cautious) changesArguments() string {
	k.t.Helper()
	execution, list := k.asks("run touch unchanged.txt", 1)
	if list[0].Editable != (k.arguments != "") {
		k.t.Errorf("the request is editable: %v", list[0].Editable)
	}
	cell := "yes"
	if k.arguments == "" {
		cell = "refused"
		if status, code := k.decide(list[0], map[string]any{"decision": "approve", "arguments": map[string]any{"command": "touch changed.txt"}}); code != "ARGUMENTS_NOT_SUPPORTED" {
			k.t.Errorf("changed arguments: %d %s", status, code)
		}
		k.mustDecide(list[0], map[string]any{"decision": "skip"})
	} else {
		k.mustDecide(list[0], map[string]any{"decision": "approve", "arguments": json.RawMessage(k.arguments)})
	}
	k.mustEnd(execution)
	if k.created("unchanged.txt") || k.created("changed.txt") != (k.arguments != "") {
		k.t.Errorf("the call created unchanged.txt: %v, changed.txt: %v", k.created("unchanged.txt"), k.created("changed.txt"))
	}
	return cell
}

// asksQuestion answers a question of the agent, and returns the cell of the table.
func (k cautious) asksQuestion() string {
	k.t.Helper()
	if !k.questions {
		return "no"
	}
	execution, list := k.asks("ask me", 1)
	if list[0].Kind != events.ApprovalQuestion || len(list[0].Questions) != 1 {
		k.t.Fatalf("request %+v", list[0])
	}
	k.mustDecide(list[0], map[string]any{"decision": "answer", "answers": map[string]any{list[0].Questions[0].ID: []string{"Red"}}})
	if result := ended[events.ExecutionCompleted](k.mustEnd(execution)).Result; !strings.Contains(result, "The answer: ") || !strings.Contains(result, "Red") {
		k.t.Errorf("the agent received %q", result)
	}
	return "yes"
}

// nextAction returns the time from the decision of a person to the next event of the agent after it.
func nextAction(x turn) time.Duration {
	var decided time.Time
	for _, w := range x.events {
		switch {
		case w.Type == events.ApprovalDecided{}.EventType():
			decided = w.Time
		case !decided.IsZero() && w.Source == events.FromRunner && w.Type != (events.ApprovalResolved{}).EventType():
			return w.Time.Sub(decided)
		}
	}
	return 0
}

// asksNobody posts a text in an execution without a person.
func (k cautious) asksNobody(text string) string {
	k.t.Helper()
	s, err := k.c.JoinSocket(0, k.session, k.s)
	if err != nil {
		k.t.Fatal(err)
	}
	k.s = s
	var posted struct{ ExecutionID string }
	if code := k.c.Call(0, "POST", "/api/sessions/"+k.session+"/messages", map[string]any{"content": text, "permissions": map[string]any{"unattended": true}}, &posted); code != http.StatusAccepted {
		k.t.Fatalf("posted: %d", code)
	}
	x := k.mustEnd(posted.ExecutionID)
	d := of[events.PermissionDecided](x)
	if len(of[events.ApprovalRequested](x)) > 0 || len(d) == 0 || d[0].Decision != "deny" || d[0].Rule != "unattended" || k.created("unattended.txt") {
		k.t.Errorf("unattended: %+v, created %v", d, k.created("unattended.txt"))
	}
	return "denied"
}

// executorKilled kills the executor while the agent waits. The decision reaches the agent through the next one.
func (k cautious) executorKilled(c *harness.Cluster) {
	k.t.Helper()
	execution, list := k.asks("run touch taken-over.txt", 1)
	c.KillExecutor(0)
	k.mustDecide(list[0], map[string]any{"decision": "approve"})
	c.StartExecutor()
	x := k.mustEnd(execution)
	if starts, asked := len(of[events.ExecutionStarted](x)), len(of[events.ApprovalRequested](x)); starts != 1 || asked != 1 || !k.created("taken-over.txt") {
		k.t.Errorf("after the executor was killed: %d starts, %d requests, created %v", starts, asked, k.created("taken-over.txt"))
	}
}

// agentKilled kills the agent while it waits. Its request is retracted, and the next attempt asks again.
func (k cautious) agentKilled() {
	k.t.Helper()
	execution, list := k.asks("run touch again.txt", 1)
	k.killAgent()
	again := k.asksAgain()
	if status, code := k.decide(list[0], map[string]any{"decision": "approve"}); status != http.StatusConflict {
		k.t.Errorf("a decision on a retracted request: %d %s", status, code)
	}
	k.mustDecide(again, map[string]any{"decision": "approve"})
	x := k.mustEnd(execution)
	retracted := of[events.ApprovalRetracted](x)
	if len(retracted) != 1 || retracted[0].ApprovalID != list[0].ApprovalID || again.ApprovalID == list[0].ApprovalID || !k.created("again.txt") {
		k.t.Errorf("after the agent was killed: retracted %+v, created %v", retracted, k.created("again.txt"))
	}
}

// TestApprovals_ManyAtOnce tests an agent that makes 1,000 calls in one answer, all of which ask. Only so many requests are open as clients can
// show. After one was rejected and the class of another approved, all calls run but the rejected one.
func TestApprovals_ManyAtOnce(t *testing.T) {
	t.Parallel()
	const calls, rejected = 1000, 7
	var many strings.Builder
	many.WriteString("models: [known-model]\nrules:\n  - match: {user: many}\n    steps:\n      - tools:\n")
	for i := range calls {
		fmt.Fprintf(&many, "          - {name: run_code, input: {language: bash, code: touch made-%d}}\n", i)
	}
	many.WriteString("      - text: done\n")
	c := harness.New(t, harness.Options{Script: many.String()})
	k := asker{architecture: "spool"}.begin(t, c, "many", map[string]any{"preset": "ask"})
	execution, list := k.asks("many", events.MaxOpenApprovals)
	var page struct{ Approvals []json.RawMessage }
	if code := c.Call(0, "GET", "/api/approvals?status=pending&pageSize=200&executionId="+execution, nil, &page); code != http.StatusOK || len(page.Approvals) != events.MaxOpenApprovals {
		t.Errorf("list: %d, %d requests are pending, want %d", code, len(page.Approvals), events.MaxOpenApprovals)
	}
	k.mustDecide(list[rejected], map[string]any{"decision": "reject"})
	k.mustDecide(list[3], map[string]any{"decision": "approve"})
	k.mustDecide(list[0], map[string]any{"decision": "approve_all"})
	x := k.mustEnd(execution)
	outcomes := map[string]int{}
	for _, r := range of[events.ApprovalResolved](x) {
		outcomes[r.Outcome]++
	}
	byPolicy := len(of[events.PermissionDecided](x))
	if outcomes[events.OutcomeRejected] != 1 || outcomes[events.OutcomeApproved]+byPolicy != calls-1 || byPolicy == 0 {
		t.Errorf("outcomes %v, %d by the approved class", outcomes, byPolicy)
	}
	made, err := filepath.Glob(filepath.Join(c.WorkspaceFolder(k.session), "made-*"))
	if err != nil || len(made) != calls-1 || k.created(fmt.Sprint("made-", rejected)) {
		t.Errorf("%d of %d calls ran, %v", len(made), calls, err)
	}
}

// TestApprovals_ShowLargeCommandsWholeOrDenyThem tests that a command of 90 KiB is whole in the event, over REST and on
// the command line, and that a command which is too large to be shown is denied without a person.
func TestApprovals_ShowLargeCommandsWholeOrDenyThem(t *testing.T) {
	t.Parallel()
	c := harness.New(t, harness.Options{Script: script(t, "approvals.yaml")})
	k := asker{architecture: "spool"}.begin(t, c, "asks", map[string]any{"preset": "ask"})
	command := "touch large.txt #" + strings.Repeat("x", 90<<10) + "\u3164end"
	shown := strings.ReplaceAll(command, "\u3164", `\u{3164}`)
	execution, list := k.asks("run "+command, 1)
	if p := list[0].Preview; p.Command != shown || len(p.Cut) != 1 || p.Cut[0].Field != "input" || int(p.Cut[0].Bytes) <= len(command) {
		t.Errorf("the event has a command of %d bytes, cut %+v", len(p.Command), p.Cut)
	}
	var stored struct{ Request events.ApprovalRequested }
	if status := c.Call(0, "GET", "/api/approvals/"+list[0].ApprovalID, nil, &stored); status != http.StatusOK || stored.Request.Preview.Command != shown {
		t.Errorf("REST: %d, a command of %d bytes", status, len(stored.Request.Preview.Command))
	}
	code, out, says := c.RunCLI(t, t.TempDir(), t.TempDir(), "approvals", "show", list[0].ApprovalID)
	if code != 0 || !strings.Contains(out, "\ncommand: "+shown+"\n") {
		t.Errorf("the command line: %d, %d bytes, %s", code, len(out), says)
	}
	k.mustDecide(list[0], map[string]any{"decision": "approve"})
	k.mustEnd(execution)
	if !k.created("large.txt") {
		t.Error("the approved command did not run")
	}
	execution, list = k.asks("run touch larger.txt #"+strings.Repeat("\u3164", 20<<10), 0)
	x := k.mustEnd(execution)
	if d := of[events.PermissionDecided](x); len(list) != 0 || len(of[events.ApprovalRequested](x)) != 0 || len(d) != 1 || d[0].Rule != "too-large-to-show" || k.created("larger.txt") {
		t.Errorf("%d requests, decisions %+v", len(list), d)
	}
}
