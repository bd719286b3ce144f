// Uses examples/chat in a browser: sends a message, waits for the answer, loads the page again, and prints what it showed.
import { chromium } from "playwright-core";

const { PAGE_URL, CHROMIUM = "/usr/bin/chromium" } = process.env;
const browser = await chromium.launch({ executablePath: CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
const page = await browser.newPage();
page.setDefaultTimeout(120_000); // a machine may be busy
const errors = [];
page.on("pageerror", (error) => errors.push(String(error)));
const texts = (kind) => page.locator(`li[data-kind=${kind}][data-status=complete]`).allTextContents();
const answered = () => page.getByRole("status").filter({ hasText: "completed" }).waitFor();
try {
  await page.goto(PAGE_URL);
  await page.getByLabel("Message").fill("list the folder");
  await page.getByRole("button", { name: "Send" }).click();
  await answered();
  const shown = [await texts("user_message"), await texts("assistant_text")];
  await page.reload();
  await answered();
  await page.locator("li[data-kind=user_message]").waitFor();
  const session = await page.evaluate(async () => (await (await fetch("/conversation", { method: "POST" })).json()).sessionId);
  const refused = await page.evaluate(async () => {
    const statuses = [];
    for (const [method, url] of [["GET", "/api/sessions"], ["GET", "/api/sessions/ses_other"], ["GET", "/api/sessions/ses_other/blocks"]]) {
      statuses.push((await fetch(url, { method })).status);
    }
    return statuses;
  });
  console.log(JSON.stringify({ session, shown, again: [await texts("user_message"), await texts("assistant_text")], refused, errors }));
} finally {
  await browser.close();
}
