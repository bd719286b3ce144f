import type { Block, SpoolClient } from "@spoolhq/client";
import { useApprovals, useClient, useEvents, useExecutions, useMessages, useSubagents, type ApprovalDecision, type Subagent } from "@spoolhq/react";
import { useCallback, useEffect, useMemo, useState } from "react";
import { ErrorNote } from "../error";
import { useParameters } from "../location";
import { ApprovalCard, type Approval } from "./approval";
import "./conversation.css";
import { ConversationList } from "./list";
import type { Turn } from "./rows";
import { transcriptMarkdown } from "./transcript";

interface Props {
  sessionId: string;
  /** The seq of an event to scroll to. */
  at?: number;
}

/** The conversation of a session: live, with its sub-agents, requests and the ends of its turns. */
export function Conversation({ sessionId, at }: Props) {
  const client = useClient();
  const messages = useMessages(sessionId);
  const { subagents } = useSubagents(sessionId);
  const executions = useExecutions(sessionId);
  const { decide } = useApprovals(sessionId);
  const { approvals, error: approvalsError } = useAllApprovals(client, sessionId);
  const { atBlockId, error: atError } = useBlockAt(client, sessionId, at, messages.blocks, subagents);
  const { loadOlder, loadBlock } = messages;

  const subagentsById = useMemo(() => new Map(subagents.map((subagent) => [subagent.metadata.subagentId ?? subagent.id, subagent])), [subagents]);
  const turns = useMemo(
    () =>
      new Map(
        executions.map((e): [string, Turn] => [
          e.executionId!,
          { executionId: e.executionId!, phase: e.phase ?? "", durationMs: e.durationMs, costUsd: e.costUsd ?? e.meteredCostUsd, model: e.model, code: e.code, message: e.message, reason: e.reason },
        ]),
      ),
    [executions],
  );
  const [error, setError] = useState<unknown>();
  const attempt = useCallback((work: Promise<unknown>) => work.then(() => setError(undefined), setError), []);
  const load = useCallback((blockId: string) => void attempt(loadBlock(blockId)), [attempt, loadBlock]);
  const older = useCallback(() => attempt(loadOlder()), [attempt, loadOlder]);
  const copyLink = useCallback(async (blockId: string) => copyLinkTo(await seqOf(client, sessionId, blockId)), [client, sessionId]);
  const { set } = useParameters();
  const showEvent = useCallback((blockId: string) => void attempt(seqOf(client, sessionId, blockId).then((seq) => set({ tab: "event", seq: String(seq) }))), [attempt, client, sessionId, set]);
  const download = useCallback(() => void attempt(downloadTranscript(client, sessionId)), [attempt, client, sessionId]);
  const renderApproval = useCallback((approval: Approval) => <SessionApproval approval={approval} decide={decide} />, [decide]);
  const problem = error ?? atError ?? approvalsError;

  return (
    <>
      {problem !== undefined && <ErrorNote error={problem} />}
      <ConversationList
        key={sessionId}
        blocks={messages.blocks}
        streamingBlockIds={messages.streamingBlockIds}
        truncatedBlockIds={messages.truncatedBlockIds}
        keyOf={messages.keyOf}
        subagents={subagentsById}
        turns={turns}
        approvals={approvals}
        renderApproval={renderApproval}
        hasOlder={messages.hasOlder}
        isLoading={messages.isLoading}
        loadOlder={older}
        loadWhole={load}
        copyLink={copyLink}
        showEvent={showEvent}
        download={download}
        {...(atBlockId ? { atBlockId } : {})}
      />
    </>
  );
}

/** A request of the session. Its function to decide is the same between renders, so that the card renders only with its request. */
function SessionApproval({ approval, decide }: { approval: Approval; decide: ReturnType<typeof useApprovals>["decide"] }) {
  const onDecide = useCallback((decision: ApprovalDecision) => decide(approval.approvalId!, decision), [decide, approval.approvalId]);
  return <ApprovalCard approval={approval} onDecide={onDecide} />;
}

/** Returns all requests of a session, oldest first: the open ones live, and those that have ended with who decided them. */
function useAllApprovals(client: SpoolClient, sessionId: string): { approvals: readonly Approval[]; error?: unknown } {
  const { approvals: open } = useApprovals(sessionId);
  const { events } = useEvents(sessionId);
  const [ended, setEnded] = useState<{ sessionId: string; approvals: readonly Approval[]; error?: unknown }>();
  const position = useMemo(() => events.find((event) => event.type === "approval_resolved" || event.type === "approval_retracted")?.position, [events]);
  useEffect(() => {
    let wanted = true;
    void readEnded(client, sessionId, position).then(
      (approvals) => wanted && setEnded({ sessionId, approvals }),
      (failure: unknown) => wanted && setEnded({ sessionId, approvals: [], error: failure }),
    );
    return () => void (wanted = false);
  }, [client, sessionId, position]);
  return useMemo(() => {
    const known = new Map((ended?.sessionId === sessionId ? ended.approvals : []).map((approval) => [approval.approvalId, approval]));
    const openOnly = open.filter((approval) => !known.has(approval.approvalId));
    const approvals = [...known.values(), ...openOnly].sort((a, b) => (a.requestedSeq ?? 0) - (b.requestedSeq ?? 0));
    return { approvals, error: ended?.error };
  }, [ended, open, sessionId]);
}

