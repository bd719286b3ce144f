import assert from "node:assert/strict";
import { test } from "node:test";
import { SpoolClient } from "@spoolhq/client";
import { beginStream, bodyOf, frame, problem, serve, stored } from "../../typescript/test/server.mjs";
import { paint, paintUntil, renderHook } from "./dom.mjs";
const { useMessages } = await import("../dist/index.js");

const json = (response, value, status = 200) => response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(value));

/** A gateway with one session. Routes are answered by `routes`, by the beginning of their path; the others are empty. */
export async function gateway(t, routes = {}) {
  const defaults = {
    "/api/sessions/ses_1/blocks": (_, response) => json(response, { blocks: [], tip: 0 }),
    "/api/sessions/ses_1/executions": (_, response) => json(response, { executions: [] }),
    "/api/sessions/ses_1/events/stream": (_, response) => beginStream(response),
    "/api/sessions/ses_1": (_, response) => json(response, { sessionId: "ses_1" }),
    "/api/approvals": (_, response) => json(response, { approvals: [] }),
  };
  const url = await serve(t, (request, response) => {
    const path = new URL(request.url, "http://x").pathname;
    const route = routes[`${request.method} ${path}`] ?? routes[path] ?? defaults[path];
    if (!route) return problem(response, 404, "NOT_FOUND");
    route(request, response);
  });
  return new SpoolClient({ baseUrl: url, retry: { minDelayMs: 1, maxDelayMs: 5 } });
}

test("a conversation opens with the newest blocks and follows after their tip", async (t) => {
  const client = await gateway(t, {
    "/api/sessions/ses_1/blocks": (_, response) =>
      json(response, { tip: 5, next: "older", blocks: [
        { id: "b", kind: "assistant_text", status: "pending", content: "He", executionId: "exe_1", conversationId: "main" },
        { id: "a", kind: "user_message", status: "complete", content: "hi", executionId: "exe_1", conversationId: "main" },
      ] }),
    "/api/sessions/ses_1/events/stream": (request, response) => {
      assert.equal(new URL(request.url, "http://x").searchParams.get("after"), "5");
      beginStream(response);
      const delta = { ...stored(5, "text_delta", { blockId: "b", offset: 0, delta: "Hello" }), conversationId: "main" };
      response.write(frame(delta));
    },
  });
  const view = await renderHook(t, client, () => useMessages("ses_1"));
  await paintUntil(() => view.last.blocks[1]?.content === "Hello");
  assert.deepEqual(view.last.blocks.map((b) => [b.id, b.content]), [["a", "hi"], ["b", "Hello"]]);
  assert.deepEqual([...view.last.streamingBlockIds], ["b"]);
  assert.equal(view.last.hasOlder, true);
  assert.equal(view.last.connection.status, "live");
});
