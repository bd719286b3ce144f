// Opens pages of the inspector in Chromium, and prints what it measured as JSON: node measure.mjs SCENARIO URL SECONDS.
// SCENARIO is "open", which opens a page and scrolls it, or "text", which watches a page that receives text.
import { chromium } from "playwright-core";

const [scenario, url, seconds] = process.argv.slice(2);
const browser = await chromium.launch({ executablePath: process.env.SPOOL_CHROMIUM, args: ["--no-sandbox", "--disable-gpu", "--disable-background-networking"] });
try {
  const page = await browser.newPage({ viewport: { width: 1280, height: 800 } });
  await page.addInitScript(observe, rowSelector());
  const cdp = await page.context().newCDPSession(page);
  await cdp.send("Performance.enable");
  await page.goto(url, { waitUntil: "commit" });
  await page.waitForFunction(() => window.measured.painted > 0, undefined, { timeout: 60_000 }).catch(async (error) => {
    throw new Error(`nothing was painted; the page shows: ${await page.evaluate(() => document.body.innerText)}`, { cause: error });
  });
  await page.waitForTimeout(2000); // until what follows the first paint is done
  const result = await page.evaluate(() => {
    const all = performance.getEntriesByType("resource").concat(performance.getEntriesByType("navigation"));
    const sum = (list) => list.reduce((bytes, r) => bytes + r.transferSize, 0);
    const bytes = sum(all.filter((r) => r.responseEnd <= window.measured.painted));
    const data = performance.getEntriesByType("resource").filter((r) => /\/api\/sessions(\/[^/]+\/blocks)?(\?|$)/.test(r.name));
    const received = Math.min(...data.map((r) => r.responseEnd));
    return { bytes, laterBytes: sum(all) - bytes, paintMs: window.measured.painted, afterDataMs: window.measured.painted - received };
  });
  const before = await browserProcesses();
  const began = Date.now();
  await page.evaluate(() => (window.measured.frames = []));
  if (scenario === "open") {
    await page.mouse.move(...(url.includes("/sessions/") ? [640, 400] : [100, 400]));
    while (Date.now() - began < seconds * 1000) {
      await page.mouse.wheel(0, url.includes("/sessions/") ? -700 : 700);
      await page.waitForTimeout(16);
    }
  } else {
    await page.waitForTimeout(seconds * 1000);
  }
  const wall = (Date.now() - began) / 1000;
  const after = await browserProcesses();
  const frames = await page.evaluate(() => window.measured.frames);
  await cdp.send("HeapProfiler.collectGarbage");
  const { metrics } = await cdp.send("Performance.getMetrics");
  const heap = metrics.find((m) => m.name === "JSHeapUsedSize").value;
  const shown = await page.evaluate((selector) => [document.querySelectorAll(selector).length, document.body.innerText.length], rowSelector());
  console.log(JSON.stringify({ ...result, longFrames: frames.length, longestFrameMs: Math.max(0, ...frames), heapBytes: heap, rendererCores: (after.renderer - before.renderer) / wall, allCores: (after.all - before.all) / wall, rows: shown[0], characters: shown[1] }));
} finally {
  await browser.close();
}

/** Returns the selector of the rows whose first one is the first paint. */
function rowSelector() {
  return url.includes("/sessions/") ? '[role="log"] article' : '.sessions-row';
}

/** Returns the processor time of the page's process, and of all processes of the browser, in seconds. */
async function browserProcesses() {
  const cdp = await browser.newBrowserCDPSession();
  const { processInfo } = await cdp.send("SystemInfo.getProcessInfo");
  await cdp.detach();
  const sum = (list) => list.reduce((total, p) => total + p.cpuTime, 0);
  return { renderer: sum(processInfo.filter((p) => p.type === "renderer")), all: sum(processInfo) };
}

/** Runs in the page: records when a row is first painted, and frames of more than 50 ms. */
function observe(selector) {
  window.measured = { painted: 0, frames: [] };
  const look = () => {
    if (!document.querySelector(selector)) return requestAnimationFrame(look);
    // The frame that has the row is painted before the next task.
    requestAnimationFrame(() => setTimeout(() => (window.measured.painted = performance.now())));
  };
  requestAnimationFrame(look);
  new PerformanceObserver((list) => window.measured.frames.push(...list.getEntries().map((e) => e.duration))).observe({ type: "long-animation-frame" });
}
