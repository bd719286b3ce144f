import type { Schemas } from "@spoolhq/client";
import type { ApprovalDecision } from "@spoolhq/react";
import { memo, useId, useMemo, useState, type MouseEvent, type ReactNode } from "react";
import { ErrorNote } from "../error";
import { visible } from "../text";
import "./approval.css";
import "./conversation.css";
import { UnifiedDiff } from "./diffview";
import { formatDuration, formatSize } from "./format";
import { LongText } from "./longtext";
import { StatusMark, type Status } from "./status";

/** An approval request, as the API lists it. */
export type Approval = Schemas["spool.v1.Approval"];

/** The data of the event approval_requested. */
interface Request {
  kind?: string;
  rule?: string;
  reason?: string;
  preview?: { command?: string; cwd?: string; paths?: string[]; hosts?: string[]; url?: string; diff?: string; text?: string; cut?: { field: string; bytes: number }[] };
  input?: unknown;
  editable?: boolean;
  class?: string;
  questions?: Question[];
  schema?: unknown;
  timeoutMs?: number;
}

interface Question {
  id: string;
  header?: string;
  question: string;
  options?: { label: string; description?: string }[];
  multiple?: boolean;
  other?: boolean;
  secret?: boolean;
}

interface Props {
  approval: Approval;
  /** Sends a decision. Resolves when it is in the log; rejects with the API's error. */
  onDecide: (decision: ApprovalDecision) => Promise<unknown>;
}

/**
 * A request of an agent for a decision. What the call does comes first and whole; the agent's words about it are apart from it. Only a
 * click on a button, or a key while that button has the focus, decides.
 */
export const ApprovalCard = memo(function ApprovalCard({ approval, onDecide }: Props) {
  const request = (approval.request ?? {}) as Request;
  const headId = useId();
  const [sending, setSending] = useState(false);
  const [error, setError] = useState<unknown>();
  const decide = async (decision: ApprovalDecision) => {
    setSending(true);
    setError(undefined);
    try {
      await onDecide(decision);
    } catch (failure) {
      setError(failure);
    } finally {
      setSending(false);
    }
  };
  const open = approval.status === "pending";
  const shown = { request, approval, decide, sending };
  return (
    <div role="group" className={`approval${open ? " approval-open" : ""}`} aria-labelledby={headId} onClickCapture={ignoreDoubleClick}>
      <header className="approval-head">
        <StatusMark status={statusOf(approval)} word={approval.status} />
        <h3 id={headId}>{open ? headline(approval, request) : <Outcome approval={approval} />}</h3>
        {approval.conversationId && approval.conversationId !== "main" && <span className="approval-note">of a sub-agent</span>}
        {open && request.timeoutMs ? <span className="approval-note">rejected if nobody decides within {formatDuration(request.timeoutMs)}</span> : null}
      </header>
      {open ? (
        <>
          <WhatItDoes request={request} />
          {request.kind === "question" ? <Questions {...shown} /> : request.kind === "elicitation" ? <Elicitation {...shown} /> : <Decide {...shown} />}
          {error !== undefined && <ErrorNote error={error} />}
        </>
      ) : (
        <DecidedRequest request={request} comment={(approval.decided as { comment?: string } | undefined)?.comment} />
      )}
    </div>
  );
});

/** Stops the second click of a double click on a button that decides: a decision moves cards, and the click was meant for another one. */
function ignoreDoubleClick(event: MouseEvent): void {
  if (event.detail > 1 && (event.target as Element).closest(".approval-buttons, .approval-all")) event.stopPropagation();
}

/** What was decided about: folded, because it is over. */
function DecidedRequest({ request, comment }: { request: Request; comment: string | undefined }) {
  const [open, setOpen] = useState(false);
  return (
    <>
      {comment && (
        <q className="approval-comment" dir="auto">
          {visible(comment)}
        </q>
      )}
      <details className="approval-details" onToggle={(event) => setOpen(event.currentTarget.open)}>
        <summary>The request</summary>
        {open && <WhatItDoes request={request} />}
      </details>
    </>
  );
}

