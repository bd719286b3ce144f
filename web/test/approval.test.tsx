import { SpoolError } from "@spoolhq/client";
import assert from "node:assert/strict";
import { test } from "node:test";
import { act } from "react";
import { installBrowser } from "./dom";

installBrowser();
const { createRoot } = await import("react-dom/client");
const { ApprovalCard } = await import("../src/conversation/approval");
type Props = Parameters<typeof ApprovalCard>[0];

/** Renders a card. decisions are those that were sent. */
function render(request: object, approval: object = {}, answer: () => Promise<unknown> = async () => undefined) {
  const decisions: unknown[] = [];
  const container = document.createElement("div");
  document.body.append(container);
  const onDecide: Props["onDecide"] = (decision) => {
    decisions.push(decision);
    return answer();
  };
  act(() => createRoot(container).render(<ApprovalCard approval={{ approvalId: "apr_1", status: "pending", kind: "tool", toolName: "Bash", ...approval, request: request as never }} onDecide={onDecide} />));
  const button = (name: string) => [...container.querySelectorAll("button")].find((b) => b.textContent === name)!;
  return {
    container,
    decisions,
    button,
    click: (name: string) => act(async () => button(name).click()),
    /** Writes into the n-th field, as React hears it. */
    write: (text: string, n = 0) =>
      act(async () => {
        const field = [...container.querySelectorAll<HTMLInputElement>("textarea, input:not([type=radio]):not([type=checkbox])")][n]!;
        Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value")!.set!.call(field, text);
        field.dispatchEvent(new Event("input", { bubbles: true }));
      }),
  };
}

const command = { preview: { command: "rm -rf build/", hosts: ["a.example"] }, input: { command: "rm -rf build/" }, reason: "This is safe.", class: "Bash(rm *)", editable: true };

test("ApprovalCard shows what the call does before the agent's words", () => {
  const text = render(command).container.textContent!;
  assert.ok(text.indexOf("rm -rf build/") < text.indexOf("a.example"));
  assert.ok(text.indexOf("a.example") < text.indexOf("The agent says (nobody has checked this)"));
  assert.ok(text.indexOf("The agent says") < text.indexOf("This is safe."));
});

test("ApprovalCard shows a command of many lines whole", () => {
  const lines = Array.from({ length: 2000 }, (_, i) => `echo ${i}`).join("\n");
  assert.equal(render({ preview: { command: lines } }).container.querySelector(".approval-command")!.textContent, lines);
});

test("ApprovalCard says how much of a text is not shown", () => {
  const { container } = render({ preview: { command: "x".repeat(128 * 1024), cut: [{ field: "diff", bytes: 300_000 }] } });
  assert.match(container.textContent!, /Show all \(128 KB\)/);
  assert.match(container.textContent!, /diff is not whole here: it has 293 KB/);
});

test("ApprovalCard makes invisible characters visible", () => {
  const { container } = render({ preview: { command: "echo \u202e\u200b\x1b[8m", paths: ["a\nb"] }, reason: "\u202e" });
  assert.match(container.textContent!, /echo \\u\{202e\}\\u\{200b\}\\u\{1b\}\[8m/);
  assert.match(container.textContent!, /a\\u\{a\}b/);
});

for (const [name, decision] of Object.entries({
  "Approve Bash": { decision: "approve" },
  Reject: { decision: "reject" },
  Skip: { decision: "skip" },
  "Approve this and all later calls of Bash(rm *)": { decision: "approve_all" },
})) {
  test(`ApprovalCard decides with the button ${name}`, async () => {
    const card = render(command);
    await card.click(name);
    assert.deepEqual(card.decisions, [decision]);
  });
}

test("ApprovalCard has no button for a class that the request does not have", () => {
  assert.equal([...render({ preview: { command: "ls" } }).container.querySelectorAll("button")].some((b) => /all later calls/.test(b.textContent!)), false);
});

test("ApprovalCard sends a comment with a rejection", async () => {
  const card = render(command);
  await card.write("use rg");
  await card.click("Reject");
  assert.deepEqual(card.decisions, [{ decision: "reject", comment: "use rg" }]);
});

test("ApprovalCard sends changed arguments, and none that are not an object", async () => {
  const card = render(command);
  await card.click("Edit arguments");
  for (const [text, message] of [["{", /not JSON/], ["[1]", /must be a JSON object/], ["null", /must be a JSON object/]] as const) {
    await card.write(text);
    assert.match(card.container.querySelector("[role=alert]")!.textContent!, message);
    assert.equal(card.button("Approve with these arguments").disabled, true);
  }
  await card.write('{"command":"ls"}');
  await card.click("Approve with these arguments");
  assert.deepEqual(card.decisions, [{ decision: "approve", input: { command: "ls" } }]);
});

test("ApprovalCard decides nothing by a key", () => {
  const card = render(command);
  for (const key of ["Enter", " ", "a", "y"]) {
    for (const element of [card.container.querySelector("[role=group]")!, ...card.container.querySelectorAll("textarea, pre")]) {
      act(() => void element.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true })));
    }
  }
  assert.deepEqual(card.decisions, []);
});

