import { SpoolClient } from "@spoolhq/client";
import { beginStream, frame, problem, serve } from "../../typescript/test/server.mjs";

export const json = (response, value, status = 200) => response.writeHead(status, { "Content-Type": "application/json" }).end(JSON.stringify(value));

const empty = {
  "/api/sessions/ses_1/blocks": { blocks: [], tip: 0 },
  "/api/sessions/ses_1/executions": { executions: [] },
  "/api/sessions/ses_1/conversations": { conversations: [] },
  "/api/sessions/ses_1": { sessionId: "ses_1" },
  "/api/approvals": { approvals: [] },
  "/api/sessions": { sessions: [] },
};

/**
 * Starts a gateway with one session. `routes` answers a path, with or without a method before it, by a value or a handler; all
 * others are empty. Streams stay open; send writes events on those of the session, change writes on those of all sessions.
 */
export async function gateway(t, routes = {}) {
  const streams = new Set();
  const lists = new Set();
  const requests = [];
  const opened = [];
  const keep = (set) => (request, response) => {
    beginStream(response);
    set.add(response);
    request.socket.on("close", () => set.delete(response));
    opened.forEach((resolve) => resolve());
  };
  const streaming = {
    "/api/sessions/ses_1/events/stream": keep(streams),
    "/api/sessions/stream": (request, response) => {
      keep(lists)(request, response);
      const after = new URL(request.url, "http://x").searchParams.get("after");
      response.write(`event: started\ndata: ${JSON.stringify({ cursor: after ?? "c0" })}\n\n`);
    },
  };
  const url = await serve(t, (request, response) => {
    const { pathname, searchParams } = new URL(request.url, "http://x");
    requests.push({ method: request.method, path: pathname, query: Object.fromEntries(searchParams) });
    const route = [`${request.method} ${pathname}`, pathname].map((key) => routes[key] ?? streaming[key] ?? empty[key]).find((r) => r !== undefined);
    if (route === undefined) return problem(response, 404, "NOT_FOUND");
    if (typeof route === "function") return route(request, response);
    json(response, route);
  });
  return {
    client: new SpoolClient({ baseUrl: url, retry: { minDelayMs: 1, maxDelayMs: 5 } }),
    requests,
    streams,
    lists,
    count: (path) => requests.filter((r) => r.path === path).length,
    send: (...events) => streams.forEach((response) => response.write(Buffer.concat(events.map((e) => frame(e))))),
    change: (type, value, id) => lists.forEach((response) => response.write(`id: ${id}\nevent: ${type}\ndata: ${JSON.stringify(value)}\n\n`)),
  };
}

/** Returns an event of an execution in the conversation main. */
export const event = (seq, type, data, more = {}) => ({
  ...{ seq, position: `0-${seq}`, id: `evt_${seq}`, type, time: "2026-01-02T03:04:05Z", sessionId: "ses_1", executionId: "exe_1" },
  ...{ conversationId: "main", source: "runner", data, ...more },
});

/** Returns text in flight of a block. */
export const delta = (seq, blockId, offset, text) => event(seq, "text_delta", { blockId, offset, delta: text }, { id: undefined });

export const block = (id, kind, fields = {}) => ({ id, kind, status: "complete", executionId: "exe_1", conversationId: "main", ...fields });