function statusOf({ status }: Approval): Status {
  if (status === "pending") return "waiting";
  if (status === "decided") return "running";
  return status === "rejected" ? "failed" : status === "retracted" || status === "skipped" ? "cancelled" : "done";
}

function headline(approval: Approval, request: Request): ReactNode {
  const tool = visible(approval.toolName || "a tool");
  if (request.kind === "question") return "The agent has a question";
  if (request.kind === "elicitation") return <>An MCP server asks for input</>;
  if (request.kind === "plan") return "The agent proposes a plan";
  return (
    <>
      Run <code>{tool}</code>?
    </>
  );
}

/** What the call does, whole, and below it the agent's own words. */
function WhatItDoes({ request }: { request: Request }) {
  const { command, cwd, paths = [], hosts = [], url, diff, text } = request.preview ?? {};
  const hasPreview = Boolean(command || paths.length || hosts.length || url || diff || text);
  return (
    <div className="approval-what">
      {command && (
        <pre className="approval-command" tabIndex={0} aria-label="Command">
          <LongText text={command}>{visible}</LongText>
        </pre>
      )}
      <dl className="approval-facts">
        <Fact name="in" values={cwd ? [cwd] : []} />
        <Fact name={paths.length === 1 ? "file" : `${paths.length} files`} values={paths} />
        <Fact name={hosts.length === 1 ? "host" : `${hosts.length} hosts`} values={hosts} />
        <Fact name="URL" values={url ? [url] : []} />
      </dl>
      {diff && <UnifiedDiff text={diff} />}
      {text && (
        <pre className="approval-text" tabIndex={0} aria-label={request.kind === "plan" ? "Plan" : "Content"}>
          <LongText text={text}>{visible}</LongText>
        </pre>
      )}
      {request.preview?.cut?.map((cut) => (
        <p key={cut.field} className="approval-cut">
          <b>{visible(cut.field)}</b> is not whole here: it has {formatSize(cut.bytes)}. The call in the conversation has more.
        </p>
      ))}
      {request.input !== undefined && request.kind !== "question" && (
        <Arguments input={request.input} open={!hasPreview} />
      )}
      {request.reason && (
        <figure className="approval-reason">
          <figcaption>The agent says (nobody has checked this):</figcaption>
          <blockquote dir="auto">
            <LongText text={request.reason}>{visible}</LongText>
          </blockquote>
        </figure>
      )}
    </div>
  );
}

function Fact({ name, values }: { name: string; values: string[] }) {
  if (values.length === 0) return null;
  return (
    <>
      <dt>{name}</dt>
      <dd>
        <LongText text={values.map((value) => visible(value).replace(/\n/g, "\\u{a}")).join("\n")}>{(part) => <bdi>{part}</bdi>}</LongText>
      </dd>
    </>
  );
}

function Arguments({ input, open: opened }: { input: unknown; open: boolean }) {
  const [open, setOpen] = useState(opened);
  return (
    <details className="approval-details" open={open} onToggle={(event) => setOpen(event.currentTarget.open)}>
      <summary>All arguments</summary>
      {open && (
        <pre tabIndex={0} aria-label="Arguments">
          <LongText text={JSON.stringify(input, undefined, 2)}>{visible}</LongText>
        </pre>
      )}
    </details>
  );
}

interface DecideProps {
  request: Request;
  approval: Approval;
  decide: (decision: ApprovalDecision) => Promise<void>;
  sending: boolean;
}

