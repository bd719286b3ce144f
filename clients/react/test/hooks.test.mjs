import assert from "node:assert/strict";
import { test } from "node:test";
import { beginStream, bodyOf, frame, problem } from "../../typescript/test/server.mjs";
import { frames, paint, paintUntil, renderHook, settle } from "./dom.mjs";
import { block, delta, event, gateway, json } from "./gateway.mjs";
const { useAgentSession, useApprovals, useEvents, useExecution, useLogs, useMessages, usePlan, useReplay, useSessionList, useSubagents, useUsage, useWorkspaceFiles } = await import("../dist/index.js");

const texts = (view) => view.last.blocks.map((b) => b.content);
const live = (view) => paintUntil(() => view.last.connection.status === "live");

test("a conversation opens with the newest blocks and follows after their tip", async (t) => {
  const blocks = [
    block("b", "assistant_text", { status: "pending", content: "He" }),
    block("a", "user_message", { content: "hi" }),
  ];
  const g = await gateway(t, { "/api/sessions/ses_1/blocks": { blocks, tip: 5, next: "older" } });
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  assert.deepEqual([view.seen[0].isLoading, view.seen[0].blocks], [true, []]);
  await live(view);
  g.send(delta(5, "b", 0, "Hello"));
  await paintUntil(() => texts(view)[1] === "Hello");
  assert.deepEqual(texts(view), ["hi", "Hello"]);
  assert.deepEqual([...view.last.streamingBlockIds], ["b"]);
  assert.deepEqual([view.last.hasOlder, view.last.isLoading, view.last.isStreaming], [true, false, true]);
  assert.equal(g.requests.find((r) => r.path.endsWith("/stream")).query.after, "5");
});

test("older pages come before the blocks, and unchanged blocks stay the same objects", async (t) => {
  const pages = { undefined: { blocks: [block("c", "assistant_text", { content: "3", executionId: "exe_2" })], tip: 9, next: "p1" } };
  pages.p1 = { blocks: [block("b", "assistant_text", { content: "2" }), block("a", "user_message", { content: "1" })], tip: 9 };
  const g = await gateway(t, {
    "/api/sessions/ses_1/blocks": (request, response) => json(response, pages[new URL(request.url, "http://x").searchParams.get("before") ?? "undefined"]),
  });
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await live(view);
  const [newest] = view.last.blocks;
  await view.act(() => Promise.all([view.last.loadOlder(), view.last.loadOlder()]));
  await paintUntil(() => view.last.blocks.length === 3);
  assert.equal(g.count("/api/sessions/ses_1/blocks"), 2);
  assert.deepEqual(texts(view), ["1", "2", "3"]);
  assert.equal(view.last.blocks[2], newest);
  assert.equal(view.last.hasOlder, false);
  g.send(event(10, "block_start", { block: { id: "d", kind: "assistant_text", content: "4" } }, { executionId: "exe_2" }));
  await paintUntil(() => view.last.blocks.length === 4);
  assert.deepEqual(texts(view), ["1", "2", "3", "4"]);
  assert.equal(view.last.blocks[2], newest);
});

test("1,000 deltas cause one render a frame", async (t) => {
  const g = await gateway(t);
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await live(view);
  const deltas = Array.from({ length: 1000 }, (_, i) => delta(1, "b", i, "x"));
  g.send(event(1, "block_start", { block: { id: "b", kind: "assistant_text" } }), ...deltas);
  const before = view.seen.length;
  let painted = 0;
  while (texts(view)[0]?.length !== 1000) {
    await settle();
    if (await paint()) painted++;
  }
  assert.ok(painted < 100, `${painted} frames had a change`);
  assert.ok(view.seen.length - before <= painted, `${view.seen.length - before} renders in ${painted} frames`);
});

