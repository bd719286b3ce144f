import { memo, useMemo } from "react";
import { visible } from "../text";
import { diffOf, parseUnified, type Diff } from "./diff";
import { formatSize } from "./format";
import { LongLines } from "./longtext";
import type { FileChange } from "./tools";

/** Changes whose texts are longer are compared only after a click. */
const maxCompared = 1024 * 1024;
/** Characters of one line that are shown. */
const maxLine = 4096;

const verbs: Record<FileChange["action"], string> = { add: "new file", write: "whole content", edit: "", delete: "deleted" };

/** A change of one file. */
export const FileDiff = memo(function FileDiff({ change }: { change: FileChange }) {
  const length = (change.before?.length ?? 0) + (change.after?.length ?? 0) + (change.patch?.length ?? 0);
  const diff = useMemo(() => (length <= maxCompared ? diffOf(change) : undefined), [change, length]);
  return (
    <figure className="diff">
      <figcaption className="diff-head">
        <bdi className="diff-path">{visible(change.path)}</bdi>
        {change.movedTo && <bdi className="diff-path">→ {visible(change.movedTo)}</bdi>}
        {verbs[change.action] && <span className="diff-verb">{verbs[change.action]}</span>}
        {diff && <DiffCount diff={diff} />}
      </figcaption>
      {diff ? <DiffLines diff={diff} /> : <p className="diff-note">The change has {formatSize(length)}: open the file to see it.</p>}
    </figure>
  );
});

/** A unified diff as a tool or a request has it. */
export const UnifiedDiff = memo(function UnifiedDiff({ text }: { text: string }) {
  const diff = useMemo(() => parseUnified(text), [text]);
  return (
    <figure className="diff">
      <DiffLines diff={diff} />
    </figure>
  );
});

function DiffCount({ diff }: { diff: Diff }) {
  return (
    <span className="diff-count">
      <span className="diff-count-added">+{diff.added}</span> <span className="diff-count-removed">−{diff.removed}</span>
    </span>
  );
}

function DiffLines({ diff }: { diff: Diff }) {
  return (
    <div className="diff-lines" role="table" aria-label={`${diff.added} lines added, ${diff.removed} removed`} tabIndex={0}>
      <LongLines lines={diff.lines}>
        {(line, i) => (
          <div key={i} role="row" className={`diff-line diff-line-${marks[line.mark]}`}>
            <span role="cell" className="diff-mark">
              {line.mark === "@" ? "⋯" : line.mark}
            </span>
            <bdi role="cell" className="diff-text">
              {line.text.length > maxLine ? `${visible(line.text.slice(0, maxLine))} … (${formatSize(line.text.length)} in this line)` : visible(line.text)}
            </bdi>
          </div>
        )}
      </LongLines>
    </div>
  );
}

const marks = { " ": "same", "+": "added", "-": "removed", "@": "gap" };
