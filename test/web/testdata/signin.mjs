// The page exchanges the code of `spool open` for a session cookie, removes it from its address, and stays signed in.
import assert from "node:assert/strict";
import { run } from "./browser.mjs";

await run(
  async ({ page, context, url, code }) => {
    const exchanged = page.waitForResponse((r) => r.url() === `${url}api/signin/sessions`);
    await page.goto(`${url}#code=${code}`);
    assert.equal((await exchanged).status(), 201);
    assert.equal(page.url(), url);
    const [cookie, ...others] = await context.cookies();
    assert.deepEqual(others, []);
    assert.equal(cookie.path, new URL(url).pathname);
    assert.ok(cookie.httpOnly && cookie.sameSite === "Strict", JSON.stringify(cookie));
    const session = page.waitForResponse((r) => r.url() === `${url}api/signin/session`);
    await page.reload();
    assert.equal((await session).status(), 200);
  },
  { signedIn: false },
);