/** The buttons for the call of a tool or a plan. */
function Decide({ request, approval, decide, sending }: DecideProps) {
  const [comment, setComment] = useState("");
  const [draft, setDraft] = useState<string>(); // the changed arguments, while they are edited
  const commentId = useId();
  const changed = useMemo(() => parseArguments(draft), [draft]);
  const what = request.kind === "plan" ? "plan" : visible(approval.toolName || "call");
  return (
    <div className="approval-decide">
      {draft !== undefined && <JsonEditor label="Arguments as JSON" value={draft} onChange={setDraft} error={changed.error} />}
      <label htmlFor={commentId} className="approval-comment-label">
        Comment for the agent, with a rejection
      </label>
      <textarea id={commentId} value={comment} onChange={(event) => setComment(event.target.value)} rows={1} maxLength={16 * 1024} />
      <div className="approval-buttons">
        <button type="button" disabled={sending} onClick={() => decide({ decision: "reject", ...(comment && { comment }) })}>
          Reject
        </button>
        <button type="button" disabled={sending} onClick={() => decide({ decision: "skip" })}>
          Skip
        </button>
        {request.editable && (
          <button type="button" disabled={sending} onClick={() => setDraft(draft === undefined ? JSON.stringify(request.input ?? {}, undefined, 2) : undefined)} aria-pressed={draft !== undefined}>
            {draft === undefined ? "Edit arguments" : "Discard changes"}
          </button>
        )}
        <span className="approval-gap" />
        {draft === undefined ? (
          <button type="button" className="approval-approve" disabled={sending} onClick={() => decide({ decision: "approve" })}>
            Approve {what}
          </button>
        ) : (
          <button type="button" className="approval-approve" disabled={sending || changed.error !== undefined} onClick={() => decide({ decision: "approve", input: changed.value })}>
            Approve with these arguments
          </button>
        )}
      </div>
      {request.class && draft === undefined && (
        <button type="button" className="approval-all" disabled={sending} onClick={() => decide({ decision: "approve_all" })}>
          Approve this and all later calls of <bdi className="approval-class">{visible(request.class)}</bdi>
        </button>
      )}
    </div>
  );
}

/** Parses edited arguments. They must be an object, as the API requires. */
function parseArguments(draft: string | undefined): { value?: unknown; error?: string } {
  if (draft === undefined) return {};
  try {
    const value: unknown = JSON.parse(draft);
    return typeof value === "object" && value !== null && !Array.isArray(value) ? { value } : { error: "The arguments must be a JSON object." };
  } catch (error) {
    return { error: `This is not JSON: ${(error as Error).message}` };
  }
}

/** The questions of an agent, with their options. */
function Questions({ request, decide, sending }: DecideProps) {
  const questions = request.questions ?? [];
  const group = useId();
  const [chosen, setChosen] = useState<ReadonlyMap<string, readonly string[]>>(new Map());
  const [other, setOther] = useState<ReadonlyMap<string, string>>(new Map());
  const answerTo = ({ id }: Question) => [...(chosen.get(id) ?? []), ...(other.get(id) ? [other.get(id)!] : [])];
  const choose = ({ id, multiple }: Question, label: string) => {
    const before = chosen.get(id) ?? [];
    setChosen(new Map(chosen).set(id, !multiple ? [label] : before.includes(label) ? before.filter((l) => l !== label) : [...before, label]));
    if (!multiple) setOther(new Map(other).set(id, ""));
  };
  const write = ({ id, multiple }: Question, text: string) => {
    setOther(new Map(other).set(id, text));
    if (!multiple) setChosen(new Map(chosen).set(id, []));
  };
  const answer = () => decide({ decision: "answer", answers: Object.fromEntries(questions.map((question) => [question.id, answerTo(question)])) });
  return (
    <div className="approval-decide">
      {questions.map((question, index) => (
        <fieldset key={question.id} className="approval-question">
          <legend>
            {question.header && <span className="approval-note">{visible(question.header)}</span>} <span dir="auto">{visible(question.question)}</span>
          </legend>
          {question.options?.map(({ label, description }) => (
            <label key={label} className="approval-option">
              <input type={question.multiple ? "checkbox" : "radio"} name={`${group}${index}`} checked={(chosen.get(question.id) ?? []).includes(label)} onChange={() => choose(question, label)} />
              <span dir="auto">{visible(label)}</span>
              {description && <span className="approval-note">{visible(description)}</span>}
            </label>
          ))}
          {(question.other || question.secret || !question.options?.length) && (
            <input
              type={question.secret ? "password" : "text"}
              autoComplete="off"
              aria-label={question.options?.length ? "Another answer" : visible(question.question)}
              placeholder={question.secret ? "Stored encrypted, and deleted with the execution" : question.options?.length ? "Another answer" : "Answer"}
              value={other.get(question.id) ?? ""}
              onChange={(event) => write(question, event.target.value)}
            />
          )}
        </fieldset>
      ))}
      <Buttons decide={decide} sending={sending} answer={questions.every((question) => answerTo(question).length > 0) ? answer : undefined} />
    </div>
  );
}

