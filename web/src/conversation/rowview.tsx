import type { Block, Part, PlanItem, Step } from "@spoolhq/client";
import { memo, useEffect, useMemo, useState, type ReactNode } from "react";
import { visible } from "../text";
import { CopyButton } from "./code";
import { FileDiff, UnifiedDiff } from "./diffview";
import { failuresUrl, loadRemedies, remedyOf } from "./failures";
import { count, formatCost, formatDuration } from "./format";
import { Icon } from "./icons";
import { LongText } from "./longtext";
import { Markdown } from "./markdown";
import { Output } from "./output";
import { isFailure, type Row, type Turn } from "./rows";
import { StatusMark, type Status } from "./status";
import { commandOf, fileChanges, summarize } from "./tools";

/** What a row can do to the list. The functions are the same between renders. */
export interface RowActions {
  toggle: (key: string, open: boolean) => void;
  /** Returns the blocks of a turn as Markdown. */
  turnMarkdown: (executionId: string) => string;
  /** Copies a link to the event that began a block; resolves when it is copied. Absent where there is no page to link to. */
  copyLink?: (blockId: string) => Promise<void>;
  /** Shows the event that began a block, as the log has it. */
  showEvent?: (blockId: string) => void;
  /** Loads the fields of a block that the page of blocks does not have whole. */
  loadWhole: (blockId: string) => void;
}

interface Props {
  row: Row;
  open: boolean;
  /** Whether the turn of the row is over. */
  ended: boolean;
  actions: RowActions;
}

/** Reports whether a row is open before anybody has opened or closed it: failures are. */
export function opensByItself(row: Row): boolean {
  return row.type === "subagent" ? row.open : row.type !== "turn" && isFailure(row);
}

/** A row of the conversation. It renders again only if what it shows has changed. */
export const RowView = memo(
  function RowView({ row, open, ended, actions }: Props) {
    const toggle = () => actions.toggle(row.key, !open);
    switch (row.type) {
      case "tool":
        return <ToolCall {...{ row, open, ended, actions, toggle }} />;
      case "result":
        return (
          <Fold icon={<Icon name="other" />} name="Result" argument={row.block.toolUseId ?? ""} open={open} toggle={toggle} meta={<Duration ms={row.block.durationMs} />} status={row.block.isError ? "failed" : "done"}>
            <ResultText block={row.block} loadWhole={loaderOf(row.cut, row.block, actions)} />
          </Fold>
        );
      case "subagent":
        return <SubagentLine {...{ row, open, ended, toggle, actions }} />;
      case "turn":
        return <TurnEnd turn={row.turn} actions={actions} />;
      case "block":
        return <BlockView {...{ row, open, toggle, actions }} />;
    }
  },
  (a, b) => a.open === b.open && a.ended === b.ended && a.actions === b.actions && isSame(a.row, b.row),
);

/** Reports whether two rows show the same objects. */
function isSame(a: Row, b: Row): boolean {
  const names = new Set([...Object.keys(a), ...Object.keys(b)]) as Set<keyof Row>;
  return [...names].every((name) => a[name] === b[name]);
}

/** A line that opens: an icon, a name, what matters about it, and its status. */
function Fold(props: { icon: ReactNode; name: string; argument: string; mono?: boolean; open: boolean; toggle: () => void; meta?: ReactNode; status?: Status; word?: string; children?: ReactNode }) {
  return (
    <div className={`fold${props.open ? " fold-open" : ""}`}>
      <button type="button" className="fold-line" aria-expanded={props.open} onClick={props.toggle}>
        {props.icon}
        <span className="fold-name">{visible(props.name)}</span>
        <bdi className={props.mono ? "fold-argument fold-argument-mono" : "fold-argument"} title={visible(props.argument)}>
          {visible(props.argument)}
        </bdi>
        <span className="fold-meta">{props.meta}</span>
        {props.status && <StatusMark status={props.status} word={props.word} />}
      </button>
      {props.open && <div className="fold-body">{props.children}</div>}
    </div>
  );
}

function Duration({ ms }: { ms: number | undefined }) {
  return ms ? <span className="duration">{formatDuration(ms)}</span> : null;
}

