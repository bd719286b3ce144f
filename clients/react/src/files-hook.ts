import type { Schemas, SessionEvent } from "@spoolhq/client";
import { useCallback, useEffect, useMemo, useRef, useState } from "react";
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
  const [result, setResult] = useState<{ source: SessionSource; files?: readonly FileEntry[]; error?: Error }>();
  const read = useMemo(() => source && coalesced(() => readFiles(source, live, dir, setResult)), [source, live, dir]);
  useEffect(() => {
    if (!source || !read) return;
    void read();
    const changed = live ? /^(file_|files_applied|workspace_)/ : /^workspace_synced$/;
    const listener = (event: SessionEvent) => void (changed.test(event.type) && read());
    source.eventListeners.add(listener);
    return () => void source.eventListeners.delete(listener);
  }, [source, read, live]);
  const present = result?.source === source ? result : undefined;
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
    refresh: useWith(read, "refresh", (again) => again()),
  };
}

async function readFiles(source: SessionSource, live: boolean, dir: string | undefined, report: (result: { source: SessionSource; files?: readonly FileEntry[]; error?: Error }) => void) {
  try {
    const { files } = await source.session.files.list({ live, ...(dir !== undefined && { dir }) });
    report({ source, files });
  } catch (error) {
    report({ source, error: error as Error });
  }
}

function globExpression(glob: string): RegExp {
  const parts = glob.split(/(\*\*\/|\*\*|\*|\?)/).map((part) => ({ "**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]" })[part] ?? part.replace(/[.*+?^${}()|[\]\\]/g, "\\$&"));
  return new RegExp(`^${parts.join("")}$`);
}
