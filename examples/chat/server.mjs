// Serves the page, and passes the requests of its conversation to Spool with the API key, which no browser ever has.
import { createHmac, randomUUID, timingSafeEqual } from "node:crypto";
import { readFile } from "node:fs/promises";
import { createServer } from "node:http";
import { extname } from "node:path";
import { Readable } from "node:stream";
import { pipeline } from "node:stream/promises";
import { fileURLToPath } from "node:url";
import { SpoolClient } from "@spoolhq/client";

const { SPOOL_URL = "http://127.0.0.1:7700", SPOOL_API_KEY: apiKey, PORT = "3000" } = process.env;
const cookieSecret = process.env.COOKIE_SECRET || randomUUID(); // anyone can sign with an empty one
const client = new SpoolClient({ baseUrl: SPOOL_URL, ...(apiKey && { apiKey }) });
const dist = fileURLToPath(new URL("dist", import.meta.url));
const types = { ".html": "text/html", ".js": "text/javascript", ".css": "text/css" };

// What the page may do with its own session, as method and path below /api/sessions/{id}.
const allowed = new Set(["GET ", "GET /blocks", "GET /executions", "GET /events/stream", "POST /messages", "POST /interrupt"]);

/** Reports whether another page than that of this server sent a request, for example by a form. */
const isForeign = (request) => !["same-origin", "none", undefined].includes(request.headers["sec-fetch-site"]);

const sign = (value) => createHmac("sha256", cookieSecret).update(value).digest("hex");

/** Returns the session of the browser, from its signed cookie. */
function sessionOf(request) {
  const [, id, signature] = /(?:^|; )conversation=(ses_\w+)\.([0-9a-f]{64})(?:;|$)/.exec(request.headers.cookie ?? "") ?? [];
  return id && timingSafeEqual(Buffer.from(signature), Buffer.from(sign(id))) ? id : undefined;
}

async function openConversation(request, response) {
  let id = sessionOf(request);
  if (!id) {
    id = (await client.createSession({ architecture: process.env.ARCHITECTURE ?? "spool" })).id;
    response.setHeader("Set-Cookie", `conversation=${id}.${sign(id)}; HttpOnly; SameSite=Strict; Path=/`);
  }
  response.setHeader("Content-Type", "application/json").end(JSON.stringify({ sessionId: id }));
}

/** Reads a message. Of its fields only the text is passed on: a visitor must not choose permissions, variables or limits. */
async function readMessage(request) {
  let text = "";
  for await (const piece of request.setEncoding("utf8")) {
    if ((text += piece).length > 1 << 20) throw new Error("the message is too long");
  }
  const { content } = JSON.parse(text || "{}");
  return JSON.stringify({ content }); // {} without a text, for /interrupt
}

/** Passes a request to Spool, and the answer back as it comes. */
async function pass(request, response, url) {
  const abort = new AbortController();
  response.on("close", () => abort.abort());
  const headers = { ...(apiKey && { Authorization: `Bearer ${apiKey}` }) };
  for (const name of ["accept", "content-type", "idempotency-key", "last-event-id"]) {
    if (request.headers[name]) headers[name] = request.headers[name];
  }
  const body = request.method === "GET" ? undefined : await readMessage(request);
  const answer = await fetch(SPOOL_URL + url.pathname + url.search, { method: request.method, headers, body, signal: abort.signal });
  const retryAfter = answer.headers.get("Retry-After");
  response.writeHead(answer.status, { "Content-Type": answer.headers.get("Content-Type") ?? "application/json", ...(retryAfter && { "Retry-After": retryAfter }) });
  if (answer.body) await pipeline(Readable.fromWeb(answer.body), response, { signal: abort.signal });
  else response.end();
}

async function serveFile(path, response) {
  const name = /^\/assets\/[\w.-]+$/.test(path) ? path : "/index.html";
  response.setHeader("Content-Type", types[extname(name)] ?? "application/octet-stream").end(await readFile(dist + name));
}

const server = createServer(async (request, response) => {
  if (!URL.canParse(request.url, "http://page")) return void response.writeHead(400).end();
  const url = new URL(request.url, "http://page");
  const [, id, rest = ""] = /^\/api\/sessions\/(ses_\w+)(\/[\w/]+)?$/.exec(url.pathname) ?? [];
  try {
    if (request.method !== "GET" && isForeign(request)) response.writeHead(403).end();
    else if (request.method === "POST" && url.pathname === "/conversation") await openConversation(request, response);
    else if (!url.pathname.startsWith("/api/")) await serveFile(url.pathname, response);
    else if (id && id === sessionOf(request) && allowed.has(`${request.method} ${rest}`)) await pass(request, response, url);
    else response.writeHead(403).end();
  } catch (error) {
    if (response.destroyed) return; // the browser has left
    console.error(request.method, url.pathname, error);
    if (response.headersSent) response.destroy();
    else response.writeHead(502).end();
  }
});
server.listen(Number(PORT), "127.0.0.1", () => console.log(`http://127.0.0.1:${server.address().port}`));
