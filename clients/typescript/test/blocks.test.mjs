import assert from "node:assert/strict";
import { readFileSync, readdirSync } from "node:fs";
import { test } from "node:test";
import { BlockView, foldBlocks } from "../dist/index.js";

const folder = new URL("../../../pkg/events/blocks/testdata/", import.meta.url);
const plain = (value) => JSON.parse(JSON.stringify(value));

for (const name of readdirSync(folder).filter((n) => n.endsWith(".json"))) {
  test(`vector ${name}`, () => {
    const { doc, feed, blocks } = JSON.parse(readFileSync(new URL(name, folder), "utf8"));
    const before = plain(feed);
    assert.deepEqual(plain(foldBlocks(feed)), blocks, doc);
    assert.deepEqual(feed, before, "the events were changed");
  });
}

const event = (seq, type, data) => ({ seq, position: `0-${seq}`, id: `evt_${seq}`, type, time: "2026-01-02T03:04:05Z", sessionId: "ses_1", executionId: "exe_1", conversationId: "main", source: "runner", data });

test("an unchanged block stays the same object, a changed one does not", () => {
  const view = new BlockView();
  view.apply(event(1, "message_accepted", { blockId: "blk_m", content: "hello" }));
  view.apply(event(2, "block_start", { block: { id: "blk_a", kind: "assistant_text", status: "pending" } }));
  const [message, text] = view.blocks();
  assert.equal(view.apply(event(2, "text_delta", { blockId: "blk_a", offset: 0, delta: "é" })), "blk_a");
  assert.equal(view.blocks()[0], message);
  assert.notEqual(view.blocks()[1], text);
  assert.equal(view.get("blk_a").content, "é");
  assert.equal(view.blocks(), view.blocks());
});

test("pieces of a text in any order, overlapping and repeated, add up to the text", () => {
  const whole = "aé漢𝄞b".repeat(40);
  const encoder = new TextEncoder();
  const characters = [...whole];
  let seed = 7;
  const random = (n) => (seed = (seed * 48271) % 2147483647) % n;
  for (let round = 0; round < 50; round++) {
    const pieces = [];
    const piece = (from, to) => ({ offset: encoder.encode(characters.slice(0, from).join("")).length, delta: characters.slice(from, to).join("") });
    for (let i = 0; i < characters.length; i += 5) pieces.push(piece(i, i + 5));
    for (let i = 0; i < 10; i++) pieces.push(piece(random(100), 100 + random(100)));
    pieces.sort(() => random(3) - 1);
    const view = new BlockView();
    view.apply(event(1, "block_start", { block: { id: "b", kind: "assistant_text", status: "pending" } }));
    for (const data of pieces) {
      view.apply(event(1, "text_delta", { blockId: "b", ...data }));
      assert.ok(whole.startsWith(view.get("b").content ?? ""));
    }
    assert.equal(view.get("b").content, whole);
  }
});

test("malformed events change nothing", () => {
  const view = new BlockView();
  for (const type of ["text_delta", "block_start", "block_update", "block_complete", "message_accepted"]) {
    for (const data of [undefined, null, {}, { block: null }, { blockId: 7 }, { blockId: "x", offset: "0", delta: 1 }]) {
      if (type === "message_accepted" && data?.blockId) continue;
      view.apply(event(1, type, data));
    }
  }
  assert.deepEqual(view.blocks(), []);
});

test("100,000 events fold without deep recursion", () => {
  const view = new BlockView();
  let seq = 0;
  for (let i = 0; i < 20_000; i++) {
    const id = `blk_${i}`;
    view.apply(event(++seq, "block_start", { block: { id, kind: "assistant_text", status: "pending" } }));
    for (let n = 0; n < 3; n++) view.apply(event(seq, "text_delta", { blockId: id, offset: n, delta: "x" }));
    view.apply(event(++seq, "block_complete", { block: { id, kind: "assistant_text", status: "complete", content: "xxx" } }));
  }
  assert.equal(view.blocks().length, 20_000);
  // One text of 100,000 pieces, the first of which comes last.
  view.apply(event(++seq, "block_start", { block: { id: "long", kind: "assistant_text", status: "pending" } }));
  for (let n = 1; n <= 100_000; n++) view.apply(event(seq, "text_delta", { blockId: "long", offset: n, delta: "y" }));
  view.apply(event(seq, "text_delta", { blockId: "long", offset: 0, delta: "x" }));
  assert.equal(view.get("long").content.length, 100_001);
});

