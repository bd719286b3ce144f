import { structuredPatch } from "diff";
import type { FileChange } from "./tools";

/** A line of a diff. "@" separates parts of the file that are not adjacent. */
export interface DiffLine {
  mark: " " | "+" | "-" | "@";
  text: string;
}

/** A change of a file as lines. */
export interface Diff {
  lines: DiffLine[];
  added: number;
  removed: number;
}

/** Texts that differ in more lines than this are shown one after the other: the search for the smallest difference is quadratic. */
const maxEdits = 1000;

/** Returns a change of a file as lines, all of them. */
export function diffOf(change: FileChange): Diff {
  if (change.patch !== undefined) return parseUnified(change.patch);
  // The texts of an edit are parts of the file: the end of a text is not the end of the file.
  const whole = (text = "") => (change.action === "edit" && text !== "" && !text.endsWith("\n") ? `${text}\n` : text);
  const before = whole(change.before);
  const after = whole(change.after);
  const patch = before && after ? structuredPatch("", "", before, after, "", "", { context: 3, maxEditLength: maxEdits }) : undefined;
  if (!patch) return counted([...marked("-", before), ...marked("+", after)]);
  return counted(patch.hunks.flatMap((hunk, i) => [...(i > 0 ? [{ mark: "@" as const, text: "" }] : []), ...hunk.lines.map(diffLine)]));
}

/** Returns the lines of a unified diff. Lines that belong to no hunk, such as the names of files, become separators. */
export function parseUnified(patch: string): Diff {
  const lines = splitLines(patch);
  const out: DiffLine[] = [];
  let before = 0; // lines of the hunk that are still to come, in the old file and in the new one
  let after = 0;
  for (let i = 0; i < lines.length; i++) {
    const line = lines[i]!;
    const hunk = before <= 0 && after <= 0;
    const counts = hunk && /^@@ -\d+(?:,(\d+))? \+\d+(?:,(\d+))? @@/.exec(line);
    if (counts) [before, after] = [Number(counts[1] ?? 1), Number(counts[2] ?? 1)];
    if (hunk && (/^(@@|diff --git |index |\\)/.test(line) || isFileName(lines, i))) {
      out.push({ mark: "@", text: line });
      continue;
    }
    const next = diffLine(line);
    if (next.mark === "-" || next.mark === " ") before--;
    if (next.mark === "+" || next.mark === " ") after--;
    out.push(next);
  }
  return counted(out);
}

/** Reports whether a line is one of the two that name the file, "--- a" and "+++ b". */
function isFileName(lines: string[], i: number): boolean {
  const first = lines[i]!.startsWith("--- ") ? i : i - 1;
  return Boolean(lines[first]?.startsWith("--- ") && lines[first + 1]?.startsWith("+++ "));
}

function diffLine(line: string): DiffLine {
  const mark = line[0];
  return mark === "+" || mark === "-" || mark === " " ? { mark, text: line.slice(1) } : { mark: mark === "\\" ? "@" : " ", text: line };
}

function marked(mark: "+" | "-", text: string): DiffLine[] {
  return splitLines(text).map((line) => ({ mark, text: line }));
}

/** Returns the lines of a text. A line feed ends a line; a text without one at its end has a last line all the same. */
function splitLines(text: string): string[] {
  if (text === "") return [];
  return (text.endsWith("\n") ? text.slice(0, -1) : text).split("\n");
}

function counted(lines: DiffLine[]): Diff {
  const count = (mark: string) => lines.reduce((n, line) => (line.mark === mark ? n + 1 : n), 0);
  return { lines, added: count("+"), removed: count("-") };
}
