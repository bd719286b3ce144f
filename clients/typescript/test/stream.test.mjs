import assert from "node:assert/strict";
import { test } from "node:test";
import { SpoolClient, StreamEndedError } from "../dist/index.js";
import { beginStream, frame, problem, serve, stored } from "./server.mjs";

const fast = { minDelayMs: 1, maxDelayMs: 5 };
const clientOf = (baseUrl, more = {}) => new SpoolClient({ baseUrl, retry: fast, ...more });
const afterOf = (request) => Number(new URL(request.url, "http://x").searchParams.get("after"));

/** The events of a session that ends with its deletion. */
const history = (count) => Array.from({ length: count }, (_, i) => stored(i + 1, i + 1 === count ? "session_deleted" : "log"));

async function collect(stream) {
  const out = [];
  for await (const event of stream) out.push(event);
  return out;
}

/** Tests that a client receives a history whole from servers that send it in their own way. */
function survives(name, send, count = 40) {
  test(`nothing is lost or doubled by an intermediary that ${name}`, async (t) => {
    const events = history(count);
    let connections = 0;
    const handler = (request, response) => {
      beginStream(response);
      send(response, events.slice(afterOf(request)), connections++);
    };
    const stream = clientOf([await serve(t, handler), await serve(t, handler)]).session("ses_1").follow();
    assert.deepEqual(await collect(stream), events);
    assert.equal(stream.endReason, "deleted");
    assert.equal(stream.cursor, count);
  });
}

survives("cuts the connection after every event", (response, events) => response.write(frame(events[0]), () => response.destroy()));
survives("ends the connection after every event", (response, events) => response.end(frame(events[0])));
survives("cuts every event but the first in the middle", (response, [first, second]) => {
  const rest = second ? frame(second) : Buffer.of();
  response.write(Buffer.concat([frame(first), rest.subarray(0, rest.length - 1)]), () => response.destroy());
});
survives("cuts before the first event each second time", (response, events, n) => (n % 2 ? response.destroy() : response.end(frame(events[0]))));
survives("sends events twice, and old ones again", (response, events) => {
  for (const event of events.slice(0, 3)) response.write(Buffer.concat([frame(event), frame(event), frame(stored(1))]));
  response.end();
});
survives("drops an event", (response, events, n) => response.end(Buffer.concat(events.filter((_, i) => n % 3 === 0 || i !== 2).slice(0, 5).map((e) => frame(e)))));
survives("garbles an event", (response, events, n) => {
  const bytes = Buffer.concat(events.slice(0, 2).map((e) => frame(e)));
  if (n % 2) bytes[bytes.indexOf("{")] = 0x78;
  response.end(bytes);
});
for (const end of ["\r", "\r\n"]) {
  survives(`ends lines with ${JSON.stringify(end)} and sends single bytes`, async (response, events) => {
    for (const byte of Buffer.concat(events.map((e) => frame(e, end)))) {
      if (!response.write(Buffer.of(byte))) await new Promise((resolve) => response.once("drain", resolve));
    }
    response.end();
  }, 5);
}
survives("buffers everything", (response, events) => response.end(Buffer.concat([Buffer.from(": \n\n".repeat(1000)), ...events.map((e) => frame(e))])), 2000);

survives("puts other values in place of events", (response, events, n) => {
  const values = ["null", "7", "[]", '"x"', '{"seq":"1"}', "{}", '{"seq":1}', "{"];
  response.end(n % 2 ? frame(events[0]) : `event: log\ndata: ${values[(n / 2) % values.length]}\n\n`);
});
survives("sends malformed text now and then", (response, events, n) => response.end(Buffer.concat([frame(events[0]), Buffer.from(n % 2 ? 'event: text_delta\ndata: {"data":null}\n\n' : "")])));

test("a connection that delivers nothing is replaced", async (t) => {
  let connections = 0;
  const url = await serve(t, (request, response) => {
    beginStream(response);
    if (connections++ > 0) response.write(frame(stored(1, "session_deleted")));
  });
  const statuses = [];
  const stream = clientOf(url).session("ses_1").follow({ idleTimeoutMs: 50, onStatus: (s) => statuses.push(s.type) });
  assert.equal((await collect(stream)).length, 1);
  assert.ok(statuses.includes("disconnected"));
  assert.ok(connections >= 2);
});

