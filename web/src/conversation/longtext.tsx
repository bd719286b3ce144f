import { Fragment, useState, type ReactNode } from "react";
import { count, formatSize } from "./format";

/** Characters of a text that are processed and shown at first. */
export const firstCut = 64 * 1024;
/** Characters that each further click shows: more at once would freeze the page. */
const nextCut = 512 * 1024;

interface Props {
  text: string;
  /** Loads the whole text, if `text` may be only its beginning. */
  loadWhole?: () => void;
  /** Renders a part of the text; whole reports whether it is all of it. */
  children: (part: string, whole: boolean) => ReactNode;
}

/** A text of any length: it is cut before anything else is done with it, with a button that shows more. */
export function LongText({ text, loadWhole, children }: Props) {
  const [shown, setShown] = useState(firstCut);
  if (text.length <= shown && !loadWhole) return children(text, shown === firstCut);
  const parts: ReactNode[] = [];
  for (let start = 0; start < Math.min(shown, text.length); ) {
    const end = cutAt(text, start, Math.min(start + firstCut, shown));
    // Whole lines are laid out only when they are near the view.
    const Part = text[end - 1] === "\n" ? "span" : Fragment;
    parts.push(
      <Part key={start} {...(Part === "span" ? { className: "long-text-lines" } : {})}>
        {children(text.slice(start, end), false)}
      </Part>,
    );
    start = end;
  }
  const rest = text.length - Math.min(shown, text.length);
  return (
    <>
      {parts}
      {rest > 0 && (
        <button type="button" className="long-text-more" onClick={() => setShown(shown + nextCut)}>
          {rest <= nextCut ? `Show all (${formatSize(text.length)})` : `Show ${formatSize(nextCut)} more of ${formatSize(text.length)}`}
        </button>
      )}
      {rest <= 0 && loadWhole && (
        <button type="button" className="long-text-more" onClick={loadWhole}>
          Load the whole text
        </button>
      )}
    </>
  );
}

/** Returns where to cut a text: after start, at most at end, after a line feed if one is near, and not in a surrogate pair. */
function cutAt(text: string, start: number, end: number): number {
  if (end >= text.length) return text.length;
  const from = Math.max(start, end - 4096);
  const feed = text.slice(from, end).lastIndexOf("\n");
  if (feed >= 0) return from + feed + 1;
  const code = text.charCodeAt(end - 1);
  return code >= 0xd800 && code < 0xdc00 && end - 1 > start ? end - 1 : end;
}

/** Lines of a diff that are shown at first, and that each further click shows. */
const lineStep = 200;

/** A list of lines of any length, with a button that shows more and says how many there are. */
export function LongLines<T>({ lines, children }: { lines: readonly T[]; children: (line: T, index: number) => ReactNode }) {
  const [shown, setShown] = useState(lineStep);
  const rest = lines.length - shown;
  return (
    <>
      {lines.slice(0, shown).map(children)}
      {rest > 0 && (
        <button type="button" className="long-text-more" onClick={() => setShown(shown * 2 + 2000)}>
          Show more: {count(rest, "line")} of {lines.length.toLocaleString("en")} not shown
        </button>
      )}
    </>
  );
}
