import { ConnectionError, SpoolError, StreamEndedError, type StreamEndReason } from "./errors.js";
import { isTemporary, sleep, type Http } from "./http.js";
import { ServerSentEventParser } from "./sse.js";

/** What a stream reports besides its events, for a display of the connection. */
export type StreamStatus =
  | { type: "connected"; url: string }
  | { type: "disconnected"; url: string; error?: unknown; retryInMs: number }
  | { type: "lag"; lagging: boolean; lagMs: number };

/** Options of every stream. */
export interface StreamOptions {
  /** Ends the stream; the iteration throws the signal's reason. */
  signal?: AbortSignal | undefined;
  /** "sse" or "websocket"; by default what the client's options say. A WebSocket has no idle timeout after the stream was joined. */
  transport?: "sse" | "websocket" | undefined;
  /** A connection without a byte for this long is replaced; 45,000 ms by default. The gateway sends something every 15 s. */
  idleTimeoutMs?: number | undefined;
  /** Called when the stream connects, disconnects, or the server's read models fall behind or catch up. */
  onStatus?: ((status: StreamStatus) => void) | undefined;
}

const maxInbox = 10_000; // frames of a WebSocket that were not read

/** The errors that end a stream: the reason, and the status, which a WebSocket does not send. */
const endings: Record<string, [StreamEndReason, number]> = {
  UNAUTHENTICATED: ["unauthenticated", 401],
  FORBIDDEN: ["forbidden", 403],
  SESSION_NOT_FOUND: ["deleted", 404],
  CURSOR_AHEAD: ["cursor_ahead", 409],
  CURSOR_EXPIRED: ["cursor_expired", 410],
  INVALID_REQUEST: ["refused", 400],
};

/** Returns why an error ends streams; undefined if it may pass. */
export function endReasonOf(error: unknown): StreamEndReason | undefined {
  if (!(error instanceof SpoolError) || isTemporary(error) || error.status >= 500) return undefined;
  return endings[error.code]?.[0] ?? "refused";
}

/** One message of a connection, or an item that was read without one. */
export interface Frame {
  type: string;
  value: any;
  /** The id of a server-sent event. */
  id?: string;
}

/** What the request of a stream has besides its path. */
export interface StreamRequest {
  query: object;
  headers?: Record<string, string>;
}

/** A message of the gateway on a WebSocket: its type without the prefix "session:" or "sessions:", and its other fields. */
export type SocketMessage = { type: string } & Record<string, any>;

/**
 * A stream that connects again after every cut, to the next gateway, and continues after its cursor. A subclass knows the
 * messages. It can be iterated once.
 */
export abstract class ResumableStream<T, Cursor extends number | string> implements AsyncIterable<T> {
  /** The cursor with which another stream continues after the last item that was returned. */
  abstract cursor: Cursor;
  /** Why the stream has ended; undefined while it runs, and after `break` or an abort. */
  endReason: StreamEndReason | undefined;
  #iterated = false;

  /** @internal */
  constructor(
    protected readonly http: Http,
    private readonly path: string,
    private readonly streamOptions: StreamOptions,
  ) {}

  /** Returns the request for the items after the cursor, by SSE. */
  protected abstract request(): StreamRequest;
  /** Returns the message that joins the stream on a WebSocket; undefined if it is complete. */
  protected abstract joinMessage(): object | undefined;
  /** Returns the frame of a message on the WebSocket; undefined if it has none. */
  protected abstract frameOf(message: SocketMessage): Frame | undefined;
  /** Returns the items of a frame that were not returned before, and moves the cursor. */
  protected abstract itemsOf(frame: Frame): Iterable<T>;
  /** Reads the next frames without a stream, after connections that did not move the cursor; undefined if that is not possible. */
  protected readNext?(signal: AbortSignal | undefined): AsyncIterable<Frame>;

  async *[Symbol.asyncIterator](): AsyncGenerator<T, void, undefined> {
    if (this.#iterated) throw new TypeError("the stream was iterated already: open another one after its cursor");
    this.#iterated = true;
    const { signal, onStatus } = this.streamOptions;
    let futile = 0; // connections in a row that did not move the cursor
    for (let attempt = 0; ; attempt++) {
      signal?.throwIfAborted();
      const url = this.http.gateway;
      const began = Date.now();
      const cursor = this.cursor;
      let failure: unknown;
      try {
        for await (const frame of this.#frames(futile)) {
          signal?.throwIfAborted();
          const items = this.#items(frame);
          attempt = 0; // unless the frame is a problem
          for (const item of items) yield item;
          if (this.endReason) return;
        }
        if (this.endReason) return;
      } catch (error) {
        signal?.throwIfAborted();
        if (!(error instanceof SpoolError || error instanceof ConnectionError)) throw error;
        this.endReason = endReasonOf(error);
        if (this.endReason) throw new StreamEndedError(this.endReason, this.cursor, error as SpoolError);
        failure = error;
      }
      futile = this.cursor === cursor ? futile + 1 : 0;
      // A connection that lasted was no failed attempt, even if nothing happened on it.
      if (Date.now() - began > this.http.retry.maxDelayMs) attempt = 0;
      this.http.rotate(url);
      const least = failure instanceof SpoolError ? (failure.retryAfterMs ?? 0) : 0;
      const retryInMs = Math.max(least, this.http.backoff(attempt));
      onStatus?.({ type: "disconnected", url, error: failure, retryInMs });
      await sleep(retryInMs, signal);
    }
  }

  #frames(futile: number): AsyncIterable<Frame> {
    if (futile % 3 === 2 && this.readNext) return this.readNext(this.streamOptions.signal);
    return (this.streamOptions.transport ?? this.http.transport) === "websocket" ? this.#webSocketFrames() : this.#serverSentEvents();
  }