/** The input for an MCP server, as JSON by its schema. */
function Elicitation({ request, decide, sending }: DecideProps) {
  const [draft, setDraft] = useState(() => JSON.stringify(emptyAnswer(request.schema), undefined, 2));
  const parsed = useMemo(() => parseArguments(draft), [draft]);
  return (
    <div className="approval-decide">
      {request.schema !== undefined && (
        <details className="approval-details">
          <summary>Schema of the answer</summary>
          <pre>
            <LongText text={JSON.stringify(request.schema, undefined, 2)}>{visible}</LongText>
          </pre>
        </details>
      )}
      <JsonEditor label="Answer as JSON" value={draft} onChange={setDraft} error={parsed.error} />
      <Buttons decide={decide} sending={sending} answer={parsed.error === undefined ? () => decide({ decision: "answer", input: parsed.value }) : undefined} />
    </div>
  );
}

function JsonEditor({ label, value, onChange, error }: { label: string; value: string; onChange: (text: string) => void; error: string | undefined }) {
  return (
    <div className="approval-edit">
      <textarea aria-label={label} value={value} onChange={(event) => onChange(event.target.value)} rows={Math.min(16, value.split("\n", 17).length + 1)} spellCheck={false} aria-invalid={error !== undefined} />
      {error && <p className="approval-error" role="alert">{error}</p>}
    </div>
  );
}

/** Returns an object with the fields of a schema, without values to send by mistake. */
function emptyAnswer(schema: unknown): Record<string, unknown> {
  // The schema is of an MCP server, and may be anything.
  const properties = (schema as { properties?: Record<string, { type?: string; default?: unknown } | null> | null } | null | undefined)?.properties ?? {};
  return Object.fromEntries(Object.entries(properties).map(([name, property]) => [name, property?.default ?? (property?.type === "string" ? "" : null)]));
}

/** The buttons below questions. Without an answer the button to send it is disabled; Enter in a field does not send it. */
function Buttons({ decide, sending, answer }: { decide: DecideProps["decide"]; sending: boolean; answer: (() => void) | undefined }) {
  return (
    <div className="approval-buttons">
      <button type="button" disabled={sending} onClick={() => decide({ decision: "reject" })}>
        Decline
      </button>
      <button type="button" disabled={sending} onClick={() => decide({ decision: "skip" })}>
        Skip
      </button>
      <span className="approval-gap" />
      <button type="button" className="approval-approve" disabled={sending || !answer} onClick={answer}>
        Answer
      </button>
    </div>
  );
}

const outcomes: Record<string, string> = { decided: "Decided", approved: "Approved", rejected: "Rejected", skipped: "Skipped", answered: "Answered", retracted: "Ended without a decision" };
const causes: Record<string, string> = {
  class: "because all requests of its class were approved",
  timeout: "because nobody decided in time",
  withdrawn: "because the agent withdrew it",
  turn_ended: "because the turn ended",
  attempt_failed: "because the agent's process ended",
  execution_ended: "because the execution ended",
};

/** What was decided, by whom and when. */
function Outcome({ approval }: { approval: Approval }) {
  const { decidedBy: by, decidedAt, endedAt, cause, toolName } = approval;
  const who = by && (by.user || by.keyName || by.id || by.kind);
  const when = decidedAt ?? endedAt;
  return (
    <span className="approval-outcome">
      {outcomes[approval.status ?? ""] ?? visible(approval.status ?? "")}
      {toolName && <> {visible(toolName)}</>}
      {who && (
        <>
          {" "}
          by <bdi>{visible(who)}</bdi>
        </>
      )}
      {cause && causes[cause] && ` ${causes[cause]}`}
      {when && (
        <>
          , <time dateTime={when}>{new Date(when).toLocaleString()}</time>
        </>
      )}
      {approval.status === "decided" && "; the agent has not received it yet"}
    </span>
  );
}
