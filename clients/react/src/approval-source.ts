import type { Schemas, SpoolClient } from "@spoolhq/client";
import { changeHub } from "./change-hub.js";
import { Source, coalesced, idleConnection, type SourceSnapshot } from "./source.js";

export interface ApprovalListSnapshot extends SourceSnapshot {
  approvals: readonly Schemas["spool.v1.Approval"][];
}

export const idleApprovals: ApprovalListSnapshot = { approvals: [], connection: idleConnection, error: undefined };

/** The open approval requests of all sessions. They are read again when a session with requests changes. */
export class ApprovalListSource extends Source<ApprovalListSnapshot> {
  #open = new Set<string>(); // ids of the sessions with open requests
  #next: Partial<ApprovalListSnapshot> = {};

  constructor(private readonly client: SpoolClient) {
    super(idleApprovals);
  }

  protected async run(signal: AbortSignal): Promise<void> {
    for await (const change of changeHub(this.client).follow(signal, this.onStatus)) {
      if (change.type === "started") void this.read();
      else {
        const [id, count] = change.type === "session" ? [change.session.sessionId!, change.session.openApprovals ?? 0] : [change.sessionId, 0];
        if (count > 0 || this.#open.has(id)) void this.read();
        if (count > 0) this.#open.add(id);
        else this.#open.delete(id);
      }
    }
  }

  /** Reads the requests again. */
  readonly read = coalesced(async () => {
    try {
      const all: Schemas["spool.v1.Approval"][] = [];
      for (let pageToken: string | undefined; ; ) {
        const { approvals = [], nextPageToken } = await this.client.call("Approvals_ListApprovals", { query: { status: "open", pageSize: 200, pageToken } });
        all.push(...approvals);
        if (!nextPageToken) break;
        pageToken = nextPageToken;
      }
      for (const { sessionId } of all) this.#open.add(sessionId!);
      this.#next.approvals = all;
      this.error = undefined;
      this.schedule();
    } catch (error) {
      this.error = error as Error;
    }
  });

  protected collect(): Partial<ApprovalListSnapshot> {
    const next = this.#next;
    this.#next = {};
    return next;
  }
}

const sources = new WeakMap<SpoolClient, ApprovalListSource>();

/** Returns the source of the open approval requests, which all hooks with this client share. */
export function approvalSource(client: SpoolClient): ApprovalListSource {
  let source = sources.get(client);
  if (!source) sources.set(client, (source = new ApprovalListSource(client)));
  return source;
}