  #items(frame: Frame): Iterable<T> {
    const { type, value } = frame;
    // A reason that is not final, such as SLOW_CLIENT, is a cut: the next request shows whether the stream can continue.
    if (type === "problem") throw new SpoolError({ ...value, status: endings[value.code]?.[1] ?? 503 });
    if (type !== "lag") return this.itemsOf(frame);
    this.streamOptions.onStatus?.({ type: "lag", ...value });
    return [];
  }

  async *#serverSentEvents(): AsyncGenerator<Frame, void, undefined> {
    const { signal, idleTimeoutMs = 45_000, onStatus } = this.streamOptions;
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
      const { query, headers } = this.request();
      const response = await timed(
        this.http.once({ method: "GET", path: this.path, query, headers: { Accept: "text/event-stream", ...headers }, signal: connection.signal, repeatable: true }),
      );
      if (response.status === 204) {
        this.endReason = "replayed"; // the cut was after the last event
        return;
      }
      if (!response.body || !response.headers.get("Content-Type")?.startsWith("text/event-stream")) {
        throw new ConnectionError(`the answer is not a stream of events but ${response.headers.get("Content-Type")}`);
      }
      onStatus?.({ type: "connected", url: this.http.gateway });
      const parser = new ServerSentEventParser();
      const reader = response.body.getReader();
      for (let chunk; !(chunk = await timed(reader.read())).done; ) {
        for (const { type, data, lastEventId } of parser.push(chunk.value)) yield { type, value: parseJson(data), id: lastEventId };
      }
    } finally {
      signal?.removeEventListener("abort", abort);
      connection.abort();
    }
  }

  async *#webSocketFrames(): AsyncGenerator<Frame, void, undefined> {
    const { signal, idleTimeoutMs = 45_000, onStatus } = this.streamOptions;
    const join = this.joinMessage();
    if (!join) {
      this.endReason = "replayed"; // the cut was after the last event
      return;
    }
    const { socket, firstMessage } = await this.http.openWebSocket();
    let inbox: Frame[] = [];
    let failure: Error | undefined;
    let joined = false;
    let wake = () => {};
    const fail = (error: Error) => {
      failure ??= error;
      wake();
    };
    // A WebSocket cannot be told to wait. Another one continues after the cursor when all frames are read.
    const close = (error: Error) => {
      socket.onclose = socket.onerror = socket.onmessage = socket.onopen = null;
      socket.close();
      fail(error);
    };
    const abort = () => fail(new ConnectionError("aborted"));
    const late = setTimeout(() => fail(new ConnectionError(`the stream was not joined in ${idleTimeoutMs} ms`)), idleTimeoutMs);
    signal?.addEventListener("abort", abort);
    if (signal?.aborted) abort(); // while the key was read
    socket.onclose = socket.onerror = () => fail(new ConnectionError("the WebSocket was cut"));
    socket.onopen = () => {
      if (firstMessage) socket.send(JSON.stringify(firstMessage));
      socket.send(JSON.stringify(join));
    };
    socket.onmessage = ({ data }) => {
      try {
        const message = parseJson(String(data));
        const type = String(message.type).replace(/^sessions?:/, "");
        if (type === "error") inbox.push({ type: "problem", value: { code: message.code, detail: message.message, field: message.field, tip: message.tip } });
        else if (type === "left") fail(new ConnectionError("the gateway ended the stream"));
        else if (type === "joined") {
          joined = true;
          clearTimeout(late);
          onStatus?.({ type: "connected", url: this.http.gateway });
        }
        const frame = this.frameOf({ ...message, type });
        if (frame) inbox.push(frame);
        if (inbox.length >= maxInbox) close(new ConnectionError(`${maxInbox} messages arrived that were not read`));
        wake();
      } catch (error) {
        fail(error as Error);
      }
    };
    try {
      for (;;) {
        const frames = inbox;
        inbox = []; // so that frames that were read are not kept
        yield* frames;
        if (inbox.length > 0) continue;
        if (failure) break;
        await new Promise<void>((resolve) => (wake = resolve));
      }
      // A refused handshake does not say why; a request does.
      if (!joined) await this.http.once({ method: "GET", path: this.path.replace(/(\/events)?\/stream$/, ""), signal, whole: true, repeatable: true });
      throw failure;
    } finally {
      clearTimeout(late);
      signal?.removeEventListener("abort", abort);
      close(new ConnectionError("the stream ended"));
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