test("a hidden page is updated too", async (t) => {
  const g = await gateway(t);
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await live(view);
  let hidden = false;
  Object.defineProperty(document, "hidden", { get: () => hidden, configurable: true });
  t.after(() => delete document.hidden);
  g.send(event(1, "message_accepted", { blockId: "a", content: "1" }));
  while (frames.size === 0) await settle();
  hidden = true;
  await view.act(async () => document.dispatchEvent(new window.Event("visibilitychange")));
  assert.equal(frames.size, 0);
  g.send(event(2, "block_start", { block: { id: "b", kind: "assistant_text", content: "2" } }));
  while (texts(view).length < 2) await settle();
  assert.equal(frames.size, 0);
});

test("a block that completes is there in every render, under the same id", async (t) => {
  const g = await gateway(t);
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await live(view);
  g.send(event(1, "block_start", { block: { id: "b", kind: "assistant_text" } }), delta(1, "b", 0, "Hel"));
  await paintUntil(() => texts(view)[0] === "Hel");
  const first = view.seen.length - 1;
  g.send(delta(1, "b", 3, "lo"), event(2, "block_complete", { block: { id: "b", kind: "assistant_text", content: "Hello!" } }), delta(2, "b", 3, "late"));
  await paintUntil(() => texts(view)[0] === "Hello!" && !view.last.isStreaming);
  for (const { blocks } of view.seen.slice(first)) {
    assert.deepEqual(blocks.map((b) => b.id), ["b"]);
    assert.ok("Hello!".startsWith(blocks[0].content));
  }
});

const parts = [{ type: "text", text: "hi" }, { type: "image", mediaType: "image/png", data: "AA==" }];
for (const [eventFirst, body] of [[true, { content: "hi" }], [true, { parts }], [false, { content: "hi" }]]) {
  test(`a message with ${Object.keys(body)} is shown at once and replaced when ${eventFirst ? "its event comes before the answer" : "the answer comes before its event"}`, async (t) => {
    let answer;
    const g = await gateway(t, {
      "POST /api/sessions/ses_1/messages": async (request, response) => {
        assert.deepEqual(JSON.parse(await bodyOf(request)), { metadata: { a: 1 }, ...body });
        answer = () => json(response, { executionId: "exe_1" }, 202);
      },
    });
    const view = await renderHook(t, g.client, () => useMessages("ses_1"));
    await live(view);
    const posted = view.last.sendMessage(body.content ?? body.parts, { metadata: { a: 1 } });
    await paintUntil(() => view.last.blocks.length === 1 && answer);
    const first = view.seen.length - 1;
    assert.deepEqual([view.last.blocks[0].status, view.last.blocks[0].content ?? view.last.blocks[0].parts], ["pending", body.content ?? body.parts]);
    const accept = () => g.send(event(1, "message_accepted", { blockId: "blk_1", ...body }));
    const stored = () => view.last.blocks[0].id === "blk_1";
    if (eventFirst) {
      accept();
      await paintUntil(stored);
    }
    answer();
    await posted;
    if (!eventFirst) {
      accept();
      await paintUntil(stored);
    }
    await paint();
    const keys = view.seen.slice(first).map(({ blocks, keyOf }) => blocks.map(keyOf).join());
    assert.deepEqual(new Set(keys), new Set([keys[0]]));
    assert.equal(view.last.blocks[0].status, "complete");
  });
}

test("a message that the first page of blocks has is shown once", async (t) => {
  let answerBlocks;
  const g = await gateway(t, {
    "/api/sessions/ses_1/blocks": (_, response) => (answerBlocks = () => json(response, { blocks: [block("blk_1", "user_message", { content: "hi" })], tip: 2 })),
    "POST /api/sessions/ses_1/messages": (_, response) => json(response, { executionId: "exe_1" }, 202),
  });
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await view.act(() => view.last.sendMessage("hi"));
  await paintUntil(() => view.last.blocks.length === 1 && answerBlocks);
  answerBlocks();
  await live(view);
  await paint();
  assert.deepEqual(view.last.blocks.map((b) => b.id), ["blk_1"]);
  assert.equal(view.last.keyOf(view.last.blocks[0]), "local_1");
});

