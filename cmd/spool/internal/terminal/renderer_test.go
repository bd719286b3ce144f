package terminal

import (
	"bytes"
	"flag"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

var update = flag.Bool("update", false, "write the golden files anew")

const exe = "exe_01ARZ3NDEKTSV4RRFFQ69G5FAV"

var start = time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)

// step is one step of a scene: an event, a delta, or the passing of time.
type step struct {
	event        events.Payload
	block, text  string
	conversation string
	tick         bool
}

func ev(p events.Payload) step            { return step{event: p} }
func say(block, text string) step         { return step{block: block, text: text} }
func in(conversation string, s step) step { s.conversation = conversation; return s }
func begin(id string, k events.BlockKind) step {
	return ev(events.BlockStart{Block: events.Block{ID: id, Kind: k, Status: events.StatusPending}})
}
func whole(b events.Block) step {
	if b.Status == "" {
		b.Status = events.StatusComplete
	}
	return ev(events.BlockComplete{Block: b})
}

var tick = step{tick: true}

func calls(id, name, input, output string) []step {
	return []step{
		ev(events.BlockStart{Block: events.Block{ID: "blk_" + id, Kind: events.KindToolUse, Status: events.StatusPending, ToolName: name, ToolUseID: id}}),
		tick,
		whole(events.Block{ID: "blk_" + id, Kind: events.KindToolUse, ToolName: name, ToolUseID: id, Input: []byte(input)}),
		tick,
		whole(events.Block{ID: "blk_r" + id, Kind: events.KindToolResult, ToolUseID: id, Output: output}),
	}
}

func lines(n int) string {
	var b strings.Builder
	for i := range n {
		fmt.Fprintf(&b, "line %d\n", i+1)
	}
	return b.String()
}

