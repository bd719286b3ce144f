import assert from "node:assert/strict";
import { test } from "node:test";
import { diffOf, parseUnified } from "../src/conversation/diff";
import { commandOf, fileChanges, summarize } from "../src/conversation/tools";

test("summarize shows the kind and the argument that matters of each architecture's tools", () => {
  const cases: [string, unknown, string, string][] = [
    // Claude Code
    ["Bash", { command: "go test ./...\necho done", description: "Run the tests" }, "command", "go test ./..."],
    ["Read", { file_path: "/w/a.go", offset: 1 }, "read", "/w/a.go"],
    ["Write", { file_path: "a.txt", content: "x" }, "edit", "a.txt"],
    ["Edit", { file_path: "a.txt", old_string: "x", new_string: "y" }, "edit", "a.txt"],
    ["MultiEdit", { file_path: "a.txt", edits: [{ old_string: "x", new_string: "y" }] }, "edit", "a.txt"],
    ["Grep", { pattern: "x", path: "src" }, "search", "x  in src"],
    ["WebFetch", { url: "https://a.example/", prompt: "?" }, "web", "https://a.example/"],
    ["WebSearch", { query: "go time" }, "web", "go time"],
    ["TaskCreate", { subject: "First step", description: "Do it" }, "plan", "First step"],
    ["AskUserQuestion", { questions: [{ question: "Which color?" }] }, "question", "Which color?"],
    ["Skill", { skill: "pdf" }, "skill", "pdf"],
    ["Agent", { description: "Count", prompt: "Count the files" }, "agent", "Count"],
    // Codex
    ["shell", { command: "/bin/bash -lc 'echo hi > a'", cwd: "/w" }, "command", "echo hi > a"],
    ["apply_patch", { changes: [{ path: "a.txt", kind: { type: "update", move_path: "b.txt" }, diff: "" }] }, "edit", "a.txt → b.txt"],
    // OpenCode
    ["edit", { filePath: "a.txt", oldString: "x", newString: "y" }, "edit", "a.txt"],
    ["glob", { pattern: "*.go" }, "search", "*.go"],
    // agents over ACP, and the built-in agent
    ["replace", { file_path: "a.txt", old_string: "x", new_string: "y" }, "edit", "a.txt"],
    ["run_shell_command", { command: "ls" }, "command", "ls"],
    ["write_file", { path: "a.txt", content: "x" }, "edit", "a.txt"],
    ["run_code", { language: "bash", code: "touch ran" }, "command", "touch ran"],
    ["mcp__desk__open", { drawer: "left" }, "other", "left"],
  ];
  for (const [toolName, input, kind, argument] of cases) {
    const summary = summarize({ toolName, input });
    assert.deepEqual({ kind: summary.kind, argument: summary.argument }, { kind, argument }, toolName);
  }
  assert.equal(summarize({ toolName: "mcp__desk__open" }).name, "desk · open");
});

test("summarize leaves the folder of the workspace out of paths", () => {
  for (const [file_path, want] of [
    ["/var/lib/spool/executor/workspaces/ses_01M8J4AB8TCVB0VG8G38B2RJAH/src/a.ts", "src/a.ts"],
    ["/workspace/src/a.ts", "src/a.ts"],
    ["/etc/passwd", "/etc/passwd"],
    ["/workspaces/other/a.ts", "/workspaces/other/a.ts"],
  ] as const) {
    assert.equal(summarize({ toolName: "Read", input: { file_path } }).argument, want);
    assert.equal(summarize({ toolName: "Write", input: { file_path, content: "" } }).argument, want);
  }
});

test("summarize accepts any input", () => {
  for (const input of [undefined, null, 1, "text", [], [1], { command: 1, path: {}, changes: [null, 1, {}], edits: [null] }, { questions: [null] }]) {
    for (const toolName of ["Bash", "Edit", "AskUserQuestion", undefined]) assert.equal(typeof summarize({ toolName, input }).argument, "string");
  }
});

test("summarize cuts an argument of 8 MB to one short line", () => {
  assert.equal(summarize({ toolName: "Bash", input: { command: "x".repeat(8 << 20) } }).argument.length, 400);
});

