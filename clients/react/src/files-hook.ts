import type { Schemas, SessionEvent } from "@spoolhq/client";
import { useCallback, useEffect, useMemo, useReducer, useRef } from "react";
import type { SessionSource } from "./session-source.js";
import { coalesced } from "./source.js";
import { useSessionPart, useSessionSource, useWith } from "./use-source.js";

type FileEntry = Schemas["FileEntry"];

export interface UseWorkspaceFiles {
  files: readonly FileEntry[];
  isLoading: boolean;
  error: Error | undefined;
  getFile(path: string): Promise<Response>;
  /** Returns the files whose path matches a pattern: `*` within a folder, `**` across folders, `?` one character. */
  getFilesByPattern(glob: string): FileEntry[];
  /** Returns the files with an extension, such as "ts". */
  getFilesByExtension(extension: string): FileEntry[];
  refresh(): Promise<void>;
}

const none: readonly FileEntry[] = [];

/** The files of a session's workspace: of the last snapshot, or with `live` of the sandbox. Read again when they change. */
export function useWorkspaceFiles(id: string | undefined, options: { live?: boolean; dir?: string } = {}): UseWorkspaceFiles {
  const { live = false, dir } = options;
  const source = useSessionSource(id);
  const connection = useSessionPart(source, (s) => s.connection); // keeps the session open
  const [, renderAgain] = useReducer((n: number) => n + 1, 0);
  const listing = useMemo(() => source && newListing(source, live, dir, renderAgain), [source, live, dir]);
  useEffect(() => {
    if (!source || !listing) return;
    void listing.read();
    const changed = live ? /^(file_|files_applied|workspace_)/ : /^workspace_synced$/;
    const listener = (event: SessionEvent) => void (changed.test(event.type) && listing.read());
    source.eventListeners.add(listener);
    return () => void source.eventListeners.delete(listener);
  }, [source, listing, live]);
  const present = listing?.result;
  const files = present?.files ?? none;
  const latest = useRef(files); // so that functions stay the same
  latest.current = files;
  return {
    files,
    isLoading: source !== undefined && present === undefined && connection.status !== "ended",
    error: present?.error,
    getFile: useWith(source, "getFile", (s, path: string) => s.session.files.get(path, { live })),
    getFilesByPattern: useCallback((glob) => latest.current.filter((f) => globExpression(glob).test(f.path)), []),
    getFilesByExtension: useCallback((extension) => latest.current.filter((f) => f.path.endsWith(`.${extension.replace(/^\./, "")}`)), []),
    refresh: useWith(listing, "refresh", (l) => l.read()),
  };
}

/** The files of one folder as they were read last. An answer for other options cannot replace them. */
interface Listing {
  result?: { files?: readonly FileEntry[]; error?: Error };
  read(): Promise<void>;
}

function newListing(source: SessionSource, live: boolean, dir: string | undefined, changed: () => void): Listing {
  const listing: Listing = {
    read: coalesced(async () => {
      try {
        const { files } = await source.session.files.list({ live, ...(dir !== undefined && { dir }) });
        listing.result = { files };
      } catch (error) {
        listing.result = { error: error as Error };
      }
      changed();
    }),
  };
  return listing;
}

function globExpression(glob: string): RegExp {
  const parts = glob.split(/(\*\*\/|\*\*|\*|\?)/).map((part) => ({ "**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]" })[part] ?? part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join("")}$`);
}
