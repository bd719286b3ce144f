import type { Block } from "@spoolhq/client";
import type { Approval } from "../src/conversation/approval";
import type { Turn } from "../src/conversation/rows";

const at = "2026-01-02T03:04:05Z";
const executionId = "exe_1";
let ids = 0;
const block = (fields: object): Block => ({ id: `blk_${++ids}`, status: "complete", timestamp: at, executionId, ...fields }) as unknown as Block;
const call = (toolName: string, input: unknown, result?: object): Block[] => {
  const toolUseId = `toolu_${ids}`;
  return [block({ kind: "tool_use", toolName, toolUseId, input }), ...(result ? [block({ kind: "tool_result", toolUseId, durationMs: 1234, ...result })] : [])];
};

const markdown = `Two tests failed because **the clock was read twice**. I changed \`Decide\` so that the time is an argument:

\`\`\`go
// Decide returns the events of a command.
func Decide(s State, c Command, now time.Time) ([]Event, error) {
	if s.closed {
		return nil, ErrClosed // nothing more is accepted
	}
	return []Event{Accepted{At: now, Count: 42}}, nil
}
\`\`\`

1. The tests pass the time
   - in UTC
   - without a monotonic part
2. The executor reads the clock once

| file | lines | why |
| --- | ---: | --- |
| decide.go | 12 | the argument |
| decide_test.go | 40 | the tests pass it |

> The old code read the clock in \`Evolve\`, too.

See [the Go docs](https://pkg.go.dev/time) for *monotonic* times.
`;

/** A conversation with a block of every kind, as a coding agent makes it. */
export const sample: Block[] = [
  block({ kind: "user_message", content: "Make the tests of pkg/events pass, and say what was wrong." }),
  block({ kind: "thinking", content: "The tests fail on some days only. Let me look at where the clock is read.\nThere are two places." }),
  ...call("Bash", { command: "go test ./pkg/events/...", description: "Run the tests" }, { output: "\x1b[31m--- FAIL: TestDecide\x1b[0m (0.00s)\n    decide_test.go:12: got 2, want 1\nFAIL\texit status 1", isError: true, durationMs: 8420 }),
  ...call("Grep", { pattern: "time\\.Now", path: "pkg/events" }, { output: "pkg/events/decide.go:14:\tnow := time.Now()\npkg/events/evolve.go:30:\tat := time.Now()" }),
  ...call("Read", { file_path: "pkg/events/decide.go" }, { output: "package events\n" }),
  block({ kind: "todo", todos: [{ content: "Find where the clock is read", status: "completed" }, { content: "Pass the time as an argument", status: "in_progress" }, { content: "Run the tests", status: "pending" }] }),
  block({ kind: "plan", plan: { title: "The clock", explanation: "Small steps first.", items: [{ content: "Find where the clock is read", status: "completed", priority: "high" }, { content: "Change the API", status: "cancelled" }] } }),
  block({ kind: "step", step: { id: "1", title: "Find where the clock is read", status: "failed", errorCode: "AGENT_EXITED", errorMessage: "The agent ended." } }),
  block({ kind: "skill_load", skill: { name: "go-tests", path: ".claude/skills/go-tests/SKILL.md" } }),
  ...call("Edit", { file_path: "pkg/events/decide.go", old_string: "func Decide(s State, c Command) ([]Event, error) {\n\tnow := time.Now()\n\tif s.closed {", new_string: "func Decide(s State, c Command, now time.Time) ([]Event, error) {\n\tif s.closed {" }, { output: "ok" }),
  ...call("apply_patch", { changes: [{ path: "pkg/events/evolve.go", kind: { type: "update" }, diff: "@@ -30 +30 @@\n-\tat := time.Now()\n+\tat := e.Time\n" }] }, { output: "" }),
  ...call("WebFetch", { url: "https://pkg.go.dev/time", prompt: "What is a monotonic time?" }, { output: "A monotonic clock reading…" }),
  block({ kind: "assistant_text", content: markdown, model: "claude-opus-4-8" }),
  block({ kind: "system", subtype: "compacted", message: "The conversation was compacted." }),
  block({ kind: "error", code: "MODEL_RATE_LIMITED", message: "429: too many requests; the agent tried 3 times" }),
];

