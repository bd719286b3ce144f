import type { CallParams, Schemas } from "@spoolhq/client";
import { useCallback, useEffect, useMemo } from "react";
import { approvalSource, idleApprovals } from "./approval-source.js";
import { filterKey, idleList, listSource, type SessionFilters } from "./list-source.js";
import { useClient } from "./provider.js";
import type { Connection } from "./source.js";
import { useSessionPart, useSessionSource, useSource } from "./use-source.js";

export interface UseSessionList {
  sessions: readonly Schemas["spool.v1.Session"][];
  isLoading: boolean;
  error: Error | undefined;
  hasMore: boolean;
  connection: Connection;
  loadMore(): Promise<void>;
  refresh(): Promise<void>;
  /** Returns a session of the list. */
  getSession(id: string): Schemas["spool.v1.Session"] | undefined;
}

/** The sessions that match the filters, newest first. The list is live: nothing is polled. */
export function useSessionList(filters: SessionFilters = {}): UseSessionList {
  const client = useClient();
  const key = filterKey(filters);
  const source = useMemo(() => listSource(client, Object.fromEntries(JSON.parse(key) as [string, unknown][])), [client, key]);
  const snapshot = useSource(source, idleList, (s) => s);
  const getSession = useCallback((id: string) => source.getSnapshot().sessions.find((s) => s.sessionId === id), [source]);
  return { ...snapshot, loadMore: source.loadMore, refresh: source.refresh, getSession };
}

/** A decision. `input` are changed arguments of a call, or the content for an MCP server; scope "all" approves all calls of the class. */
export type ApprovalDecision = Omit<NonNullable<CallParams<"Approvals_DecideApproval">["body"]>, "arguments" | "decision"> & {
  decision: "approve" | "approve_all" | "skip" | "reject" | "answer";
  input?: unknown;
  scope?: "once" | "all";
};

export interface UseApprovals {
  /** The open requests. */
  approvals: readonly Schemas["spool.v1.Approval"][];
  count: number;
  error: Error | undefined;
  decide(id: string, decision: ApprovalDecision): Promise<void>;
}

/** The open approval requests of a session; without one, of all sessions of the tenant. */
export function useApprovals(sessionId?: string): UseApprovals {
  const client = useClient();
  const session = useSessionSource(sessionId);
  const all = useMemo(() => (sessionId === undefined ? approvalSource(client) : undefined), [client, sessionId]);
  useEffect(() => void session?.readApprovals(), [session]);
  const ofSession = useSessionPart(session, (s) => s.approvals);
  const ofAll = useSource(all, idleApprovals, (s) => s.approvals);
  const sessionError = useSessionPart(session, (s) => s.error);
  const allError = useSource(all, idleApprovals, (s) => s.error);
  const approvals = session ? ofSession : ofAll;
  const decide = useCallback(
    async (approval_id: string, { input, scope, ...body }: ApprovalDecision) => {
      const decision = scope === "all" && body.decision === "approve" ? "approve_all" : body.decision;
      const given = input === undefined ? {} : decision === "answer" ? { content: input as never } : { arguments: input as never };
      await client.call("Approvals_DecideApproval", { path: { approval_id }, body: { ...body, ...given, decision } });
    },
    [client],
  );
  return { approvals, count: approvals.length, error: session ? sessionError : allError, decide };
}
