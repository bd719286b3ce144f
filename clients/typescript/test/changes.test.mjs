import assert from "node:assert/strict";
import { test } from "node:test";
import { SpoolClient, StreamEndedError } from "../dist/index.js";
import { beginStream, problem, serve } from "./server.mjs";

const clientOf = (baseUrl, more = {}) => new SpoolClient({ baseUrl, retry: { minDelayMs: 1, maxDelayMs: 5 }, ...more });
const session = (n) => ({ type: "session", cursor: `c${n}`, session: { sessionId: `ses_${n}`, tip: n } });
const deleted = (n) => ({ type: "session_deleted", cursor: `c${n}`, sessionId: `ses_${n}`, deletedAt: "2026-01-02T03:04:05Z" });
const started = { type: "started", cursor: "c0" };
const history = [session(1), session(2), deleted(3), session(4), session(5)];

/** Returns the bytes of a change, as the gateway sends it. */
function frame({ type, cursor, session: row, ...value }) {
  return type === "started" ? `event: started\ndata: {"cursor":"${cursor}"}\n\n` : `id: ${cursor}\nevent: ${type}\ndata: ${JSON.stringify(row ?? value)}\n\n`;
}

async function take(stream, count) {
  const out = [];
  for await (const change of stream) if (out.push(change) === count) break;
  return out;
}

const after = (cursor) => history.slice(cursor === null ? 0 : Number(cursor.slice(1)));

for (const [name, send] of [
  ["cuts after every change", (response, changes) => response.write(frame(changes[0]), () => response.destroy())],
  ["cuts in the middle of the second change", (response, changes) => response.end(frame(changes[0]) + (changes[1] ? frame(changes[1]).slice(0, -1) : ""))],
  ["sends events of unknown types", (response, changes) => response.end(`id: x\nevent: from_the_future\ndata: {"a":1}\n\n${frame(changes[0])}`)],
  ["sends a change without a cursor or a session", (response, changes, n) => response.end(n % 2 ? frame(changes[0]) : 'event: session\ndata: {"sessionId":"ses_9"}\n\n' + 'id: c9\nevent: session\ndata: {}\n\n')],
]) {
  test(`no change is lost or doubled by an intermediary that ${name}`, async (t) => {
    let connections = 0;
    const url = await serve(t, (request, response) => {
      const cursor = new URL(request.url, "http://x").searchParams.get("after");
      assert.ok(!request.url.includes("?") || cursor, request.url);
      beginStream(response);
      response.write(frame({ type: "started", cursor: cursor ?? "c0" }));
      send(response, after(cursor), connections++);
    });
    const stream = clientOf(url).changes();
    assert.deepEqual(await take(stream, 6), [started, ...history]);
    assert.equal(stream.cursor, "c5");
  });
}

test("a stream of changes continues after a cursor", async (t) => {
  const url = await serve(t, (request, response) => {
    assert.equal(request.url, "/api/sessions/stream?after=c3");
    beginStream(response);
    response.write(frame({ type: "started", cursor: "c3" }) + history.slice(3).map(frame).join(""));
  });
  assert.deepEqual(await take(clientOf(url).changes({ after: "c3" }), 3), [{ type: "started", cursor: "c3" }, ...history.slice(3)]);
});

test("a stream of changes ends with a typed reason", async (t) => {
  const url = await serve(t, (_, response) => {
    beginStream(response);
    response.end(`${frame(started)}event: problem\ndata: {"code":"UNAUTHENTICATED","status":401,"detail":"revoked"}\n\n`);
  });
  const stream = clientOf(url).changes();
  await assert.rejects(take(stream, 9), (error) => error instanceof StreamEndedError && error.reason === "unauthenticated" && error.cursor === "c0");
  const refused = clientOf(await serve(t, (_, response) => problem(response, 400, "INVALID_REQUEST", { field: "after" }))).changes({ after: "x" });
  await assert.rejects(take(refused, 1), { reason: "refused", field: "after" });
});

test("by WebSocket changes continue after cuts", async () => {
  const joins = [];
  const messages = { session: (c) => ({ type: "sessions:changed", cursor: c.cursor, session: c.session }), session_deleted: ({ cursor, type: _, ...value }) => ({ type: "sessions:deleted", cursor, deleted: value }) };
  const openWebSocket = () => {
    const socket = { close() {}, send(text) {
      const join = JSON.parse(text);
      joins.push(join);
      const send = (message) => socket.onmessage?.({ data: JSON.stringify(message) });
      send({ type: "sessions:joined", requestId: "1", cursor: join.cursor ?? "c0" });
      for (const change of after(join.cursor ?? null).slice(0, 2)) send(messages[change.type](change));
      socket.onclose?.();
    } };
    setImmediate(() => socket.onopen?.());
    return socket;
  };
  const stream = clientOf("http://127.0.0.1:9", { openWebSocket, transport: "websocket" }).changes();
  assert.deepEqual(await take(stream, 6), [started, ...history]);
  assert.deepEqual(joins, [undefined, "c2", "c4"].map((cursor) => ({ type: "sessions:join", requestId: "1", ...(cursor && { cursor }) })));
});
