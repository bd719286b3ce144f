import type { Block, CallParams, Part, PlanItem, Schemas, SessionEvent, Step } from "@spoolhq/client";
import { useCallback, useEffect, useMemo, useState } from "react";
import { useClient } from "./provider.js";
import { hasPlan, noBlocks, planItems, type ConversationMetadata, type MessageOptions, type SessionSnapshot, type SessionSource } from "./session-source.js";
import type { Connection } from "./source.js";
import { useSessionPart, useSessionSource, useWith } from "./use-source.js";

type Usage = Schemas["spool.v1.Usage"];

export interface UseAgentSession {
  session: Schemas["spool.v1.Session"] | undefined;
  /** The session's present sandbox, or the last one. */
  runtime: Schemas["spool.v1.CurrentSandbox"] | undefined;
  isLoading: boolean;
  error: Error | undefined;
  /** Creates a session, which the hook then shows. */
  createSession(agentProfileRef: string | undefined, architecture: string | undefined, options?: Omit<NonNullable<CallParams<"Sessions_CreateSession">["body"]>, "agentProfileRef" | "architecture">): Promise<string>;
  /** Shows another session. */
  loadSession(id: string): void;
  destroySession(): Promise<void>;
  /** Stores the workspace. */
  syncSession(): Promise<void>;
  updateSessionOptions(options: Schemas["spool.v1.SessionOptions"]): Promise<void>;
}

/** One session: its state, and what can be done with it. */
export function useAgentSession(id?: string): UseAgentSession {
  const client = useClient();
  const [chosen, setChosen] = useState<{ id: string; insteadOf: string | undefined }>();
  const shown = chosen && chosen.insteadOf === id ? chosen.id : id;
  const source = useSessionSource(shown);
  const session = useSessionPart(source, (s) => s.session);
  const isLoading = useSessionPart(source, (s) => s.session === undefined && s.connection.status !== "ended");
  const error = useSessionPart(source, (s) => s.error);
  const loadSession = useCallback((next: string) => setChosen({ id: next, insteadOf: id }), [id]);
  const createSession = useCallback<UseAgentSession["createSession"]>(
    async (agentProfileRef, architecture, options) => {
      const body = { ...options, ...(agentProfileRef && { agentProfileRef }), ...(architecture && { architecture }) };
      const created = await client.createSession(body);
      loadSession(created.id);
      return created.id;
    },
    [client, loadSession],
  );
  const destroySession = useWith(source, "destroySession", async (s) => void (await s.session.delete()));
  const syncSession = useWith(source, "syncSession", async (s) => void (await client.call("Sessions_SyncSession", { path: { session_id: s.id } })));
  const updateSessionOptions = useWith(source, "updateSessionOptions", async (s, sessionOptions: Schemas["spool.v1.SessionOptions"]) => {
    await client.call("Sessions_UpdateSession", { path: { session_id: s.id }, body: { sessionOptions } });
  });
  return { session, runtime: session?.currentSandbox, isLoading: source !== undefined && isLoading, error, createSession, loadSession, destroySession, syncSession, updateSessionOptions };
}

export interface UseMessages {
  /** The blocks of the conversation "main", oldest first, with text in flight and messages that are being sent. */
  blocks: readonly Block[];
  streamingBlockIds: ReadonlySet<string>;
  isStreaming: boolean;
  metadata: ConversationMetadata | undefined;
  error: Error | undefined;
  connection: Connection;
  /** Whether the first page is being read. */
  isLoading: boolean;
  /** Whether there are blocks before the first one. */
  hasOlder: boolean;
  loadOlder(): Promise<void>;
  sendMessage(content: string | Part[], options?: MessageOptions): Promise<Schemas["spool.v1.PostMessageResponse"]>;
  getBlock(id: string): Block | undefined;
  getBlocksByType<K extends Block["kind"]>(kind: K): Extract<Block, { kind: K }>[];
  /** The blocks whose long fields were cut. */
  truncatedBlockIds: ReadonlySet<string>;
  /** Reads a block whose long fields were cut. */
  loadBlock(id: string): Promise<Block>;
  /** A key for a list of blocks. It stays the same when a message that was sent here comes into the log. */
  keyOf(block: Block): string;
}

