import { BlockView, SpoolError, endReasonOf, isTerminal, type Block, type CallParams, type Part, type PlanItem, type Schemas, type Session, type SessionEvent, type SpoolClient } from "@spoolhq/client";
import { Source, coalesced, idleConnection, single, type SourceSnapshot } from "./source.js";

/** The blocks of a conversation. */
export interface ConversationBlocks {
  blocks: readonly Block[];
  /** The blocks whose text is being written. */
  streamingBlockIds: ReadonlySet<string>;
}

/** Usage and model of the execution that reported last. */
export interface ConversationMetadata {
  usage?: Schemas["spool.v1.Usage"];
  costUsd?: number;
  model?: string;
}

/** The present state of a session. Values that did not change are the same objects. */
export interface SessionSnapshot extends SourceSnapshot {
  isLoading: boolean;
  hasOlder: boolean;
  conversations: ReadonlyMap<string, ConversationBlocks>;
  subagents: readonly Schemas["spool.v1.Conversation"][];
  session: Schemas["spool.v1.Session"] | undefined;
  executions: readonly Schemas["spool.v1.Execution"][];
  approvals: readonly Schemas["spool.v1.Approval"][];
  metadata: ConversationMetadata | undefined;
  events: readonly SessionEvent[];
  truncatedBlockIds: ReadonlySet<string>;
  /** Why the newest execution waited when it was read last, in its phase of that time. */
  waiting: Pick<Schemas["spool.v1.Execution"], "executionId" | "phase" | "waiting"> | undefined;
  /** The plan of the main conversation, if its block is before the blocks that were read. */
  earlierPlan: readonly PlanItem[] | undefined;
}

/** The options of a message besides its content. */
export type MessageOptions = Omit<NonNullable<CallParams<"Sessions_PostMessage">["body"]>, "content" | "parts">;

export const noBlocks: ConversationBlocks = { blocks: [], streamingBlockIds: new Set() };

/** The snapshot of a session that was not read. */
export const idleSession: SessionSnapshot = {
  connection: idleConnection,
  error: undefined,
  isLoading: false,
  hasOlder: false,
  conversations: new Map(),
  subagents: [],
  session: undefined,
  executions: [],
  approvals: [],
  metadata: undefined,
  events: [],
  truncatedBlockIds: new Set(),
  waiting: undefined,
  earlierPlan: undefined,
};

const pageSize = 50;
const maxEvents = 1000; // of the list of events
const eventsAFrame = 2000; // so that a long history does not block the page
const maxWaiting = 10_000; // events that were received and not taken in

/** Events after which session and executions are read again. */
const changesDetails = /^(session_|execution_|message_accepted|attempt_failed|approval_|sandbox_(?!usage|health)|workspace_synced)/;
const hasEnded = (e: Schemas["spool.v1.Execution"]) => /^(completed|failed|cancelled)$/.test(e.phase ?? "");
const streamedKinds = new Set<string>(["assistant_text", "thinking", "tool_use"]);

type PlanBlock = Extract<Block, { kind: "plan" | "todo" }>;

/** Reports whether a block has the plan of its conversation. Logs of earlier servers have it in blocks of kind todo. */
export const hasPlan = (block: Block): block is PlanBlock => block.kind === "plan" || block.kind === "todo";

/** Returns the items of a plan. */
export const planItems = (block: PlanBlock): readonly PlanItem[] => ("plan" in block ? block.plan?.items : block.todos) ?? [];

/** A user message that is not in the log yet. */
interface OptimisticMessage {
  block: Block;
  content: string;
  executionId?: string;
}

/** Returns a text that is the same for messages with the same content. */
const contentKey = ({ content, parts }: { content?: string; parts?: Part[] }): string => JSON.stringify([content, parts]);