test("two equal messages are both shown, and both replaced", async (t) => {
  let executions = 0;
  const g = await gateway(t, { "POST /api/sessions/ses_1/messages": (_, response) => json(response, { executionId: `exe_${++executions}` }, 202) });
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await live(view);
  await view.act(() => Promise.all([view.last.sendMessage("hi"), view.last.sendMessage("hi")]));
  for (const n of [1, 2]) g.send(event(n, "message_accepted", { blockId: `blk_${n}`, content: "hi" }, { executionId: `exe_${n}` }));
  await paintUntil(() => view.last.blocks.length === 2 && view.last.blocks.every((b) => b.id.startsWith("blk_")));
  assert.deepEqual(view.last.blocks.map((b) => b.id), ["blk_1", "blk_2"]);
  assert.ok(view.seen.every(({ blocks }) => blocks.length <= 2));
});

test("a refused message is removed, and its error is shown", async (t) => {
  const g = await gateway(t, { "POST /api/sessions/ses_1/messages": (_, response) => problem(response, 409, "SESSION_CLOSED") });
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await live(view);
  await view.act(() => assert.rejects(view.last.sendMessage("hi"), { code: "SESSION_CLOSED" }));
  await paintUntil(() => view.last.error !== undefined && view.last.blocks.length === 0);
  assert.equal(view.last.error.code, "SESSION_CLOSED");
});

test("hooks with one id share one connection, which ends with the last of them, in StrictMode too", async (t) => {
  const g = await gateway(t);
  const hook = () => [useMessages("ses_1"), useExecution("ses_1"), useApprovals("ses_1"), useUsage("ses_1")];
  const one = await renderHook(t, g.client, hook, { strict: true });
  const two = await renderHook(t, g.client, hook, { strict: true });
  await paintUntil(() => one.last[0].connection.status === "live" && two.last[0].connection.status === "live");
  assert.equal(g.count("/api/sessions/ses_1/events/stream"), 1);
  assert.equal(g.count("/api/sessions/ses_1/blocks"), 1);
  assert.equal(one.last[0].blocks, two.last[0].blocks);
  await one.unmount();
  await settle();
  assert.equal(g.streams.size, 1);
  await two.unmount();
  await paintUntil(() => g.streams.size === 0);
  assert.equal(frames.size, 0);
});

test("a component that takes the place of another one continues with its connection", async (t) => {
  const g = await gateway(t);
  const view = await renderHook(t, g.client, () => useMessages("ses_1"), { remount: true });
  await live(view);
  await view.render("next");
  await settle();
  assert.equal(view.last.connection.status, "live");
  g.send(event(1, "message_accepted", { blockId: "a", content: "hi" }));
  await paintUntil(() => view.last.blocks.length === 1);
  assert.equal(g.count("/api/sessions/ses_1/events/stream"), 1);
});

test("another id shows another session, and no id shows nothing", async (t) => {
  const g = await gateway(t, { "/api/sessions/ses_1/blocks": { blocks: [block("a", "user_message", { content: "hi" })], tip: 1 } });
  const view = await renderHook(t, g.client, (id) => useMessages(id));
  assert.deepEqual([view.last.blocks, view.last.isLoading], [[], false]);
  await assert.rejects(view.last.sendMessage("hi"), /no session/);
  await view.render("ses_1");
  await paintUntil(() => view.last.blocks.length === 1);
  await view.render(undefined);
  assert.deepEqual(view.last.blocks, []);
  await paintUntil(() => g.streams.size === 0);
});

