import type { components } from "./generated/schema.js";

/** The body of an error: problem+json, as docs/errors.md describes it. */
export type Problem = components["schemas"]["Problem"];

/** An error that the API answered with. */
export class SpoolError extends Error {
  override readonly name: string = "SpoolError";
  /** The stable code, such as SESSION_NOT_FOUND; "" if the answer is not one of Spool, but of a proxy. */
  readonly code: string;
  /** The HTTP status. */
  readonly status: number;
  /** One sentence for the user. */
  readonly detail: string;
  /** The invalid field of the request. */
  readonly field: string | undefined;
  /** The seq of the session's last event, if a cursor is not valid. */
  readonly tip: number | undefined;
  /** The key that makes a retry safe, if the outcome of a command is unknown. */
  readonly idempotencyKey: string | undefined;
  /** How long to wait before a retry, in milliseconds, if the server says so. */
  readonly retryAfterMs: number | undefined;

  constructor(problem: Partial<Problem> & { status: number }, retryAfterMs?: number) {
    const detail = problem.detail ?? problem.title ?? `the server answered with status ${problem.status}`;
    super(problem.code ? `${problem.code}: ${detail}` : detail);
    this.code = problem.code ?? "";
    this.status = problem.status;
    this.detail = detail;
    this.field = problem.field;
    this.tip = problem.tip;
    this.idempotencyKey = problem.idempotencyKey;
    this.retryAfterMs = retryAfterMs;
  }
}

/** No gateway answered: the connection failed or was cut. `cause` is the last failure. */
export class ConnectionError extends Error {
  override readonly name = "ConnectionError";
}

/** Why a stream of events has ended. */
export type StreamEndReason =
  /** The session was deleted, or does not exist. */
  | "deleted"
  /** The API key is missing, wrong, expired or revoked. */
  | "unauthenticated"
  /** The key may not read the session. */
  | "forbidden"
  /** The cursor is after the session's last event, whose seq is `tip` of the error. */
  | "cursor_ahead"
  /** Events after the cursor are no longer kept. */
  | "cursor_expired"
  /** The server refused the request for another reason. */
  | "refused"
  /** The replay is complete. */
  | "replayed";

/** Thrown by a stream of events that cannot continue. */
export class StreamEndedError extends SpoolError {
  override readonly name = "StreamEndedError";
  constructor(
    readonly reason: StreamEndReason,
    /** The cursor of the stream: for the events of a session, the seq of the last event that it returned. */
    readonly cursor: number | string,
    error: SpoolError,
  ) {
    super(error);
    this.message = `the stream ended after ${typeof cursor === "number" ? `event ${cursor}` : `cursor ${cursor || "none"}`}: ${error.message}`;
    this.cause = error;
  }
}

/** Returns the error of a response whose status is not 2xx. */
export async function errorOf(response: Response): Promise<SpoolError> {
  const after = Number(response.headers.get("Retry-After") ?? NaN);
  const retryAfterMs = after >= 0 ? after * 1000 : undefined;
  const text = await response.text().catch(() => ""); // the status alone is enough if the body is cut
  return new SpoolError({ ...problemOf(text), status: response.status }, retryAfterMs);
}

/** Parses problem+json. Returns {} for any other text. */
export function problemOf(text: string): Partial<Problem> {
  try {
    const problem = JSON.parse(text) as Partial<Problem> | null;
    return typeof problem?.code === "string" ? problem : {};
  } catch {
    return {}; // the page of a proxy
  }
}