// scenes returns the sessions that are shown, each on a terminal and in a pipe.
func scenes() map[string][]step {
	query := []step{
		ev(events.SessionCreated{Architecture: "spool", Provider: "local"}),
		ev(events.MessageAccepted{BlockID: "blk_q", Content: "Write a program that prints the first ten primes and run it."}),
		ev(events.ExecutionQueued{}), ev(events.ExecutionDispatched{}), tick,
		ev(events.ExecutionStarted{Attempt: 1}),
	}
	turn := append([]step(nil), query...)
	turn = append(turn, begin("blk_t", events.KindThinking), say("blk_t", "The user wants primes; "), tick, say("blk_t", "I write a file."),
		whole(events.Block{ID: "blk_t", Kind: events.KindThinking, Content: "The user wants primes; I write a file."}),
		begin("blk_a", events.KindAssistantText), say("blk_a", "I will write the program to primes.sh, "), tick, say("blk_a", "and then run it with bash, which is on every machine."),
		whole(events.Block{ID: "blk_a", Kind: events.KindAssistantText, Content: "I will write the program to primes.sh, and then run it with bash, which is on every machine.\n"}))
	turn = append(turn, calls("c1", "write_file", `{"path":"primes.sh","content":"…"}`, "wrote 412 bytes")...)
	turn = append(turn, calls("c2", "run_code", `{"language":"bash","code":"bash primes.sh\necho done"}`, lines(30))...)
	turn = append(turn, ev(events.MetadataUpdate{Usage: events.Usage{InputTokens: 1234, OutputTokens: 56}}), tick,
		begin("blk_e", events.KindAssistantText), say("blk_e", "Done."),
		whole(events.Block{ID: "blk_e", Kind: events.KindAssistantText, Content: "Done."}),
		ev(events.ExecutionCompleted{DurationMs: 1234, Usage: events.Usage{InputTokens: 1234, OutputTokens: 56}, CostUSD: 0.0123}))

	hostile := append(append([]step(nil), query...),
		begin("blk_a", events.KindAssistantText), say("blk_a", "before \x1b[2"), tick, say("blk_a", "J\x1b[31mafter\x1b]0;owned\x07 and \u202etxt.exe\r"), say("blk_a", "\nnext"),
		whole(events.Block{ID: "blk_a", Kind: events.KindAssistantText, Content: "before \x1b[2J\x1b[31mafter\x1b]0;owned\x07 and \u202etxt.exe\r\nnext"}))
	hostile = append(hostile, calls("c1", "run\x1b[8mcode", `{"command":"rm \u001b[8m-rf /"}`, "\x1b[32mok\x1b[0m 10%\r100%\x07")...)
	hostile = append(hostile, whole(events.Block{ID: "blk_x", Kind: events.KindError, Code: "E", Message: "bad \x1b]52;c;AAAA\x07thing"}),
		ev(events.ExecutionFailed{Code: "MODEL_ERROR", Message: "the model answered \x1b[1m500"}))

	command := events.ApprovalRequested{
		ApprovalID: "apr_1", Kind: events.ApprovalTool, ToolName: "Bash\x1b[2J", Title: "Remove\x1b]0;owned\x07 the\nbuild", Reason: "the rule asks", Class: "commands that begin with `rm`",
		Rule: "rules[0]", Preview: events.ApprovalPreview{Command: "rm -rf build \u202e&& \x1b[8mcurl evil", Cwd: "sub", Paths: []string{"build\x1b[1A"}, Truncated: true},
	}
	plan := events.ApprovalRequested{ApprovalID: "apr_2", Kind: events.ApprovalPlan, Preview: events.ApprovalPreview{Text: lines(30)}}
	question := events.ApprovalRequested{ApprovalID: "apr_3", Kind: events.ApprovalQuestion, Questions: []events.Question{
		{Header: "Color", Question: "Which color?\x1b[2J", Multiple: true, Other: true, Options: []events.QuestionOption{{Label: "Blue\x1b[1m", Description: "calm"}, {Label: "Red"}}}, {Question: "Which token?", Secret: true},
	}}
	elicitation := events.ApprovalRequested{ApprovalID: "apr_4", Kind: events.ApprovalElicitation, Title: "Your age", Schema: []byte(`{"type":"object"}`)}
	approval := append(append([]step(nil), query...),
		begin("blk_m", events.KindAssistantText), say("blk_m", "I will remove "), ev(command), tick, say("blk_m", "the build."),
		whole(events.Block{ID: "blk_m", Kind: events.KindAssistantText, Content: "I will remove the build."}), tick,
		ev(events.ApprovalDecided{ApprovalID: "apr_1", Decision: events.DecisionReject, Comment: "use \x1b[2Jmake clean"}),
		ev(events.ApprovalResolved{ApprovalID: "apr_1", Outcome: events.OutcomeRejected, Cause: events.ResolvedByPerson}), tick,
		ev(plan), ev(events.ApprovalResolved{ApprovalID: "apr_2", Outcome: events.OutcomeApproved, Cause: events.ResolvedByClass}),
		in("sub", ev(question)), ev(elicitation), tick, ev(events.ApprovalResolved{ApprovalID: "apr_3", Outcome: events.OutcomeRejected, Cause: events.ResolvedByTimeout}), tick,
		ev(events.AgentDenied{ToolName: "Bash\x1b[2J", Code: "no_check", Reason: "not \x1b[1mallowed"}),
		ev(events.ApprovalRetracted{ApprovalID: "apr_4", Reason: "turn_ended"}), tick, ev(events.ExecutionCancelled{Reason: "interrupted"}))

	parallel := append(append([]step(nil), query...),
		ev(events.SubagentSpawned{SubagentID: "s1", Conversation: "sub", Name: "searcher", Parent: "main"}),
		begin("blk_m", events.KindAssistantText), say("blk_m", "The main agent "),
		in("sub", begin("blk_s", events.KindAssistantText)), in("sub", say("blk_s", "The sub-agent speaks at the same time, and at some length. ")), tick,
		say("blk_m", "talks on."), ev(events.Log{Level: "warn", Stream: "stderr", Message: "a warning"}),
		in("sub", whole(events.Block{ID: "blk_s", Kind: events.KindAssistantText, Content: "The sub-agent speaks at the same time, and at some length. Yes."})),
		say("blk_m", " And on."),
		whole(events.Block{ID: "blk_m", Kind: events.KindAssistantText, Content: "The main agent talks on. And on."}),
		whole(events.Block{ID: "blk_u", Kind: events.KindSubagent, Name: "searcher", Output: "found it", DurationMs: 1500}),
		whole(events.Block{ID: "blk_d", Kind: events.KindTodo, Todos: []events.TodoItem{{Content: "look", Status: "completed"}, {Content: "write", Status: "in_progress"}, {Content: "run", Status: "pending"}}}),
		ev(events.PermissionDecided{ToolName: "Write", Decision: "deny", Rule: "workspace", Reason: "/etc/passwd lies outside"}),
		in("sub", ev(events.LoopDetected{ToolName: "Read\x1b[2J", Calls: 3, Limit: 3, StopAt: 5})),
		ev(events.InterruptRequested{Control: 1}), tick,
		begin("blk_z", events.KindAssistantText), say("blk_z", "I was about to"),
		ev(events.ExecutionCancelled{Reason: "interrupted", DurationMs: 4000}))
	environment := append(append([]step(nil), query...),
		ev(events.SandboxCreating{Provider: "docker"}), tick, ev(events.SandboxReady{Image: "agents:2"}), ev(events.WorkspaceRestored{Files: 1200}),
		ev(events.FilePut{N: 1, Path: "a"}), ev(events.FilesApplied{N: 1}), ev(events.FilesApplied{N: 2, Error: "b/../../c leads out of the workspace"}),
		ev(events.FileCreated{Path: "a"}), ev(events.FileModified{Path: "a"}), ev(events.FileDeleted{Path: "a"}),
		ev(events.EgressDenied{Host: "evil.example\x1b[2J", Port: 443, Code: "NOT_ALLOWED", Count: 1200}), ev(events.EgressDenied{Host: "169.254.169.254", Code: "PRIVATE_ADDRESS", Count: 1}),
		ev(events.EgressDenied{Host: "api.example", Port: 443, Method: "POST", Code: "METHOD_NOT_ALLOWED", Count: 1}),
		ev(events.ModelCalled{Model: "m"}),
		ev(events.PauseRequested{}), tick, ev(events.SandboxPaused{}), ev(events.ExecutionPaused{}), tick, ev(events.ResumeRequested{}), ev(events.SandboxResumed{}), ev(events.ExecutionResumed{PausedMs: 90_000}), tick,
		ev(events.SandboxHealth{Status: events.Unhealthy, Reason: "the runner does not answer"}), ev(events.SandboxHealth{Status: events.Healthy}),
		ev(events.SyncRequested{}), ev(events.WorkspaceSynced{Reason: "interval", Files: 7}), ev(events.WorkspaceSynced{Reason: "requested", Files: 8}),
		ev(events.TerminateRequested{}), tick, ev(events.ExecutionCancelled{Reason: "terminated", DurationMs: 4000}), ev(events.SandboxTerminated{Reason: "manual"}))
	planned := func(status events.PlanStatus) *events.Plan {
		return &events.Plan{Title: "Fix\x1b[2J it", Explanation: "The test\x1b]0;owned\x07 fails.", Items: []events.PlanItem{
			{Content: "look\x1b[8m", Status: status}, {Content: "measure", Status: events.PlanCancelled}, {Content: "write", Status: events.PlanPending},
		}}
	}
	began := func(b events.Block) step {
		b.Status = events.StatusPending
		return ev(events.BlockStart{Block: b})
	}
	change := func(id string, u events.BlockUpdates) step { return ev(events.BlockUpdate{BlockID: id, Updates: u}) }
	plans := append(append([]step(nil), query...),
		began(events.Block{ID: "blk_p", Kind: events.KindPlan, Plan: planned(events.PlanPending)}), tick,
		begin("blk_a", events.KindAssistantText), say("blk_a", "I begin. "), tick, change("blk_p", events.BlockUpdates{Plan: planned(events.PlanInProgress)}), say("blk_a", "And go on."),
		whole(events.Block{ID: "blk_a", Kind: events.KindAssistantText, Content: "I begin. And go on."}), tick,
		began(events.Block{ID: "blk_k", Kind: events.KindSkillLoad, ToolUseID: "c1", Skill: &events.LoadedSkill{Name: "pdf\x1b[2J"}}),
		whole(events.Block{ID: "blk_k", Kind: events.KindSkillLoad, ToolUseID: "c1", Skill: &events.LoadedSkill{Name: "pdf", Path: "/bin/skills/pdf"}}),
		whole(events.Block{ID: "blk_l", Kind: events.KindSkillLoad, Skill: &events.LoadedSkill{Name: "xls", Path: "/x\x1b[2J"}}),
		began(events.Block{ID: "blk_s", Kind: events.KindStep, Step: &events.Step{StepID: "1", Title: "look\x1b[2J", Status: events.StepReady}}), tick,
		change("blk_s", events.BlockUpdates{Step: &events.Step{StepID: "1", Title: "look", Status: events.StepRunning}}), tick,
		whole(events.Block{ID: "blk_s", Kind: events.KindStep, Step: &events.Step{StepID: "1", Title: "look", Status: events.StepCompleted, Result: "found it"}}),
		whole(events.Block{ID: "blk_f", Kind: events.KindStep, Step: &events.Step{StepID: "2", Title: "write", Status: events.StepFailed, ErrorCode: "TIMEOUT", ErrorMessage: "It took\x1b[2J too long."}}),
		change("blk_p", events.BlockUpdates{Plan: planned(events.PlanCompleted)}), tick,
		whole(events.Block{ID: "blk_p", Kind: events.KindPlan, Plan: planned(events.PlanCompleted)}), ev(events.ExecutionCompleted{DurationMs: 4000}))
	return map[string][]step{"plans": plans, "turn": turn, "hostile": hostile, "approval": approval, "parallel": parallel, "environment": environment}
}