const assistant = (id, executionId, fields = {}) => ({ id, kind: "assistant_text", status: "complete", executionId, conversationId: "main", timestamp: "2026-01-02T03:04:05Z", ...fields });
const eventOf = (seq, type, data, executionId) => ({ seq, position: `0-${seq}`, id: `evt_${seq}`, type, time: "2026-01-02T03:04:05Z", sessionId: "ses_1", executionId, conversationId: "main", source: "runner", data });

test("pages of older blocks come before the blocks, in the order of display", () => {
  const view = new BlockView();
  view.prepend([assistant("c", "exe_2"), assistant("d", "exe_3", { status: "pending", content: "He" })], 9);
  const [c] = view.blocks();
  view.apply(eventOf(10, "block_start", { block: { id: "e", kind: "assistant_text" } }, "exe_4"));
  view.apply(eventOf(11, "block_start", { block: { id: "f", kind: "assistant_text" } }, "exe_3")); // executions do not mix
  view.prepend([assistant("a", "exe_1"), assistant("b", "exe_2")], 11);
  assert.deepEqual(view.blocks().map((b) => b.id), ["a", "b", "c", "d", "f", "e"]);
  assert.equal(view.get("c"), c);
});

test("events up to the tip of a page do not change its blocks, and its text is continued", () => {
  const view = new BlockView();
  view.prepend([assistant("a", "exe_1", { status: "pending", content: "Hé" })], 9);
  assert.equal(view.apply(eventOf(9, "block_complete", { block: { id: "a", kind: "assistant_text", content: "old" } }, "exe_1")), undefined);
  view.apply(eventOf(9, "text_delta", { blockId: "a", offset: 0, delta: "H" }));
  assert.equal(view.get("a").content, "Hé");
  view.apply(eventOf(9, "text_delta", { blockId: "a", offset: 1, delta: "éllo" }));
  assert.equal(view.get("a").content, "Héllo");
  view.apply(eventOf(10, "block_complete", { block: { id: "a", kind: "assistant_text", content: "Héllo!" } }, "exe_1"));
  assert.equal(view.get("a").content, "Héllo!");
});

test("a block that was completed before its page was read keeps its last state", () => {
  const view = new BlockView();
  view.apply(eventOf(7, "block_complete", { block: { id: "b", kind: "assistant_text", content: "whole" } }, "exe_1"));
  view.prepend([assistant("a", "exe_1"), assistant("b", "exe_1", { status: "pending", content: "wh" })], 5);
  assert.deepEqual(view.blocks().map((b) => [b.id, b.status]), [["a", "complete"], ["b", "complete"]]);
});

test("a page that was read before text arrived, or before a block was completed, takes nothing away", () => {
  const view = new BlockView();
  const pending = { id: "blk_a", kind: "assistant_text", status: "pending", executionId: "exe_1" };
  view.apply(event(1, "block_start", { block: { id: "blk_a", kind: "assistant_text" } }));
  view.apply(event(1, "text_delta", { blockId: "blk_a", offset: 0, delta: "text" }));
  view.prepend([pending], 1);
  assert.equal(view.get("blk_a").content, "text");
  view.replace(pending, 1);
  assert.equal(view.get("blk_a").content, "text");
  view.apply(event(2, "block_complete", { block: { id: "blk_a", kind: "assistant_text", content: "text, whole" } }));
  view.replace(pending, 1);
  assert.deepEqual([view.get("blk_a").status, view.get("blk_a").content], ["complete", "text, whole"]);
});
