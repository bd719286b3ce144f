// Another site can neither frame the page nor use its cookie, and markup that gets into the page runs no script.
import assert from "node:assert/strict";
import { createServer } from "node:http";
import { once } from "node:events";
import { run } from "./browser.mjs";

/** Serves one HTML document on loopback, at a host name of another site than 127.0.0.1. */
async function serveForeignSite(html) {
  const server = createServer((_, response) => response.setHeader("Content-Type", "text/html").end(html)).listen(0, "127.0.0.1");
  await once(server, "listening");
  return { url: `http://localhost:${server.address().port}/`, close: () => server.close() };
}

await run(
  async ({ page, url }) => {
    await page.goto(url);
    const seen = await page.evaluate(async () => {
      const violation = new Promise((resolve) => document.addEventListener("securitypolicyviolation", (e) => resolve(e.effectiveDirective), { once: true }));
      document.body.insertAdjacentHTML("beforeend", `<img src="data:," onerror="window.ran = true">`);
      return { directive: await violation, ran: window.ran };
    });
    assert.deepEqual(seen, { directive: "script-src-attr", ran: undefined });

    const foreign = await serveForeignSite(`<iframe src="${url}"></iframe>
      <form method="post" action="${url}api/sessions" enctype="text/plain"><input name='{"x":"' value='"}'><button>send</button></form>`);
    await page.goto(foreign.url);
    const frame = await (await page.waitForSelector("iframe")).contentFrame();
    await frame.waitForLoadState();
    assert.equal(await frame.locator("#root").count(), 0, "the page is shown in a frame of another site");
    const [answer] = await Promise.all([page.waitForResponse(`${url}api/sessions`), page.click("button")]);
    assert.equal(answer.status(), 403);
    assert.equal((await answer.json()).code, "ORIGIN_REFUSED");
    assert.equal((await answer.request().allHeaders()).cookie, undefined);
    foreign.close();
  },
  { expected: [/Content Security Policy/, /Refused to/, /status of 403/] },
);
