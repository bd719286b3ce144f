import assert from "node:assert/strict";
import { test } from "node:test";
import { beginStream, problem } from "../../typescript/test/server.mjs";
import { paint, paintUntil, renderHook, settle } from "./dom.mjs";
import { block, event, gateway, json } from "./gateway.mjs";
const { useApprovals, useReplay, useSessionList } = await import("../dist/index.js");

const row = (n, more = {}) => ({ sessionId: `ses_${n}`, createdAt: `2026-01-02T03:04:0${n}Z`, updatedAt: `2026-01-02T03:04:0${n}Z`, tip: 1, phase: "idle", ...more });
const ids = (view) => view.last.sessions.map((s) => s.sessionId).join(" ");
const queryOf = (request) => Object.fromEntries(new URL(request.url, "http://x").searchParams);

test("a list of sessions follows changes, without polling", async (t) => {
  const g = await gateway(t, {
    "/api/sessions": (request, response) => json(response, queryOf(request).pageToken === "p2" ? { sessions: [row(2), row(1)] } : { sessions: [row(5), row(4)], nextPageToken: "p2" }),
  });
  const view = await renderHook(t, g.client, () => useSessionList(), { strict: true });
  assert.equal(view.seen[0].isLoading, true);
  await paintUntil(() => !view.last.isLoading);
  assert.deepEqual([ids(view), view.last.hasMore, view.last.connection.status], ["ses_5 ses_4", true, "live"]);
  const unchanged = view.last.sessions[0];
  g.change("session", row(6), "c1");
  g.change("session", row(4, { phase: "running", tip: 3 }), "c2");
  g.change("session", row(4, { phase: "queued", tip: 2 }), "c3"); // an older state
  g.change("session", row(3), "c4"); // belongs to the next page
  await paintUntil(() => ids(view) === "ses_6 ses_5 ses_4" && view.last.getSession("ses_4").phase === "running");
  assert.equal(view.last.sessions[1], unchanged);
  await view.act(() => view.last.loadMore());
  await paintUntil(() => !view.last.hasMore);
  assert.equal(ids(view), "ses_6 ses_5 ses_4 ses_2 ses_1");
  g.change("session_deleted", { sessionId: "ses_5", deletedAt: "2026-01-02T03:04:05Z" }, "c5");
  await paintUntil(() => ids(view) === "ses_6 ses_4 ses_2 ses_1");
  g.lists.forEach((response) => response.destroy());
  await paintUntil(() => g.count("/api/sessions/stream") === 2 && view.last.connection.status === "live");
  assert.equal(g.requests.at(-1).query.after, "c5");
  assert.equal(g.count("/api/sessions"), 2);
});

test("a session leaves a filtered list, or comes into it, when it changes", async (t) => {
  const g = await gateway(t, { "/api/sessions": { sessions: [row(1, { phase: "failed" })] } });
  const view = await renderHook(t, g.client, () => useSessionList({ phase: ["failed", "running"] }));
  await paintUntil(() => ids(view) === "ses_1");
  g.change("session", row(2, { phase: "running" }), "c1");
  g.change("session", row(1, { tip: 2 }), "c2");
  g.change("session", row(3), "c3");
  await paintUntil(() => ids(view) === "ses_2");
});

test("a filter that only the server knows makes the list read again", async (t) => {
  let found = [];
  const g = await gateway(t, { "/api/sessions": (request, response) => (assert.equal(queryOf(request).text, "fix"), json(response, { sessions: found })) });
  const view = await renderHook(t, g.client, () => useSessionList({ search: "fix" }));
  await paintUntil(() => !view.last.isLoading);
  found = [row(1)];
  g.change("session", row(1), "c1");
  await paintUntil(() => ids(view) === "ses_1");
});

