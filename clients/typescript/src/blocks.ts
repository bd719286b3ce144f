import type { SessionEvent } from "./events.js";
import { StreamedText } from "./text.js";

interface BlockBase {
  id: string;
  /** A pending block may still change; complete and error are final. */
  status: "pending" | "complete" | "error";
  timestamp: string;
  executionId?: string;
  /** "main", or the id of a sub-agent's conversation. */
  conversationId?: string;
  anchor?: string;
}

/** A part of a user message: text or an image, whose data is base64. */
export interface Part {
  type: "text" | "image";
  text?: string;
  mediaType?: string;
  data?: string;
}

/** The whole plan of a conversation: what the agent intends to do, and how far it is. */
export interface Plan {
  title?: string;
  /** Why the plan is as it is, in the agent's words. */
  explanation?: string;
  items?: PlanItem[];
}

export interface PlanItem {
  /** The agent's own id. */
  id?: string;
  content: string;
  status: "pending" | "in_progress" | "completed" | "cancelled";
  priority?: string;
}

/** One step of a plan that is being executed. */
export interface Step {
  id: string;
  title: string;
  status: "pending" | "blocked" | "ready" | "running" | "completed" | "failed" | "skipped";
  /** Ids of the steps that must be completed before. */
  dependsOn?: string[];
  /** The conversation of the sub-agent that executes the step. */
  conversationId?: string;
  /** The execution of another session that executes the step. */
  executionId?: string;
  result?: string;
  errorCode?: string;
  errorMessage?: string;
  startedAt?: string;
  endedAt?: string;
}

/** A skill whose instructions the agent has read. */
export interface LoadedSkill {
  name: string;
  /** The SHA-256 of a skill that was pushed to Spool. */
  version?: string;
  path?: string;
}

/** An entry of a list of tasks. */
export interface TodoItem {
  content: string;
  status: PlanItem["status"];
}

/** A unit to display. `kind` decides which fields a block has. A field that is empty is absent. */
export type Block = BlockBase &
  (
    | { kind: "user_message"; content?: string; parts?: Part[] }
    | { kind: "assistant_text"; content?: string; model?: string }
    | { kind: "thinking"; content?: string; summary?: string }
    | { kind: "tool_use"; toolName?: string; toolUseId?: string; input?: unknown; content?: string; displayName?: string; description?: string }
    | { kind: "tool_result"; toolUseId?: string; output?: string; isError?: boolean; durationMs?: number }
    | { kind: "subagent"; subagentId?: string; name?: string; toolUseId?: string; input?: unknown; output?: string; durationMs?: number }
    | { kind: "todo"; todos?: TodoItem[] } // in logs of earlier servers
    | { kind: "plan"; plan?: Plan; todos?: TodoItem[] } // todos are the items of the plan
    | { kind: "step"; step?: Step }
    | { kind: "skill_load"; skill?: LoadedSkill; toolUseId?: string }
    | { kind: "system"; subtype?: string; message?: string }
    | { kind: "error"; code?: string; message?: string }
  );

type Fields = Record<string, unknown>;

/**
 * The blocks of one session, folded from its events and its text in flight by the rules of the server. A block that
 * changes is replaced by a new object, so that an unchanged block stays the same object.
 */
export class BlockView {
  readonly #blocks = new Map<string, Block>(); // in the order of their first appearance
  readonly #texts = new Map<string, StreamedText>();
  readonly #runs = new Map<string, number>(); // execution id to its place among the executions
  readonly #tips = new Map<string, number>(); // block id to the seq of the last event that a page had folded into it
  #firstRun = 0;
  #lastRun = 0;
  #sorted: readonly Block[] | undefined;

