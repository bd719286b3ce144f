/** Calls `run` once before the next paint, or soon where nothing is painted. Returns a function that cancels the call. */
export function nextFrame(run: () => void): () => void {
  if (typeof requestAnimationFrame === "function" && !globalThis.document?.hidden) {
    const id = requestAnimationFrame(run);
    return () => cancelAnimationFrame(id);
  }
  const id = setTimeout(run, 16);
  return () => clearTimeout(id);
}
