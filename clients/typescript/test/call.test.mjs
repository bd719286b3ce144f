import assert from "node:assert/strict";
import { test } from "node:test";
import { ConnectionError, SpoolClient, SpoolError } from "../dist/index.js";
import { operationTable } from "../dist/generated/operations.js";
import { bodyOf, frame, beginStream, problem, serve, stored } from "./server.mjs";

const fast = { minDelayMs: 1, maxDelayMs: 5 };
const json = (response, value, status = 200) => response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(value));

test("a call sends its path, query, body, key and user", async (t) => {
  const seen = [];
  const url = await serve(t, async (request, response) => {
    seen.push([request.method, request.url, request.headers.authorization, request.headers["spool-user"], request.headers["content-type"], String(await bodyOf(request))]);
    json(response, { sessionId: "ses_1" }, 201);
  });
  let keys = 0;
  const client = new SpoolClient({ baseUrl: `${url}/prefix/`, apiKey: async () => `key-${++keys}`, user: "ada" });
  assert.equal((await client.createSession({ architecture: "spool" })).id, "ses_1");
  await client.call("Sessions_GetSession", { path: { session_id: "ses/é" }, query: { minPosition: "0-1" } });
  await client.session("ses_1").interrupt();
  await client.session("ses_1").files.get("a b/c.txt", { live: true });
  assert.deepEqual(seen, [
    ["POST", "/prefix/api/sessions", "Bearer key-1", "ada", "application/json", '{"architecture":"spool"}'],
    ["GET", "/prefix/api/sessions/ses%2F%C3%A9?minPosition=0-1", "Bearer key-2", "ada", undefined, ""],
    ["POST", "/prefix/api/sessions/ses_1/interrupt", "Bearer key-3", "ada", "application/json", "{}"],
    ["GET", "/prefix/api/sessions/ses_1/files/a%20b/c.txt?live=true", "Bearer key-4", "ada", undefined, ""],
  ]);
});

test("the answer of an error is a SpoolError with its fields", async (t) => {
  const url = await serve(t, (_, response) => problem(response, 400, "INVALID_REQUEST", { field: "architecture" }));
  await assert.rejects(new SpoolClient({ baseUrl: url }).createSession({}), (error) => {
    assert.ok(error instanceof SpoolError);
    assert.deepEqual([error.code, error.status, error.field, error.detail], ["INVALID_REQUEST", 400, "architecture", "detail of INVALID_REQUEST"]);
    return true;
  });
});

test("one Idempotency-Key is kept over the attempts of a call, and each call has its own", async (t) => {
  const keys = [];
  const handler = (request, response) => {
    keys.push(request.headers["idempotency-key"]);
    if (keys.length === 1) return response.destroy();
    if (keys.length === 2) return problem(response, 503, "UNAVAILABLE", {}, { "Retry-After": "0" });
    if (keys.length === 3) return response.writeHead(502).end();
    json(response, { executionId: "exe_1" }, 202);
  };
  const client = new SpoolClient({ baseUrl: [await serve(t, handler), await serve(t, handler)], retry: fast });
  assert.equal((await client.session("ses_1").post("hello")).executionId, "exe_1");
  await client.session("ses_1").post("hello");
  await client.session("ses_1").post("hello", { idempotencyKey: "mine" });
  assert.equal(keys.length, 6);
  assert.match(keys[0], /^[0-9a-f]{32}$/);
  assert.deepEqual(keys.slice(0, 4), Array(4).fill(keys[0]));
  assert.notEqual(keys[4], keys[0]);
  assert.equal(keys[5], "mine");
});

test("a command without an Idempotency-Key is only repeated if nothing was done", async (t) => {
  let n = 0;
  const answers = [
    (response) => problem(response, 429, "RATE_LIMITED", {}, { "Retry-After": "0" }),
    (response) => problem(response, 503, "OVERLOADED", {}, { "Retry-After": "0" }),
    (response) => problem(response, 503, "UNAVAILABLE", { idempotencyKey: "k" }, { "Retry-After": "0" }),
    (response) => response.destroy(),
  ];
  const url = await serve(t, (_, response) => answers[n++](response));
  const client = new SpoolClient({ baseUrl: url, retry: fast });
  await assert.rejects(client.session("ses_1").interrupt(), { code: "UNAVAILABLE", idempotencyKey: "k" });
  assert.equal(n, 3);
  await assert.rejects(client.session("ses_1").interrupt(), ConnectionError);
  assert.equal(n, 4);
});