function ToolCall({ row, open, ended, actions, toggle }: Props & { row: Extract<Row, { type: "tool" }>; toggle: () => void }) {
  const { block, result } = row;
  const summary = useMemo(() => summarize(block), [block]);
  const status: Status = isFailure(row) ? "failed" : result && result.status !== "pending" ? "done" : ended ? "cancelled" : row.waiting ? "waiting" : "running";
  const word = status === "cancelled" ? "no result" : status === "waiting" ? "waits for a person" : status;
  return (
    <Fold icon={<Icon name={summary.kind} />} name={summary.name} argument={summary.argument} mono={summary.kind !== "agent" && summary.kind !== "question"} open={open} toggle={toggle} meta={<Duration ms={result?.durationMs} />} status={status} word={word}>
      <ToolInput block={block} loadWhole={loaderOf(row.cut, block, actions)} />
      {result && <ResultText block={result} loadWhole={loaderOf(row.resultCut, result, actions)} />}
      <RowTools block={block} actions={actions} />
    </Fold>
  );
}

/** The arguments of a call: what it changes as a diff, what it runs as text, all else as JSON. */
function ToolInput({ block, loadWhole }: { block: Extract<Block, { kind: "tool_use" }>; loadWhole: (() => void) | undefined }) {
  const changes = useMemo(() => fileChanges(block.toolName, block.input), [block]);
  if (changes.length > 0) return changes.map((change, i) => <FileDiff key={i} change={change} />);
  const command = commandOf(block.input);
  const text = command ?? (block.input === undefined ? (block.content ?? "") : JSON.stringify(block.input, undefined, 2));
  return (text === "" || text === "{}") && !loadWhole ? null : (
    <pre className="tool-input" tabIndex={0} aria-label={command === undefined ? "Arguments" : "Command"} dir="auto">
      <LongText text={text} loadWhole={loadWhole}>
        {visible}
      </LongText>
    </pre>
  );
}

function ResultText({ block, loadWhole }: { block: Extract<Block, { kind: "tool_result" }>; loadWhole: (() => void) | undefined }) {
  const output = block.output ?? "";
  if (output === "") return <p className="fold-note">{block.status === "pending" ? "no output yet" : "no output"}</p>;
  if (output.startsWith("--- ") && /^--- .*\n\+\+\+ /.test(output.slice(0, 4096)) && output.length <= 1024 * 1024) return <UnifiedDiff text={output} />;
  return <Output text={output} loadWhole={loadWhole} />;
}

function SubagentLine({ row, open, ended, toggle, actions }: Props & { row: Extract<Row, { type: "subagent" }>; toggle: () => void }) {
  const { block, subagent } = row;
  const failed = isFailure(row);
  const running = !failed && !ended && (subagent ? subagent.status === "running" : block.status === "pending");
  const prompt = summarize({ toolName: "Agent", input: block.input }).argument;
  return (
    <Fold
      icon={<Icon name="agent" />}
      name={subagent?.name || block.name || "Sub-agent"}
      argument={prompt}
      open={open}
      toggle={toggle}
      meta={
        <>
          {subagent && <span>{count(subagent.blocks.length, "block")}</span>}
          <Duration ms={block.durationMs} />
        </>
      }
      status={failed ? "failed" : running ? "running" : "done"}
    >
      {/* The blocks of the sub-agent are the next rows. */}
      {!subagent && <Output text={block.output ?? ""} loadWhole={loaderOf(row.cut, block, actions)} />}
    </Fold>
  );
}