test("a list ends with a typed reason when the key is revoked", async (t) => {
  const g = await gateway(t, { "/api/sessions/stream": (_, response) => problem(response, 401, "UNAUTHENTICATED") });
  const view = await renderHook(t, g.client, () => useSessionList());
  await paintUntil(() => view.last.connection.status === "ended");
  assert.deepEqual([view.last.connection.reason, view.last.error.reason], ["unauthenticated", "unauthenticated"]);
});

test("approval requests of all sessions are read again when a session with requests changes", async (t) => {
  let approvals = [{ approvalId: "apr_1", sessionId: "ses_1" }];
  const g = await gateway(t, { "/api/approvals": (_, response) => json(response, { approvals }) });
  const view = await renderHook(t, g.client, () => useApprovals());
  await paintUntil(() => view.last.count === 1);
  const reads = g.count("/api/approvals");
  g.change("session", row(9), "c1"); // without requests
  approvals = [];
  g.change("session", row(1, { openApprovals: 0 }), "c2");
  await paintUntil(() => view.last.count === 0);
  assert.equal(g.count("/api/approvals"), reads + 1);
});

test("a replay seeks, plays, pauses and ends", async (t) => {
  const replays = [];
  const g = await gateway(t, {
    "/api/sessions/ses_1": { sessionId: "ses_1", tip: 4 },
    "/api/sessions/ses_1/state": (request, response) => {
      const seq = Number(queryOf(request).at);
      json(response, { seq, blocks: seq < 2 ? [] : [block("b", "assistant_text", { status: seq < 4 ? "pending" : "complete", content: "Hello".slice(0, seq) })] });
    },
    "/api/sessions/ses_1/events/stream": (request, response) => {
      replays.push({ query: queryOf(request), response });
      beginStream(response);
      response.write(`event: replay_started\ndata: {"from":${queryOf(request).from},"to":4,"tip":4,"speed":1}\n\n`);
    },
  });
  const write = (e) => replays.at(-1).response.write(`id: ${e.seq}\nevent: ${e.type}\ndata: ${JSON.stringify(e)}\n\n`);
  const view = await renderHook(t, g.client, () => useReplay("ses_1", { speed: 2 }));
  await paintUntil(() => view.last.tip === 4 && view.last.seq === 1);
  await view.act(() => view.last.seek(2));
  await paintUntil(() => view.last.blocks[0]?.content === "He");
  await view.act(() => view.last.play());
  await paintUntil(() => view.last.isPlaying && replays.length === 1);
  assert.deepEqual(replays[0].query, { replay: "1", speed: "2", from: "3" });
  write(event(2, "text_delta", { blockId: "b", offset: 0, delta: "Hell" }));
  write(event(3, "log", {}));
  await paintUntil(() => view.last.seq === 3 && view.last.blocks[0].content === "Hell");
  await view.act(() => view.last.pause());
  await paintUntil(() => !view.last.isPlaying);
  await view.act(() => view.last.setSpeed("max"));
  await view.act(() => view.last.play());
  await paintUntil(() => replays.length === 2);
  assert.deepEqual(replays[1].query, { replay: "1", speed: "max", from: "4" });
  write(event(4, "block_complete", { block: { id: "b", kind: "assistant_text", content: "Hello" } }));
  replays[1].response.end('event: replay_ended\ndata: {"seq":4}\n\n');
  await paintUntil(() => !view.last.isPlaying && view.last.blocks[0].content === "Hello");
  assert.equal(view.last.seq, 4);
  await view.act(() => view.last.seek(1));
  await paintUntil(() => view.last.blocks.length === 0 && view.last.seq === 1);
});

