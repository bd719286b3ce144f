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
  #reads = new Set<SessionChange[]>(); // the changes since each read began that is not answered
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
      else {
        this.#reads.forEach((changes) => changes.push(change));
        this.#apply(change);
      }
    }
  }

  /** Reads a page, and the changes that came meanwhile, which the page may lack. */
  async #read(pageToken?: string, signal?: AbortSignal) {
    const changes: SessionChange[] = [];
    this.#reads.add(changes);
    try {
      const { sessions = [], nextPageToken } = await this.client.call("Sessions_ListSessions", { query: { ...this.#query, pageToken } }, { signal });
      this.error = undefined;
      return { sessions, next: nextPageToken || undefined, changes };
    } finally {
      this.#reads.delete(changes);
    }
  }

  async #readFirst(signal?: AbortSignal): Promise<void> {
    const { sessions, next, changes } = await this.#read(undefined, signal);
    this.#rows = new Map(sessions.map((s) => [s.sessionId!, s]));
    this.#more = next;
    this.#isLoading = false;
    for (const change of changes) this.#apply(change);
    this.#publish();
  }

  /** Adds the rows of a page to the list. */
  #add(sessions: SessionRow[], changes: SessionChange[]): void {
    for (const row of sessions) this.#put(row);
    for (const change of changes) if (change.type === "session_deleted") this.#rows.delete(change.sessionId);
    this.#publish();
  }

  /** Reads the list again, from its first page. */
  readonly refresh = coalesced(() => this.#readFirst().catch((error: Error) => void (this.error = error)));

  /** Adds what the first page has; the pages after it stay. */
  readonly #readNewest = coalesced(async () => {
    try {
      const { sessions, changes } = await this.#read();
      this.#add(sessions, changes);
    } catch (error) {
      this.error = error as Error;
    }
  });

  /** Reads the next page. */
  readonly loadMore = single(async () => {
    const token = this.#more;
    if (!token) return;
    try {
      const { sessions, next, changes } = await this.#read(token);
      if (this.#more !== token) return; // the list was read again: this page does not follow its last one
      this.#more = next;
      this.#add(sessions, changes);
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
    if (!this.#more || this.#rows.size === 0) return true;
    for (const known of this.#rows.values()) if (this.#compare(row, known) <= 0) return true;
    return false;
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