/** Reads the newest 200 requests of a session, and returns those that have ended. */
async function readEnded(client: SpoolClient, sessionId: string, minPosition: string | undefined): Promise<readonly Approval[]> {
  // The list of requests cannot wait for the event that ended the request; the session, which is stored with it, can.
  if (minPosition) await client.call("Sessions_GetSession", { path: { session_id: sessionId }, query: { minPosition } });
  const { approvals = [] } = await client.call("Approvals_ListApprovals", { query: { sessionId, pageSize: 200 } });
  return approvals.filter((approval) => approval.status !== "pending" && approval.status !== "decided");
}

/** Levels of sub-agents that are searched for the block that an event belongs to. */
const maxDepth = 32;

/** The types of the events that begin a block. */
const beginnings = ["message_accepted", "block_start"];

/** Returns the block of the main conversation that shows an event, or the first block after it. */
function useBlockAt(client: SpoolClient, sessionId: string, seq: number | undefined, blocks: ReturnType<typeof useMessages>["blocks"], subagents: readonly Subagent[]): { atBlockId?: string; error?: unknown } {
  const [found, setFound] = useState<{ sessionId: string; seq: number; blockId?: string; conversationId?: string; error?: unknown }>();
  useEffect(() => {
    if (seq === undefined) return;
    let wanted = true;
    client.call("Events_ListEvents", { path: { session_id: sessionId }, query: { after: seq - 1, limit: 1, types: [...beginnings, "block_complete"], metadata: false } }).then(
      ({ events: [event] = [] }) => {
        const data = event?.data as { blockId?: string; block?: { id: string } } | undefined;
        const blockId = data?.blockId ?? data?.block?.id;
        if (wanted) setFound({ sessionId, seq, ...(blockId ? { blockId, conversationId: event?.conversationId || "main" } : {}) });
      },
      (failure: unknown) => wanted && setFound({ sessionId, seq, error: failure }),
    );
    return () => void (wanted = false);
  }, [client, sessionId, seq]);
  if (!found || found.sessionId !== sessionId || found.seq !== seq) return {};
  if (found.error) return { error: found.error };
  // Blocks of a sub-agent are below its own block.
  let { blockId, conversationId } = found;
  for (let depth = 0; conversationId !== "main" && depth < maxDepth; depth++) {
    const subagent = subagents.find((s) => s.id === conversationId);
    if (!subagent) return {};
    const { subagentId } = subagent.metadata;
    conversationId = subagent.parentId ?? "main";
    const within = conversationId === "main" ? blocks : (subagents.find((s) => s.id === conversationId)?.blocks ?? []);
    blockId = within.find((block) => block.kind === "subagent" && block.subagentId === subagentId)?.id;
    if (!blockId) return {};
  }
  return blockId && conversationId === "main" ? { atBlockId: blockId } : {};
}

/** Returns the seq of the event that began a block. */
async function seqOf(client: SpoolClient, sessionId: string, blockId: string): Promise<number> {
  for (let after = 0; ; ) {
    const { events = [] } = await client.call("Events_ListEvents", { path: { session_id: sessionId }, query: { after, limit: 1000, types: beginnings, metadata: false } });
    const event = events.find(({ data }) => {
      const begun = data as { blockId?: string; block?: { id: string } } | undefined;
      return (begun?.blockId ?? begun?.block?.id) === blockId;
    });
    if (event?.seq) return event.seq;
    const last = events.at(-1)?.seq;
    if (last === undefined) throw new Error("The event is not stored yet.");
    after = last;
  }
}

/** Copies the URL of this page with the seq of an event. */
function copyLinkTo(seq: number): Promise<void> {
  const url = new URL(location.href);
  url.searchParams.set("seq", String(seq));
  return navigator.clipboard.writeText(url.href);
}

/** Saves all blocks of the main conversation, whole, as a Markdown file. */
async function downloadTranscript(client: SpoolClient, sessionId: string): Promise<void> {
  const { blocks = [] } = await client.call("Events_ListBlocks", { path: { session_id: sessionId }, query: { conversationId: "main" } });
  const url = URL.createObjectURL(new Blob([transcriptMarkdown(blocks as Block[])], { type: "text/markdown" }));
  const link = document.createElement("a");
  link.href = url;
  link.download = `${sessionId}.md`;
  link.click();
  URL.revokeObjectURL(url);
}
