// A person signs in, starts a session with a file, approves a call, looks at files and events, and is signed out.
import assert from "node:assert/strict";
import { checkAccessibility, run, screenshots } from "./browser.mjs";

const message = "write a program that prints primes and run it";
const hostileName = `<img src=x onerror="window.ran = true">.txt`;

/** Checks that the page does not scroll sideways in a narrow window. */
async function checkNarrow(page) {
  const before = page.viewportSize();
  await page.setViewportSize({ width: 360, height: 740 });
  const { width, wide } = await page.evaluate(() => ({
    width: document.documentElement.scrollWidth,
    wide: [...document.querySelectorAll("#root *")].filter((e) => e.getBoundingClientRect().right > 361 && e.checkVisibility()).map((e) => e.className),
  }));
  assert.ok(width <= 360, `the page is ${width} px wide: ${wide}`);
  const marks = await page.locator(".status-mark").evaluateAll((all) => all.map((mark) => mark.scrollWidth));
  assert.ok(Math.max(0, ...marks) <= 24, `marks of states are ${marks} px wide: the words for screen readers are seen`);
  await page.setViewportSize(before);
}

await run(
  async ({ page, context, url, code }) => {
    const row = (text) => page.locator(".sessions-row", { hasText: text });

    // Without a sign-in: a form, which refuses a wrong key with its code.
    await page.goto(url);
    await page.getByLabel("API key").fill("spool_sk_wrong");
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.getByText("UNAUTHENTICATED").waitFor();
    await checkAccessibility(page);
    await screenshots(page, "sign-in");

    // A link signs in, and its code leaves the address.
    await page.goto("about:blank");
    await page.goto(`${url}#code=${code}`);
    await page.getByText("There is no session yet").waitFor();
    assert.equal(page.url(), url);
    await checkAccessibility(page);
    await screenshots(page, "empty");

    // A new session with a file.
    await page.getByRole("link", { name: "New session" }).click();
    await page.getByLabel("Message").fill(message);
    await page.getByRole("combobox", { name: "Agent", exact: true }).selectOption("asks");
    await page.getByLabel("Files for the workspace").setInputFiles({ name: hostileName, mimeType: "text/plain", buffer: Buffer.from("hostile") });
    await checkAccessibility(page);
    await checkNarrow(page);
    await screenshots(page, "new");
    await page.getByRole("button", { name: "Start the session" }).click();
    await page.waitForURL(`${url}sessions/ses_*`);

    // The agent asks: the row, the title and the conversation say so.
    await row("1 approval").waitFor();
    await page.waitForFunction(() => document.title === "(1) Spool");
    const approve = (tool) => page.getByRole("button", { name: `Approve ${tool}`, exact: true });
    await approve("write_file").waitFor();
    await checkAccessibility(page);
    await checkNarrow(page);
    await screenshots(page, "approval");
    await page.getByRole("link", { name: "Approvals" }).click();
    await page.waitForURL(`${url}approvals`);
    await approve("write_file").click();
    // The next call of the turn asks too.
    await approve("run_code").waitFor();
    await row(message).click();
    await approve("run_code").click();
    await page.getByText("sum 129").first().waitFor();
    await row("idle").waitFor();
    await page.waitForFunction(() => document.title === "Spool");
    const session = new URL(page.url()).pathname.split("/").pop();

    // Files, with names as text; and the first event.
    await page.getByRole("tab", { name: "Files" }).click();
    await page.getByRole("button", { name: hostileName }).click();
    await page.getByText("hostile", { exact: true }).waitFor();
    await page.goto(`${url}sessions/${session}?seq=1`);
    await page.locator(".event-json", { hasText: "session_created" }).waitFor();
    await checkAccessibility(page);
    await screenshots(page, "event");
    await page.getByRole("tab", { name: "Usage" }).click();
    await page.getByText("Output tokens").waitFor();
    await checkAccessibility(page);
    await checkNarrow(page);

    // A message for the open session.
    await page.getByLabel("Message").fill("hello again");
    await page.keyboard.press("Enter");
    await page.getByText("You said: hello again", { exact: true }).waitFor();

    // The list is live, and is searched and filtered by the address.
    const csrf = (await (await context.request.get(`${url}api/signin/session`)).json()).csrfToken;
    const created = await context.request.post(`${url}api/sessions`, { data: { agent: "asks" }, headers: { "X-CSRF-Token": csrf } });
    assert.equal(created.status(), 201, await created.text());
    await row("No message yet").waitFor();
    await page.keyboard.press("Escape");
    await page.locator("body").click({ position: { x: 1, y: 1 } });
    await page.keyboard.press("/");
    await page.keyboard.type("primes");
    await row("No message yet").waitFor({ state: "detached" });
    assert.equal(new URL(page.url()).searchParams.get("q"), "primes");
    await page.getByRole("button", { name: "Failed" }).click();
    await page.getByText("No session matches.").waitFor();
    await page.goto(`${url}?q=primes`);
    await row(message).waitFor();

    // Signed out elsewhere: the page says so and keeps what it shows; a key signs in again.
    const ended = await context.request.delete(`${url}api/signin/session`, { headers: { "X-CSRF-Token": csrf } });
    assert.equal(ended.status(), 200, await ended.text());
    await page.getByText("You are signed out.").waitFor();
    await row(message).waitFor();
    await checkAccessibility(page);
    await screenshots(page, "signed-out");
    await page.getByLabel("API key").fill(process.env.SPOOL_KEY);
    await page.getByRole("button", { name: "Sign in" }).click();
    await page.getByText("You are signed out.").waitFor({ state: "detached" });
    await row(message).waitFor();

    assert.equal(await page.evaluate(() => window.ran), undefined, "markup in a text has run a script");
  },
  { signedIn: false, expected: [/status of 401/, /status of 404 .*files/] },
);
