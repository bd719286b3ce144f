import assert from "node:assert/strict";
import { test } from "node:test";
import { act } from "react";
import { installBrowser } from "./dom";

installBrowser();
const { createRoot } = await import("react-dom/client");
const { useKeys } = await import("../src/help");

test("useKeys leaves the keys of a dialog to the dialog", () => {
  const called: string[] = [];
  const container = document.createElement("div");
  document.body.append(container);
  function Page() {
    useKeys({ onEscape: () => called.push("escape"), onHelp: () => called.push("help") });
    return (
      <>
        <button id="outside" />
        <dialog>
          <button id="inside" />
        </dialog>
      </>
    );
  }
  act(() => createRoot(container).render(<Page />));
  const press = (id: string) => {
    const event = new KeyboardEvent("keydown", { key: "Escape", bubbles: true, cancelable: true });
    document.getElementById(id)!.dispatchEvent(event);
    return event.defaultPrevented;
  };
  assert.equal(press("inside"), false, "a prevented Escape does not close the dialog");
  assert.deepEqual(called, []);
  assert.equal(press("outside"), true);
  assert.deepEqual(called, ["escape"]);
});