test("nothing is lost by an intermediary that cuts after every event, and unknown events are kept", async (t) => {
  const history = [
    event(1, "message_accepted", { blockId: "a", content: "hi" }),
    event(2, "from_the_future", { block: 7, blockId: null }),
    event(3, "block_start", { block: { id: "b", kind: "assistant_text" } }),
    event(4, "block_complete", { block: { id: "b", kind: "assistant_text", content: "Hello" } }),
    event(5, "log", { level: "info", message: "line" }),
  ];
  const g = await gateway(t, {
    "/api/sessions/ses_1/events/stream": (request, response) => {
      beginStream(response);
      const next = history[Number(new URL(request.url, "http://x").searchParams.get("after"))];
      if (next) response.write(frame(next), () => response.destroy());
    },
  });
  const view = await renderHook(t, g.client, () => ({ ...useMessages("ses_1"), ...useEvents("ses_1"), ...useLogs("ses_1") }));
  await paintUntil(() => view.last.events.length === 5);
  assert.deepEqual(view.last.events.map((e) => e.seq), [5, 4, 3, 2, 1]);
  assert.deepEqual(view.last.logs.map((e) => e.seq), [5]);
  assert.deepEqual(texts(view), ["hi", "Hello"]);
  await view.act(() => view.last.clearEvents());
  await paintUntil(() => view.last.events.length === 0);
});

const ends = [
  ["the session is deleted", (response) => response.write(frame(event(1, "session_deleted", {}))), "deleted"],
  ["the key is revoked", (response) => response.write('event: problem\ndata: {"code":"UNAUTHENTICATED","status":401,"detail":"revoked"}\n\n'), "unauthenticated"],
];
for (const [name, send, reason] of ends) {
  test(`the conversation ends with a typed reason when ${name}`, async (t) => {
    const g = await gateway(t);
    const view = await renderHook(t, g.client, () => useMessages("ses_1"));
    await live(view);
    g.streams.forEach(send);
    await paintUntil(() => view.last.connection.status === "ended");
    assert.equal(view.last.connection.reason, reason);
    assert.deepEqual([view.last.error.name, view.last.error.reason], ["StreamEndedError", reason]);
  });
}

for (const [status, code, reason] of [[404, "SESSION_NOT_FOUND", "deleted"], [401, "UNAUTHENTICATED", "unauthenticated"], [403, "FORBIDDEN", "forbidden"]]) {
  test(`${code} at the beginning ends the conversation with reason ${reason}`, async (t) => {
    const g = await gateway(t, { "/api/sessions/ses_1/blocks": (_, response) => problem(response, status, code) });
    const view = await renderHook(t, g.client, () => useMessages("ses_1"));
    await paintUntil(() => view.last.connection.status === "ended");
    assert.deepEqual([view.last.error.reason, view.last.error.code, view.last.isLoading], [reason, code, false]);
  });
}

test("a cursor that is ahead of the log makes the conversation read its blocks again", async (t) => {
  let reads = 0;
  const g = await gateway(t, {
    "/api/sessions/ses_1/blocks": (_, response) => json(response, { blocks: [block(`a${++reads}`, "user_message", { content: `read ${reads}` })], tip: reads === 1 ? 9 : 1 }),
    "/api/sessions/ses_1/events/stream": (request, response) => {
      const after = new URL(request.url, "http://x").searchParams.get("after");
      // The log is restored from a backup while the stream is open.
      if (after === "10") return problem(response, 409, "CURSOR_AHEAD", { tip: 1 });
      beginStream(response);
      if (after === "9") response.end(frame(event(10, "log", {})));
    },
  });
  const view = await renderHook(t, g.client, () => useMessages("ses_1"));
  await paintUntil(() => texts(view)[0] === "read 2");
  await live(view);
  assert.equal(reads, 2);
});

test("100,000 events are taken in in slices", async (t) => {
  const total = 100_000;
  const g = await gateway(t);
  const view = await renderHook(t, g.client, () => useEvents("ses_1"));
  await paintUntil(() => g.streams.size === 1);
  const [stream] = g.streams;
  (async () => {
    for (let seq = 1; seq <= total; seq += 1000) {
      const part = Buffer.concat(Array.from({ length: 1000 }, (_, i) => frame(event(seq + i, "log", { message: "x" }))));
      if (!stream.write(part)) await new Promise((resolve) => stream.once("drain", resolve));
    }
  })();
  const taken = [];
  let last = 0;
  while (last < total) {
    await settle();
    await paint();
    const now = view.last.events[0]?.seq ?? 0;
    if (now > last) taken.push(now - last);
    last = now;
  }
  assert.ok(Math.max(...taken) <= 2000, `a frame took in ${Math.max(...taken)} events`);
  assert.equal(view.last.events.length, 1000);
  assert.equal(view.last.events[999].seq, total - 999);
});