test("text in flight that is sent again after a cut is returned once", async (t) => {
  const delta = (offset, text) => ({ ...stored(1, "text_delta", { blockId: "blk_a", offset, delta: text }), id: undefined });
  const answers = [
    [stored(1, "block_start", { block: { id: "blk_a" } }), delta(0, "aé"), delta(3, "漢")],
    [delta(0, "aé漢𝄞"), delta(10, "b")],
    [delta(0, "aé漢𝄞b"), stored(2, "session_deleted")],
  ];
  const url = await serve(t, (_, response) => {
    beginStream(response);
    response.end(Buffer.concat(answers.shift().map((e) => frame(e))));
  });
  const events = await collect(clientOf(url).session("ses_1").follow());
  assert.deepEqual(events.filter((e) => e.type === "text_delta").map((e) => [e.data.offset, e.data.delta]), [[0, "aé"], [3, "漢"], [6, "𝄞"], [10, "b"]]);
});

const ends = [
  [401, "UNAUTHENTICATED", "unauthenticated"],
  [403, "FORBIDDEN", "forbidden"],
  [404, "SESSION_NOT_FOUND", "deleted"],
  [409, "CURSOR_AHEAD", "cursor_ahead"],
  [410, "CURSOR_EXPIRED", "cursor_expired"],
  [400, "INVALID_REQUEST", "refused"],
];
for (const [status, code, reason] of ends) {
  for (const during of code === "INVALID_REQUEST" ? [false] : [false, true]) {
    test(`${code} ${during ? "during the stream" : "at the beginning"} ends it with reason ${reason}`, async (t) => {
      const url = await serve(t, (_, response) => {
        if (!during) return problem(response, status, code, { tip: 7 });
        beginStream(response);
        response.write(frame(stored(1)));
        response.end(`event: problem\ndata: ${JSON.stringify({ status, code, detail: "why", tip: 7 })}\n\n`);
      });
      const stream = clientOf(url).session("ses_1").follow();
      await assert.rejects(collect(stream), (error) => {
        assert.ok(error instanceof StreamEndedError);
        assert.deepEqual([error.reason, error.code, error.status, error.tip, error.cursor], [reason, code, status, 7, during ? 1 : 0]);
        return true;
      });
      assert.equal(stream.endReason, reason);
    });
  }
}

test("a stream continues after SLOW_CLIENT, UNAVAILABLE, the page of a proxy and a gateway that is gone", async (t) => {
  const gone = await serve(t, (_, response) => response.destroy());
  let n = 0;
  const url = await serve(t, (request, response) => {
    switch (n++) {
      case 0:
        return problem(response, 503, "UNAVAILABLE", {}, { "Retry-After": "0" });
      case 1:
        beginStream(response);
        response.write(frame(stored(1)));
        return response.end('event: problem\ndata: {"code":"SLOW_CLIENT","status":0,"detail":"slow"}\n\n');
      case 2:
        return response.writeHead(200, { "Content-Type": "text/html" }).end("<p>please log in</p>");
      case 3:
        return response.writeHead(502).end("bad gateway");
      case 4:
        return response.writeHead(500).end();
    }
    assert.equal(afterOf(request), 1);
    beginStream(response);
    response.end(frame(stored(2, "session_deleted")));
  });
  assert.deepEqual((await collect(clientOf([gone, url]).session("ses_1").follow())).map((e) => e.seq), [1, 2]);
});

test("break and abort close the connection", async (t) => {
  let open = 0;
  let closed;
  const url = await serve(t, (request, response) => {
    open++;
    beginStream(response);
    response.write(frame(stored(1)));
    request.socket.on("close", () => {
      open--;
      closed?.();
    });
  });
  const session = clientOf(url).session("ses_1");
  const wait = () => new Promise((resolve) => (open === 0 ? resolve() : (closed = resolve)));
  for await (const event of session.follow()) {
    assert.equal(event.seq, 1);
    break;
  }
  await wait();
  const abort = new AbortController();
  const reason = new Error("enough");
  await assert.rejects(async () => {
    for await (const _ of session.follow({ signal: abort.signal })) abort.abort(reason);
  }, reason);
  await wait();
});

test("a stream is iterated once", async (t) => {
  const url = await serve(t, (_, response) => (beginStream(response), response.end(frame(stored(1, "session_deleted")))));
  const stream = clientOf(url).session("ses_1").follow();
  await collect(stream);
  await assert.rejects(collect(stream), TypeError);
});

