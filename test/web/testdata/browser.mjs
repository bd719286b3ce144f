// Runs scenarios in Chromium. A scenario is a program that calls run once.
import assert from "node:assert/strict";
import { mkdir, readFile } from "node:fs/promises";
import { createRequire } from "node:module";
import { join } from "node:path";
import { chromium } from "playwright-core";

const axe = await readFile(createRequire(import.meta.url).resolve("axe-core/axe.min.js"), "utf8");

/** The widths in pixels and the themes in which a scenario looks at the page. */
export const widths = [360, 1280, 2560];
export const themes = ["light", "dark"];

/**
 * Opens a browser and calls scenario with a page, its context, the URL of the inspector (which ends with a slash) and the
 * code of `spool open`, if there is one. With signedIn, the context has a session cookie, in exchange for the code. It
 * fails if the page writes an error to the console, throws an error that it does not catch, or violates its content
 * security policy, unless a regular expression of expected matches.
 */
export async function run(scenario, { signedIn = true, expected = [] } = {}) {
  const [url, code] = process.env.SPOOL_PAGE.split("#code=");
  const browser = await chromium.launch({ executablePath: process.env.SPOOL_CHROMIUM, args: ["--disable-gpu", "--disable-background-networking"] });
  try {
    const context = await browser.newContext({ viewport: { width: 1280, height: 900 } });
    const problems = [];
    context.on("console", (m) => m.type() === "error" && problems.push(`${m.text()} (${m.location().url})`));
    context.on("weberror", (e) => problems.push(String(e.error().stack)));
    if (signedIn && code) {
      const answer = await context.request.post(new URL("api/signin/sessions", url).href, { data: { code, cookie: true } });
      assert.equal(answer.status(), 201, await answer.text());
    }
    const page = await context.newPage();
    await scenario({ page, context, browser, url, code });
    assert.deepEqual(problems.filter((p) => !expected.some((e) => e.test(p))), []);
  } finally {
    await browser.close();
  }
}

/** Fails if axe-core finds a serious or critical fault in the page, in either theme. */
export async function checkAccessibility(page) {
  await page.evaluate(axe);
  for (const colorScheme of themes) {
    await page.emulateMedia({ colorScheme });
    const { violations } = await page.evaluate(() => window.axe.run());
    const faults = violations.filter((v) => v.impact === "serious" || v.impact === "critical");
    assert.deepEqual(faults.map((v) => `${colorScheme}: ${v.id}: ${v.help}: ${v.nodes.map((n) => n.html).join(" ")}`), []);
  }
}

/** Writes screenshots NAME-WIDTH-THEME.png into the folder SPOOL_SCREENSHOTS, if it is set. */
export async function screenshots(page, name) {
  const folder = process.env.SPOOL_SCREENSHOTS;
  if (!folder) return;
  await mkdir(folder, { recursive: true });
  const before = page.viewportSize();
  for (const width of widths) {
    for (const colorScheme of themes) {
      await page.setViewportSize({ width, height: width < 760 ? 800 : 900 });
      await page.emulateMedia({ colorScheme });
      await page.screenshot({ path: join(folder, `${name}-${width}-${colorScheme}.png`) });
    }
  }
  await page.setViewportSize(before);
}