test("a call fails at once if it must wait longer than maxDelayMs, and after its retries", async (t) => {
  let n = 0;
  let wait = "3600";
  const url = await serve(t, (_, response) => (n++, problem(response, 429, "TENANT_EVENTS", {}, { "Retry-After": wait })));
  const client = new SpoolClient({ baseUrl: url, retry: { ...fast, retries: 2 } });
  await assert.rejects(client.session("ses_1").get(), { code: "TENANT_EVENTS", retryAfterMs: 3_600_000 });
  assert.equal(n, 1);
  wait = "0";
  await assert.rejects(client.session("ses_1").get(), { code: "TENANT_EVENTS" });
  assert.equal(n, 4);
});

test("an abort ends the wait for a retry", async (t) => {
  const abort = new AbortController();
  const url = await serve(t, (_, response) => (problem(response, 429, "RATE_LIMITED", {}, { "Retry-After": "60" }), setImmediate(() => abort.abort())));
  const client = new SpoolClient({ baseUrl: url, retry: { maxDelayMs: 100_000 } });
  await assert.rejects(client.session("ses_1").get({ signal: abort.signal }), { name: "AbortError" });
});

test("parameters cannot lead to another operation", async () => {
  const client = new SpoolClient({ baseUrl: "http://127.0.0.1:9" });
  for (const id of ["", ".", ".."]) await assert.rejects(client.session(id).delete(), TypeError);
  for (const path of ["", "../../keys", "a//b", "a/./b", "/a"]) await assert.rejects(client.session("ses_1").files.remove(path), TypeError);
  assert.throws(() => client.session("..").follow(), TypeError);
  assert.throws(() => new SpoolClient({ baseUrl: [] }), TypeError);
  assert.throws(() => new SpoolClient({ baseUrl: "ftp://x" }), TypeError);
});

test("every operation of the API but the WebSocket can be called", async (t) => {
  const { default: document } = await import("../../../pkg/api/spool/v1/openapi.json", { with: { type: "json" } });
  const names = Object.values(document.paths).flatMap((item) => Object.values(item).map((o) => o.operationId));
  assert.deepEqual(names.filter((n) => !(n in operationTable)), ["Events_WebSocket"]);
  const url = await serve(t, (request, response) => json(response, { method: request.method }));
  const client = new SpoolClient({ baseUrl: url });
  for (const [name, operation] of Object.entries(operationTable)) {
    const path = Object.fromEntries([...operation.path.matchAll(/\{(\w+)\}/g)].map((m) => [m[1], "x"]));
    const result = await client.call(name, { path, ...(operation.body && { body: operation.body === "application/json" ? {} : "x" }) });
    assert.equal((operation.json ? result : await result.json()).method, operation.method);
  }
});

test("an upload reports its progress, and is sent again after a failure", async (t) => {
  const bodies = [];
  const url = await serve(t, async (request, response) => {
    bodies.push((await bodyOf(request)).length);
    if (bodies.length === 1) return problem(response, 503, "UNAVAILABLE", {}, { "Retry-After": "0" });
    json(response, { path: "a", mode: new URL(request.url, "http://x").searchParams.get("mode") }, 202);
  });
  const { files } = new SpoolClient({ baseUrl: url, retry: fast }).session("ses_1");
  const progress = [];
  const content = new Uint8Array(1 << 20);
  assert.equal((await files.put("a", content, { mode: "755", onProgress: (...p) => progress.push(p) })).mode, "755");
  assert.deepEqual(bodies, [1 << 20, 1 << 20]);
  assert.deepEqual(progress.at(-1), [1 << 20, 1 << 20]);
  await files.put("a", new Blob(["text"]).stream(), { onProgress: (...p) => progress.push(p) });
  assert.deepEqual([bodies.at(-1), progress.at(-1)], [4, [4, undefined]]);
});

test("a download is a stream", async (t) => {
  let finish;
  const url = await serve(t, (_, response) => {
    response.write("first");
    finish = () => response.end("last");
  });
  const reader = (await new SpoolClient({ baseUrl: url }).session("ses_1").files.get("big")).body.getReader();
  assert.equal(Buffer.from((await reader.read()).value).toString(), "first");
  finish();
  assert.equal(Buffer.from((await reader.read()).value).toString(), "last");
});