const zalgo = "z" + "\u0301\u0310\u0334\u035e".repeat(10) + "a" + "\u0321\u0330".repeat(10) + "lgo";
const long = "x".repeat(8 * 1024 * 1024);
const lines = Array.from({ length: 1_000_000 }, (_, i) => `line ${i} of a long output that a tool has printed`).join("\n");

/** Texts that try to harm the page or its reader. */
export const hostile: Block[] = [
  block({ kind: "user_message", content: `<img src=x onerror=alert(1)> \x1b[31mred\x1b[0m NUL:\0 lone:\ud800 rlo:\u202egnp.exe ${zalgo}` }),
  block({ kind: "assistant_text", content: `<script>alert(1)</script> [click](javascript:alert(1)) ![track](https://evil.example/x.png) <b onclick=alert(1)>b</b> ${zalgo} \u202etxt.exe` }),
  block({ kind: "assistant_text", content: ">".repeat(5000) + " deep" }),
  block({ kind: "assistant_text", content: `|${" a |".repeat(10_000)}\n|${" - |".repeat(10_000)}\n|${" 1 |".repeat(10_000)}` }),
  ...call(`<img onerror=alert(1)>\u202e`, { command: `echo \u202e${zalgo}\x1b[2J; rm -rf /` }, { output: "\x1b[1;32mgreen\x1b[0m \x1b]0;title\x07 \r progress \b\b NUL:\0", isError: true }),
  ...call("Bash", { command: long }, { output: long, isError: true }),
  ...call("Bash", { command: "yes" }, { output: lines, isError: true }),
];

/** How the turn of the samples ended. */
export const turns = new Map<string, Turn>([[executionId, { executionId, phase: "completed", durationMs: 74_200, costUsd: 0.0312, model: "claude-opus-4-8" }]]);

const approval = (fields: Partial<Approval>): Approval => ({ approvalId: `apr_${++ids}`, executionId, sessionId: "ses_1", conversationId: "main", status: "pending", kind: "tool", requestedAt: at, ...fields });

/** Requests of every kind, open and decided. */
export const approvals: Approval[] = [
  approval({
    toolName: "Bash",
    title: "rm -rf build/",
    request: { kind: "tool", editable: true, class: "Bash(rm *)", reason: "I clean the build folder, which is always safe.", input: { command: "rm -rf build/ && make", description: "Clean" }, preview: { command: "rm -rf build/ && make", cwd: "/workspace/app", paths: ["build/"], hosts: ["proxy.golang.org"] } },
  }),
  approval({ toolName: "Edit", request: { kind: "tool", preview: { paths: ["main.go"], diff: "--- main.go\n+++ main.go\n@@ -1,2 +1,2 @@\n package main\n---x\n+++x\n", cut: [{ field: "diff", bytes: 300_000 }] } } }),
  approval({ kind: "question", request: { kind: "question", questions: [{ id: "color", header: "Color", question: "Which color?", options: [{ label: "Blue", description: "Like the sky" }, { label: "Red" }], other: true }, { id: "token", question: "A token?", secret: true }] } }),
  approval({ kind: "elicitation", request: { kind: "elicitation", preview: { text: "Which account?" }, schema: { type: "object", properties: { account: { type: "string" } } } } }),
  approval({ toolName: "Bash", status: "rejected", cause: "person", decision: "reject", decidedAt: at, decidedBy: { kind: "key", keyName: "anna" }, decided: { comment: "use rg" }, request: { kind: "tool", preview: { command: "grep -r x /" } } }),
];
