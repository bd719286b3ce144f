// The page loads at its URL and at the URL of a session, and reaches the API with its cookie.
import assert from "node:assert/strict";
import { checkAccessibility, run, screenshots } from "./browser.mjs";

/** Waits until the page has drawn something, and checks that it knows its base and reaches the API. */
async function checkLoaded(page, url) {
  await page.waitForFunction(() => document.querySelector("#root").childElementCount > 0);
  assert.equal(await page.evaluate(() => document.baseURI), url);
  const session = await page.evaluate(async () => {
    const answer = await fetch(new URL("api/signin/session", document.baseURI));
    return { status: answer.status, ...(await answer.json()) };
  });
  assert.equal(session.status, 200, JSON.stringify(session));
  assert.ok(session.csrfToken, "the session has no CSRF token, so the cookie was not sent");
  const opened = await page.evaluate(
    () =>
      new Promise((resolve) => {
        const socket = new WebSocket(new URL("api/ws", document.baseURI));
        socket.onopen = () => resolve("open");
        socket.onerror = () => resolve("error");
      }),
  );
  assert.equal(opened, "open");
  return session.csrfToken;
}

await run(
  async ({ page, context, url }) => {
    await page.goto(url);
    const token = await checkLoaded(page, url);
    await checkAccessibility(page);
    await screenshots(page, "load");
    const created = await context.request.post(new URL("api/sessions", url).href, { data: {}, headers: { "X-CSRF-Token": token } });
    assert.equal(created.status(), 201, await created.text());
    const deep = new URL(`sessions/${(await created.json()).sessionId}?seq=1`, url).href;
    assert.equal((await page.goto(deep)).status(), 200);
    await checkLoaded(page, url);
    await page.locator(".event-json", { hasText: "session_created" }).waitFor();
    assert.equal((await page.reload()).status(), 200);
    await checkLoaded(page, url);
    assert.equal(page.url(), deep);
    await checkAccessibility(page);
    await screenshots(page, "session");
  },
  { expected: [/status of 404.*\/files\?/] }, // a new session has no snapshot of files
);