test("a state has the blocks of all pages", async (t) => {
  const seen = [];
  const url = await serve(t, (request, response) => {
    const query = Object.fromEntries(new URL(request.url, "http://x").searchParams);
    seen.push(query);
    json(response, query.pageToken ? { status: "idle", blocks: [{ id: "b" }], incompleteText: [{ blockId: "b" }] } : { status: "idle", blocks: [{ id: "a" }], nextPageToken: "p" });
  });
  const state = await new SpoolClient({ baseUrl: url }).session("ses_1").state(12);
  assert.deepEqual(state, { status: "idle", blocks: [{ id: "a" }, { id: "b" }], incompleteText: [{ blockId: "b" }] });
  assert.deepEqual(seen, [{ at: "12" }, { at: "12", pageToken: "p" }]);
});

test("waitForEnd returns the execution after its last event", async (t) => {
  const seen = [];
  const url = await serve(t, (request, response) => {
    seen.push(request.url);
    if (request.url.includes("/events/stream")) {
      beginStream(response);
      response.write(Buffer.concat([
        frame({ ...stored(6, "execution_completed"), executionId: "exe_other" }),
        frame({ ...stored(7, "execution_completed"), executionId: "exe_1" }),
      ]));
    } else if (request.url.includes("/events")) json(response, { events: [], tip: 5 });
    else json(response, { phase: request.url.includes("minPosition") ? "completed" : "running" });
  });
  assert.equal((await new SpoolClient({ baseUrl: url }).session("ses_1").waitForEnd("exe_1")).phase, "completed");
  assert.deepEqual(seen, ["/api/sessions/ses_1/events?limit=1", "/api/executions/exe_1", "/api/sessions/ses_1/events/stream?after=5", "/api/executions/exe_1?minPosition=0-7"]);
});

test("pages of the newest blocks, whole blocks and the timeline are read", async (t) => {
  const paths = [];
  const url = await serve(t, (request, response) => {
    paths.push(request.url);
    const answers = [{ blocks: [{ id: "b" }], tip: 4, next: "p", truncated: [{ blockId: "b", field: "content", bytes: 9000 }] }, {}, { block: { id: "b" }, tip: 5 }, { bucketMs: 3 }];
    response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(answers[paths.length - 1]));
  });
  const session = new SpoolClient({ baseUrl: url }).session("ses_1");
  assert.deepEqual(await session.newestBlocks({ limit: 1, conversationId: "main" }), { blocks: [{ id: "b" }], tip: 4, next: "p", truncated: [{ blockId: "b", field: "content", bytes: 9000 }] });
  assert.deepEqual(await session.newestBlocks({ before: "p" }), { blocks: [], tip: 0, next: undefined, truncated: [] });
  assert.deepEqual(await session.block("b"), { block: { id: "b" }, tip: 5 });
  assert.deepEqual(await session.timeline({ buckets: 7 }), { bucketMs: 3 });
  assert.deepEqual(paths, [
    "/api/sessions/ses_1/blocks?limit=1&conversationId=main&order=newest",
    "/api/sessions/ses_1/blocks?before=p&order=newest",
    "/api/sessions/ses_1/blocks/b",
    "/api/sessions/ses_1/timeline?buckets=7",
  ]);
});

test("an answer that is cut in its body is asked for again, with the same key", async (t) => {
  const keys = [];
  const url = await serve(t, (request, response) => {
    keys.push(request.headers["idempotency-key"]);
    response.writeHead(200, { "Content-Type": "application/json", "Content-Length": 23 });
    if (keys.length % 2) response.write('{"executionId":', () => response.destroy());
    else response.end('{"executionId":"exe_1"}');
  });
  const session = new SpoolClient({ baseUrl: url, retry: { minDelayMs: 1, maxDelayMs: 5 } }).session("ses_1");
  assert.equal((await session.post("hello")).executionId, "exe_1");
  assert.deepEqual([keys.length, keys[0]], [2, keys[1]]);
  assert.equal((await session.files.list()).executionId, "exe_1");
  const once = new SpoolClient({ baseUrl: url, retry: { retries: 0 } });
  await assert.rejects(once.session("ses_1").get(), { name: "ConnectionError" });
});