test("executions, usage and session follow the events", async (t) => {
  let phase = "running";
  const executions = () => [
    { executionId: "exe_0", phase: "completed", usage: { inputTokens: 5 }, costUsd: 1 },
    { executionId: "exe_1", phase },
  ];
  const controls = [];
  const control = (request, response) => (controls.push(request.url), json(response, {}, 202));
  const g = await gateway(t, {
    "/api/sessions/ses_1": (_, response) => json(response, { sessionId: "ses_1", phase, currentSandbox: { sandboxId: "sbx_1" } }),
    "/api/sessions/ses_1/executions": (_, response) => json(response, { executions: executions() }),
    "POST /api/executions/exe_1/cancel": control,
    "POST /api/sessions/ses_1/interrupt": control,
  });
  const view = await renderHook(t, g.client, () => ({ ...useAgentSession("ses_1"), ...useExecution("ses_1"), ...useUsage("ses_1"), metadata: useMessages("ses_1").metadata }));
  await paintUntil(() => view.last.phase === "running" && g.streams.size === 1);
  assert.equal(view.last.runtime.sandboxId, "sbx_1");
  g.send(event(1, "metadata_update", { usage: { inputTokens: 7 }, costUsd: 0.5, model: "m" }));
  await paintUntil(() => view.last.costUsd === 1.5);
  assert.equal(view.last.usage.inputTokens, 12);
  assert.deepEqual(view.last.byExecution.map((e) => [e.executionId, e.costUsd]), [["exe_0", 1], ["exe_1", 0.5]]);
  assert.deepEqual(view.last.metadata, { usage: { inputTokens: 7 }, costUsd: 0.5, model: "m" });
  await view.last.cancel();
  await view.last.interrupt();
  assert.deepEqual(controls, ["/api/executions/exe_1/cancel", "/api/sessions/ses_1/interrupt"]);
  phase = "completed";
  g.send(event(2, "execution_completed", { durationMs: 1 }));
  await paintUntil(() => view.last.phase === "completed" && view.last.session.phase === "completed");
  assert.equal(g.requests.filter((r) => r.path === "/api/sessions/ses_1").at(-1).query.minPosition, "0-2");
});

test("an execution that waits has the reason, until it runs", async (t) => {
  let phase = "queued";
  let waiting = { reason: "slot", detail: "no free slot" };
  const g = await gateway(t, {
    "/api/sessions/ses_1/executions": (_, response) => json(response, { executions: [{ executionId: "exe_1", phase }] }),
    "/api/executions/exe_1": (_, response) => json(response, { executionId: "exe_1", phase, waiting }),
  });
  const view = await renderHook(t, g.client, () => useExecution("ses_1"));
  await paintUntil(() => view.last.waiting && g.streams.size === 1);
  assert.deepEqual([view.last.waiting.detail, view.last.execution.waiting.reason], ["no free slot", "slot"]);
  [phase, waiting] = ["paused", { reason: "paused" }];
  g.send(event(1, "execution_paused", {}));
  await paintUntil(() => view.last.waiting?.reason === "paused");
  [phase, waiting] = ["running", undefined];
  g.send(event(2, "execution_resumed", {}));
  await paintUntil(() => view.last.phase === "running");
  assert.ok(view.seen.every((s) => s.waiting === undefined || { queued: "slot", paused: "paused" }[s.phase] === s.waiting.reason));
  assert.equal(view.last.waiting, undefined);
});

