package claudecode_test

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// nestedRules returns rules of a script in which the sub-agent of each level up to the given one runs a command, creates the
// file level-N and starts the sub-agent of the next level. Every level has a word of its own: DIG-1, DIG-2, …
func nestedRules(levels int) []string {
	var rules []string
	for n := 1; n <= levels; n++ {
		next := ""
		if n < levels {
			next = fmt.Sprintf("\n      - tool: {name: Agent, input: {description: Dig, prompt: DIG-%d please, subagent_type: general-purpose}}", n+1)
		}
		rules = append(rules, fmt.Sprintf(`
  - match: {user: DIG-%[1]d}
    steps:
      - text: I am level %[1]d.
      - tool: {name: Bash, input: {command: "echo output-%[1]d; touch level-%[1]d"}}%[2]s
      - text: DONE-%[1]d
`, n, next))
	}
	return append(rules, agenttest.ScriptRule("dig", tool("Agent", map[string]any{"description": "Dig", "prompt": "DIG-1 please", "subagent_type": "general-purpose"})))
}

// subagentsByDepth returns the sub-agents of a turn in the order in which they were started, and checks that each one is started in the
// conversation of its parent, one level below it.
func subagentsByDepth(t *testing.T, x agenttest.Turn) []events.SubagentSpawned {
	t.Helper()
	depth := map[string]uint32{events.MainConversation: 0}
	spawned := agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned")
	for _, s := range spawned {
		above, known := depth[s.Parent]
		if _, twice := depth[s.Conversation]; !known || twice || s.Depth != above+1 {
			t.Errorf("sub-agent %+v: its parent has depth %d, known %v, twice %v%s", s, above, known, twice, x)
		}
		depth[s.Conversation] = s.Depth
	}
	return spawned
}

// conversationLines returns the types of the lines of a conversation, with the kind of each block, in order.
func conversationLines(t *testing.T, x agenttest.Turn, conversation string) []string {
	t.Helper()
	var out []string
	for _, l := range x.Lines {
		if l.ConversationID != conversation {
			continue
		}
		var d struct{ Block events.Block }
		if err := json.Unmarshal(l.Data, &d); err != nil {
			t.Fatal(err)
		}
		name := string(l.Type)
		if d.Block.Kind != "" {
			name += " " + string(d.Block.Kind)
		}
		out = append(out, name)
	}
	return out
}

// Every sub-agent has a conversation of its own with all its calls, their inputs and results, however deep it is.
func TestRealNestedSubagents_AreRecordedAtEveryDepth(t *testing.T) {
	t.Parallel()
	for name, permissions := range map[string]events.Permissions{
		"without a policy":          {},
		"with a policy":             {Preset: "full"},
		"where nobody can be asked": {Default: events.PermissionAllow},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, nestedRules(5)...))
			x := b.RunTurnOK("dig", "DONE-1", func(q *runner.Query) { q.Permissions, q.SubagentDepth = permissions, 5 })
			spawned := subagentsByDepth(t, x)
			if len(spawned) != 5 {
				t.Fatalf("%d sub-agents%s", len(spawned), x)
			}
			for i, s := range spawned {
				checkNestedConversation(t, x, s, i+1)
			}
			if n := len(x.FinishedBlocks(events.KindSubagent)); n != 5 {
				t.Errorf("%d blocks of sub-agents%s", n, x)
			}
			checkNestedUsage(t, b, x)
		})
	}
}

// checkNestedConversation checks the conversation of the sub-agent of a level of nestedRules.
func checkNestedConversation(t *testing.T, x agenttest.Turn, s events.SubagentSpawned, level int) {
	t.Helper()
	var in, out, texts []string
	for _, kind := range []events.BlockKind{events.KindToolUse, events.KindToolResult, events.KindAssistantText, events.KindUserMessage} {
		for _, b := range x.FinishedBlocks(kind) {
			switch {
			case b.ConversationID != s.Conversation:
			case kind == events.KindToolUse:
				in = append(in, b.ToolName+" "+b.ToolUseID+" "+string(b.Input))
			case kind == events.KindToolResult:
				out = append(out, b.ToolUseID+" "+b.Output)
			default:
				texts = append(texts, b.Content)
			}
		}
	}
	if len(in) == 0 || len(out) != len(in) || !strings.Contains(in[0], fmt.Sprintf("echo output-%d;", level)) || !strings.HasSuffix(out[0], fmt.Sprintf(" output-%d", level)) {
		t.Errorf("level %d: calls %q, results %q%s", level, in, out, x)
	}
	for _, want := range []string{fmt.Sprintf("DIG-%d please", level), fmt.Sprintf("I am level %d.", level), fmt.Sprintf("DONE-%d", level)} {
		if !slices.ContainsFunc(texts, func(text string) bool { return strings.Contains(text, want) }) {
			t.Errorf("level %d: %q is not in its texts %q", level, want, texts)
		}
	}
	lines := conversationLines(t, x, s.Conversation)
	use, result := slices.Index(lines, "block_start tool_use"), slices.Index(lines, "block_start tool_result")
	if text := slices.Index(lines, "block_start assistant_text"); text < 0 || use < text || result < use {
		t.Errorf("level %d: the order is %q", level, lines)
	}
	if d := slices.Index(lines, "permission_decided"); d < use || d > result && d >= 0 {
		t.Errorf("level %d: the permission is decided at %d of %q", level, d, lines)
	}
}

