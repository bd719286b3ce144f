/**
 * Calls `run` once before the next paint, or soon where nothing is painted: in a hidden page too, whose title may show what waits.
 * Returns a function that cancels the call.
 */
export function nextFrame(run: () => void): () => void {
  const page = globalThis.document;
  if (typeof requestAnimationFrame !== "function" || page?.hidden) {
    const timer = setTimeout(run, 16);
    return () => clearTimeout(timer);
  }
  const now = () => {
    cancel();
    run();
  };
  const hide = () => page.hidden && now();
  const frame = requestAnimationFrame(now);
  page?.addEventListener("visibilitychange", hide);
  const cancel = () => {
    cancelAnimationFrame(frame);
    page?.removeEventListener("visibilitychange", hide);
  };
  return cancel;
}
