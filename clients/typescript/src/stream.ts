import { call } from "./call.js";
import { ResumableStream, type Frame, type SocketMessage, type StreamOptions, type StreamRequest } from "./connection.js";
import { ConnectionError } from "./errors.js";
import type { ReplayNotice, SessionEvent } from "./events.js";
import { expandPath, type Http } from "./http.js";
import { dropUtf8, utf8Length } from "./text.js";

/** Options of a stream of the events of a session. */
export interface FollowOptions extends StreamOptions {
  /** The cursor: the seq of the last event that the caller has; 0 by default. */
  after?: number | undefined;
  /** Whether the stream returns text in flight (text_delta); true by default. */
  text?: boolean | undefined;
  /** Whether events have the metadata of the application; true by default. */
  metadata?: boolean | undefined;
}

/** Options of a replay. */
export interface ReplayOptions extends Omit<FollowOptions, "after"> {
  /** A multiple of the original speed, or "max"; 1 by default. */
  speed?: number | "max" | undefined;
  /** Seq of the first event; 1 by default. */
  from?: number | undefined;
  /** Seq of the last event; by default the session's last event. */
  to?: number | undefined;
  /** Replays the events of this execution only. */
  executionId?: string | undefined;
}

const notices = new Set(["replay_started", "gap_shortened", "block_whole", "replay_ended"]);

/**
 * The events of a session, in order and each once. It connects again after every cut, to the next gateway, and continues
 * after its cursor. The iteration ends after session_deleted, at the end of a replay, or with a StreamEndedError. It can be
 * iterated once.
 */
export class EventStream<T = SessionEvent> extends ResumableStream<T, number> {
  /** The seq of the last stored event that was returned: the cursor with which another stream continues. */
  cursor: number;

  readonly #sessionId: string;
  readonly #options: FollowOptions & ReplayOptions;
  readonly #replay: boolean;
  readonly #shown = new Map<string, number>(); // bytes of the text of open blocks that were returned
  #replayTo: number | undefined; // the last event of a replay, once the server has named it

  /** @internal */
  constructor(http: Http, sessionId: string, options: FollowOptions | ReplayOptions, replay: boolean) {
    super(http, expandPath("/api/sessions/{id}/events/stream", { id: sessionId }), options);
    this.#sessionId = sessionId;
    this.#options = options;
    this.#replay = replay;
    this.cursor = this.#replay ? (this.#options.from ?? 1) - 1 : (this.#options.after ?? 0);
    // An intermediary may cut each connection after a frame that is no event, such as replay_started.
    if (replay) this.readNext = this.#readNextEvent;
  }

  protected request(): StreamRequest {
    const { metadata, speed, from, executionId } = this.#options;
    if (!this.#replay) return { query: { after: this.cursor, metadata } };
    const query = { replay: 1, speed, from, to: this.#replayTo ?? this.#options.to, executionId, metadata };
    const resumes = this.#replayTo !== undefined && this.cursor > 0;
    return resumes ? { query, headers: { "Last-Event-ID": String(this.cursor) } } : { query };
  }

  protected joinMessage(): object | undefined {
    const { metadata, speed, executionId } = this.#options;
    const join = { type: "session:join", requestId: "1", sessionId: this.#sessionId, metadata };
    if (!this.#replay) return { ...join, after: this.cursor };
    const to = this.#replayTo ?? this.#options.to;
    const from = this.#replayTo === undefined ? this.#options.from : this.cursor + 1;
    if (this.#replayTo !== undefined && from! > this.#replayTo) return undefined;
    return { ...join, replay: true, speed, from, to, executionId };
  }

  protected frameOf({ type, sessionId: _, ...fields }: SocketMessage): Frame | undefined {
    if (type === "event") return { type: fields["event"].type, value: fields["event"] };
    return type === "lag" || notices.has(type) ? { type, value: fields } : undefined;
  }

  protected *itemsOf({ type, value }: Frame): Generator<T> {
    if (notices.has(type)) yield* this.#noticed({ type, ...value }) as Iterable<T>;
    else if (type === "text_delta") yield* this.#fresh(value) as Iterable<T>;
    else if (value.seq > this.cursor) {
      if (!this.#replay && value.seq !== this.cursor + 1) throw new ConnectionError(`event ${value.seq} came after event ${this.cursor}`);
      this.cursor = value.seq;
      if (type === "block_complete") this.#shown.delete(value.data?.block?.id);
      if (type === "session_deleted" && !this.#replay) this.endReason = "deleted";
      yield value;
    }
  }

  /** Reads the next event of a replay, without its text in flight; nothing if the end of the replay is not known yet or reached. */
  async *#readNextEvent(signal: AbortSignal | undefined): AsyncGenerator<Frame> {
    const { executionId, metadata } = this.#options;
    for (let after = this.cursor; after < (this.#replayTo ?? 0); ) {
      const query = { after, limit: 100, metadata };
      const { events = [] } = await call(this.http, "Events_ListEvents", { path: { session_id: this.#sessionId }, query }, { signal });
      const event = events.find((e) => (e.seq ?? 0) <= this.#replayTo! && (!executionId || e.executionId === executionId));
      if (event) return yield { type: event.type!, value: event };
      if (events.length === 0) return;
      after = events[events.length - 1]!.seq!;
    }
    if (this.#replayTo !== undefined) this.endReason = "replayed"; // only the notice of the end was cut
  }

  *#noticed(notice: ReplayNotice): Generator<ReplayNotice> {
    if (notice.type === "replay_started") {
      if (this.#replayTo !== undefined) return; // it continues after a cut
      this.#replayTo = notice.to;
    }
    if (notice.type === "replay_ended") this.endReason = "replayed";
    yield notice;
  }

  /** Returns the part of a text_delta that was not returned before. */
  *#fresh(event: SessionEvent): Generator<SessionEvent> {
    if (this.#options.text === false) return;
    const { blockId, offset, delta } = (event.data ?? {}) as { blockId: string; offset: number; delta: string };
    if (typeof offset !== "number" || typeof delta !== "string") throw new ConnectionError("the connection delivered malformed text");
    const shown = this.#shown.get(blockId) ?? 0;
    const end = offset + utf8Length(delta);
    if (offset > shown) yield event; // after a gap: a BlockView keeps it
    else if (end > shown) {
      this.#shown.set(blockId, end);
      yield offset === shown ? event : { ...event, data: { blockId, offset: shown, delta: dropUtf8(delta, shown - offset) } };
    }
  }
}