test("the error of a read is shown until a read succeeds, and the reason of a wait may be refused", async (t) => {
  let works = false;
  const g = await gateway(t, {
    "/api/sessions/ses_1/executions": (_, response) => (works ? json(response, { executions: [{ executionId: "exe_1", phase: "queued" }] }) : problem(response, 500, "INTERNAL")),
    "/api/executions/exe_1": (_, response) => problem(response, 403, "FORBIDDEN"),
  });
  const view = await renderHook(t, g.client, () => useExecution("ses_1"));
  await paintUntil(() => view.last.error?.code === "INTERNAL" && g.streams.size === 1);
  works = true;
  g.send(event(1, "execution_started", {}));
  await paintUntil(() => view.last.phase === "queued" && view.last.error === undefined && g.count("/api/executions/exe_1") === 1);
  await settle();
  await paint();
  assert.equal(view.last.error, undefined);
});

test("approval requests of a session open, are decided, and end", async (t) => {
  const decisions = [];
  const g = await gateway(t, {
    "/api/approvals": { approvals: [{ approvalId: "apr_1", status: "pending", sessionId: "ses_1" }] },
    "POST /api/approvals/apr_2/decide": async (request, response) => (decisions.push(JSON.parse(await bodyOf(request))), json(response, {}, 202)),
  });
  const view = await renderHook(t, g.client, () => ({ ...useApprovals("ses_1"), ...{ connection: useMessages("ses_1").connection } }));
  await paintUntil(() => view.last.count === 1 && g.streams.size === 1);
  g.send(event(1, "approval_requested", { approvalId: "apr_2", kind: "tool", title: "rm -rf build", preview: { command: "rm" } }));
  await paintUntil(() => view.last.count === 2);
  assert.deepEqual([view.last.approvals[1].title, view.last.approvals[1].request.preview.command, view.last.approvals[1].executionId], ["rm -rf build", "rm", "exe_1"]);
  await view.last.decide("apr_2", { decision: "approve", scope: "all", input: { a: 1 }, comment: "ok" });
  assert.deepEqual(decisions, [{ decision: "approve_all", arguments: { a: 1 }, comment: "ok" }]);
  g.send(event(2, "approval_decided", { approvalId: "apr_2", decision: "approve_all" }), event(3, "approval_retracted", { approvalId: "apr_1", reason: "withdrawn" }));
  await paintUntil(() => view.last.count === 1 && view.last.approvals[0].status === "decided");
  g.send(event(4, "approval_resolved", { approvalId: "apr_2", outcome: "approved" }));
  await paintUntil(() => view.last.count === 0);
});

test("sub-agents have their blocks and status", async (t) => {
  const g = await gateway(t, {
    "/api/sessions/ses_1/conversations": { conversations: [{ conversationId: "main", status: "running" }, { conversationId: "cnv_1", name: "old", status: "completed", parentConversationId: "main" }] },
    "/api/sessions/ses_1/blocks": (request, response) => {
      const conversation = new URL(request.url, "http://x").searchParams.get("conversationId");
      json(response, { tip: 0, blocks: conversation === "cnv_1" ? [block("s", "assistant_text", { content: "done", conversationId: "cnv_1" })] : [] });
    },
  });
  const view = await renderHook(t, g.client, () => ({ ...useSubagents("ses_1"), main: useMessages("ses_1") }));
  await paintUntil(() => view.last.getSubagentBlocks("cnv_1").length === 1 && g.streams.size === 1);
  const data = { subagentId: "sub_2", subConversationId: "cnv_2", name: "new", parentConversationId: "main" };
  g.send(
    event(1, "subagent_spawned", data),
    event(2, "block_start", { block: { id: "x", kind: "assistant_text" } }, { conversationId: "cnv_2" }),
    { ...delta(2, "x", 0, "text"), conversationId: undefined },
  );
  await paintUntil(() => view.last.getSubagent("sub_2")?.blocks[0]?.content === "text");
  assert.deepEqual([view.last.count, view.last.hasRunningSubagents, [...view.last.getSubagent("cnv_2").streamingBlockIds]], [2, true, ["x"]]);
  assert.deepEqual(view.last.main.blocks, []);
  g.send(event(3, "subagent_completed", { ...data, isError: true }));
  await paintUntil(() => !view.last.hasRunningSubagents);
  assert.deepEqual(view.last.getSubagentsByStatus("failed").map((s) => s.id), ["cnv_2"]);
});

