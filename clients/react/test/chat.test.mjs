import assert from "node:assert/strict";
import { spawn } from "node:child_process";
import { once } from "node:events";
import { connect } from "node:net";
import { test } from "node:test";
import { fileURLToPath } from "node:url";
import { serve } from "../../typescript/test/server.mjs";
import { json } from "./gateway.mjs";

const program = fileURLToPath(new URL("../../../examples/chat/server.mjs", import.meta.url));

/** Starts the server of examples/chat, and returns its URL. */
async function chat(t, handler, env = {}) {
  const child = spawn(process.execPath, [program], { env: { ...process.env, SPOOL_URL: await serve(t, handler), SPOOL_API_KEY: "secret", PORT: "0", ...env }, stdio: ["ignore", "pipe", "ignore"] });
  t.after(() => child.kill());
  const [line] = await once(child.stdout.setEncoding("utf8"), "data");
  return line.trim();
}

/** Sends a request line as it is, and returns the status of the answer. */
async function statusOf(url, target) {
  const { hostname, port } = new URL(url);
  const socket = connect(Number(port), hostname);
  socket.end(`GET ${target} HTTP/1.1\r\nHost: page\r\nConnection: close\r\n\r\n`);
  let answer = "";
  for await (const chunk of socket.setEncoding("utf8")) answer += chunk;
  return Number(answer.split(" ")[1]);
}

test("the chat refuses requests whose target is no path, and runs on", async (t) => {
  const url = await chat(t, (_, response) => response.end());
  for (const target of ["//", "http://[/"]) assert.equal(await statusOf(url, target), 400);
  assert.equal((await fetch(`${url}/api/sessions`)).status, 403);
});

test("a page of another site cannot open a conversation in the chat", async (t) => {
  const created = [];
  const url = await chat(t, (request, response) => (created.push(request.headers.authorization), json(response, { sessionId: "ses_1" }, 201)));
  const open = (headers) => fetch(`${url}/conversation`, { method: "POST", headers });
  const refused = await open({ "Sec-Fetch-Site": "cross-site" });
  assert.deepEqual([refused.status, refused.headers.get("Set-Cookie"), created], [403, null, []]);
  assert.deepEqual(await (await open({ "Sec-Fetch-Site": "same-origin" })).json(), { sessionId: "ses_1" });
  assert.deepEqual(created, ["Bearer secret"]);
});

test("the chat passes when to repeat a request", async (t) => {
  const url = await chat(t, (request, response) => {
    if (request.url === "/api/sessions") return json(response, { sessionId: "ses_1" }, 201);
    response.writeHead(429, { "Content-Type": "application/problem+json", "Retry-After": "7" }).end("{}");
  });
  const [cookie] = (await fetch(`${url}/conversation`, { method: "POST" })).headers.getSetCookie()[0].split(";");
  const answer = await fetch(`${url}/api/sessions/ses_1/messages`, { method: "POST", headers: { Cookie: cookie }, body: "{}" });
  assert.deepEqual([answer.status, answer.headers.get("Retry-After")], [429, "7"]);
});

test("a visitor of the chat sends a text and no other field of a message", async (t) => {
  const bodies = [];
  const url = await chat(t, async (request, response) => {
    if (request.url === "/api/sessions") return json(response, { sessionId: "ses_1" }, 201);
    let body = "";
    for await (const piece of request.setEncoding("utf8")) body += piece;
    bodies.push(JSON.parse(body));
    json(response, {}, 202);
  });
  const [cookie] = (await fetch(`${url}/conversation`, { method: "POST" })).headers.getSetCookie()[0].split(";");
  const post = (rest, body) => fetch(`${url}/api/sessions/ses_1${rest}`, { method: "POST", headers: { Cookie: cookie, "Content-Type": "application/json" }, body });
  await post("/messages", JSON.stringify({ content: "hello", permissions: { preset: "full" }, secrets: { A: "b" } }));
  await post("/interrupt");
  await post("/interrupt", "{}");
  assert.deepEqual(bodies, [{ content: "hello" }, {}, {}]);
  assert.equal((await post("/messages", "{")).status, 502);
});