test("a replay continues after a cut up to the event at which it began to end", async (t) => {
  const requests = [];
  const url = await serve(t, (request, response) => {
    const query = Object.fromEntries(new URL(request.url, "http://x").searchParams);
    requests.push([query, request.headers["last-event-id"]]);
    if (requests.length === 3) return response.writeHead(204).end();
    beginStream(response);
    const started = `event: replay_started\ndata: {"from":2,"to":4,"tip":9,"speed":"max"}\n\n`;
    const seqs = requests.length === 1 ? [2] : [3, 4];
    response.end(Buffer.concat([Buffer.from(started), ...seqs.map((seq) => frame(stored(seq)))]));
  });
  const stream = clientOf(url).session("ses_1").replay({ speed: "max", from: 2 });
  assert.deepEqual((await collect(stream)).map((e) => e.seq ?? e.type), ["replay_started", 2, 3, 4]);
  assert.equal(stream.endReason, "replayed");
  assert.deepEqual(requests, [
    [{ replay: "1", speed: "max", from: "2" }, undefined],
    [{ replay: "1", speed: "max", from: "2", to: "4" }, "2"],
    [{ replay: "1", speed: "max", from: "2", to: "4" }, "4"],
  ]);
});

test("a replay makes progress behind an intermediary that cuts after the very first frame", async (t) => {
  const events = [1, 2, 3, 4].map((seq) => ({ ...stored(seq), executionId: seq === 2 ? "exe_2" : "exe_1" }));
  const reads = [];
  const url = await serve(t, (request, response) => {
    const { pathname, searchParams } = new URL(request.url, "http://x");
    if (pathname.endsWith("/events")) {
      reads.push(Number(searchParams.get("after")));
      return response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify({ events: events.slice(reads.at(-1)) }));
    }
    if (request.headers["last-event-id"] === "3") return response.writeHead(204).end();
    beginStream(response);
    response.end('event: replay_started\ndata: {"from":1,"to":3,"tip":4,"speed":"max"}\n\n');
  });
  const replay = (more) => clientOf(url).session("ses_1").replay({ speed: "max", ...more });
  const stream = replay();
  assert.deepEqual((await collect(stream)).map((e) => e.seq ?? e.type), ["replay_started", 1, 2, 3]);
  assert.equal(stream.endReason, "replayed");
  assert.deepEqual(reads, [0, 1, 2]);
  assert.deepEqual((await collect(replay({ executionId: "exe_1" }))).map((e) => e.seq ?? e.type), ["replay_started", 1, 3]);
});

/** A WebSocket that a test drives: answer is called with each message of the client. */
function fakeSocket(answer, joins) {
  const socket = { close() {}, send: (text) => (joins.push(JSON.parse(text)), answer((message) => socket.onmessage?.({ data: JSON.stringify(message) }), () => socket.onclose?.())) };
  setImmediate(() => socket.onopen?.());
  return socket;
}

test("by WebSocket a stream continues after cuts, and ends with the reason", async () => {
  const joins = [];
  const session = (send) => (event) => send({ type: "session:event", sessionId: "ses_1", event });
  const answers = [
    (send, cut) => (send({ type: "session:joined", requestId: "1", seq: 3 }), session(send)(stored(1)), send({ type: "session:lag", lagging: true, lagMs: 5 }), cut()),
    (send, cut) => (send({ type: "session:joined", requestId: "1", seq: 3 }), session(send)(stored(2)), session(send)(stored(2)), cut()),
    (send) => send({ type: "error", code: "UNAVAILABLE", message: "later" }),
    (send) => (send({ type: "error", code: "CURSOR_AHEAD", message: "why", tip: 1 }), send({ type: "session:snapshot", seq: 1, blocks: [] })),
  ];
  const lags = [];
  const client = clientOf("http://127.0.0.1:9", { apiKey: "key", openWebSocket: (url, headers) => {
    assert.deepEqual([url, headers], ["ws://127.0.0.1:9/api/ws", { authorization: "Bearer key" }]);
    return fakeSocket(answers.shift(), joins);
  } });
  const stream = client.session("ses_1").follow({ transport: "websocket", onStatus: (s) => s.type === "lag" && lags.push(s) });
  const seqs = [];
  await assert.rejects(async () => {
    for await (const event of stream) seqs.push(event.seq);
  }, { reason: "cursor_ahead", status: 409, tip: 1, cursor: 2 });
  assert.deepEqual(seqs, [1, 2]);
  assert.deepEqual(joins.map((j) => [j.type, j.sessionId, j.after]), [0, 1, 2, 2].map((after) => ["session:join", "ses_1", after]));
  assert.deepEqual(lags, [{ type: "lag", lagging: true, lagMs: 5 }]);
});

