import { call, type CallParams, type CallResult, type Operation } from "./call.js";
import { Http, type CallOptions, type ClientOptions } from "./http.js";
import { Session } from "./session.js";

/** A client of Spool. It holds no connection: nothing has to be closed. */
export class SpoolClient {
  readonly #http: Http;

  constructor(options: ClientOptions) {
    this.#http = new Http(options);
  }

  /**
   * Calls any operation of the API by its name in the OpenAPI document. Failures that may pass are repeated: after lost
   * connections only if a repetition is safe, with the same Idempotency-Key, and not before the Retry-After of the answer.
   */
  call<O extends Operation>(
    operation: O,
    ...[params, options]: object extends CallParams<O> ? [params?: CallParams<O>, options?: CallOptions] : [params: CallParams<O>, options?: CallOptions]
  ): Promise<CallResult<O>> {
    return call(this.#http, operation, (params ?? {}) as CallParams<O>, options);
  }

  /** Returns a handle of a session. It makes no request. */
  session(id: string): Session {
    return new Session(this.#http, id);
  }

  /** Creates a session, and returns its handle. */
  async createSession(body: NonNullable<CallParams<"Sessions_CreateSession">["body"]>, options?: CallOptions): Promise<Session> {
    const { sessionId } = await this.call("Sessions_CreateSession", { body }, options);
    return this.session(sessionId!);
  }
}