test("the plan is that of the newest block", async (t) => {
  const g = await gateway(t, { "/api/sessions/ses_1/blocks": { tip: 1, blocks: [block("t1", "todo", { todos: [{ content: "a", status: "pending" }] })] } });
  const view = await renderHook(t, g.client, () => usePlan("ses_1"));
  await paintUntil(() => view.last.blockId === "t1" && g.streams.size === 1);
  g.send(event(2, "block_start", { block: { id: "t2", kind: "todo", todos: [{ content: "b", status: "in_progress" }] } }));
  await paintUntil(() => view.last.blockId === "t2");
  assert.deepEqual(view.last.items, [{ content: "b", status: "in_progress" }]);
  g.send(event(3, "block_start", { block: { id: "p", kind: "plan", plan: { items: [{ id: "1", content: "c", status: "pending", priority: "high" }] } } }), event(4, "block_start", { block: { id: "s", kind: "step", step: { id: "1", title: "c", status: "running" } } }));
  await paintUntil(() => view.last.steps.length === 1);
  assert.deepEqual(view.last, { items: [{ id: "1", content: "c", status: "pending", priority: "high" }], steps: [{ id: "1", title: "c", status: "running" }], blockId: "p" });
});

test("a plan whose block was not read yet is shown, and stays at its place", async (t) => {
  const pages = { "": { blocks: [block("z", "assistant_text", { content: "end" })], tip: 9, next: "p" } };
  pages.p = { blocks: [block("p1", "plan", { plan: { items: [{ content: "third", status: "completed" }] } })], tip: 11 };
  const g = await gateway(t, {
    "/api/sessions/ses_1/blocks": (request, response) => json(response, pages[new URL(request.url, "http://x").searchParams.get("before") ?? ""]),
    "/api/sessions/ses_1/state": { todos: [{ conversationId: "main", items: [{ content: "first", status: "pending" }] }] },
  });
  const view = await renderHook(t, g.client, () => ({ ...usePlan("ses_1"), ...useMessages("ses_1") }));
  await paintUntil(() => view.last.items[0]?.content === "first" && g.streams.size === 1);
  g.send(event(10, "block_update", { blockId: "p1", updates: { plan: { items: [{ content: "second", status: "pending" }] } } }));
  await paintUntil(() => view.last.items[0].content === "second");
  g.send(event(11, "block_complete", { block: { id: "p1", kind: "plan", plan: { items: [{ content: "third", status: "completed" }] } } }));
  await paintUntil(() => view.last.items[0].content === "third");
  assert.deepEqual(view.last.blocks.map((b) => b.id), ["z"]);
  await view.act(() => view.last.loadOlder());
  await paintUntil(() => view.last.blockId === "p1");
  assert.deepEqual(view.last.blocks.map((b) => b.id), ["p1", "z"]);
});

test("functions are the same at each render", async (t) => {
  const g = await gateway(t, { "/api/sessions/ses_1/files": { files: [] } });
  const hooks = () => [useAgentSession("ses_1"), useMessages("ses_1"), useSubagents("ses_1"), useExecution("ses_1"), useApprovals("ses_1"), useEvents("ses_1"), useWorkspaceFiles("ses_1"), useReplay("ses_1"), useSessionList()];
  const view = await renderHook(t, g.client, hooks);
  await paintUntil(() => g.streams.size === 1);
  g.send(event(1, "message_accepted", { blockId: "a", content: "hi" }), event(2, "subagent_spawned", { subConversationId: "cnv_1" }));
  await paintUntil(() => view.last[1].blocks.length === 1 && view.last[2].count === 1);
  const functionsOf = (result) => result.map((hook) => Object.fromEntries(Object.entries(hook).filter(([, value]) => typeof value === "function")));
  const [first, last] = [functionsOf(view.seen[0]), functionsOf(view.last)];
  first.forEach((hook, i) => Object.keys(hook).forEach((name) => assert.equal(last[i][name], hook[name], name)));
  assert.ok(first.every((hook) => Object.keys(hook).length > 0));
});

