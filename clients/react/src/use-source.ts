import { useCallback, useMemo, useSyncExternalStore } from "react";
import { useClient } from "./provider.js";
import { idleSession, sessionSource, type SessionSnapshot, type SessionSource } from "./session-source.js";
import type { Source, SourceSnapshot } from "./source.js";

const nothing = () => () => {};

/** Returns a part of a source's snapshot. The component is rendered again when this part is another object. */
export function useSource<S extends SourceSnapshot, V>(source: Source<S> | undefined, idle: S, select: (snapshot: S) => V): V {
  return useSyncExternalStore(
    source?.subscribe ?? nothing,
    () => select(source ? source.getSnapshot() : idle),
    () => select(source ? source.initial : idle),
  );
}

/** Returns the source of a session; undefined without an id. */
export function useSessionSource(id: string | undefined): SessionSource | undefined {
  const client = useClient();
  return useMemo(() => (id === undefined ? undefined : sessionSource(client, id)), [client, id]);
}

/** Returns a part of the snapshot of a session. */
export function useSessionPart<V>(source: SessionSource | undefined, select: (snapshot: SessionSnapshot) => V): V {
  return useSource(source, idleSession, select);
}

/** Returns a function that calls `use` with the value, and rejects without one. It is the same between renders. */
export function useWith<T, A extends unknown[], R>(value: T | undefined, name: string, use: (value: T, ...args: A) => Promise<R>): (...args: A) => Promise<R> {
  return useCallback((...args: A) => (value === undefined ? Promise.reject(new Error(`${name}: there is no session`)) : use(value, ...args)), [value, name]);
}