// checkNestedUsage checks that the turn's usage includes the requests of all sub-agents.
func checkNestedUsage(t *testing.T, b *agenttest.Harness, x agenttest.Turn) {
	t.Helper()
	var last events.MetadataUpdate
	for _, m := range agenttest.DataOfType[events.MetadataUpdate](x, "metadata_update") {
		last = m
	}
	answers := 0
	for _, r := range b.Model.Requests() {
		if strings.HasPrefix(r.URL, "/v1/messages?") {
			answers++
		}
	}
	// Each request has thousands of tokens of tools and instructions.
	if used := x.Ended().Usage.InputTokens; answers < 14 || used < uint32(answers)*3000 || last.Usage.InputTokens < used {
		t.Errorf("%d requests, usage %+v, last reported %+v", answers, x.Ended().Usage, last)
	}
}

// A sub-agent below the limit does nothing: its call is denied, and recorded as its start.
func TestRealNestedSubagents_BelowTheLimitDoNotStart(t *testing.T) {
	t.Parallel()
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, nestedRules(5)...))
	x := b.RunTurn("dig", func(q *runner.Query) { q.SubagentDepth = 2 })
	spawned := subagentsByDepth(t, x)
	if len(spawned) != 3 || spawned[2].Depth != 3 {
		t.Fatalf("sub-agents %+v%s", spawned, x)
	}
	if !b.HasFile("level-1") || !b.HasFile("level-2") || b.HasFile("level-3") {
		t.Errorf("files of levels 1 to 3: %v %v %v", b.HasFile("level-1"), b.HasFile("level-2"), b.HasFile("level-3"))
	}
	for _, r := range b.Model.Requests() {
		if strings.Contains(r.Rule, "DIG-3") || strings.Contains(string(r.Body), `"DIG-3 please"`) && !strings.Contains(string(r.Body), "DIG-2") {
			t.Error("the sub-agent of level 3 asked the model")
		}
	}
	for _, s := range spawned[:2] {
		checkNestedConversation(t, x, s, int(s.Depth))
	}
	last := x.FinishedBlocks(events.KindSubagent)[0]
	if last.SubagentID != spawned[2].SubagentID || !last.IsError || !strings.Contains(last.Output, "subagentDepth") {
		t.Errorf("the denied sub-agent: %+v", last)
	}
}

// A person decides the calls of sub-agents at every depth, after the log has the call.
func TestRealNestedSubagents_AskForTheirCalls(t *testing.T) {
	t.Parallel()
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, nestedRules(3)...))
	x := b.RunTurnDeciding("dig", asked, approve)
	spawned := subagentsByDepth(t, x)
	if len(spawned) != 3 || x.Ended().Outcome != runner.OutcomeCompleted || !b.HasFile("level-3") {
		t.Fatalf("sub-agents %+v%s", spawned, x)
	}
	for _, s := range spawned {
		lines := conversationLines(t, x, s.Conversation)
		use, request, result := slices.Index(lines, "block_start tool_use"), slices.Index(lines, "approval_requested"), slices.Index(lines, "block_start tool_result")
		if use < 0 || request < use || result < request {
			t.Errorf("level %d: %q", s.Depth, lines)
		}
	}
}

// An interrupt ends the sub-agents of all levels: no block stays open, and every sub-agent has an end.
func TestRealNestedSubagents_EndWithAnInterrupt(t *testing.T) {
	t.Parallel()
	rules := append([]string{agenttest.ScriptRule("DIG-3", bash("touch started; sleep 300"))}, nestedRules(3)...)
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, rules...))
	x := b.MustStartTurn("dig", nil)
	x = b.ReadUntil("the command of level 3", func(l runner.JournalLine) bool {
		return strings.Contains(string(l.Data), "sleep 300") && l.Type == "permission_decided"
	}, x)
	b.Supervisor.Interrupt()
	x = b.ReadToEnd(x)
	if got := x.Ended().Outcome; got != runner.OutcomeInterrupted {
		t.Errorf("ended as %s%s", got, x)
	}
	checkNothingOpen(t, x)
	// The next turn of the process is not affected.
	b.RunTurnOK("hello", "You said: hello", nil)
}

