import type { Block } from "@spoolhq/client";
import type { Approval } from "./approval";

type KindOf<K extends Block["kind"]> = Extract<Block, { kind: K }>;

/** A sub-agent of a session with its own conversation. */
export interface Subagent {
  id: string;
  name?: string | undefined;
  blocks: readonly Block[];
  status: "running" | "completed" | "failed";
  streamingBlockIds: ReadonlySet<string>;
}

/** The end of a turn, as the list of executions has it. */
export interface Turn {
  executionId: string;
  phase: string;
  durationMs?: number;
  costUsd?: number;
  model?: string;
  code?: string;
  message?: string;
  reason?: string;
}

/** A row of the list. depth counts the sub-agents around it; cut reports whether long fields of the block are not whole. */
export type Row = { key: string; depth: number; executionId?: string; cut?: boolean } & (
  | { type: "block"; block: Exclude<Block, { kind: "tool_use" | "tool_result" | "subagent" }>; streaming: boolean }
  // waiting reports whether the call waits for a person.
  | { type: "tool"; block: KindOf<"tool_use">; result?: KindOf<"tool_result">; resultCut?: boolean; streaming: boolean; waiting: boolean }
  | { type: "result"; block: KindOf<"tool_result"> }
  | { type: "subagent"; block: KindOf<"subagent">; subagent?: Subagent; open: boolean }
  | { type: "approval"; approval: Approval }
  | { type: "turn"; turn: Turn }
);

/** What the rows are made of. */
export interface Conversation {
  blocks: readonly Block[];
  streamingBlockIds: ReadonlySet<string>;
  /** Blocks of whose long fields only the beginning is known. */
  truncatedBlockIds: ReadonlySet<string>;
  /** The sub-agents by the id that their blocks name. */
  subagents: ReadonlyMap<string, Subagent>;
  turns: ReadonlyMap<string, Turn>;
  /** Requests, which are shown below their calls; open ones whose calls are not shown come last. */
  approvals: readonly Approval[];
  /** Returns the key of the row of a block. */
  keyOf: (block: Block) => string;
  /** Reports whether the blocks of a sub-agent are shown. */
  isOpen: (row: { key: string; block: KindOf<"subagent">; subagent?: Subagent }) => boolean;
}

/** Phases of an execution that has ended. */
const ended = new Set(["completed", "failed", "cancelled"]);

/** Reports whether a turn is over. A turn that is not in the list of executions yet is not. */
export function isEnded(turn: Turn | undefined): boolean {
  return turn !== undefined && ended.has(turn.phase);
}

/** Returns the rows from top to bottom: a result belongs to its call, and a turn that is over ends with a row of its own. */
export function rowsOf(conversation: Conversation): Row[] {
  const rows: Row[] = [];
  const waiting = new Map<string, Approval[]>(); // by the call
  for (const approval of conversation.approvals) {
    const of = waiting.get(callKey(approval));
    if (of) of.push(approval);
    else waiting.set(callKey(approval), [approval]);
  }
  addRows(rows, conversation, conversation.blocks, conversation.streamingBlockIds, 0, new Set(), waiting);
  for (const approval of [...waiting.values()].flat()) if (approval.status === "pending") rows.push(approvalRow(approval, 0));
  return rows;
}

/** Returns what identifies a tool call in its session. */
function callKey(part: { executionId?: string; toolUseId?: string }): string {
  return `${part.executionId ?? ""}/${part.toolUseId ?? ""}`;
}

function approvalRow(approval: Approval, depth: number): Row {
  return { key: `approval:${approval.approvalId}`, depth, ...(approval.executionId ? { executionId: approval.executionId } : {}), type: "approval", approval };
}

function addRows(rows: Row[], all: Conversation, blocks: readonly Block[], streaming: ReadonlySet<string>, depth: number, within: ReadonlySet<string>, waiting: Map<string, Approval[]>): void {
  const results = new Map<string, KindOf<"tool_result">>();
  const calls = new Set<string>();
  for (const block of blocks) {
    if (block.kind === "tool_result") results.set(callKey(block), block);
    else if (block.kind === "tool_use" || block.kind === "subagent") calls.add(callKey(block));
  }
  let executionId: string | undefined;
  const endTurn = () => {
    const turn = depth === 0 && executionId ? all.turns.get(executionId) : undefined;
    if (turn && isEnded(turn)) rows.push({ key: `turn:${turn.executionId}`, depth: 0, executionId, type: "turn", turn });
  };
  for (const block of blocks) {
    if (depth === 0 && block.executionId !== executionId) {
      endTurn();
      executionId = block.executionId;
    }
    const common = { key: all.keyOf(block), depth, ...(block.executionId ? { executionId: block.executionId } : {}), ...(all.truncatedBlockIds.has(block.id) ? { cut: true } : {}) };
    switch (block.kind) {
      case "tool_use": {
        const result = results.get(callKey(block));
        rows.push({ ...common, type: "tool", block, ...(result ? { result, resultCut: all.truncatedBlockIds.has(result.id) } : {}), streaming: streaming.has(block.id) || streaming.has(result?.id ?? ""), waiting: waiting.get(callKey(block))?.some((approval) => approval.status === "pending") ?? false });
        break;
      }
      case "tool_result":
        if (!calls.has(callKey(block))) rows.push({ ...common, type: "result", block });
        break;
      case "subagent": {
        const subagent = all.subagents.get(block.subagentId ?? "");
        const open = subagent !== undefined && !within.has(subagent.id) && all.isOpen({ key: common.key, block, subagent });
        rows.push({ ...common, type: "subagent", block, ...(subagent ? { subagent } : {}), open });
        if (open) addRows(rows, all, subagent.blocks, subagent.streamingBlockIds, depth + 1, new Set([...within, subagent.id]), waiting);
        break;
      }
      default:
        rows.push({ ...common, type: "block", block, streaming: streaming.has(block.id) });
    }
    if (block.kind === "tool_use" || block.kind === "subagent") {
      for (const approval of waiting.get(callKey(block)) ?? []) rows.push(approvalRow(approval, depth));
      waiting.delete(callKey(block));
    }
  }
  endTurn();
}

/** Reports whether a row shows a failure. */
export function isFailure(row: Row): boolean {
  switch (row.type) {
    case "tool":
      return row.block.status === "error" || row.result?.isError === true;
    case "result":
      return row.block.isError === true;
    case "subagent":
      return row.block.status === "error" || row.subagent?.status === "failed";
    case "turn":
      return row.turn.phase === "failed";
    case "approval":
      return false;
    case "block":
      return row.block.kind === "error" || row.block.status === "error" || (row.block.kind === "step" && row.block.step?.status === "failed");
  }
}
