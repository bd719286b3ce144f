import assert from "node:assert/strict";
import { test } from "node:test";
import { ServerSentEventParser } from "../dist/sse.js";

const bytes = (text) => new TextEncoder().encode(text);

function parse(...chunks) {
  const parser = new ServerSentEventParser();
  return chunks.flatMap((chunk) => parser.push(typeof chunk === "string" ? bytes(chunk) : chunk));
}

const events = [
  ["id: 1\nevent: log\ndata: {\"a\":1}\n\n", [{ type: "log", data: '{"a":1}', lastEventId: "1" }]],
  ["data:no space\ndata:  two\n\n", [{ type: "message", data: "no space\n two", lastEventId: "" }]],
  ["id: 7\ndata: x\n\ndata: y\n\n", [{ type: "message", data: "x", lastEventId: "7" }, { type: "message", data: "y", lastEventId: "7" }]],
  ["id: a\0b\ndata: x\n\n", [{ type: "message", data: "x", lastEventId: "" }]],
  ["event: gone\n\ndata: x\n\n", [{ type: "message", data: "x", lastEventId: "" }]],
  [": a comment\nretry: 1000\nunknown: 1\ndata\n\n", [{ type: "message", data: "", lastEventId: "" }]],
  ["\ufeffdata: é漢𝄞\n\n", [{ type: "message", data: "é漢𝄞", lastEventId: "" }]],
  ["data: complete\n\ndata: cut", [{ type: "message", data: "complete", lastEventId: "" }]],
];

for (const end of ["\n", "\r", "\r\n"]) {
  test(`line end ${JSON.stringify(end)}: every cut of the bytes gives the same events`, () => {
    for (const [text, want] of events) {
      const all = bytes(text.replaceAll("\n", end));
      assert.deepEqual(parse(all), want);
      assert.deepEqual(parse(...[...all].map((b) => Uint8Array.of(b))), want);
      for (let i = 0; i <= all.length; i++) assert.deepEqual(parse(all.subarray(0, i), all.subarray(i)), want);
    }
  });
}

test("a chunk without a character does not separate CR from LF", () => {
  assert.equal(parse("data: x\r", new Uint8Array(), "\ndata: y\r", "\n\r", "\n")[0].data, "x\ny");
});

test("a line of 8 MB in small chunks is one event", () => {
  const parser = new ServerSentEventParser();
  parser.push(bytes("data: "));
  const chunk = bytes("0123456789abcdef".repeat(64));
  for (let i = 0; i < 8 << 10; i++) assert.deepEqual(parser.push(chunk), []);
  const [event] = parser.push(bytes("\n\n"));
  assert.equal(event.data.length, 8 << 20);
});

test("an event without an end is refused before it fills the memory", () => {
  const parser = new ServerSentEventParser();
  const chunk = bytes("data: " + "x".repeat(1 << 20) + "\n");
  assert.throws(() => {
    for (let i = 0; i < 80; i++) parser.push(chunk);
  }, /longer than/);
});