function BlockView({ row, open, toggle, actions }: { row: Extract<Row, { type: "block" }>; open: boolean; toggle: () => void; actions: RowActions }) {
  const { block } = row;
  const loadWhole = loaderOf(row.cut, block, actions);
  switch (block.kind) {
    case "user_message":
      return (
        <div role="group" className={`message message-user${block.status === "pending" ? " message-pending" : ""}`} aria-label="You">
          {block.parts ? block.parts.map((part, i) => <MessagePart key={i} part={part} />) : <PlainText text={block.content ?? ""} loadWhole={loadWhole} />}
          {block.status === "pending" && <span className="message-note">sending…</span>}
          <RowTools block={block} actions={actions} turn />
        </div>
      );
    case "assistant_text": {
      const text = block.content ?? "";
      return (
        <div role="group" className={`message message-agent${row.streaming ? " message-streaming" : ""}`} aria-label="Agent" aria-busy={row.streaming}>
          <LongText text={text} loadWhole={loadWhole}>
            {(part) => <Markdown text={part} streaming={row.streaming} />}
          </LongText>
          {block.status === "error" && <span className="message-note">stopped here</span>}
          {!row.streaming && <RowTools block={block} actions={actions} text={text} />}
        </div>
      );
    }
    case "thinking": {
      const text = block.content || block.summary || "";
      return (
        <Fold icon={<Icon name="thinking" />} name={row.streaming ? "Thinking" : "Thought"} argument={block.summary || text.slice(0, 400)} open={open} toggle={toggle}>
          <div className="thinking" dir="auto">
            <LongText text={text} loadWhole={loadWhole}>
              {visible}
            </LongText>
          </div>
        </Fold>
      );
    }
    case "todo":
      return <PlanList items={block.todos ?? []} />;
    case "plan":
      return <PlanList items={block.plan?.items ?? []} title={block.plan?.title} explanation={block.plan?.explanation} />;
    case "step":
      return block.step ? <StepLine step={block.step} open={open} toggle={toggle} /> : null;
    case "skill_load":
      return (
        <Fold icon={<Icon name="skill" />} name="Skill loaded" argument={block.skill?.name ?? ""} open={open} toggle={toggle}>
          <p className="fold-note">
            <bdi>{visible([block.skill?.path, block.skill?.version && `version ${block.skill.version}`].filter(Boolean).join(", ") || "its version and path are not known")}</bdi>
          </p>
        </Fold>
      );
    case "system":
      return (
        <p className="system-line">
          <bdi>
            <LongText text={block.message || block.subtype || "system"} loadWhole={loadWhole}>
              {visible}
            </LongText>
          </bdi>
        </p>
      );
    case "error":
      return <Failure code={block.code} message={block.message} />;
  }
}

/** Returns a function that loads a block of which the page of blocks has only the beginning. */
function loaderOf(cut: boolean | undefined, block: Block, actions: RowActions): (() => void) | undefined {
  return cut ? () => actions.loadWhole(block.id) : undefined;
}

function PlainText({ text, loadWhole }: { text: string; loadWhole?: () => void }) {
  return (
    <div className="message-text" dir="auto">
      <LongText text={text} loadWhole={loadWhole}>
        {visible}
      </LongText>
    </div>
  );
}

/** Image types that a browser draws without running anything. */
const imageTypes = /^image\/(png|jpeg|gif|webp|avif)$/;

function MessagePart({ part }: { part: Part }) {
  if (part.type === "text") return <PlainText text={part.text ?? ""} />;
  if (!imageTypes.test(part.mediaType ?? "") || !part.data) return <p className="message-note">An image of type {visible(part.mediaType || "unknown")}, which is not shown.</p>;
  return <img className="message-image" src={`data:${part.mediaType};base64,${part.data}`} alt="Attached image" loading="lazy" />;
}

const planStatus = new Map<string, Status>(Object.entries({ completed: "done", in_progress: "running", running: "running", failed: "failed", cancelled: "cancelled", skipped: "cancelled" }));

/** A plan or a list of tasks. */
function PlanList({ items, title, explanation }: { items: readonly PlanItem[]; title?: string; explanation?: string }) {
  const done = items.filter((item) => item.status === "completed").length;
  return (
    <div role="group" className="plan" aria-label="Plan">
      <header className="plan-head">
        <Icon name="plan" />
        <span className="plan-title">{visible(title || "Plan")}</span>
        <span className="fold-meta">
          {done} of {items.length} done
        </span>
      </header>
      {explanation && <p className="plan-explanation">{visible(explanation)}</p>}
      <ol className="plan-items">
        {items.slice(0, 200).map((item, i) => (
          <li key={i} className={`plan-item plan-item-${planStatus.get(item.status) ?? "open"}`}>
            {planStatus.has(item.status) ? <StatusMark status={planStatus.get(item.status)!} word={item.status.replace(/_/g, " ")} /> : <span className="status-mark" title={item.status}>○</span>}
            <bdi>{visible(item.content)}</bdi>
            {item.priority && <span className="plan-priority">{visible(item.priority)}</span>}
          </li>
        ))}
      </ol>
      {items.length > 200 && <p className="fold-note">{count(items.length - 200, "item")} more</p>}
    </div>
  );
}

const stepStatus: Record<Step["status"], Status> = { pending: "waiting", blocked: "waiting", ready: "waiting", running: "running", completed: "done", failed: "failed", skipped: "cancelled" };

