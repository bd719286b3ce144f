import type { Block } from "@spoolhq/client";
import assert from "node:assert/strict";
import { test } from "node:test";
import { act } from "react";
import { installBrowser } from "./dom";

installBrowser();
const { createRoot } = await import("react-dom/client");
const { ConversationList } = await import("../src/conversation/list");
type Props = Parameters<typeof ConversationList>[0];

const block = (id: string, fields: object): Block => ({ id, status: "complete", timestamp: "2026-01-02T03:04:05Z", executionId: "exe_1", ...fields }) as Block;
const call = (id: string, input: unknown, output?: string, isError = false): Block[] => [
  block(id, { kind: "tool_use", toolName: "Bash", toolUseId: id, input }),
  ...(output === undefined ? [] : [block(`${id}_result`, { kind: "tool_result", toolUseId: id, output, isError })]),
];

/** Renders a list. Only rows of the last turn have a height here, and so only they are mounted. */
function render(t: { after: (run: () => void) => void }, props: Partial<Props>) {
  const container = document.createElement("div");
  document.body.append(container);
  const root = createRoot(container);
  const all: Props = {
    blocks: [],
    streamingBlockIds: new Set(),
    truncatedBlockIds: new Set(),
    keyOf: (b) => b.id,
    subagents: new Map(),
    turns: new Map(),
    approvals: [],
    renderApproval: () => null,
    hasOlder: false,
    isLoading: false,
    loadOlder: () => Promise.resolve(),
    loadWhole: () => undefined,
    ...props,
  };
  act(() => root.render(<ConversationList {...all} />));
  t.after(() => act(() => root.unmount()));
  const row = (key: string) => container.querySelector<HTMLElement>(`[data-row="${key}"]`)!;
  return {
    container,
    row,
    update: (changes: Partial<Props>) => act(() => root.render(<ConversationList {...Object.assign(all, changes)} />)),
    press: (key: string) => act(() => void (document.activeElement ?? document.body).dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true, cancelable: true }))),
    isOpen: (key: string) => row(key).querySelector("button")!.getAttribute("aria-expanded") === "true",
  };
}

test("ConversationList shows a call on one line until it is opened", (t) => {
  const list = render(t, { blocks: call("t1", { command: "ls" }, "a.txt") });
  assert.equal(list.isOpen("t1"), false);
  assert.doesNotMatch(list.container.textContent!, /a\.txt/);
  act(() => list.row("t1").querySelector("button")!.click());
  assert.equal(list.isOpen("t1"), true);
  assert.match(list.container.textContent!, /a\.txt/);
});

test("ConversationList opens failures by itself", (t) => {
  const list = render(t, { blocks: call("t1", { command: "ls" }, "no such file", true) });
  assert.equal(list.isOpen("t1"), true);
});

test("ConversationList shows the other rows if one cannot be drawn", (t) => {
  const quiet = t.mock.method(console, "error", () => undefined);
  const list = render(t, { blocks: [...call("t1", { command: "ls" }, "a"), block("b1", { kind: "tool_use", toolUseId: "b1", displayName: 7 as unknown as string }), ...call("t2", { command: "pwd" }, "b")] });
  assert.match(list.row("b1").textContent!, /This part cannot be shown/);
  assert.match(list.row("t2").textContent!, /pwd/);
  assert.ok(quiet.mock.callCount() > 0);
});

test("ConversationList says in words what became of a call", (t) => {
  const list = render(t, { blocks: [...call("t1", {}, "ok"), ...call("t2", {}, "no", true), ...call("t3", {})] });
  assert.deepEqual(["t1", "t2", "t3"].map((key) => list.row(key).querySelector(".status-mark")!.lastElementChild!.textContent), ["done", "failed", "running"]);
  list.update({ turns: new Map([["exe_1", { executionId: "exe_1", phase: "cancelled" }]]) });
  assert.equal(list.row("t3").querySelector(".status-mark")!.lastElementChild!.textContent, "no result");
});

