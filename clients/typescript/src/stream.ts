import { ConnectionError, SpoolError, StreamEndedError, type StreamEndReason } from "./errors.js";
import type { ReplayNotice, SessionEvent } from "./events.js";
import { expandPath, isTemporary, sleep, type Http } from "./http.js";
import { ServerSentEventParser } from "./sse.js";
import { dropUtf8, utf8Length } from "./text.js";

/** What a stream reports besides its events, for a display of the connection. */
export type StreamStatus =
  | { type: "connected"; url: string }
  | { type: "disconnected"; url: string; error?: unknown; retryInMs: number }
  | { type: "lag"; lagging: boolean; lagMs: number };

/** Options of a stream. */
export interface FollowOptions {
  /** The cursor: the seq of the last event that the caller has; 0 by default. */
  after?: number | undefined;
  /** Ends the stream; the iteration throws the signal's reason. */
  signal?: AbortSignal | undefined;
  /**
   * "sse" (the default) or "websocket". A browser cannot send an API key on a WebSocket, and a WebSocket has no idle timeout
   * after the session was joined.
   */
  transport?: "sse" | "websocket" | undefined;
  /** Whether the stream returns text in flight (text_delta); true by default. */
  text?: boolean | undefined;
  /** Whether events have the metadata of the application; true by default. */
  metadata?: boolean | undefined;
  /** A connection without a byte for this long is replaced; 45,000 ms by default. The gateway sends something every 15 s. */
  idleTimeoutMs?: number | undefined;
  /** Called when the stream connects, disconnects, or the server's read models fall behind or catch up. */
  onStatus?: ((status: StreamStatus) => void) | undefined;
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

/** The errors that end a stream: the reason, and the status, which a WebSocket does not send. */
const endings: Record<string, [StreamEndReason, number]> = {
  UNAUTHENTICATED: ["unauthenticated", 401],
  FORBIDDEN: ["forbidden", 403],
  SESSION_NOT_FOUND: ["deleted", 404],
  CURSOR_AHEAD: ["cursor_ahead", 409],
  CURSOR_EXPIRED: ["cursor_expired", 410],
  INVALID_REQUEST: ["refused", 400],
};

/** One message of a connection: an event, text in flight, or "lag", "problem" and the notices of a replay. */
interface Frame {
  type: string;
  value: any;
}

/**
 * The events of a session, in order and each once. It connects again after every cut, to the next gateway, and continues
 * after its cursor. The iteration ends after session_deleted, at the end of a replay, or with a StreamEndedError. It can be
 * iterated once.
 */
export class EventStream<T = SessionEvent> implements AsyncIterable<T> {
  /** The seq of the last stored event that was returned: the cursor with which another stream continues. */
  cursor: number;
  /** Why the stream has ended; undefined while it runs, and after `break` or an abort. */
  endReason: StreamEndReason | undefined;

  readonly #http: Http;
  readonly #sessionId: string;
  readonly #path: string;
  readonly #options: FollowOptions & ReplayOptions;
  readonly #replay: boolean;
  readonly #shown = new Map<string, number>(); // bytes of the text of open blocks that were returned
  #iterated = false;
  #replayTo: number | undefined; // the last event of a replay, once the server has named it

  /** @internal */
  constructor(http: Http, sessionId: string, options: FollowOptions | ReplayOptions, replay: boolean) {
    this.#http = http;
    this.#sessionId = sessionId;
    this.#path = expandPath("/api/sessions/{id}/events/stream", { id: sessionId });
    this.#options = options;
    this.#replay = replay;
    this.cursor = this.#replay ? (this.#options.from ?? 1) - 1 : (this.#options.after ?? 0);
  }

