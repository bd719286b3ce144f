import type { UploadOptions } from "@spoolhq/client";
import { useRef, useState } from "react";
import { formatSize } from "./conversation/format";
import { ErrorNote } from "./error";
import { visible } from "./text";
import "./uploads.css";

interface Upload {
  file: File;
  sent: number;
  status: "uploading" | "done" | "failed";
  error?: unknown;
  abort: AbortController;
}

type Put = (file: File, options: UploadOptions) => Promise<unknown>;

/** Holds the uploads of a form, with their progress. */
export function useUploads() {
  const [uploads, setUploads] = useState<readonly Upload[]>([]);
  const latest = useRef(uploads);
  const set = (next: readonly Upload[]) => {
    latest.current = next;
    setUploads(next);
  };
  const change = (abort: AbortController, changes: Partial<Upload>) => set(latest.current.map((u) => (u.abort === abort ? { ...u, ...changes } : u)));

  /** Uploads a file. Returns whether it is in the workspace. */
  const add = async (file: File, put: Put): Promise<boolean> => {
    const abort = new AbortController();
    set([...latest.current, { file, sent: 0, status: "uploading", abort }]);
    try {
      await put(file, { signal: abort.signal, onProgress: (sent) => change(abort, { sent }) });
      change(abort, { status: "done", sent: file.size });
      return true;
    } catch (error) {
      change(abort, { status: "failed", error });
      return false;
    }
  };
  const remove = (upload: Upload) => {
    upload.abort.abort();
    set(latest.current.filter((u) => u.abort !== upload.abort));
  };
  return { uploads, add, remove, clear: () => set([]), isUploading: uploads.some((u) => u.status === "uploading") };
}

/** The files of a form, with the progress of their uploads. */
export function FileList({ uploads: { uploads, remove } }: { uploads: ReturnType<typeof useUploads> }) {
  if (uploads.length === 0) return null;
  return (
    <ul className="uploads" aria-label="Files">
      {uploads.map((upload, index) => (
        <li key={index} className="uploads-file">
          <bdi className="truncate">{visible(upload.file.name)}</bdi>
          <span className="muted">{formatSize(upload.file.size)}</span>
          {upload.status === "uploading" && <progress aria-label="Uploaded" max={upload.file.size || 1} value={upload.sent} />}
          {upload.status === "done" && <span className="muted">✓ in the workspace</span>}
          {upload.status !== "done" && (
            <button type="button" className="button button-quiet" aria-label={`Remove ${visible(upload.file.name)}`} onClick={() => remove(upload)}>
              ✕
            </button>
          )}
          {upload.error !== undefined && <ErrorNote error={upload.error} />}
        </li>
      ))}
    </ul>
  );
}
