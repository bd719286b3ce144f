import Anser from "anser";
import { memo, type ReactNode } from "react";
import { visible } from "../text";
import { LongText } from "./longtext";

/** Changes of colour in one part of a text that are shown; a text with more of them is shown without colours. */
const maxSpans = 2000;

/** The output of a tool, with the colours of a terminal. All other control characters are visible. */
export const Output = memo(function Output({ text, loadWhole }: { text: string; loadWhole?: () => void }) {
  return (
    <pre className="output" tabIndex={0} dir="auto" aria-label="Output">
      <LongText text={text} loadWhole={loadWhole}>
        {(part) => <Colored text={part} />}
      </LongText>
    </pre>
  );
});

const Colored = memo(function Colored({ text }: { text: string }): ReactNode {
  if (!text.includes("\x1b[")) return visible(text);
  if (text.split("\x1b[", maxSpans + 1).length > maxSpans) return visible(Anser.ansiToText(text));
  // A carriage return would make anser drop the line before it.
  return Anser.ansiToJson(text.replace(/\r\n/g, "\n").replace(/\r/g, "␍\n"), { json: true, remove_empty: true, use_classes: true }).map((part, i) => {
    const names = [part.fg, part.bg && `${part.bg}-background`, ...part.decorations].filter((name) => /^[a-z-]+\d*(-background)?$/.test(name ?? ""));
    return names.length === 0 ? visible(part.content) : (
      <span key={i} className={names.map((name) => `ansi-${name!.replace(/^ansi-/, "")}`).join(" ")}>
        {visible(part.content)}
      </span>
    );
  });
});
