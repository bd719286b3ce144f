import { ConnectionError, SpoolError } from "@spoolhq/client";
import { useEffect, useState } from "react";
import { failuresUrl } from "./conversation/failures";
import { Markdown } from "./conversation/markdown";
import { visible } from "./text";
import "./error.css";

const errorsUrl = failuresUrl.replace("failures.md", "errors.md");

/** Length of a remedy that is open at first. */
const shortRemedy = 300;

interface Meaning {
  title: string;
  remedy: string;
}

/** Returns what a code of an answer of the API means and what to do, from docs/errors.md. */
async function meaningOf(code: string): Promise<Meaning | undefined> {
  const { default: page } = await import("../../docs/errors.md?raw");
  for (const line of page.split("\n")) {
    const [name, , , title, remedy] = line.slice(2, -2).split(" | ");
    if (name === code && title && remedy) return { title, remedy };
  }
  return undefined;
}

/** An error: what happened, its code, what to do, and a link to the page of codes. */
export function ErrorNote({ error, onRetry }: { error: unknown; onRetry?: () => void }) {
  const [meaning, setMeaning] = useState<Meaning>();
  const code = error instanceof SpoolError ? error.code : "";
  useEffect(() => {
    let active = true;
    setMeaning(undefined);
    if (code) void meaningOf(code).then((m) => active && setMeaning(m));
    return () => {
      active = false;
    };
  }, [code]);

  let what = error instanceof Error ? error.message : String(error);
  if (error instanceof SpoolError) what = error.detail;
  if (error instanceof ConnectionError) what = "No gateway answered. Check that Spool runs and that this machine can reach it.";
  return (
    <div className="error-note" role="alert">
      <p>
        {meaning && <strong>{meaning.title}. </strong>}
        <bdi>{visible(what)}</bdi>
      </p>
      {meaning && (
        <details open={meaning.remedy.length <= shortRemedy}>
          <summary>What to do</summary>
          <Markdown text={meaning.remedy} />
        </details>
      )}
      {code && (
        <p className="muted">
          <code>{visible(code)}</code>
          {error instanceof SpoolError && error.field && (
            <>
              {" "}
              · field <code>{visible(error.field)}</code>
            </>
          )}{" "}
          ·{" "}
          <a href={errorsUrl} target="_blank" rel="noopener">
            all codes
          </a>
        </p>
      )}
      {onRetry && (
        <button className="button" onClick={onRetry}>
          Try again
        </button>
      )}
    </div>
  );
}