  async *[Symbol.asyncIterator](): AsyncGenerator<T, void, undefined> {
    if (this.#iterated) throw new TypeError("the stream was iterated already: open another one after its cursor");
    this.#iterated = true;
    const { signal, onStatus } = this.#options;
    for (let attempt = 0; ; attempt++) {
      signal?.throwIfAborted();
      const url = this.#http.gateway;
      const began = Date.now();
      let failure: unknown;
      try {
        for await (const item of this.#connect()) {
          signal?.throwIfAborted();
          attempt = 0;
          yield item as T;
          if (this.endReason) return;
        }
        if (this.endReason) return;
      } catch (error) {
        signal?.throwIfAborted();
        if (!(error instanceof SpoolError || error instanceof ConnectionError)) throw error;
        if (error instanceof SpoolError && !isTemporary(error) && error.status < 500) {
          this.endReason = endings[error.code]?.[0] ?? "refused";
          throw new StreamEndedError(this.endReason, this.cursor, error);
        }
        failure = error;
      }
      // A connection that lasted was no failed attempt, even if nothing happened on it.
      if (Date.now() - began > this.#http.retry.maxDelayMs) attempt = 0;
      this.#http.rotate(url);
      const least = failure instanceof SpoolError ? (failure.retryAfterMs ?? 0) : 0;
      const retryInMs = Math.max(least, this.#http.backoff(attempt));
      onStatus?.({ type: "disconnected", url, error: failure, retryInMs });
      await sleep(retryInMs, signal);
    }
  }

  /** Returns what one connection delivers, without what was returned before. It returns when the connection is cut. */
  async *#connect(): AsyncGenerator<SessionEvent | ReplayNotice, void, undefined> {
    const frames = this.#options.transport === "websocket" ? this.#webSocketFrames() : this.#serverSentEvents();
    for await (const { type, value } of frames) {
      // A reason that is not final, such as SLOW_CLIENT, is a cut: the next request shows whether the stream can continue.
      if (type === "problem") throw new SpoolError({ ...value, status: endings[value.code]?.[1] ?? 503 });
      if (type === "lag") this.#options.onStatus?.({ type: "lag", ...value });
      else if (notices.has(type)) yield* this.#noticed({ type, ...value });
      else if (type === "text_delta") yield* this.#fresh(value);
      else if (value.seq > this.cursor) {
        if (!this.#replay && value.seq !== this.cursor + 1) throw new ConnectionError(`event ${value.seq} came after event ${this.cursor}`);
        this.cursor = value.seq;
        if (type === "block_complete") this.#shown.delete(value.data?.block?.id);
        if (type === "session_deleted" && !this.#replay) this.endReason = "deleted";
        yield value;
      }
    }
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

  async *#serverSentEvents(): AsyncGenerator<Frame, void, undefined> {
    const { signal, idleTimeoutMs = 45_000, metadata, speed, from, executionId, onStatus } = this.#options;
    const connection = new AbortController();
    const abort = () => connection.abort(signal?.reason);
    signal?.addEventListener("abort", abort);
    let idle: ReturnType<typeof setTimeout> | undefined;
    // The consumer may take any time between two reads, so only reads are timed.
    const timed = async <V>(wait: Promise<V>): Promise<V> => {
      idle = setTimeout(() => connection.abort(new Error(`nothing arrived for ${idleTimeoutMs} ms`)), idleTimeoutMs);
      try {
        return await wait;
      } catch (error) {
        if (error instanceof SpoolError || error instanceof ConnectionError) throw error;
        throw new ConnectionError(`the connection failed: ${String(connection.signal.reason ?? error)}`, { cause: error });
      } finally {
        clearTimeout(idle);
      }
    };
    try {
      const query = this.#replay
        ? { replay: 1, speed, from, to: this.#replayTo ?? this.#options.to, executionId, metadata }
        : { after: this.cursor, metadata };
      const headers: Record<string, string> = { Accept: "text/event-stream" };
      if (this.#replayTo !== undefined && this.cursor > 0) headers["Last-Event-ID"] = String(this.cursor);
      const response = await timed(
        this.#http.once({ method: "GET", path: this.#path, query, headers, signal: connection.signal, repeatable: true }),
      );
      if (response.status === 204) {
        this.endReason = "replayed"; // the cut was after the last event
        return;
      }
      if (!response.body || !response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
        throw new ConnectionError(`the answer is not a stream of events but ${response.headers.get("Content-Type")}`);
      }
      onStatus?.({ type: "connected", url: this.#http.gateway });
      const parser = new ServerSentEventParser();
      const reader = response.body.getReader();
      for (let chunk; !(chunk = await timed(reader.read())).done; ) {
        for (const { type, data } of parser.push(chunk.value)) yield { type, value: parseJson(data) };
      }
    } finally {
      signal?.removeEventListener("abort", abort);
      connection.abort();
    }
  }

  async *#webSocketFrames(): AsyncGenerator<Frame, void, undefined> {
    const { signal, idleTimeoutMs = 45_000, metadata, speed, executionId, onStatus } = this.#options;
    const to = this.#replayTo ?? this.#options.to;
    const from = this.#replayTo === undefined ? this.#options.from : this.cursor + 1;
    if (from !== undefined && to !== undefined && this.#replayTo !== undefined && from > to) {
      this.endReason = "replayed"; // the cut was after the last event
      return;
    }
    const socket = await this.#http.openWebSocket();
    const inbox: Frame[] = [];
    let failure: Error | undefined;
    let joined = false;
    let wake = () => {};
    const fail = (error: Error) => {
      failure ??= error;
      wake();
    };
    const abort = () => fail(new ConnectionError("aborted"));
    const late = setTimeout(() => fail(new ConnectionError(`the session was not joined in ${idleTimeoutMs} ms`)), idleTimeoutMs);
    signal?.addEventListener("abort", abort);
    socket.onclose = socket.onerror = () => fail(new ConnectionError("the WebSocket was cut"));
    socket.onopen = () => {
      const about = { type: "session:join", requestId: "1", sessionId: this.#sessionId, metadata };
      socket.send(JSON.stringify(this.#replay ? { ...about, replay: true, speed, from, to, executionId } : { ...about, after: this.cursor }));
    };
    socket.onmessage = ({ data }) => {
      try {
        const message = parseJson(String(data));
        const { type, sessionId, ...fields } = message;
        if (type === "session:event") inbox.push({ type: message.event.type, value: message.event });
        else if (type === "error") inbox.push({ type: "problem", value: { code: fields.code, detail: fields.message, field: fields.field, tip: fields.tip } });
        else if (type === "session:left") fail(new ConnectionError("the gateway ended the stream"));
        else if (type === "session:joined") {
          joined = true;
          clearTimeout(late);
          onStatus?.({ type: "connected", url: this.#http.gateway });
        } else if (type !== "session:snapshot") inbox.push({ type: String(type).replace(/^session:/, ""), value: fields });
        wake();
      } catch (error) {
        fail(error as Error);
      }
    };
    try {
      for (;;) {
        for (let i = 0; i < inbox.length; i++) yield inbox[i]!;
        inbox.length = 0;
        if (failure) break;
        await new Promise<void>((resolve) => (wake = resolve));
      }
      // A refused handshake does not say why; a request does.
      if (!joined) await this.#http.once({ method: "GET", path: this.#path.replace(/\/events\/stream$/, ""), signal, repeatable: true });
      throw failure;
    } finally {
      clearTimeout(late);
      signal?.removeEventListener("abort", abort);
      socket.onclose = socket.onerror = socket.onmessage = socket.onopen = null;
      socket.close();
    }
  }
}

function parseJson(text: string): any {
  let value: unknown;
  try {
    value = JSON.parse(text);
  } catch (cause) {
    throw new ConnectionError("the connection delivered an event that is not JSON", { cause });
  }
  if (typeof value !== "object" || value === null) throw new ConnectionError("the connection delivered an event that is not an object");
  return value;
}
