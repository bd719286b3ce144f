import { Window } from "happy-dom";

const window = new Window({ url: "http://page.test/" });

/** The callbacks that wait for the next frame, by their ids. Tests decide when a frame is. */
export const frames = new Map();
let lastFrame = 0;

Object.assign(globalThis, {
  window,
  document: window.document,
  IS_REACT_ACT_ENVIRONMENT: true,
  requestAnimationFrame: (run) => (frames.set(++lastFrame, run), lastFrame),
  cancelAnimationFrame: (id) => frames.delete(id),
});

Object.defineProperty(globalThis, "navigator", { value: window.navigator, configurable: true }); // Node 21 has one of its own

export const { act, createElement, StrictMode } = await import("react");
const { createRoot } = await import("react-dom/client");
const { AgentServiceProvider } = await import("../dist/index.js");

/** Runs the callbacks of one frame. Returns their number. */
export async function paint() {
  const now = [...frames.values()];
  frames.clear();
  await act(async () => now.forEach((run) => run()));
  return now.length;
}

/** Lets sockets and timers that are due run. */
export const settle = () => act(() => new Promise((resolve) => setImmediate(resolve)));

/** Paints until the condition holds. */
export async function paintUntil(condition) {
  while (!condition()) {
    await paint();
    await settle();
  }
}

/**
 * Renders a component that calls a hook. `seen` has what the hook returned at each render. With `remount`, another input renders
 * another component in its place.
 */
export async function renderHook(t, client, hook, { strict = false, remount = false } = {}) {
  const seen = [];
  const Probe = ({ input }) => {
    seen.push(hook(input));
    return null;
  };
  const root = createRoot(document.createElement("div"));
  const tree = (input) => {
    const element = createElement(AgentServiceProvider, { client }, createElement(Probe, { input, ...(remount && { key: String(input) }) }));
    return strict ? createElement(StrictMode, null, element) : element;
  };
  const render = (input) => act(async () => root.render(tree(input)));
  const unmount = () => act(async () => root.unmount());
  t.after(unmount);
  await render();
  return { seen, render, unmount, act, get last() { return seen[seen.length - 1]; } };
}