test("commandOf keeps a command that only looks like one of a shell", () => {
  assert.equal(commandOf({ command: "bash -c 'a'; rm -rf / 'b'" }), "bash -c 'a'; rm -rf / 'b'");
  assert.equal(commandOf({ command: ["bash", "-lc", "echo hi"] }), "echo hi");
  assert.equal(commandOf({ command: ["git", "status"] }), "git status");
});

test("fileChanges returns the changes of a patch in the order of its files", () => {
  const patch = "*** Begin Patch\n*** Add File: a.txt\n+one\n+two\n*** Update File: b.txt\n*** Move to: c.txt\n@@\n-x\n+y\n*** Delete File: d.txt\n*** End Patch";
  assert.deepEqual(fileChanges("apply_patch", { input: patch }), [
    { path: "a.txt", action: "add", after: "one\ntwo" },
    { path: "b.txt", action: "edit", patch: "@@\n-x\n+y", movedTo: "c.txt" },
    { path: "d.txt", action: "delete", before: "" },
  ]);
});

const marks = (lines: readonly { mark: string; text: string }[]) => lines.map(({ mark, text }) => mark + text);

test("diffOf shows the lines that differ, with lines around them", () => {
  const before = Array.from({ length: 20 }, (_, i) => `line ${i}`).join("\n");
  const diff = diffOf({ path: "a", action: "edit", before, after: before.replace("line 2\n", "").replace("line 15", "LINE 15") });
  assert.deepEqual([diff.added, diff.removed], [1, 2]);
  assert.deepEqual(marks(diff.lines), [" line 0", " line 1", "-line 2", " line 3", " line 4", " line 5", "@", " line 12", " line 13", " line 14", "-line 15", "+LINE 15", " line 16", " line 17", " line 18"]);
});

test("diffOf shows texts that have nothing in common one after the other", () => {
  const lines = (name: string) => Array.from({ length: 5000 }, (_, i) => `${name} ${i}`).join("\n");
  const diff = diffOf({ path: "a", action: "edit", before: lines("a"), after: lines("b") });
  assert.deepEqual([diff.added, diff.removed, diff.lines[0]!.text, diff.lines[9999]!.text], [5000, 5000, "a 0", "b 4999"]);
});

test("diffOf takes the texts of an edit for parts of a file, and those of a written file for the file", () => {
  const texts = { path: "a", before: "a - b", after: "a + b" };
  assert.deepEqual(diffOf({ ...texts, action: "edit" }).lines.map((line) => line.mark), ["-", "+"]);
  assert.ok(diffOf({ ...texts, action: "write" }).lines.some((line) => line.text.includes("No newline")));
});

test("parseUnified does not count the note about a missing line feed as a line of its hunk", () => {
  const { lines } = parseUnified("@@ -1,2 +1,2 @@\n-a\n\\ No newline at end of file\n+b\n--- a\n+++ b\n");
  assert.deepEqual(lines.map((line) => line.mark), ["@", "-", "@", "+", "-", "+"]);
});

test("parseUnified takes lines of a hunk for changes, whatever they look like", () => {
  const diff = parseUnified("--- a.sql\n+++ a.sql\n@@ -1,2 +1,2 @@\n --- a\n--- comment\n+++ added\n\\ No newline at end of file\n@@ -9 +9 @@\n-x\n+y\n");
  assert.deepEqual(marks(diff.lines), ["@--- a.sql", "@+++ a.sql", "@@@ -1,2 +1,2 @@", " --- a", "--- comment", "+++ added", "@\\ No newline at end of file", "@@@ -9 +9 @@", "-x", "+y"]);
  assert.deepEqual([diff.added, diff.removed], [2, 2]);
});

test("parseUnified accepts a diff without hunks, as agents over ACP report it", () => {
  const diff = parseUnified("--- a\n+++ a\n-old\n+new\n");
  assert.deepEqual(marks(diff.lines), ["@--- a", "@+++ a", "-old", "+new"]);
});
