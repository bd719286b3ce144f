import type { CallParams, Schemas, SessionChange, SpoolClient } from "@spoolhq/client";
import { changeHub } from "./change-hub.js";
import { Source, coalesced, idleConnection, single, type SourceSnapshot } from "./source.js";

type SessionRow = Schemas["spool.v1.Session"];

/** Which sessions a list has: the parameters of ListSessions. `search` is its `text`. */
export type SessionFilters = Omit<NonNullable<NonNullable<CallParams<"Sessions_ListSessions">["query"]>>, "pageToken" | "phase"> & {
  phase?: string | string[] | undefined;
  search?: string | undefined;
};

export interface SessionListSnapshot extends SourceSnapshot {
  sessions: readonly SessionRow[];
  isLoading: boolean;
  hasMore: boolean;
}

export const idleList: SessionListSnapshot = { sessions: [], isLoading: true, hasMore: false, connection: idleConnection, error: undefined };

/** The filters that a row shows; of the others only the server knows. */
const rowFilters: Record<string, (row: SessionRow, value: any) => boolean> = {
  status: (row, value) => row.status === value,
  phase: (row, value) => [value].flat().includes(row.phase),
  architecture: (row, value) => row.architecture === (value === "claude-sdk" ? "claude-code" : value),
  hasOpenApprovals: (row, value) => (row.openApprovals ?? 0) > 0 === value,
};
const viewParameters = new Set(["sort", "order", "pageSize"]);

/** A list of sessions: pages by REST, and what changes by the stream of changes of all sessions. */
export class SessionListSource extends Source<SessionListSnapshot> {
  #rows = new Map<string, SessionRow>();
  #more: string | undefined; // token of the next page
  #changed = false;
  #isLoading = true;
  readonly #query: NonNullable<CallParams<"Sessions_ListSessions">["query"]>;

  constructor(
    private readonly client: SpoolClient,
    filters: SessionFilters,
    private readonly registry: Map<string, SessionListSource>,
    private readonly key: string,
  ) {
    super(idleList);
    const { search, phase, ...query } = filters;
    this.#query = { ...query, text: search ?? query.text, phase: phase === undefined ? undefined : [phase].flat() };
  }

  protected override retained(active: boolean): void {
    if (active) this.registry.set(this.key, this);
    else if (this.registry.get(this.key) === this) this.registry.delete(this.key);
  }

  protected async run(signal: AbortSignal): Promise<void> {
    for await (const change of changeHub(this.client).follow(signal, this.onStatus)) {
      // The list is read after the stream has begun, so no change is between them.
      if (change.type === "started") await this.#readFirst(signal);
      else this.#apply(change);
    }
  }

  async #readFirst(signal?: AbortSignal): Promise<void> {
    const { sessions = [], nextPageToken } = await this.client.call("Sessions_ListSessions", { query: this.#query }, { signal });
    this.#rows = new Map(sessions.map((s) => [s.sessionId!, s]));
    this.#more = nextPageToken || undefined;
    this.#isLoading = false;
    this.#publish();
  }

  /** Reads the list again, from its first page. */
  readonly refresh = coalesced(() => this.#readFirst().catch((error: Error) => void (this.error = error)));

  /** Adds what the first page has; the pages after it stay. */
  readonly #readNewest = coalesced(async () => {
    try {
      const { sessions = [] } = await this.client.call("Sessions_ListSessions", { query: this.#query });
      for (const row of sessions) this.#put(row);
      this.#publish();
    } catch (error) {
      this.error = error as Error;
    }
  });

  /** Reads the next page. */
  readonly loadMore = single(async () => {
    if (!this.#more) return;
    try {
      const { sessions = [], nextPageToken } = await this.client.call("Sessions_ListSessions", { query: { ...this.#query, pageToken: this.#more } });
      for (const row of sessions) this.#put(row);
      this.#more = nextPageToken || undefined;
      this.#publish();
    } catch (error) {
      this.error = error as Error;
    }
  });

  #apply(change: SessionChange): void {
    if (change.type === "session_deleted") this.#rows.delete(change.sessionId);
    if (change.type === "session") {
      const row = change.session;
      const set = Object.entries(this.#query).filter(([name, value]) => value !== undefined && !viewParameters.has(name));
      if (set.some(([name, value]) => rowFilters[name]?.(row, value) === false)) this.#rows.delete(row.sessionId!);
      else if (this.#rows.has(row.sessionId!)) this.#put(row);
      else if (set.some(([name]) => !rowFilters[name])) void this.#readNewest(); // only the server knows whether the list has it
      else if (this.#isLoadedPlace(row)) this.#put(row);
    }
    this.#publish();
  }

  /** Replaces a row, unless the present one is of a later event. */
  #put(row: SessionRow): void {
    const known = this.#rows.get(row.sessionId!);
    if (!known || (known.tip ?? 0) <= (row.tip ?? 0)) this.#rows.set(row.sessionId!, row);
  }

  /** Reports whether a row belongs before the last row of the pages that were read. */
  #isLoadedPlace(row: SessionRow): boolean {
    const rows = this.#sorted();
    const last = rows[rows.length - 1];
    return !this.#more || !last || this.#compare(row, last) <= 0;
  }

  #compare(a: SessionRow, b: SessionRow): number {
    const field = this.#query.sort === "updated" ? "updatedAt" : "createdAt";
    const byTime = Date.parse(b[field] ?? "") - Date.parse(a[field] ?? "") || (a.sessionId! < b.sessionId! ? 1 : -1);
    return this.#query.order === "asc" ? -byTime : byTime;
  }

  #sorted(): SessionRow[] {
    return [...this.#rows.values()].sort((a, b) => this.#compare(a, b));
  }

  #publish(): void {
    this.#changed = true;
    this.schedule();
  }

  protected collect(): Partial<SessionListSnapshot> {
    if (!this.#changed) return {};
    this.#changed = false;
    return { sessions: this.#sorted(), isLoading: this.#isLoading, hasMore: this.#more !== undefined };
  }
}

const sources = new WeakMap<SpoolClient, Map<string, SessionListSource>>();

/** Returns the source of a list, which all hooks with this client and these filters share. */
export function listSource(client: SpoolClient, filters: SessionFilters): SessionListSource {
  let registry = sources.get(client);
  if (!registry) sources.set(client, (registry = new Map()));
  const key = filterKey(filters);
  let source = registry.get(key);
  if (!source) registry.set(key, (source = new SessionListSource(client, filters, registry, key)));
  return source;
}

/** Returns a text that is the same for equal filters. */
export function filterKey(filters: SessionFilters): string {
  return JSON.stringify(Object.entries(filters).filter(([, value]) => value !== undefined).sort(([a], [b]) => (a < b ? -1 : 1)));
}