/** The conversation of a session. */
export function useMessages(id: string | undefined): UseMessages {
  const source = useSessionSource(id);
  const { blocks, streamingBlockIds } = useSessionPart(source, (s) => s.conversations.get("main") ?? noBlocks);
  const getBlock = useCallback((blockId: string) => blocksNow(source).find((b) => b.id === blockId), [source]);
  const getBlocksByType = useCallback<UseMessages["getBlocksByType"]>((kind) => blocksNow(source).filter((b) => b.kind === kind) as never, [source]);
  return {
    blocks,
    streamingBlockIds,
    isStreaming: streamingBlockIds.size > 0,
    metadata: useSessionPart(source, (s) => s.metadata),
    error: useSessionPart(source, (s) => s.error),
    connection: useSessionPart(source, (s) => s.connection),
    isLoading: useSessionPart(source, (s) => s.isLoading),
    hasOlder: useSessionPart(source, (s) => s.hasOlder),
    truncatedBlockIds: useSessionPart(source, (s) => s.truncatedBlockIds),
    loadOlder: useWith(source, "loadOlder", (s) => s.loadOlder()),
    sendMessage: useWith(source, "sendMessage", (s, content: string | Part[], options?: MessageOptions) => s.sendMessage(content, options)),
    loadBlock: useWith(source, "loadBlock", (s, blockId: string) => s.loadBlock(blockId)),
    keyOf: source?.keyOf ?? idOf,
    getBlock,
    getBlocksByType,
  };
}

const idOf = (block: Block) => block.id;

function blocksNow(source: SessionSource | undefined, conversation = "main"): readonly Block[] {
  return source?.getSnapshot().conversations.get(conversation)?.blocks ?? noBlocks.blocks;
}

export type SubagentStatus = "running" | "completed" | "failed";

export interface Subagent {
  /** The id of its conversation. */
  id: string;
  name: string | undefined;
  /** The conversation that started it: "main", or the id of another sub-agent. */
  parentId: string | undefined;
  blocks: readonly Block[];
  streamingBlockIds: ReadonlySet<string>;
  metadata: Schemas["spool.v1.Conversation"];
  status: SubagentStatus;
}

export interface UseSubagents {
  subagents: readonly Subagent[];
  count: number;
  hasRunningSubagents: boolean;
  getSubagent(id: string): Subagent | undefined;
  getSubagentBlocks(id: string): readonly Block[];
  getSubagentsByStatus(status: SubagentStatus): Subagent[];
}

/** The sub-agents of a session, of every depth. */
export function useSubagents(id: string | undefined): UseSubagents {
  const source = useSessionSource(id);
  const list = useSessionPart(source, (s) => s.subagents);
  const conversations = useSessionPart(source, (s) => s.conversations);
  useEffect(() => void source?.readSubagents(), [source]);
  const subagents = useMemo(() => subagentsOf(list, conversations), [list, conversations]);
  const functions = useMemo(() => {
    const now = () => {
      const snapshot = source?.getSnapshot();
      return snapshot ? subagentsOf(snapshot.subagents, snapshot.conversations) : [];
    };
    const getSubagent = (subagent: string) => now().find((s) => s.id === subagent || s.metadata.subagentId === subagent);
    return {
      getSubagent,
      getSubagentBlocks: (subagent: string) => getSubagent(subagent)?.blocks ?? noBlocks.blocks,
      getSubagentsByStatus: (status: SubagentStatus) => now().filter((s) => s.status === status),
    };
  }, [source]);
  return { subagents, count: subagents.length, hasRunningSubagents: subagents.some((s) => s.status === "running"), ...functions };
}

function subagentsOf(list: SessionSnapshot["subagents"], conversations: SessionSnapshot["conversations"]): Subagent[] {
  return list.map((metadata) => {
    const id = metadata.conversationId!;
    const status = metadata.status as SubagentStatus;
    return { id, name: metadata.name, parentId: metadata.parentConversationId, metadata, status, ...(conversations.get(id) ?? noBlocks) };
  });
}

export interface UseEvents {
  /** The last events, newest first, without text in flight. */
  events: readonly SessionEvent[];
  clearEvents(): void;
}

/** The events of a session since it was opened, at most the last 1,000. */
export function useEvents(id?: string): UseEvents {
  const source = useSessionSource(id);
  return { events: useSessionPart(source, (s) => s.events), clearEvents: source?.clearEvents ?? noop };
}

const noop = () => {};

/** The log lines of a session since it was opened, newest first. */
export function useLogs(id?: string): { logs: readonly SessionEvent[]; clearLogs(): void } {
  const { events, clearEvents } = useEvents(id);
  return { logs: useMemo(() => events.filter((e) => e.type === "log"), [events]), clearLogs: clearEvents };
}

/** The executions of a session, oldest first. */
export function useExecutions(id: string | undefined): readonly Schemas["spool.v1.Execution"][] {
  return useSessionPart(useSessionSource(id), (s) => s.executions);
}

/** Phases in which an execution may wait. The reason is not in the log, so it is read again now and then. */
const waitingPhases = new Set(["queued", "starting", "waiting_for_approval", "paused"]);
const waitingIntervalMs = 5000;