test("ConversationList moves by keys, and not while a field has the focus", (t) => {
  const list = render(t, { blocks: [...call("t1", {}, "ok"), ...call("t2", {}, "no", true), ...call("t3", {}, "ok")] });
  list.press("j");
  assert.equal(document.activeElement, list.row("t1"));
  list.press(".");
  assert.equal(document.activeElement, list.row("t2"));
  list.press("e");
  assert.equal(list.isOpen("t2"), false);
  list.press("E");
  assert.deepEqual(["t1", "t2", "t3"].map(list.isOpen), [true, true, true]);
  list.press("E");
  assert.deepEqual(["t1", "t2", "t3"].map(list.isOpen), [false, false, false]);
  const field = document.createElement("input");
  document.body.append(field);
  t.after(() => field.remove());
  field.focus();
  list.press("j");
  assert.equal(document.activeElement, field);
});

test("ConversationList announces a finished block, and not its pieces", (t) => {
  const text = (status: string, content: string) => [block("a", { kind: "assistant_text", status, content })];
  const list = render(t, { blocks: [] });
  const announced = () => list.container.querySelector(".conversation > [aria-live=polite]")!.textContent;
  list.update({ blocks: text("pending", "Hel"), streamingBlockIds: new Set(["a"]) });
  assert.equal(announced(), "");
  list.update({ blocks: text("complete", "Hello"), streamingBlockIds: new Set() });
  assert.equal(announced(), "Agent: Hello");
});

test("ConversationList keeps the row of a message when the log has it", (t) => {
  const list = render(t, { blocks: [block("local_1", { kind: "user_message", status: "pending", content: "hi" })] });
  const before = list.row("local_1");
  list.update({ blocks: [block("blk_1", { kind: "user_message", content: "hi" })], keyOf: (b) => (b.id === "blk_1" ? "local_1" : b.id) });
  assert.equal(list.row("local_1"), before);
});

test("ConversationList requests a page of older blocks once, also if it cannot be loaded", async (t) => {
  const pages: (() => void)[] = [];
  const list = render(t, { blocks: call("t2", {}, "ok"), hasOlder: true, loadOlder: () => new Promise<void>((resolve) => pages.push(resolve)) });
  const older = () => list.container.querySelector<HTMLButtonElement>(".conversation-older")!;
  assert.equal(older().textContent, "Loading…");
  await act(async () => pages[0]!());
  list.update({ turns: new Map() });
  assert.deepEqual([pages.length, older().textContent], [1, "Load older"]);
  act(() => older().click());
  list.update({ blocks: [...call("t1", {}, "ok"), ...call("t2", {}, "ok")] });
  await act(async () => pages[1]!());
  assert.equal(pages.length, 3);
});

test("ConversationList offers to load what is not whole", (t) => {
  const loaded: string[] = [];
  const list = render(t, { blocks: call("t1", { command: "ls" }, "cut", true), truncatedBlockIds: new Set(["t1_result"]), loadWhole: (id) => void loaded.push(id) });
  act(() => list.container.querySelector<HTMLButtonElement>(".long-text-more")!.click());
  assert.deepEqual(loaded, ["t1_result"]);
});

test("ConversationList loads no image but those of known types, from the block itself", (t) => {
  const list = render(t, {
    blocks: [
      block("u", {
        kind: "user_message",
        parts: [
          { type: "image", mediaType: "image/png", data: "aGk=" },
          { type: "image", mediaType: "image/svg+xml", data: "PHN2Zy8+" },
          { type: "image", mediaType: "text/html", data: "aGk=" },
        ],
      }),
    ],
  });
  assert.deepEqual([...list.container.querySelectorAll("img")].map((img) => img.getAttribute("src")), ["data:image/png;base64,aGk="]);
  assert.match(list.container.textContent!, /An image of type image\/svg\+xml, which is not shown/);
});
