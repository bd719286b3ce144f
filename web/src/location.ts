import { useCallback, useMemo } from "react";
import { useLocation, useSearch } from "wouter";

/** Parameters of the URL that belong to the list of sessions, and stay when another session is opened. */
const listParameters = new Set(["q", "phase"]);

/** Returns the seq of ?seq=; undefined without one, or if it is not the seq of an event. */
export function readSeq(parameters: URLSearchParams): number | undefined {
  const text = parameters.get("seq") ?? "";
  return /^[1-9]\d{0,14}$/.test(text) ? Number(text) : undefined;
}

/** Returns the parameters of the URL, and a function that changes some of them. undefined removes a parameter. */
export function useParameters() {
  const search = useSearch();
  const [path, navigate] = useLocation();
  const parameters = useMemo(() => new URLSearchParams(search), [search]);
  const set = useCallback(
    (changes: Record<string, string | undefined>, options: { replace?: boolean } = {}) => {
      const next = new URLSearchParams(search);
      for (const [name, value] of Object.entries(changes)) {
        if (value === undefined || value === "") next.delete(name);
        else next.set(name, value);
      }
      navigate(withQuery(path, next), options);
    },
    [search, path, navigate],
  );
  /** Returns the address of another path with the present list of sessions. */
  const linkTo = useCallback(
    (target: string) => withQuery(target, new URLSearchParams([...parameters].filter(([name]) => listParameters.has(name)))),
    [parameters],
  );
  return { parameters, set, linkTo };
}

function withQuery(path: string, query: URLSearchParams): string {
  const text = query.toString();
  return text ? `${path}?${text}` : path;
}
