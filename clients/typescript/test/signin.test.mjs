import assert from "node:assert/strict";
import { test } from "node:test";
import { SpoolClient } from "../dist/index.js";
import { bodyOf, problem, serve } from "./server.mjs";

/** A gateway whose requests that change something need the CSRF token. */
async function gateway(t) {
  const g = { token: "csrf_1", requests: [] };
  g.url = await serve(t, async (request, response) => {
    const body = await bodyOf(request);
    const { authorization, "x-csrf-token": csrf } = request.headers;
    g.requests.push({ line: `${request.method} ${request.url}`, authorization, csrf, body: String(body) });
    const json = (value) => response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify(value));
    if (request.url === "/api/signin/sessions") return json({ role: "use", tenant: "default", csrfToken: g.token });
    if (request.method === "GET") return g.token ? json({ role: "use", csrfToken: g.token }) : problem(response, 401, "UNAUTHENTICATED");
    if (csrf !== g.token) return problem(response, 403, "CSRF_REFUSED");
    json({ sessionId: "ses_1" });
  });
  g.client = new SpoolClient({ baseUrl: g.url, retry: { minDelayMs: 1, maxDelayMs: 5 } });
  return g;
}

test("a page signs in with a code, and sends the CSRF token with what changes something", async (t) => {
  const g = await gateway(t);
  assert.deepEqual(await g.client.signIn({ code: "spool_sc_x" }), { role: "use", tenant: "default" });
  await g.client.createSession({ architecture: "spool" });
  await g.client.call("Sessions_ListSessions");
  await g.client.signOut();
  assert.deepEqual(g.requests.map((r) => [r.line, r.csrf]), [
    ["POST /api/signin/sessions", undefined],
    ["POST /api/sessions", "csrf_1"],
    ["GET /api/sessions", undefined],
    ["DELETE /api/signin/session", "csrf_1"],
  ]);
  assert.deepEqual(JSON.parse(g.requests[0].body), { code: "spool_sc_x", cookie: true });
  assert.ok(g.requests.every((r) => r.authorization === undefined));
});

test("a page that was loaded again, or whose cookie was replaced, reads its token", async (t) => {
  const g = await gateway(t);
  await g.client.createSession({ architecture: "spool" }); // loaded again
  g.token = "csrf_2"; // another tab has signed in
  await g.client.createSession({ architecture: "spool" });
  const refused = g.requests.filter((r) => r.line === "POST /api/sessions").map((r) => r.csrf);
  assert.deepEqual(refused, [undefined, "csrf_1", "csrf_1", "csrf_2"]);
  assert.deepEqual(await g.client.signInSession(), { role: "use" });
});

test("a token that stays refused is an error, and so is a session that has ended", async (t) => {
  const url = await serve(t, (request, response) => {
    if (request.method === "GET") return response.writeHead(200, { "Content-Type": "application/json" }).end("{}");
    problem(response, 403, "CSRF_REFUSED");
  });
  await assert.rejects(new SpoolClient({ baseUrl: url }).createSession({}), { code: "CSRF_REFUSED" });
  const g = await gateway(t);
  g.token = undefined;
  await assert.rejects(g.client.signInSession(), { code: "UNAUTHENTICATED", status: 401 });
});

test("a request that is refused for its CSRF token is sent again once", async (t) => {
  const requests = [];
  const url = await serve(t, (request, response) => {
    requests.push(request.method);
    if (request.method === "POST") return requests.length < 20 ? problem(response, 403, "CSRF_REFUSED") : response.end("{}");
    response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify({ csrfToken: `token-${requests.length}` }));
  });
  await assert.rejects(new SpoolClient({ baseUrl: url }).session("ses_1").interrupt(), { code: "CSRF_REFUSED" });
  assert.deepEqual(requests, ["POST", "GET", "POST"]);
});