/** The state of one session, shared by all hooks with its id. */
export class SessionSource extends Source<SessionSnapshot> {
  readonly session: Session;
  #views = new Map<string, BlockView>();
  #conversationOf = new Map<string, string>(); // block id to conversation
  #touched = new Set<string>(); // conversations that changed since the last snapshot
  #changes: Partial<SessionSnapshot> = {};
  #waiting: SessionEvent[] = [];
  #drained: (() => void) | undefined;
  #cursor: number | undefined; // seq of the last event that was received; undefined before the first page of blocks
  #position: string | undefined; // of the last event that was taken in
  #older: string | undefined; // cursor of the next older page
  #optimistic: OptimisticMessage[] = [];
  #messages = 0;
  #keys = new Map<string, string>(); // block id to the id of its optimistic message
  #approvals = new Map<string, Schemas["spool.v1.Approval"]>();
  #endedApprovals = new Set<string>();
  #needsApprovals = false;
  #readError: Error | undefined; // of the read that failed last
  #executions: readonly Schemas["spool.v1.Execution"][] = [];
  #subagents: Map<string, Schemas["spool.v1.Conversation"]> | undefined; // undefined until a hook needs them
  #unread = new Set<string>(); // sub-agents whose blocks before the stream were not read
  #events: readonly SessionEvent[] = [];
  #truncated: ReadonlySet<string> = new Set();

  constructor(
    private readonly client: SpoolClient,
    readonly id: string,
    private readonly registry: Map<string, SessionSource>,
  ) {
    super({ ...idleSession, isLoading: true });
    this.session = client.session(id);
  }

  /** Called for each stored event that is taken in. */
  readonly eventListeners = new Set<(event: SessionEvent) => void>();

  protected override retained(active: boolean): void {
    if (active) this.registry.set(this.id, this);
    else if (this.registry.get(this.id) === this) this.registry.delete(this.id);
  }