/** A step of a plan that is being executed. */
function StepLine({ step, open, toggle }: { step: Step; open: boolean; toggle: () => void }) {
  const ms = step.startedAt && step.endedAt ? Date.parse(step.endedAt) - Date.parse(step.startedAt) : undefined;
  return (
    <Fold icon={<Icon name="plan" />} name="Step" argument={step.title} open={open} toggle={toggle} meta={<Duration ms={ms} />} status={stepStatus[step.status]} word={step.status}>
      {step.dependsOn && <p className="fold-note">after {visible(step.dependsOn.join(", "))}</p>}
      {step.result && <Output text={step.result} />}
      {step.errorMessage && <Failure code={step.errorCode} message={step.errorMessage} />}
    </Fold>
  );
}

/** Returns what a code means and what to do, once the page about the codes is loaded. */
function useRemedy(code: string | undefined): string | undefined {
  const [, setFailed] = useState<boolean>();
  const remedy = code && remedyOf(code);
  useEffect(() => {
    if (!code || remedy !== undefined) return;
    let mounted = true;
    // The message is enough without the page, which a browser that is offline cannot load.
    void loadRemedies().then(() => mounted && setFailed(false), () => mounted && setFailed(true));
    return () => void (mounted = false);
  }, [code, remedy]);
  return remedy;
}

/** An error: what happened, what to do, its code and where the code is described. */
function Failure({ code, message }: { code?: string; message?: string }) {
  const remedy = useRemedy(code);
  return (
    <div role="group" className="failure" aria-label="Error">
      <p className="failure-head">
        <StatusMark status="failed" word="error" />
        <bdi className="failure-message">
          <LongText text={message || "The agent reported an error without a message."}>{visible}</LongText>
        </bdi>
      </p>
      {remedy && (
        <div className="failure-remedy">
          <Markdown text={remedy} />
        </div>
      )}
      {code && (
        <a className="failure-code" href={failuresUrl} target="_blank" rel="noopener noreferrer">
          {visible(code)}
        </a>
      )}
    </div>
  );
}

const turnStatus: Record<string, [Status, string]> = { completed: ["done", "done"], failed: ["failed", "failed"], cancelled: ["cancelled", "cancelled"] };

/** The end of a turn: what became of it, how long it took and what it cost. */
function TurnEnd({ turn, actions }: { turn: Turn; actions: RowActions }) {
  const [status, word] = turnStatus[turn.phase] ?? ["done", turn.phase];
  return (
    <>
      {turn.phase === "failed" && <Failure code={turn.code} message={turn.message} />}
      <footer className="turn-end">
        <StatusMark status={status} word={word} />
        <span>{word}</span>
        {turn.reason && turn.reason !== word && <span>{visible(turn.reason)}</span>}
        <Duration ms={turn.durationMs} />
        {turn.costUsd !== undefined && <span className="cost">{formatCost(turn.costUsd)}</span>}
        {turn.model && <span className="turn-model">{visible(turn.model)}</span>}
        <CopyButton text={() => actions.turnMarkdown(turn.executionId)} label="Copy this turn as Markdown" />
      </footer>
    </>
  );
}

/** Buttons for a block. Those of a message are shown when the pointer or the focus is on it. */
function RowTools({ block, actions, text, turn }: { block: Block; actions: RowActions; text?: string; turn?: boolean }) {
  const { executionId } = block;
  return (
    <div className="row-tools">
      {turn && executionId && <CopyButton text={() => actions.turnMarkdown(executionId)} label="Copy this turn as Markdown" />}
      {text && <CopyButton text={text} label="Copy this text" />}
      {actions.copyLink && <LinkButton copy={() => actions.copyLink!(block.id)} />}
      {actions.showEvent && (
        <button type="button" className="copy-button" onClick={() => actions.showEvent!(block.id)} aria-label="Show the event of this block">
          Event
        </button>
      )}
    </div>
  );
}

function LinkButton({ copy }: { copy: () => Promise<void> }) {
  const [state, setState] = useState("");
  const run = () => copy().then(() => setState("Copied"), (error: unknown) => setState(error instanceof Error ? error.message : String(error)));
  return (
    <button type="button" className="copy-button" onClick={run} onBlur={() => setState("")} aria-label="Copy a link to this event" aria-live="polite">
      {state || "Link"}
    </button>
  );
}