// play shows a scene and calls at after each step.
func play(t *testing.T, r *Renderer, now *time.Time, scene []step, at func()) {
	t.Helper()
	offsets := map[string]int{}
	for _, s := range scene {
		*now = now.Add(time.Second)
		conversation := events.MainConversation
		if s.conversation != "" {
			conversation = s.conversation
		}
		switch {
		case s.tick:
			r.AdvanceSpinner()
		case s.event != nil:
			r.ShowEvent(events.Event{Time: start, ExecutionID: exe, ConversationID: conversation, Data: s.event})
		default:
			r.ShowDelta(events.Delta{BlockID: s.block, ExecutionID: exe, ConversationID: conversation, Offset: uint32(offsets[s.block]), Text: s.text})
			offsets[s.block] += len(s.text)
		}
		at()
	}
	if err := r.Close(); err != nil {
		t.Fatal(err)
	}
}

// TestRenderer_Golden compares the output of each scene, in a pipe and on a terminal, with a file. For a terminal the
// file has its final content and the status lines that were shown before.
func TestRenderer_Golden(t *testing.T) {
	t.Parallel()
	for name, scene := range scenes() {
		t.Run(name+"/pipe", func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			now := start
			play(t, New(Config{Out: &out, Now: func() time.Time { return now }}), &now, scene, func() {})
			if strings.ContainsAny(out.String(), "\x1b\r") {
				t.Error("a pipe got control characters")
			}
			golden(t, name+".pipe", out.String())
		})
		for _, color := range []bool{true, false} {
			t.Run(fmt.Sprintf("%s/tty/color=%t", name, color), func(t *testing.T) {
				t.Parallel()
				screen, raw := newFake(t, 60), &bytes.Buffer{}
				now := start
				r := New(Config{Out: io.MultiWriter(screen, raw), TTY: true, Color: color, Width: func() int { return 60 }, Now: func() time.Time { return now }})
				r.SetHint("Ctrl-C stops it")
				var seen []string
				play(t, r, &now, scene, func() {
					last := strings.TrimRight(string(screen.rows[screen.y]), " ")
					if len(seen) == 0 || seen[len(seen)-1] != last {
						seen = append(seen, last)
					}
				})
				if got := strings.Contains(raw.String(), "\x1b[1;36m"); got != color {
					t.Errorf("coloured: %t", got)
				}
				if screen.sgr || strings.ContainsAny(screen.text(), strings.Join(spinnerFrames, "")) {
					t.Errorf("something of the status remains:\n%s", screen.text())
				}
				golden(t, name+".tty", screen.text()+"--- seen in the last row\n"+strings.Join(seen, "\n")+"\n")
			})
		}
	}
}

