import { useSyncExternalStore } from "react";

const tickMs = 10_000;
const listeners = new Set<() => void>();
let timer: ReturnType<typeof setInterval> | undefined;

function subscribe(listener: () => void): () => void {
  listeners.add(listener);
  timer ??= setInterval(() => listeners.forEach((l) => l()), tickMs);
  return () => {
    listeners.delete(listener);
    if (listeners.size > 0) return;
    clearInterval(timer);
    timer = undefined;
  };
}

/** Returns the present time in milliseconds, in steps of 10 s. All components share one timer. */
export function useNow(): number {
  return useSyncExternalStore(subscribe, () => Math.floor(Date.now() / tickMs) * tickMs);
}

const units: [number, string][] = [
  [86_400_000, "d"],
  [3_600_000, "h"],
  [60_000, "m"],
];

/** Returns how long ago a time is: "now", "2m", "3h", "5d". */
export function formatAge(ms: number): string {
  for (const [unit, name] of units) {
    if (ms >= unit) return `${Math.floor(ms / unit)}${name}`;
  }
  return "now";
}

/** A relative time. The exact one is in the tooltip and in copied text. */
export function Time({ at }: { at: string | undefined }) {
  const now = useNow();
  if (!at) return null;
  const exact = new Date(at);
  return (
    <time dateTime={at} title={exact.toLocaleString()}>
      {formatAge(now - exact.getTime())}
      <span className="visually-hidden"> ({at})</span>
    </time>
  );
}
