import { createServer } from "node:http";

/** Starts a server whose handler answers each request, and returns its URL. It is closed when the test ends. */
export async function serve(t, handler) {
  const server = createServer(handler);
  await new Promise((resolve) => server.listen(0, "127.0.0.1", resolve));
  t.after(() => {
    server.closeAllConnections();
    server.close();
  });
  return `http://127.0.0.1:${server.address().port}`;
}

/** Answers with an error of Spool. */
export function problem(response, status, code, more = {}, headers = {}) {
  response.writeHead(status, { "Content-Type": "application/problem+json", ...headers });
  response.end(JSON.stringify({ type: "about:blank", title: code, status, detail: `detail of ${code}`, code, ...more }));
}

/** Reads the body of a request. */
export async function bodyOf(request) {
  const chunks = [];
  for await (const chunk of request) chunks.push(chunk);
  return Buffer.concat(chunks);
}

/** Returns stored event number seq. */
export const stored = (seq, type = "log", data = { text: `event ${seq} é漢𝄞` }) => ({
  seq, position: `0-${seq}`, id: `evt_${seq}`, type, time: "2026-01-02T03:04:05Z", sessionId: "ses_1", source: "runner", data,
});

/** Returns the bytes of a frame. */
export const frame = (event, end = "\n") =>
  Buffer.from([`id: ${event.seq}`, `event: ${event.type}`, `data: ${JSON.stringify(event)}`, "", ""].join(end));

/** Begins a stream of events. */
export function beginStream(response) {
  response.writeHead(200, { "Content-Type": "text/event-stream" });
  response.write("retry: 1000\n\n");
}
