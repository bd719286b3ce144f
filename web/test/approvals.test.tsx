import assert from "node:assert/strict";
import { after, test } from "node:test";
import { act } from "react";
import { Router } from "wouter";
import { memoryLocation } from "wouter/memory-location";
import { installBrowser } from "./dom";

installBrowser();
const { createRoot } = await import("react-dom/client");
const { ApprovalList, useApprovalNotices } = await import("../src/approvals");

type Approval = Parameters<typeof ApprovalList>[0]["approvals"][number];

const request = (n: number): Approval => ({ approvalId: `apr_${n}`, sessionId: "ses_1", status: "pending", kind: "tool", toolName: `tool${n}`, title: `title ${n}`, requestedAt: `2026-01-02T03:04:0${n}Z`, request: { kind: "tool" } as never });

/** Renders requests. show renders others in the same place. */
function render(approvals: Approval[]) {
  const container = document.createElement("div");
  document.body.append(container);
  const root = createRoot(container);
  const { hook, searchHook } = memoryLocation({ path: "/approvals" });
  const decided: string[] = [];
  const decide = async (id: string) => void decided.push(id);
  const show = (next: Approval[]) =>
    act(() =>
      root.render(
        <Router hook={hook} searchHook={searchHook}>
          <ApprovalList approvals={next} decide={decide} />
        </Router>,
      ),
    );
  show(approvals);
  after(() => act(() => root.unmount())); // ends the timer of relative times
  return { container, decided, show, items: () => [...container.querySelectorAll("li")] };
}

test("ApprovalList keeps the place of a request that has ended", async () => {
  const { container, show, items, decided } = render([request(1), request(2)]);
  show([request(2)]);
  assert.deepEqual(items().map((item) => item.querySelector("code")?.textContent), ["tool1", "tool2"]);
  assert.match(items()[0]!.textContent, /no longer open/);
  assert.ok(items()[0]!.querySelector("[inert] .approval"), "an ended request cannot be decided");
  assert.equal(items()[1]!.querySelector("[inert]"), null);
  await act(async () => [...items()[1]!.querySelectorAll("button")].find((b) => b.textContent === "Approve tool2")!.click());
  assert.deepEqual(decided, ["apr_2"]);
  act(() => [...container.querySelectorAll("button")].find((b) => b.textContent === "Remove 1 ended")!.click());
  assert.deepEqual(items().map((item) => item.querySelector("code")?.textContent), ["tool2"]);
});

test("ApprovalList keeps the height of a request that was decided and not yet received", () => {
  const { show, items } = render([request(1), request(2)]);
  show([{ ...request(1), status: "decided" }, request(2)]);
  assert.ok(items()[0]!.querySelector("[inert] .approval-open"));
});

/** Renders the notices of requests in a page that is not seen. Returns the titles and texts of the notifications. */
function notify(...lists: Approval[][]): string[] {
  const shown: string[] = [];
  class Notification {
    static permission = "granted";
    constructor(title: string, { body }: { body: string }) {
      if (body.includes("title 9")) throw new TypeError("Illegal constructor");
      shown.push(`${title}: ${body}`);
    }
  }
  Object.defineProperty(globalThis, "Notification", { value: Notification, configurable: true });
  Object.defineProperty(window, "Notification", { value: Notification, configurable: true });
  Object.defineProperty(document, "hidden", { value: true, configurable: true });
  function Notices({ approvals }: { approvals: Approval[] }) {
    useApprovalNotices(approvals);
    return <p>page</p>;
  }
  const container = document.createElement("div");
  const root = createRoot(container);
  for (const approvals of lists) act(() => root.render(<Notices approvals={approvals} />));
  assert.equal(container.textContent, "page");
  return shown;
}

test("useApprovalNotices shows one notification for requests that come together", () => {
  assert.deepEqual(notify([request(1), request(2), request(3)], [request(1), request(2), request(3), request(4)]), ["Spool: 3 requests wait for approval", "An agent asks for approval: title 4"]);
});

test("useApprovalNotices survives a browser that has no constructor of notifications", () => {
  assert.deepEqual(notify([request(9)], [request(9), request(1)]), ["An agent asks for approval: title 1"]);
});