test("files are read again after a snapshot", async (t) => {
  let files = ["a.ts", "src/b.ts", "src/deep/c.md"];
  const g = await gateway(t, {
    "/api/sessions/ses_1/files": (_, response) => json(response, { files: files.map((path) => ({ path, kind: "file", size: 1, mode: 420 })) }),
    "/api/sessions/ses_1/files/src/b.ts": (_, response) => response.end("text"),
  });
  const view = await renderHook(t, g.client, () => useWorkspaceFiles("ses_1"));
  assert.equal(view.last.isLoading, true);
  await paintUntil(() => view.last.files.length === 3 && g.streams.size === 1);
  const found = (glob) => view.last.getFilesByPattern(glob).map((f) => f.path);
  assert.deepEqual([found("*.ts"), found("**/*.ts"), found("src/**"), found("src/?.ts")], [["a.ts"], ["a.ts", "src/b.ts"], ["src/b.ts", "src/deep/c.md"], ["src/b.ts"]]);
  assert.deepEqual(view.last.getFilesByExtension("md").map((f) => f.path), ["src/deep/c.md"]);
  assert.equal(await (await view.last.getFile("src/b.ts")).text(), "text");
  files = [];
  g.send(event(1, "workspace_synced", { snapshot: "s", files: 0 }));
  await paintUntil(() => view.last.files.length === 0);
});

test("sub-agents are read as of the last event, and again if their blocks could not be read", async (t) => {
  let refused = true;
  const g = await gateway(t, {
    "/api/sessions/ses_1/conversations": { conversations: [{ conversationId: "cnv_1", name: "a", status: "running" }] },
    "/api/sessions/ses_1/blocks": (request, response) => {
      const isMain = new URL(request.url, "http://x").searchParams.get("conversationId") === "main";
      if (!isMain && refused) return problem(response, 400, "INVALID_REQUEST");
      json(response, { tip: 0, blocks: isMain ? [] : [block("s", "assistant_text", { content: "done", conversationId: "cnv_1" })] });
    },
  });
  const view = await renderHook(t, g.client, () => ({ ...useSubagents("ses_1"), error: useMessages("ses_1").error }));
  await paintUntil(() => view.last.error && view.last.count === 1 && g.streams.size === 1);
  refused = false;
  g.send(event(1, "execution_completed", {}));
  await paintUntil(() => view.last.getSubagentBlocks("cnv_1").length === 1);
  assert.deepEqual(g.requests.filter((r) => r.path.endsWith("/conversations")).map((r) => r.query.minPosition), [undefined, "0-1"]);
});

test("files of another folder take the place of those before, in whatever order they arrive", async (t) => {
  const waiting = new Map();
  const g = await gateway(t, {
    "/api/sessions/ses_1/files": (request, response) => {
      const dir = new URL(request.url, "http://x").searchParams.get("dir");
      waiting.set(dir, () => json(response, { files: [{ path: `${dir}/x`, kind: "file", size: 1, mode: 420 }] }));
    },
  });
  const view = await renderHook(t, g.client, (dir = "a") => useWorkspaceFiles("ses_1", { dir }));
  await paintUntil(() => waiting.has("a"));
  await view.render("b");
  await paintUntil(() => waiting.has("b"));
  waiting.get("b")();
  await paintUntil(() => view.last.files[0]?.path === "b/x");
  waiting.get("a")();
  // The answer for the folder before has arrived when a request after it is answered.
  await view.act(() => view.last.getFile("y").catch(() => undefined));
  await settle();
  assert.equal(view.last.files[0]?.path, "b/x");
});
