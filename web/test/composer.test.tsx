import { SpoolClient } from "@spoolhq/client";
import { AgentServiceProvider } from "@spoolhq/react";
import assert from "node:assert/strict";
import { test } from "node:test";
import { act } from "react";
import { installBrowser } from "./dom";

installBrowser();
const { createRoot } = await import("react-dom/client");
const { Composer } = await import("../src/composer");

test("Composer keeps what was written while a message that could not be sent was on its way", async () => {
  let fail = (_: Error) => {};
  const client = new SpoolClient({ baseUrl: "http://localhost", fetch: () => new Promise(() => {}) });
  const container = document.createElement("div");
  document.body.append(container);
  const root = createRoot(container);
  const interrupt = () => new Promise((_, reject) => (fail = reject));
  await act(async () =>
    root.render(
      <AgentServiceProvider client={client}>
        <Composer sessionId="ses_1" isRunning interrupt={interrupt} />
      </AgentServiceProvider>,
    ),
  );
  const field = container.querySelector("textarea")!;
  const write = (text: string) =>
    act(async () => {
      Object.getOwnPropertyDescriptor(Object.getPrototypeOf(field), "value")!.set!.call(field, text);
      field.dispatchEvent(new Event("input", { bubbles: true }));
    });
  await act(async () => container.querySelectorAll<HTMLInputElement>("input[type=radio]")[1]!.click());
  await write("first");
  await act(async () => [...container.querySelectorAll("button")].at(-1)!.click());
  await write("second");
  await act(async () => fail(new Error("no answer")));
  assert.equal(field.value, "first\nsecond");
  await act(async () => root.unmount());
});