// checkNothingOpen checks that every block of a turn is finished and every sub-agent has one end.
func checkNothingOpen(t *testing.T, x agenttest.Turn) {
	t.Helper()
	open, agents := map[string]bool{}, map[string]int{}
	for _, l := range x.Lines {
		var d struct{ Block events.Block }
		if err := json.Unmarshal(l.Data, &d); err != nil {
			t.Fatal(err)
		}
		if d.Block.ID != "" {
			open[d.Block.ID] = d.Block.Status == events.StatusPending
		}
	}
	for id, is := range open {
		if is {
			t.Errorf("block %s is open%s", id, x)
		}
	}
	for _, s := range agenttest.DataOfType[events.SubagentSpawned](x, "subagent_spawned") {
		agents[s.SubagentID]++
	}
	for _, c := range agenttest.DataOfType[events.SubagentCompleted](x, "subagent_completed") {
		agents[c.SubagentID]--
	}
	for id, n := range agents {
		if n != 0 {
			t.Errorf("sub-agent %s has %d ends missing%s", id, n, x)
		}
	}
}

// A process that resumes the conversation does not record the sub-agents of earlier turns again, and a message to one of them is recorded in the
// conversation that it had.
func TestRealNestedSubagents_AreNotRecordedTwiceAfterARestart(t *testing.T) {
	t.Parallel()
	rules := append(nestedRules(2), `
  - match: {user: {regex: 'again to agent-(\w+)'}}
    steps:
      - tool: {name: SendMessage, input: {to: '{{match 1}}', summary: go on, message: FOLLOW-UP please}}
      - text: 'Answered: {{result}}'
`, agenttest.ScriptRule("FOLLOW-UP", bash("echo once-more")))
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, rules...))
	x := b.RunTurnOK("dig", "DONE-1", nil)
	first := subagentsByDepth(t, x)
	session := x.TranscriptWritten().AgentSessionID
	for _, fresh := range []bool{true, false} {
		x = b.RunTurn("hello", func(q *runner.Query) {
			q.Resume = session
			if fresh {
				q.Env = b.EnvWith("OTHER", "1") // another process
			}
		})
		for _, l := range x.Lines {
			if l.ConversationID != "" && l.ConversationID != events.MainConversation {
				t.Errorf("line in conversation %s: %s", l.ConversationID, l.Data)
			}
		}
	}
	x = b.RunTurn("again to "+transcriptOf(t, b, first[0].ToolUseID), func(q *runner.Query) { q.Env, q.Resume = b.EnvWith("OTHER", "1"), session })
	uses := x.FinishedBlocks(events.KindToolUse)
	if i := slices.IndexFunc(uses, func(b events.Block) bool { return strings.Contains(string(b.Input), "once-more") }); i < 0 || uses[i].ConversationID != first[0].Conversation {
		t.Errorf("calls %+v, want one in %s%s", uses, first[0].Conversation, x)
	}
	checkNothingOpen(t, x)
}

// transcriptOf returns the name, without extensions, of the transcript of the sub-agent that a call has started.
func transcriptOf(t *testing.T, b *agenttest.Harness, call string) string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(b.Folders.State, "claude", "projects", "*", "*", "subagents", "agent-*.meta.json"))
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		if raw, err := os.ReadFile(file); err == nil && strings.Contains(string(raw), call) {
			return strings.TrimSuffix(filepath.Base(file), ".meta.json")
		}
	}
	t.Fatalf("no sub-agent of call %s among %q", call, files)
	return ""
}

// Secrets are removed from what sub-agents of every depth print.
func TestRealNestedSubagents_AreRedacted(t *testing.T) {
	t.Parallel()
	rules := append([]string{agenttest.ScriptRule("DIG-3", bash("echo hunter2-hunter2"))}, nestedRules(3)...)
	b := agenttest.NewHarnessWithScript(t, subject, agenttest.ScriptOfRules(t, rules...))
	x := b.RunTurn("dig", func(q *runner.Query) { q.Redact = []string{"hunter2-hunter2"} })
	if len(subagentsByDepth(t, x)) != 3 || strings.Contains(x.String(), "hunter2") || !strings.Contains(x.String(), "[redacted]") {
		t.Errorf("the journal has the secret, or not the call%s", x)
	}
}
