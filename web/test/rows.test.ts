import type { Block } from "@spoolhq/client";
import assert from "node:assert/strict";
import { test } from "node:test";
import { rowsOf, type Conversation, type Row, type Subagent } from "../src/conversation/rows";
import { transcriptMarkdown } from "../src/conversation/transcript";

const block = (id: string, fields: object): Block => ({ id, status: "complete", timestamp: "2026-01-02T03:04:05Z", executionId: "exe_1", ...fields }) as Block;
const conversation = (fields: Partial<Conversation>): Conversation => ({
  blocks: [],
  streamingBlockIds: new Set(),
  truncatedBlockIds: new Set(),
  keyOf: (b) => b.id,
  subagents: new Map(),
  turns: new Map(),
  approvals: [],
  isOpen: () => true,
  ...fields,
});
const keys = (rows: readonly Row[]) => rows.map((row) => `${" ".repeat(row.depth)}${row.type} ${row.key}`);

const call = block("use", { kind: "tool_use", toolName: "Bash", toolUseId: "t1", input: {} });
const result = block("result", { kind: "tool_result", toolUseId: "t1", output: "ok" });
const text = block("text", { kind: "assistant_text", content: "Done." });
const spawn = block("spawn", { kind: "subagent", subagentId: "s1", toolUseId: "t2" });
const subagent = (blocks: Block[]): Subagent => ({ id: "s1", blocks, status: "completed", streamingBlockIds: new Set() });

test("rowsOf puts a result into the row of its call", () => {
  const rows = rowsOf(conversation({ blocks: [call, text, result] }));
  assert.deepEqual(keys(rows), ["tool use", "block text"]);
  assert.ok(rows[0]?.type === "tool" && rows[0].result === result);
});

test("rowsOf does not join calls and results of different turns", () => {
  assert.deepEqual(keys(rowsOf(conversation({ blocks: [call, { ...result, executionId: "exe_2" }] }))), ["tool use", "result result"]);
});

test("rowsOf ends a turn that is over, and no other", () => {
  const turns = new Map([
    ["exe_1", { executionId: "exe_1", phase: "completed" }],
    ["exe_2", { executionId: "exe_2", phase: "running" }],
  ]);
  assert.deepEqual(keys(rowsOf(conversation({ blocks: [text, { ...text, id: "text2", executionId: "exe_2" }], turns }))), ["block text", "turn turn:exe_1", "block text2"]);
});

test("rowsOf shows the blocks of an open sub-agent below it", () => {
  const subagents = new Map([["s1", subagent([call, result])]]);
  assert.deepEqual(keys(rowsOf(conversation({ blocks: [spawn, text], subagents }))), ["subagent spawn", " tool use", "block text"]);
  assert.deepEqual(keys(rowsOf(conversation({ blocks: [spawn, text], subagents, isOpen: () => false }))), ["subagent spawn", "block text"]);
});

test("rowsOf ends with sub-agents that contain themselves", () => {
  const subagents = new Map([["s1", subagent([{ ...spawn, id: "again" } as Block])]]);
  assert.deepEqual(keys(rowsOf(conversation({ blocks: [spawn], subagents }))), ["subagent spawn", " subagent again"]);
});

test("rowsOf puts a request below its call, and an open one without a call at the end", () => {
  const approvals = [
    { approvalId: "a1", executionId: "exe_1", toolUseId: "t1", status: "approved" },
    { approvalId: "a2", executionId: "exe_1", toolUseId: "t9", status: "pending" },
    { approvalId: "a3", executionId: "exe_1", toolUseId: "t9", status: "rejected" },
  ];
  assert.deepEqual(keys(rowsOf(conversation({ blocks: [call, text], approvals }))), ["tool use", "approval approval:a1", "block text", "approval approval:a2"]);
});

test("transcriptMarkdown writes what was said and done, in fences that no text can end", () => {
  const blocks = [
    block("u", { kind: "user_message", content: "Fix it" }),
    block("c", { kind: "tool_use", toolName: "Bash", toolUseId: "t1", input: { command: "cat `a`" } }),
    block("r", { kind: "tool_result", toolUseId: "t1", output: "```\nend\n````\n", isError: true, durationMs: 1200 }),
    block("p", { kind: "todo", todos: [{ content: "One\n## two", status: "completed" }] }),
    block("e", { kind: "error", code: "AGENT_EXITED", message: "It ended\nearly" }),
    text,
  ];
  assert.equal(
    transcriptMarkdown(blocks),
    [
      "## User\n\nFix it",
      "### Tool: Bash\n\n`` cat `a` ``\n\n```json\n{\n  \"command\": \"cat `a`\"\n}\n```",
      "### Result (failed), 1.2 s\n\n`````\n```\nend\n````\n`````",
      "### Plan, 1 item\n\n- [x] One ## two",
      "> Error AGENT_EXITED: It ended\n> early",
      "## Agent\n\nDone.\n",
    ].join("\n\n"),
  );
});
