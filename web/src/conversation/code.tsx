import { memo, useEffect, useState, type ReactNode } from "react";
import { visible } from "../text";
import { LongText } from "./longtext";

/** A part of highlighted code: text, or parts with the name of what they are. */
export type CodePart = string | { scope?: string; children: CodePart[] };

type Highlight = (text: string, language: string) => CodePart[] | undefined;

/** Code with highlighting once its chunk is loaded. Code over 64 KB is plain, and cut with a button to show more. */
export const Code = memo(function Code({ text, language }: { text: string; language?: string }) {
  return (
    <div className="code">
      <pre tabIndex={0} aria-label={language ? `Code, ${visible(language)}` : "Code"}>
        <LongText text={text}>{(part, whole) => (whole ? <Highlighted text={part} language={language} /> : visible(part))}</LongText>
      </pre>
      <CopyButton text={text} label="Copy code" />
    </div>
  );
});

const Highlighted = memo(function Highlighted({ text, language }: { text: string; language?: string }) {
  const [highlight, setHighlight] = useState<{ run: Highlight }>();
  useEffect(() => {
    if (!language) return;
    let mounted = true;
    // Without the chunk the code is plain: a page that was open during an upgrade may not find it.
    import("./highlight").then((module) => mounted && setHighlight({ run: module.highlight }), () => undefined);
    return () => void (mounted = false);
  }, [language]);
  const shown = visible(text);
  return <code>{renderParts((language && highlight?.run(shown, language)) || [shown])}</code>;
});

function renderParts(parts: readonly CodePart[]): ReactNode {
  return parts.map((part, i) =>
    typeof part === "string" ? part : (
      <span key={i} className={part.scope && `code-${part.scope.split(".")[0]}`}>
        {renderParts(part.children)}
      </span>
    ),
  );
}

/** A button that copies a text. It says so for a moment. */
export function CopyButton({ text, label }: { text: string | (() => string); label: string }) {
  const [state, setState] = useState<"" | "Copied" | "Not copied">("");
  useEffect(() => {
    if (!state) return;
    const timer = setTimeout(() => setState(""), 1500);
    return () => clearTimeout(timer);
  }, [state]);
  const copy = async () => {
    try {
      await navigator.clipboard.writeText(typeof text === "string" ? text : text());
      setState("Copied");
    } catch {
      setState("Not copied"); // the browser refuses access to the clipboard
    }
  };
  return (
    <button type="button" className="copy-button" onClick={copy} aria-label={label} aria-live="polite">
      {state || "Copy"}
    </button>
  );
}
