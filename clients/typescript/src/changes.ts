import { ResumableStream, type Frame, type SocketMessage, type StreamOptions, type StreamRequest } from "./connection.js";
import { ConnectionError } from "./errors.js";
import type { components } from "./generated/schema.js";
import type { Http } from "./http.js";

/** An item of the stream of changes. `cursor` is the position after it. */
export type SessionChange =
  /** The stream begins: a list that is read from now on lacks no change that the stream does not return. */
  | { type: "started"; cursor: string }
  | { type: "session"; cursor: string; session: components["schemas"]["spool.v1.Session"] }
  | { type: "session_deleted"; cursor: string; sessionId: string; deletedAt: string };

/** Options of a stream of changes. */
export interface ChangesOptions extends StreamOptions {
  /** The cursor of the last change that the caller has; without one, the stream begins with the next change. */
  after?: string | undefined;
}

/**
 * The changes of all sessions that the caller may read, each session in its present state. After a cut it continues after
 * its cursor, so no change is missed. The iteration ends with a StreamEndedError only. It can be iterated once.
 */
export class ChangeStream extends ResumableStream<SessionChange, string> {
  /** The cursor with which another stream continues; "" before the stream has begun. */
  cursor: string;
  #started = false;

  /** @internal */
  constructor(http: Http, options: ChangesOptions) {
    super(http, "/api/sessions/stream", options);
    this.cursor = options.after ?? "";
  }

  protected request(): StreamRequest {
    return { query: { after: this.cursor || undefined } };
  }

  protected joinMessage(): object {
    return { type: "sessions:join", requestId: "1", cursor: this.cursor || undefined };
  }

  protected frameOf({ type, cursor, session, deleted }: SocketMessage): Frame | undefined {
    if (type === "joined") return { type: "started", value: { cursor }, id: cursor };
    if (type === "changed") return { type: "session", value: session, id: cursor };
    return type === "deleted" ? { type: "session_deleted", value: deleted, id: cursor } : undefined;
  }

  protected *itemsOf({ type, value, id }: Frame): Generator<SessionChange> {
    if (!/^(started|session|session_deleted)$/.test(type)) return;
    const cursor: unknown = type === "started" ? value.cursor : id;
    if (typeof cursor !== "string" || cursor === "") throw new ConnectionError(`the connection delivered ${type} without a cursor`);
    if (type !== "started" && typeof value?.sessionId !== "string") throw new ConnectionError(`the connection delivered ${type} without a session`);
    this.cursor = cursor;
    if (type === "session") yield { type, cursor, session: value };
    else if (type === "session_deleted") yield { ...value, type, cursor };
    else if (!this.#started) {
      this.#started = true;
      yield { type: "started", cursor };
    }
  }
}
