import { call, type CallParams, type CallResult, type Operation } from "./call.js";
import { ChangeStream, type ChangesOptions } from "./changes.js";
import { Http, type CallOptions, type ClientOptions } from "./http.js";
import { Session, type Schemas } from "./session.js";

/** What a page learns about its sign-in. */
export type SignIn = Omit<Schemas["spool.v1.ExchangeSignInCodeResponse"], "csrfToken" | "credential">;

/** Who is signed in, and with which rights. */
export type SignInSession = Omit<Schemas["spool.v1.SignInSession"], "csrfToken">;

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

  /** Follows all sessions: returns those that change or are deleted. docs/lists.md says how a list is kept with it. */
  changes(options: ChangesOptions = {}): ChangeStream {
    return new ChangeStream(this.#http, options);
  }

  /** Signs a page in, with a code or an API key: the browser keeps a cookie that no script can read. */
  async signIn(proof: { code: string } | { apiKey: string }, options?: CallOptions): Promise<SignIn> {
    const { csrfToken, credential: _, ...signIn } = await this.call("SignIn_ExchangeSignInCode", { body: { ...proof, cookie: true } }, options);
    this.#http.csrfToken = csrfToken;
    return signIn;
  }

  /** Returns who is signed in, after a page was loaded again too. Throws a SpoolError with status 401 if nobody is. */
  async signInSession(options?: CallOptions): Promise<SignInSession> {
    const { csrfToken: _, ...session } = await this.#http.readCsrfToken(options?.signal);
    return session;
  }

  /** Ends the session of the sign-in, also in other tabs. */
  async signOut(options?: CallOptions): Promise<void> {
    await this.call("SignIn_DeleteSignInSession", {}, options);
    this.#http.csrfToken = undefined;
  }
}
