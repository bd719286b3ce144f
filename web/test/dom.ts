import { Window } from "happy-dom";

/** Returns the elements of a piece of HTML, in a document that runs and loads nothing. */
export function parse(html: string): HTMLElement {
  const { document } = new Window({ settings: { disableJavaScriptEvaluation: true, disableJavaScriptFileLoading: true, disableCSSFileLoading: true } });
  document.body.innerHTML = html;
  return document.body as unknown as HTMLElement;
}

/** Makes the globals of a browser, for tests that render with react-dom/client. */
export function installBrowser(): void {
  const window = new Window({ url: "http://localhost/" });
  for (const name of ["document", "navigator", "HTMLElement", "Node", "Element", "Event", "KeyboardEvent", "MouseEvent", "CSS", "ResizeObserver", "requestAnimationFrame", "cancelAnimationFrame"] as const) {
    Object.defineProperty(globalThis, name, { value: window[name as keyof Window], configurable: true, writable: true });
  }
  Object.defineProperty(globalThis, "window", { value: window, configurable: true, writable: true });
  Object.defineProperty(globalThis, "IS_REACT_ACT_ENVIRONMENT", { value: true, configurable: true, writable: true });
}