export interface UseExecution {
  /** The newest execution of the session. */
  execution: Schemas["spool.v1.Execution"] | undefined;
  phase: string | undefined;
  error: Error | undefined;
  /** Why the execution waits, if that is known. */
  waiting: Schemas["spool.v1.Waiting"] | undefined;
  cancel(): Promise<void>;
  pause(): Promise<void>;
  resume(): Promise<void>;
  /** Continues a failed execution with a new one. */
  recover(): Promise<void>;
  /** Stops the present turn of the session; the agent's process stays. */
  interrupt(): Promise<void>;
}

/** The newest execution of a session. */
export function useExecution(id: string | undefined): UseExecution {
  const client = useClient();
  const source = useSessionSource(id);
  const newest = useSessionPart(source, (s) => s.executions[s.executions.length - 1]);
  const read = useSessionPart(source, (s) => s.waiting);
  const { executionId, phase } = newest ?? {};
  const waiting = read && read.executionId === executionId && read.phase === phase ? read.waiting : undefined;
  useEffect(() => {
    if (!source || !executionId || !waitingPhases.has(phase ?? "")) return;
    void source.readWaiting();
    const timer = setInterval(source.readWaiting, waitingIntervalMs);
    return () => clearInterval(timer);
  }, [source, executionId, phase]);
  const control = (operation: "Executions_CancelExecution" | "Executions_PauseExecution" | "Executions_ResumeExecution" | "Executions_RecoverExecution") => async (s: SessionSource) => {
    const id = s.getSnapshot().executions.at(-1)?.executionId;
    if (!id) throw new Error("the session has no execution");
    await client.call(operation, { path: { execution_id: id } });
  };
  return {
    execution: useMemo(() => (newest && waiting ? { ...newest, waiting } : newest), [newest, waiting]),
    phase,
    error: useSessionPart(source, (s) => s.error),
    waiting,
    cancel: useWith(source, "cancel", control("Executions_CancelExecution")),
    pause: useWith(source, "pause", control("Executions_PauseExecution")),
    resume: useWith(source, "resume", control("Executions_ResumeExecution")),
    recover: useWith(source, "recover", control("Executions_RecoverExecution")),
    interrupt: useWith(source, "interrupt", async (s) => void (await s.session.interrupt())),
  };
}

export interface UsePlan {
  items: readonly PlanItem[];
  /** The steps of a plan that is being executed. */
  steps: readonly Step[];
  /** The block that has the plan; undefined if there is none, or if it is before the blocks that were read. */
  blockId: string | undefined;
}

/** The present plan of the session's main conversation. */
export function usePlan(id: string | undefined): UsePlan {
  const source = useSessionSource(id);
  const { blocks } = useSessionPart(source, (s) => s.conversations.get("main") ?? noBlocks);
  const earlier = useSessionPart(source, (s) => s.earlierPlan);
  const isComplete = useSessionPart(source, (s) => s.isLoading || !s.hasOlder);
  const plan = useMemo(() => blocks.findLast(hasPlan), [blocks]);
  const isMissing = !plan && !isComplete;
  useEffect(() => void (isMissing && source?.readPlan()), [source, isMissing]);
  return useMemo(() => {
    const steps = blocks.flatMap((b) => (b.kind === "step" && b.step ? [b.step] : []));
    return { items: plan ? planItems(plan) : (earlier ?? noItems), steps, blockId: plan?.id };
  }, [blocks, plan, earlier]);
}

const noItems: readonly PlanItem[] = [];

export interface UseUsage {
  /** The sums over the session's executions. */
  usage: Required<Usage>;
  costUsd: number;
  byExecution: readonly { executionId: string; usage: Usage; costUsd: number; model: string | undefined }[];
}

/** What a session has used, as its agent reports it. */
export function useUsage(id: string | undefined): UseUsage {
  const executions = useSessionPart(useSessionSource(id), (s) => s.executions);
  return useMemo(() => {
    const byExecution = executions.map((e) => ({ executionId: e.executionId!, usage: e.usage ?? {}, costUsd: e.costUsd ?? 0, model: e.model }));
    const sum = (name: keyof Usage) => byExecution.reduce((total, e) => total + (e.usage[name] ?? 0), 0);
    const usage = { inputTokens: sum("inputTokens"), outputTokens: sum("outputTokens"), cacheReadTokens: sum("cacheReadTokens"), cacheWriteTokens: sum("cacheWriteTokens") };
    return { usage, costUsd: byExecution.reduce((total, e) => total + e.costUsd, 0), byExecution };
  }, [executions]);
}