test("all lists and approvals share one connection, and a list that comes later misses nothing", async (t) => {
  const g = await gateway(t);
  const one = await renderHook(t, g.client, () => useSessionList({ status: "open", phase: undefined }));
  const two = await renderHook(t, g.client, () => useSessionList({ status: "open" }));
  await paintUntil(() => !one.last.isLoading && !two.last.isLoading);
  assert.equal(g.count("/api/sessions"), 1);
  const three = await renderHook(t, g.client, () => [useSessionList(), useApprovals()]);
  await paintUntil(() => !three.last[0].isLoading && three.last[0].connection.status === "live");
  g.change("session", row(1), "c1");
  await paintUntil(() => three.last[0].sessions.length === 1 && two.last.sessions.length === 0);
  assert.equal(g.count("/api/sessions/stream"), 1);
  await three.unmount();
  await one.unmount();
  await settle();
  assert.equal(g.lists.size, 1);
  await two.unmount();
  await paintUntil(() => g.lists.size === 0);
});

/** Returns a handler that holds requests until the test answers them, in order. */
function held() {
  const waiting = [];
  const handler = (request, response) => waiting.push({ query: queryOf(request), answer: (value) => json(response, value) });
  return { waiting, handler };
}

test("changes that come while a page is read are kept", async (t) => {
  const { waiting, handler } = held();
  const g = await gateway(t, { "/api/sessions": handler });
  const view = await renderHook(t, g.client, () => useSessionList());
  const next = async () => (await paintUntil(() => waiting.length > 0), waiting.shift());
  const first = { sessions: [row(5), row(4)], nextPageToken: "p2" };
  (await next()).answer(first);
  await paintUntil(() => ids(view) === "ses_5 ses_4");

  const refreshed = view.last.refresh();
  const refresh = await next();
  g.change("session", row(6), "c1");
  g.change("session", row(4, { phase: "running", tip: 3 }), "c2");
  g.change("session_deleted", { sessionId: "ses_5" }, "c3");
  await paintUntil(() => ids(view) === "ses_6 ses_4");
  refresh.answer({ ...first, nextPageToken: "p3" });
  await view.act(() => refreshed);
  await paint();
  void view.last.loadMore();
  const more = await next();
  assert.equal(more.query.pageToken, "p3");
  assert.deepEqual([ids(view), view.last.getSession("ses_4").phase], ["ses_6 ses_4", "running"]);

  g.change("session_deleted", { sessionId: "ses_4" }, "c4");
  await paintUntil(() => ids(view) === "ses_6");
  more.answer({ sessions: [row(4), row(3)], nextPageToken: "p4" });
  await paintUntil(() => view.last.sessions.length > 1);
  assert.equal(ids(view), "ses_6 ses_3");

  const loaded = view.last.loadMore();
  const late = await next();
  void view.last.refresh();
  (await next()).answer({ sessions: [row(6)], nextPageToken: "p2" });
  await paintUntil(() => ids(view) === "ses_6");
  late.answer({ sessions: [row(1)], nextPageToken: "p5" }); // the pages between would be missing
  await view.act(() => loaded);
  await paint();
  assert.equal(ids(view), "ses_6");
});

test("the error of a list is shown until a read succeeds", async (t) => {
  let refused = false;
  const g = await gateway(t, { "/api/sessions": (_, response) => (refused ? problem(response, 400, "INVALID_REQUEST") : json(response, { sessions: [row(1)] })) });
  const view = await renderHook(t, g.client, () => useSessionList());
  await paintUntil(() => !view.last.isLoading);
  refused = true;
  await view.act(() => view.last.refresh());
  await paintUntil(() => view.last.error);
  refused = false;
  await view.act(() => view.last.refresh());
  await paintUntil(() => !view.last.error);
});

test("the error of the approval requests is shown until a read succeeds", async (t) => {
  let refused = true;
  const g = await gateway(t, { "/api/approvals": (_, response) => (refused ? problem(response, 400, "INVALID_REQUEST") : json(response, { approvals: [] })) });
  const view = await renderHook(t, g.client, () => useApprovals());
  await paintUntil(() => view.last.error);
  refused = false;
  g.change("session", row(1, { openApprovals: 1 }), "c1");
  await paintUntil(() => !view.last.error);
});