  /**
   * Applies an event. Stored events must come in order of seq, each once; text in flight may come in any order and several
   * times. Returns the id of the block that the event may have changed.
   */
  apply(event: SessionEvent): string | undefined {
    if (event.type === "text_delta") return this.#applyText(event);
    if (event.executionId && !this.#runs.has(event.executionId)) this.#runs.set(event.executionId, this.#lastRun++);
    const id = changedBlockId(event);
    if (!id || event.seq <= (this.#tips.get(id) ?? 0)) return undefined;
    const previous = this.#blocks.get(id);
    const next = reduce(previous, event);
    if (!next) return undefined;
    const text = this.#texts.get(id);
    if (next.status !== "pending") this.#texts.delete(id);
    this.#set(id, text && next.status === "pending" ? withContent(next, text.known) : next);
    return id;
  }

  /**
   * Puts blocks of the API before the blocks that the view has: in the order of display, with the seq of the last event that
   * is folded into them. Events up to this seq change them no more.
   */
  prepend(blocks: readonly Block[], tip: number): void {
    const newer = new Map(this.#blocks);
    this.#blocks.clear();
    for (const block of blocks) {
      const known = newer.get(block.id);
      newer.delete(block.id);
      this.replace(known && known.status !== "pending" ? known : block, tip);
    }
    for (const block of [...blocks].reverse()) {
      if (block.executionId && !this.#runs.has(block.executionId)) this.#runs.set(block.executionId, --this.#firstRun);
    }
    for (const [id, block] of newer) this.#blocks.set(id, block);
  }

  /** Replaces a block, or adds it, with the seq of the last event that is folded into it. A final block stays if the new one is pending. */
  replace(block: Block, tip: number): void {
    const known = this.#blocks.get(block.id);
    if (known && known.status !== "pending" && block.status === "pending") return;
    this.#tips.set(block.id, tip);
    if (block.status !== "pending") this.#texts.delete(block.id);
    else if (contentOf(block) || this.#texts.has(block.id)) {
      let text = this.#texts.get(block.id);
      if (!text) this.#texts.set(block.id, (text = new StreamedText()));
      text.add({ offset: 0, delta: contentOf(block) });
      block = withContent(block, text.known);
    }
    this.#set(block.id, block);
  }

  /** Returns the blocks in the order of display: by execution, then by seq. Returns the same list until a block changes. */
  blocks(): readonly Block[] {
    const run = (b: Block) => this.#runs.get(b.executionId ?? "") ?? 0;
    return (this.#sorted ??= [...this.#blocks.values()].sort((a, b) => run(a) - run(b)));
  }

  /** Returns a block by its id. */
  get(id: string): Block | undefined {
    return this.#blocks.get(id);
  }

  #set(id: string, block: Block): void {
    this.#blocks.set(id, block);
    this.#sorted = undefined;
  }

  #applyText(event: SessionEvent): string | undefined {
    const { blockId: id, offset, delta } = (event.data ?? {}) as { blockId?: string; offset?: number; delta?: string };
    if (!id || typeof offset !== "number" || typeof delta !== "string") return undefined;
    const block = this.#blocks.get(id);
    if (block && block.status !== "pending") return undefined;
    let text = this.#texts.get(id);
    if (!text) this.#texts.set(id, (text = new StreamedText()));
    text.add({ offset, delta });
    if (!block) return undefined; // the text waits for the block
    this.#set(id, withContent(block, text.known));
    return id;
  }
}

/** Folds the events of a session to its blocks. */
export function foldBlocks(events: Iterable<SessionEvent>): readonly Block[] {
  const view = new BlockView();
  for (const event of events) view.apply(event);
  return view.blocks();
}

function changedBlockId(event: SessionEvent): string | undefined {
  switch (event.type) {
    case "message_accepted":
    case "block_update":
      return event.data?.blockId;
    case "block_start":
    case "block_complete":
      return event.data?.block?.id;
  }
  return undefined;
}

/** Returns a block after an event; undefined if the block cannot be shown yet. */
function reduce(previous: Block | undefined, event: SessionEvent): Block | undefined {
  if (previous && previous.status !== "pending") return previous;
  const data = event.data;
  switch (event.type) {
    case "message_accepted":
      return withEventFields(
        { id: data.blockId, kind: "user_message", status: "complete", timestamp: event.time, content: data.content, parts: data.parts, conversationId: "main" },
        event,
      );
    case "block_start":
      return previous ? withContent(withEventFields(data.block, event), contentOf(previous)) : withEventFields(data.block, event);
    case "block_update":
      return previous && withUpdates(previous, data.updates ?? {});
    case "block_complete":
      return withEventFields(previous ? { ...data.block, timestamp: previous.timestamp } : data.block, event);
  }
  return previous;
}

/** Returns a copy of a block with the execution, conversation, time and status of an event. */
function withEventFields(block: Fields, event: SessionEvent): Block {
  const out: Fields = { ...block };
  out["executionId"] = event.executionId;
  if (event.conversationId) out["conversationId"] = event.conversationId;
  if (!out["timestamp"] || out["timestamp"] === "0001-01-01T00:00:00Z") out["timestamp"] = event.time;
  out["status"] ||= event.type === "block_complete" ? "complete" : "pending";
  setPlanTodos(out);
  return withoutEmpty(out);
}

/** The fields of a block that a block_update can set. */
const updatable = ["todos", "plan", "step", "displayName", "description", "summary", "output"];

function withUpdates(block: Block, updates: Fields): Block {
  const out: Fields = { ...block };
  if (updates["input"] !== undefined) out["input"] = updates["input"];
  for (const name of updatable) {
    if (updates[name] !== undefined && updates[name] !== null) out[name] = updates[name];
  }
  setPlanTodos(out);
  return withoutEmpty(out);
}

/** Sets the todos of a block of kind plan to the items of its plan, for clients that show the list of both kinds. */
function setPlanTodos(block: Fields): void {
  if (block["kind"] !== "plan") return;
  block["todos"] = (block["plan"] as Plan | undefined)?.items?.map(({ content, status }) => ({ content, status }));
}

function contentOf(block: Block): string {
  return "content" in block ? (block.content ?? "") : "";
}

function withContent(block: Block, content: string): Block {
  return withoutEmpty({ ...block, content });
}

/** Removes the fields that the server leaves out because they are empty. An input may be any JSON. */
function withoutEmpty(block: Fields): Block {
  for (const [name, value] of Object.entries(block)) {
    if (name !== "input" && (!value || (Array.isArray(value) && value.length === 0))) delete block[name];
    else if (value === undefined) delete block[name];
  }
  return block as unknown as Block;
}