test("by WebSocket a replay continues after a cut, and ends", async () => {
  const joins = [];
  const answers = [
    (send, cut) => (send({ type: "session:joined" }), send({ type: "session:replay_started", sessionId: "ses_1", from: 1, to: 2, tip: 2, speed: "max" }), send({ type: "session:event", event: stored(1) }), cut()),
    (send) => (send({ type: "session:joined" }), send({ type: "session:replay_started", from: 2, to: 2 }), send({ type: "session:event", event: stored(2) }), send({ type: "session:replay_ended", seq: 2 }), send({ type: "session:left" })),
  ];
  const stream = clientOf("http://127.0.0.1:9", { openWebSocket: () => fakeSocket(answers.shift(), joins) }).session("ses_1").replay({ transport: "websocket", speed: "max" });
  assert.deepEqual((await collect(stream)).map((e) => e.type), ["replay_started", "log", "log", "replay_ended"]);
  assert.deepEqual(joins.map((j) => [j.replay, j.speed, j.from, j.to]), [[true, "max", undefined, undefined], [true, "max", 2, 2]]);
});

test("a refused handshake of a WebSocket ends the stream with the reason that a request shows", async (t) => {
  const url = await serve(t, (_, response) => problem(response, 401, "UNAUTHENTICATED"));
  const openWebSocket = () => {
    const socket = { close() {} };
    setImmediate(() => socket.onerror());
    return socket;
  };
  await assert.rejects(collect(clientOf(url, { openWebSocket }).session("ses_1").follow({ transport: "websocket" })), { reason: "unauthenticated" });
});

test("an abort while a WebSocket is being opened closes it", async () => {
  const abort = new AbortController();
  let closed = 0;
  const openWebSocket = () => ({ close: () => closed++, send() {} }); // nothing ever arrives
  const apiKey = async () => (abort.abort(new Error("left")), "key");
  const stream = clientOf("http://127.0.0.1:9", { apiKey, openWebSocket }).session("ses_1").follow({ transport: "websocket", signal: abort.signal });
  await assert.rejects(collect(stream), { message: "left" });
  assert.equal(closed, 1);
});

test("a WebSocket whose messages are read slowly is closed, and nothing is lost", async () => {
  const count = 30_000;
  const joins = [];
  const most = []; // by socket
  const openWebSocket = () => {
    const socket = fakeSocket((send) => {
      const { after } = joins[joins.length - 1];
      let sent = 0; // while the client listens
      for (; socket.onmessage && after + sent < count; sent++) send({ type: "session:event", event: stored(after + sent + 1, after + sent + 1 === count ? "session_deleted" : "log") });
      most.push(sent);
    }, joins);
    return socket;
  };
  const seqs = (await collect(clientOf("http://127.0.0.1:9", { openWebSocket }).session("ses_1").follow({ transport: "websocket" }))).map((e) => e.seq);
  assert.deepEqual(seqs, Array.from({ length: count }, (_, i) => i + 1));
  assert.ok(most.every((n) => n <= 10_000), String(most));
});

test("connections that end with a temporary problem are opened again after longer and longer waits", async () => {
  const random = Math.random;
  Math.random = () => 1;
  try {
    const waits = [];
    const abort = new AbortController();
    const openWebSocket = () => fakeSocket((send) => send({ type: "error", code: "OVERLOADED", message: "later" }), []);
    const client = new SpoolClient({ baseUrl: "http://127.0.0.1:9", retry: { minDelayMs: 1, maxDelayMs: 1000 }, openWebSocket });
    const onStatus = ({ retryInMs }) => waits.push(retryInMs) === 4 && abort.abort(new Error("enough"));
    await assert.rejects(collect(client.session("ses_1").follow({ transport: "websocket", signal: abort.signal, onStatus })), { message: "enough" });
    assert.deepEqual(waits, [1, 2, 4, 8]);
  } finally {
    Math.random = random;
  }
});