test("ApprovalCard shows why a decision was refused, with its field", async () => {
  const card = render(command, {}, () => Promise.reject(new SpoolError({ status: 400, code: "INVALID_REQUEST", detail: "wrong type", field: "arguments.command" })));
  await card.click("Approve Bash");
  const shown = () => card.container.querySelector("[role=alert]")!.textContent!;
  while (!shown().includes("Correct the request")) await act(() => new Promise((resolve) => setImmediate(resolve))); // from docs/errors.md
  assert.match(shown(), /wrong type.*arguments\.command/);
  assert.equal(card.button("Approve Bash").disabled, false);
});

test("ApprovalCard answers questions, whatever their ids are", async () => {
  const card = render(
    { kind: "question", questions: [{ id: "__proto__", question: "Which?", options: [{ label: "A" }, { label: "B" }], multiple: true }, { id: "constructor", question: "Secret?", secret: true }] },
    { kind: "question" },
  );
  assert.equal(card.button("Answer").disabled, true);
  for (const box of card.container.querySelectorAll<HTMLInputElement>("[type=checkbox]")) await act(async () => box.click());
  await card.write("s3cret");
  assert.equal(card.container.querySelector("[type=password]") !== null, true);
  await card.click("Answer");
  assert.deepEqual(card.decisions, [{ decision: "answer", answers: Object.fromEntries([["__proto__", ["A", "B"]], ["constructor", ["s3cret"]]]) }]);
});

test("ApprovalCard shows who decided and when, and no buttons", () => {
  const { container } = render(command, { status: "rejected", cause: "person", decidedAt: "2026-01-02T03:04:05Z", decidedBy: { keyName: "anna" }, decided: { comment: "use rg" } });
  assert.match(container.textContent!, /Rejected Bash by anna, .*2026.*use rg/s);
  assert.equal(container.querySelectorAll("button").length, 0);
});

test("ApprovalCard accepts a request without any field", () => {
  assert.match(render({}, { toolName: undefined }).container.textContent!, /Run a tool\?/);
});

test("ApprovalCard ignores the second click of a double click, which was meant for what was there before", async () => {
  const { button, decisions } = render(command);
  await act(async () => void button("Approve Bash").dispatchEvent(new MouseEvent("click", { bubbles: true, detail: 2 })));
  assert.deepEqual(decisions, []);
  await act(async () => void button("Approve Bash").dispatchEvent(new MouseEvent("click", { bubbles: true, detail: 1 })));
  assert.deepEqual(decisions, [{ decision: "approve" }]);
});

test("ApprovalCard shows an elicitation whose schema is not one", () => {
  for (const properties of [{ a: null, b: true, c: 1 }, null, [null], "ab"]) {
    const { container } = render({ kind: "elicitation", schema: { properties } }, { kind: "elicitation" });
    assert.ok(container.querySelector("textarea"), JSON.stringify(properties));
  }
});

test("ApprovalCard groups the options of each question, so that arrow keys choose one", () => {
  const options = [{ label: "Blue" }, { label: "Red" }];
  const { container } = render({ kind: "question", questions: [{ id: "a", question: "A?", options }, { id: "b", question: "B?", options }] }, { kind: "question" });
  const names = [...container.querySelectorAll<HTMLInputElement>("input[type=radio]")].map((input) => input.name);
  assert.ok(names[0] && names[2]);
  assert.deepEqual(names, [names[0], names[0], names[2], names[2]]);
  assert.notEqual(names[0], names[2]);
});
