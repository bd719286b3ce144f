import type { Schemas } from "@spoolhq/client";
import { useAgentSession, useWorkspaceFiles } from "@spoolhq/react";
import { useVirtualizer } from "@tanstack/react-virtual";
import { useEffect, useMemo, useRef, useState } from "react";
import { fileUrl } from "./client";
import { Code } from "./conversation/code";
import { formatSize } from "./conversation/format";
import { LongText } from "./conversation/longtext";
import { ErrorNote } from "./error";
import { useParameters } from "./location";
import { visible } from "./text";
import { flattenTree, type TreeRow } from "./tree";
import "./files.css";

type FileEntry = Schemas["FileEntry"];

const rowHeight = 26;
/** Bytes of a file that the preview reads at most. */
const previewLimit = 4 * 1024 * 1024;
/** Types that are shown as images. SVG is not one of them: it is shown as text. */
const imageTypes: Record<string, string> = { png: "image/png", jpg: "image/jpeg", jpeg: "image/jpeg", gif: "image/gif", webp: "image/webp", avif: "image/avif" };

/** The files of the workspace: live while a sandbox runs, otherwise of the last snapshot. */
export function FilesTab({ sessionId }: { sessionId: string }) {
  const { runtime, session } = useAgentSession(sessionId);
  const isLive = runtime?.state === "ready";
  const live = useWorkspaceFiles(isLive ? sessionId : undefined, { live: true });
  const stored = useWorkspaceFiles(isLive ? undefined : sessionId);
  const { files, isLoading, error, getFile, refresh } = isLive ? live : stored;
  const { parameters, set } = useParameters();
  const path = parameters.get("file");
  const chosen = path === null ? undefined : files.find((f) => f.path === path);

  if (chosen) return <Preview key={chosen.path} file={chosen} href={fileUrl(sessionId, chosen.path, isLive)} getFile={getFile} onClose={() => set({ file: undefined })} />;
  const hasNoSnapshot = error && session && !session.snapshot && !isLive;
  return (
    <>
      <p className="files-source muted">{isLive ? "Live, as in the sandbox" : "Of the last snapshot"}</p>
      {hasNoSnapshot ? <p className="files-empty muted">There is no file yet: the workspace is stored at the end of each turn.</p> : error && <ErrorNote error={error} onRetry={refresh} />}
      {!error && !isLoading && files.length === 0 && <p className="files-empty muted">The workspace is empty.</p>}
      {files.length > 0 && <Tree files={files} onOpen={(file) => set({ file, tab: "files" })} />}
    </>
  );
}

function Tree({ files, onOpen }: { files: readonly FileEntry[]; onOpen: (path: string) => void }) {
  const [opened, setOpened] = useState<ReadonlySet<string>>(new Set());
  const rows = useMemo(() => flattenTree(files, opened), [files, opened]);
  const scroller = useRef<HTMLDivElement>(null);
  const list = useVirtualizer({ count: rows.length, getScrollElement: () => scroller.current, estimateSize: () => rowHeight, getItemKey: (index) => rows[index]!.path, overscan: 10 });
  const toggle = (path: string) => {
    const next = new Set(opened);
    if (!next.delete(path)) next.add(path);
    setOpened(next);
  };
  return (
    <div className="files-scroller" ref={scroller} tabIndex={-1}>
      <ul className="files-list" style={{ height: list.getTotalSize() }} aria-label="Files">
        {list.getVirtualItems().map((item) => {
          const row = rows[item.index]!;
          return (
            <li key={item.key} className="files-item" style={{ transform: `translateY(${item.start}px)` }} aria-setsize={rows.length} aria-posinset={item.index + 1}>
              <Row row={row} isOpen={opened.has(row.path)} onClick={() => (row.isFolder ? toggle(row.path) : onOpen(row.path))} />
            </li>
          );
        })}
      </ul>
    </div>
  );
}

function Row({ row, isOpen, onClick }: { row: TreeRow; isOpen: boolean; onClick: () => void }) {
  return (
    <button className="files-row" style={{ paddingInlineStart: `calc(var(--space-3) * ${Math.min(row.depth, 12) + 1})` }} aria-expanded={row.isFolder ? isOpen : undefined} onClick={onClick} title={visible(row.path)}>
      <span className="files-mark" aria-hidden="true">
        {row.isFolder ? (isOpen ? "▾" : "▸") : ""}
      </span>
      <bdi className="truncate">{visible(row.name)}</bdi>
      <span className="files-size muted">{row.isFolder ? "" : formatSize(row.size)}</span>
    </button>
  );
}

type Content = { text: string } | { image: string } | { note: string } | { error: unknown };

function Preview({ file, href, getFile, onClose }: { file: FileEntry; href: string; getFile: (path: string) => Promise<Response>; onClose: () => void }) {
  const [content, setContent] = useState<Content>();
  const extension = /\.([^./]+)$/.exec(file.path)?.[1]?.toLowerCase() ?? "";
  const version = file.etag ?? file.modTime;
  useEffect(() => {
    let active = true;
    let url: string | undefined;
    readContent(file, extension, getFile).then(
      (next) => {
        if ("image" in next) url = next.image;
        if (active) setContent(next);
        else if (url) URL.revokeObjectURL(url);
      },
      (error: unknown) => active && setContent({ error }),
    );
    return () => {
      active = false;
      if (url) URL.revokeObjectURL(url);
    };
    // eslint-disable-next-line react-hooks/exhaustive-deps -- the version stands for the file
  }, [file.path, version, getFile]);

  return (
    <>
      <div className="files-bar">
        <button className="button button-quiet" onClick={onClose}>
          ‹ All files
        </button>
        <a className="button" href={href} download={file.path.split("/").pop()}>
          Download {formatSize(file.size)}
        </a>
      </div>
      <p className="files-path">
        <bdi>{visible(file.path)}</bdi>
      </p>
      <div className="files-preview">
        {content && "error" in content && <ErrorNote error={content.error} />}
        {content && "note" in content && <p className="muted">{content.note}</p>}
        {content && "image" in content && <img src={content.image} alt={visible(file.path)} />}
        {content && "text" in content && <LongText text={content.text}>{(part) => <Code text={part} language={extension} />}</LongText>}
      </div>
    </>
  );
}

async function readContent(file: FileEntry, extension: string, getFile: (path: string) => Promise<Response>): Promise<Content> {
  if (file.kind === "symlink") return { note: `A link to ${visible(file.target ?? "")}. Links are not followed.` };
  if (file.size > previewLimit) return { note: "Too large for a preview: download it." };
  const bytes = await (await getFile(file.path)).arrayBuffer();
  const type = imageTypes[extension];
  if (type) return { image: URL.createObjectURL(new Blob([bytes], { type })) };
  if (new Uint8Array(bytes.slice(0, 8192)).includes(0)) return { note: "A binary file: download it." };
  return { text: new TextDecoder().decode(bytes) };
}