  protected async run(signal: AbortSignal): Promise<void> {
    for (;;) {
      let loaded: number | undefined;
      try {
        if (this.#cursor === undefined) loaded = await this.#load(signal);
        await this.#follow(signal);
        return this.end("deleted", new SpoolError({ status: 404, code: "SESSION_NOT_FOUND", detail: "the session was deleted" }));
      } catch (error) {
        const lost = error instanceof SpoolError && /^CURSOR_(AHEAD|EXPIRED)$/.test(error.code);
        this.#set({ isLoading: false });
        if (!lost || this.#cursor === loaded || signal.aborted) throw error;
        this.#reset();
      }
    }
  }

  async #load(signal: AbortSignal): Promise<number> {
    const page = await this.session.newestBlocks({ conversationId: "main", limit: pageSize }, { signal });
    this.#prepend("main", page);
    this.#older = page.next;
    this.#cursor = page.tip;
    this.#set({ isLoading: false, hasOlder: page.next !== undefined });
    void this.#readDetails();
    if (this.#needsApprovals) void this.readApprovals();
    if (this.#subagents) void this.readSubagents();
    return page.tip;
  }

  async #follow(signal: AbortSignal): Promise<void> {
    for await (const event of this.session.follow({ after: this.#cursor, signal, onStatus: this.onStatus })) {
      if (event.type !== "text_delta") this.#cursor = event.seq;
      this.#waiting.push(event);
      this.schedule();
      if (this.#waiting.length >= maxWaiting) await new Promise<void>((resolve) => (this.#drained = resolve));
    }
  }

  #reset(): void {
    for (const conversation of this.#views.keys()) this.#touched.add(conversation);
    this.#views.clear();
    this.#conversationOf.clear();
    this.#approvals.clear();
    this.#subagents?.clear();
    this.#unread.clear();
    this.#waiting = [];
    this.#cursor = this.#older = undefined;
  }

  #set(changes: Partial<SessionSnapshot>): void {
    Object.assign(this.#changes, changes);
    this.schedule();
  }

  protected collect(): Partial<SessionSnapshot> {
    const stored: SessionEvent[] = [];
    for (const event of this.#waiting.splice(0, eventsAFrame)) {
      this.#apply(event);
      if (event.type !== "text_delta") stored.push(event);
    }
    if (stored.length > 0) {
      this.#events = [...stored.slice(-maxEvents).reverse(), ...this.#events].slice(0, maxEvents);
      this.#changes.events = this.#events;
    }
    if (this.#waiting.length > 0) this.schedule();
    if (this.#waiting.length < maxWaiting) this.#drained?.();
    if (this.#touched.size > 0) {
      const conversations = new Map(this.getSnapshot().conversations);
      for (const id of this.#touched) conversations.set(id, this.#conversation(id, conversations.get(id) ?? noBlocks));
      this.#changes.conversations = conversations;
      this.#touched.clear();
    }
    const changes = this.#changes;
    this.#changes = {};
    return changes;
  }

  #conversation(id: string, before: ConversationBlocks): ConversationBlocks {
    let blocks = this.#view(id).blocks();
    const streaming = blocks.filter((b) => b.status === "pending" && streamedKinds.has(b.kind)).map((b) => b.id);
    if (id === "main" && this.#optimistic.length > 0) blocks = [...blocks, ...this.#optimistic.map((m) => m.block)];
    const same = streaming.length === before.streamingBlockIds.size && streaming.every((s) => before.streamingBlockIds.has(s));
    return { blocks, streamingBlockIds: same ? before.streamingBlockIds : new Set(streaming) };
  }

  #view(conversation: string): BlockView {
    let view = this.#views.get(conversation);
    if (!view) this.#views.set(conversation, (view = new BlockView()));
    return view;
  }

  #prepend(conversation: string, page: { blocks: Block[]; tip: number; truncated: Schemas["spool.v1.TruncatedField"][] }): void {
    for (const block of page.blocks) {
      this.#conversationOf.set(block.id, conversation);
      const message = this.#optimistic.find((m) => m.executionId !== undefined && m.executionId === block.executionId);
      if (message && block.kind === "user_message") this.#removeOptimistic(message, block.id);
    }
    this.#view(conversation).prepend(page.blocks.reverse(), page.tip);
    this.#touched.add(conversation);
    if (page.truncated.length > 0) {
      this.#truncated = new Set([...this.#truncated, ...page.truncated.map((t) => t.blockId!)]);
      this.#changes.truncatedBlockIds = this.#truncated;
    }
    this.schedule();
  }

  #apply(event: SessionEvent): void {
    const blockId = event.data?.blockId ?? event.data?.block?.id;
    const conversation = this.#conversationOf.get(blockId) ?? event.conversationId ?? "main";
    const view = this.#view(conversation);
    const plan = conversation === "main" && this.#older !== undefined && !view.get(blockId) && planOf(event);
    if (plan) this.#changes.earlierPlan = plan;
    const changed = plan ? undefined : view.apply(event);
    if (changed) {
      this.#conversationOf.set(changed, conversation);
      this.#touched.add(conversation);
    }
    if (event.type === "text_delta") return;
    this.#position = event.position;
    if (event.type === "message_accepted") this.#replaceOptimistic(event);
    else if (event.type === "metadata_update") this.#applyMetadata(event);
    else if (event.type.startsWith("approval_")) this.#applyApproval(event);
    else if (event.type.startsWith("subagent_")) this.#applySubagent(event);
    if (changesDetails.test(event.type)) void this.#readDetails();
    if (isTerminal(event) && [...(this.#subagents?.values() ?? [])].some((s) => s.status === "running")) void this.readSubagents();
    for (const listener of this.eventListeners) listener(event);
  }

  /** Posts a message. A block with status pending stands for it until the log has it. */
  readonly sendMessage = async (content: string | Part[], options: MessageOptions = {}): Promise<Schemas["spool.v1.PostMessageResponse"]> => {
    const body: { content?: string; parts?: Part[] } = typeof content === "string" ? { content } : { parts: content };
    const block = { id: `local_${++this.#messages}`, kind: "user_message" as const, status: "pending" as const, timestamp: new Date().toISOString(), conversationId: "main", ...body };
    const message: OptimisticMessage = { block, content: contentKey(body) };
    this.#optimistic.push(message);
    this.#touched.add("main");
    this.schedule();
    try {
      const posted = await this.session.post({ ...options, ...body });
      if (this.getSnapshot().connection.status === "live") this.error = undefined;
      if (posted.executionId) message.executionId = posted.executionId;
      const stored = this.#view("main").blocks().find((b) => b.kind === "user_message" && b.executionId === posted.executionId);
      if (stored) this.#removeOptimistic(message, stored.id);
      return posted;
    } catch (error) {
      this.#removeOptimistic(message);
      this.error = error as Error;
      throw error;
    }
  };

  /** Returns a key of a block that stays the same when a message that was sent here comes into the log. */
  readonly keyOf = (block: Block): string => this.#keys.get(block.id) ?? block.id;

  #replaceOptimistic(event: SessionEvent): void {
    const message =
      this.#optimistic.find((m) => m.executionId !== undefined && m.executionId === event.executionId) ??
      // The event may come before the answer of the request.
      this.#optimistic.find((m) => m.executionId === undefined && m.content === contentKey(event.data ?? {}));
    if (message) this.#removeOptimistic(message, event.data.blockId);
  }

  #removeOptimistic(message: OptimisticMessage, storedId?: string): void {
    const index = this.#optimistic.indexOf(message);
    if (index < 0) return;
    this.#optimistic.splice(index, 1);
    if (storedId) this.#keys.set(storedId, message.block.id);
    this.#touched.add("main");
    this.schedule();
  }

  /** Reads the page of blocks before the oldest one. */
  readonly loadOlder = single(async () => {
    const before = this.#older;
    if (!before) return;
    try {
      const page = await this.session.newestBlocks({ conversationId: "main", limit: pageSize, before, minPosition: this.#position });
      if (this.#older !== before) return; // the session was read again from its newest blocks
      this.#prepend("main", page);
      this.#older = page.next;
      this.#set({ hasOlder: page.next !== undefined });
    } catch (error) {
      this.error = error as Error;
    }
  });

  /** Reads a block whose long fields were cut. */
  readonly loadBlock = async (id: string): Promise<Block> => {
    const { block, tip } = await this.session.block(id);
    const conversation = this.#conversationOf.get(id) ?? block.conversationId ?? "main";
    this.#view(conversation).replace(block, tip);
    this.#touched.add(conversation);
    this.#truncated = new Set([...this.#truncated].filter((t) => t !== id));
    this.#set({ truncatedBlockIds: this.#truncated });
    return block;
  };

  /** Reads the plan of the main conversation, whose block is before the blocks that were read. */
  readonly readPlan = coalesced(async () => {
    if (this.getSnapshot().earlierPlan) return;
    try {
      const { todos = [] } = await this.client.call("Sessions_GetSessionState", { path: { session_id: this.id }, query: { pageSize: 1 } });
      const items = todos.find((list) => list.conversationId === "main")?.items ?? [];
      if (!this.#changes.earlierPlan) this.#set({ earlierPlan: items as PlanItem[] });
    } catch (error) {
      this.#failedRead(error);
    }
  });

  readonly #readDetails = coalesced(async () => {
    try {
      const path = { session_id: this.id };
      const minPosition = this.#position;
      const session = await this.client.call("Sessions_GetSession", { path, query: { minPosition } });
      const all: Schemas["spool.v1.Execution"][] = [];
      for (let pageToken: string | undefined; ; ) {
        const { executions = [], nextPageToken } = await this.client.call("Executions_ListSessionExecutions", { path, query: { pageSize: 200, pageToken, minPosition } });
        all.push(...executions);
        if (!nextPageToken) break;
        pageToken = nextPageToken;
      }
      if (this.getSnapshot().error === this.#readError) this.error = undefined;
      this.#executions = all;
      this.#set({ session, executions: all });
      const last = all[all.length - 1];
      if (last && !this.getSnapshot().metadata) this.#set({ metadata: { ...(last.usage && { usage: last.usage }), ...(last.costUsd && { costUsd: last.costUsd }), ...(last.model && { model: last.model }) } });
    } catch (error) {
      this.#failedRead(error);
    }
  });

  /** Reads why the newest execution waits. */
  readonly readWaiting = coalesced(async () => {
    const id = this.#executions[this.#executions.length - 1]?.executionId;
    if (!id) return;
    try {
      const { executionId, phase, waiting } = await this.client.call("Executions_GetExecution", { path: { execution_id: id } });
      const next = { ...(executionId && { executionId }), ...(phase && { phase }), ...(waiting && { waiting }) };
      if (JSON.stringify(next) !== JSON.stringify(this.getSnapshot().waiting)) this.#set({ waiting: next });
    } catch (error) {
      if (!endReasonOf(error)) this.#failedRead(error); // a refusal leaves the reason unknown
    }
  });

  /** Reports an error of a read, unless the stream reports why the session cannot be read. */
  #failedRead(error: unknown): void {
    if (this.getSnapshot().connection.status !== "ended") this.error = this.#readError = error as Error;
  }

  #applyMetadata(event: SessionEvent): void {
    const { usage, costUsd, model } = event.data ?? {};
    const reported = { ...(usage && { usage }), ...(costUsd && { costUsd }), ...(model && { model }) };
    this.#changes.metadata = reported;
    this.#executions = this.#executions.map((e) => (e.executionId === event.executionId && !hasEnded(e) ? { ...e, ...reported } : e));
    this.#changes.executions = this.#executions;
  }

  /** Reads the open approval requests; from then on they are kept. */
  readonly readApprovals = coalesced(async () => {
    this.#needsApprovals = true;
    if (this.#cursor === undefined) return; // #load calls it again, so that the stream has every later event
    try {
      for (let pageToken: string | undefined; ; ) {
        const { approvals = [], nextPageToken } = await this.session.approvals({ status: "open", ...(pageToken && { pageToken }) });
        for (const approval of approvals) {
          const id = approval.approvalId!;
          if (!this.#endedApprovals.has(id) && !this.#approvals.has(id)) this.#approvals.set(id, approval);
        }
        if (!nextPageToken) break;
        pageToken = nextPageToken;
      }
      this.#set({ approvals: [...this.#approvals.values()] });
    } catch (error) {
      this.#failedRead(error);
    }
  });

  #applyApproval(event: SessionEvent): void {
    const { approvalId: id, ...data } = event.data ?? {};
    const known = this.#approvals.get(id);
    if (event.type === "approval_requested") {
      if (this.#endedApprovals.has(id)) return;
      const { kind, title, toolName, toolUseId } = data;
      this.#approvals.set(id, {
        ...{ approvalId: id, kind, title, toolName, toolUseId, sessionId: event.sessionId, status: "pending", request: event.data },
        ...(event.executionId && { executionId: event.executionId }),
        ...(event.conversationId && { conversationId: event.conversationId }),
        ...{ requestedAt: event.time, requestedSeq: event.seq },
      });
    } else if (event.type === "approval_decided") {
      if (known) this.#approvals.set(id, { ...known, status: "decided", decision: data.decision, decidedAt: event.time, decidedSeq: event.seq });
    } else {
      this.#endedApprovals.add(id);
      this.#approvals.delete(id);
    }
    this.#changes.approvals = [...this.#approvals.values()];
  }

  /** Reads the sub-agents with their last blocks; from then on they are kept. */
  readonly readSubagents = coalesced(async () => {
    this.#subagents ??= new Map();
    if (this.#cursor === undefined) return; // #load calls it again, so that the stream has every later event
    try {
      const query = { minPosition: this.#position };
      const { conversations = [] } = await this.client.call("Sessions_ListConversations", { path: { session_id: this.id }, query });
      for (const c of conversations) {
        if (c.conversationId === "main") continue;
        if (!this.#subagents.has(c.conversationId!)) this.#unread.add(c.conversationId!);
        this.#subagents.set(c.conversationId!, c);
      }
      this.#set({ subagents: [...this.#subagents.values()] });
      for (const conversationId of [...this.#unread].reverse()) {
        this.#prepend(conversationId, await this.session.newestBlocks({ conversationId, limit: 200, minPosition: this.#position }));
        this.#unread.delete(conversationId);
      }
    } catch (error) {
      this.#failedRead(error);
    }
  });

  #applySubagent(event: SessionEvent): void {
    if (!this.#subagents) return;
    const { subConversationId: conversationId, subagentId, toolUseId, name, parentConversationId, isError, durationMs } = event.data ?? {};
    const known = this.#subagents.get(conversationId);
    if (event.type === "subagent_spawned" && !known) {
      this.#subagents.set(conversationId, { conversationId, subagentId, toolUseId, name, parentConversationId, status: "running", startedAt: event.time });
    } else if (event.type === "subagent_completed" && known) {
      this.#subagents.set(conversationId, { ...known, status: isError ? "failed" : "completed", endedAt: event.time, durationMs });
    }
    this.#changes.subagents = [...this.#subagents.values()];
  }

  readonly clearEvents = (): void => {
    this.#events = [];
    this.#set({ events: this.#events });
  };
}

/** Returns the plan of an event that changes or completes a plan. */
function planOf({ type, data }: SessionEvent): readonly PlanItem[] | undefined {
  if (type === "block_update") return data?.updates?.plan?.items ?? data?.updates?.todos;
  return type === "block_complete" && data?.block && hasPlan(data.block) ? planItems(data.block) : undefined;
}

const sources = new WeakMap<SpoolClient, Map<string, SessionSource>>();

/** Returns the source of a session, which all hooks with this client and id share. */
export function sessionSource(client: SpoolClient, id: string): SessionSource {
  let registry = sources.get(client);
  if (!registry) sources.set(client, (registry = new Map()));
  let source = registry.get(id);
  if (!source) registry.set(id, (source = new SessionSource(client, id, registry)));
  return source;
}
