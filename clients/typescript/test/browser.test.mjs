import assert from "node:assert/strict";
import { existsSync, readFileSync } from "node:fs";
import { test } from "node:test";
import { chromium } from "playwright-core";
import { beginStream, bodyOf, problem, serve, stored, frame } from "./server.mjs";

const executablePath = process.env.CHROMIUM ?? "/usr/bin/chromium";
const reason = existsSync(executablePath) ? false : `${executablePath} is not there: install chromium, or set CHROMIUM`;

/** Opens a page of a server that serves the package, and answers the API by a handler. */
async function openPage(t, api) {
  const url = await serve(t, (request, response) => {
    const { pathname } = new URL(request.url, "http://x");
    if (pathname.startsWith("/api/")) return api(request, response);
    if (pathname === "/") return response.writeHead(200, { "Content-Type": "text/html" }).end("<!doctype html><title>page</title>");
    if (!/^\/[\w./-]+\.js$/.test(pathname) || pathname.includes("..")) return response.writeHead(404).end();
    response.writeHead(200, { "Content-Type": "text/javascript" }).end(readFileSync(new URL(`../dist${pathname}`, import.meta.url)));
  });
  const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
  t.after(() => browser.close());
  const page = await browser.newPage();
  await page.goto(url);
  return page;
}

test("a browser uploads a file with progress, and can stop the upload", { skip: reason }, async (t) => {
  const bodies = [];
  let aborted;
  const page = await openPage(t, async (request, response) => {
    if (request.url.endsWith("/never")) return request.on("close", () => aborted?.());
    if (request.url.endsWith("/refused")) return problem(response, 413, "PAYLOAD_TOO_LARGE");
    bodies.push({ size: (await bodyOf(request)).length, mode: request.url, type: request.headers["content-type"], key: request.headers.authorization });
    response.writeHead(200, { "Content-Type": "application/json" }).end(JSON.stringify({ position: "0-1", size: 3_000_000 }));
  });
  const [accepted, progress, code] = await page.evaluate(async () => {
    const { SpoolClient } = await import("/index.js");
    const { files } = new SpoolClient({ baseUrl: location.origin, apiKey: "key" }).session("ses_1");
    const progress = [];
    const onProgress = (...sent) => progress.push(sent);
    const accepted = await files.put("a/b.bin", new Blob([new Uint8Array(3_000_000)]), { mode: "755", onProgress });
    const refused = await files.put("refused", "x", { onProgress: () => {} }).catch((error) => error.code);
    return [accepted, progress, refused];
  });
  assert.deepEqual(accepted, { position: "0-1", size: 3_000_000 });
  assert.deepEqual(progress.at(-1), [3_000_000, 3_000_000]);
  assert.equal(code, "PAYLOAD_TOO_LARGE");
  assert.deepEqual(bodies, [{ size: 3_000_000, mode: "/api/sessions/ses_1/files/a/b.bin?mode=755", type: "application/octet-stream", key: "Bearer key" }]);
  const closed = new Promise((resolve) => (aborted = resolve));
  const message = await page.evaluate(async () => {
    const { SpoolClient } = await import("/index.js");
    const abort = new AbortController();
    const onProgress = () => abort.abort(new Error("stopped"));
    const put = new SpoolClient({ baseUrl: location.origin }).session("ses_1").files.put("never", "text", { signal: abort.signal, onProgress });
    return put.catch((error) => error.message);
  });
  assert.equal(message, "stopped");
  await closed;
});

test("a browser sends the cookie of its sign-in, with streams too", { skip: reason }, async (t) => {
  const page = await openPage(t, async (request, response) => {
    const signedIn = request.headers.cookie === "spool=secret";
    if (request.url === "/api/signin/sessions") {
      response.setHeader("Set-Cookie", "spool=secret; HttpOnly; SameSite=Strict; Path=/");
      return response.writeHead(201, { "Content-Type": "application/json" }).end('{"role":"use","csrfToken":"token"}');
    }
    if (!signedIn) return problem(response, 401, "UNAUTHENTICATED");
    if (request.method === "POST" && request.headers["x-csrf-token"] !== "token") return problem(response, 403, "CSRF_REFUSED");
    if (request.method === "POST") return response.writeHead(201, { "Content-Type": "application/json" }).end('{"sessionId":"ses_1"}');
    beginStream(response);
    response.end(frame(stored(1, "session_deleted")));
  });
  const result = await page.evaluate(async () => {
    const { SpoolClient } = await import("/index.js");
    const client = new SpoolClient({ baseUrl: location.origin });
    const before = await client.createSession({}).catch((error) => error.code);
    await client.signIn({ code: "spool_sc_x" });
    const session = await client.createSession({});
    const seqs = [];
    for await (const event of session.follow()) seqs.push(event.seq);
    return [before, session.id, seqs, document.cookie];
  });
  assert.deepEqual(result, ["UNAUTHENTICATED", "ses_1", [1], ""]);
});