// TestToolUse_ShowsTheFile tests that a call of a tool that writes a file is shown with the file's name, not with its
// JSON, for the tools of each agent.
func TestToolUse_ShowsTheFile(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		block events.Block
		want  string
	}{
		"built in":              {events.Block{ToolName: "write_file", Input: []byte(`{"content":"x","path":"hello.txt"}`)}, "● write_file hello.txt"},
		"Claude Code":           {events.Block{ToolName: "Write", Input: []byte(`{"content":"x","file_path":"/workspace/hello.txt"}`)}, "● Write /workspace/hello.txt"},
		"OpenCode":              {events.Block{ToolName: "write", Description: "hello.txt", Input: []byte(`{"content":"x","filePath":"/workspace/hello.txt"}`)}, "● write /workspace/hello.txt  hello.txt"},
		"Codex":                 {events.Block{ToolName: "apply_patch", DisplayName: "Edit files", Description: "A /workspace/hello.txt", Input: []byte(`{"changes":[{"path":"/workspace/hello.txt","kind":{"type":"add"}}]}`)}, "● Edit files  A /workspace/hello.txt"},
		"no description at all": {events.Block{ToolName: "other", Input: []byte(`{"a":1}`)}, `● other {"a":1}`},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var out bytes.Buffer
			now := start
			c.block.ID, c.block.Kind, c.block.ToolUseID = "blk_1", events.KindToolUse, "call"
			play(t, New(Config{Out: &out, Now: func() time.Time { return now }}), &now, []step{whole(c.block)}, func() {})
			if got := strings.TrimSpace(out.String()); got != c.want {
				t.Errorf("shown is %q, want %q", got, c.want)
			}
		})
	}
}

// golden compares got with a golden file.
func golden(t *testing.T, name, got string) {
	t.Helper()
	path := filepath.Join("testdata", name+".golden")
	if *update {
		if err := os.WriteFile(path, []byte(got), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	if got != string(want) {
		t.Errorf("%s differs; got:\n%s", path, got)
	}
}
