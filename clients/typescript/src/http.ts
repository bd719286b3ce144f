import { ConnectionError, SpoolError, errorOf } from "./errors.js";
import type { components } from "./generated/schema.js";
import { uploadWithProgress } from "./upload.js";

type Schemas = components["schemas"];

/** How failed requests are repeated. */
export interface RetryOptions {
  /** How many times a request is repeated; 4 by default. Streams are resumed without a limit. */
  retries?: number;
  /** The wait after the first failure is at most this long, in milliseconds, and doubles each time; 200 by default. */
  minDelayMs?: number;
  /** The longest wait, in milliseconds; 10,000 by default. A request that must wait longer fails at once. */
  maxDelayMs?: number;
}

/** The settings of a client. */
export interface ClientOptions {
  /** The URL of the gateway, or the URLs of several, which are tried in turn. */
  baseUrl: string | readonly string[];
  /** The API key, or a function that returns it before each request. A page that signs in with a cookie has none. */
  apiKey?: string | (() => string | Promise<string>);
  /** The id of the end user for whom requests are made: the header Spool-User. */
  user?: string;
  /** How streams connect if their options do not say; "sse" by default. */
  transport?: "sse" | "websocket";
  /** The URL of the WebSocket, if it is not /api/ws below baseUrl. */
  webSocketUrl?: string;
  retry?: RetryOptions;
  /** Whether a browser sends cookies: "include" also to a gateway of another origin of the site; "same-origin" by default. */
  credentials?: RequestCredentials;
  /** Used in place of the global fetch. */
  fetch?: typeof fetch;
  /**
   * Opens a WebSocket with headers, for streams by WebSocket. By default the global WebSocket, which Node has from version 22
   * on, or with --experimental-websocket; it sends the key in its first message.
   */
  openWebSocket?: (url: string, headers: Record<string, string>) => WebSocket;
}

/** Options of one call. */
export interface CallOptions {
  signal?: AbortSignal | undefined;
  /** The Idempotency-Key of the call; by default a new one for each call, which is kept when the call is repeated. */
  idempotencyKey?: string | undefined;
  /** Further headers. */
  headers?: Record<string, string> | undefined;
}

export interface HttpRequest extends CallOptions {
  method: string;
  path: string;
  query?: object | undefined;
  /** A function returns the body of one attempt. */
  body?: BodyInit | (() => BodyInit) | undefined;
  /** Whether the request may be sent again although it may have had its effect. */
  repeatable: boolean;
  /** Whether the answer is read whole before it is returned, so that a cut in its body is a failed request too. */
  whole?: boolean | undefined;
  /** Called with the number of bytes of the body that were sent. A browser then sends the request by XMLHttpRequest. */
  onUpload?: ((sent: number) => void) | undefined;
}

const retryStatuses = new Set([408, 425, 429, 502, 503, 504]);

/** Reports whether a request that failed with the error may succeed later. */
export function isTemporary(error: SpoolError): boolean {
  return retryStatuses.has(error.status);
}

/** Sends requests to the gateways of a client. */
export class Http {
  readonly retry: Required<RetryOptions>;
  readonly transport: "sse" | "websocket";
  readonly #options: ClientOptions;
  readonly #urls: readonly string[];
  #next = 0; // index of the gateway that answered last
  /** The CSRF token of the session cookie, which requests that change something need. */
  csrfToken: string | undefined;

  constructor(options: ClientOptions) {
    const urls = typeof options.baseUrl === "string" ? [options.baseUrl] : options.baseUrl;
    if (urls.length === 0) throw new TypeError("baseUrl is empty");
    for (const url of urls) {
      if (!/^https?:$/.test(new URL(url).protocol)) throw new TypeError(`baseUrl ${url} must begin with http:// or https://`);
    }
    this.#urls = urls.map((url) => url.replace(/\/+$/, ""));
    this.#options = options;
    this.transport = options.transport ?? "sse";
    this.retry = { retries: 4, minDelayMs: 200, maxDelayMs: 10_000, ...options.retry };
  }

  /** The gateway that the next request goes to. */
  get gateway(): string {
    return this.#urls[this.#next % this.#urls.length]!;
  }

  /** Makes the next request go to another gateway than the one that failed. */
  rotate(failed: string): void {
    if (this.gateway === failed) this.#next++;
  }

  /** Sends a request once. Throws a ConnectionError if there is no answer, a SpoolError if its status is not 2xx. */
  async once(request: HttpRequest): Promise<Response> {
    const headers = await this.headers();
    for (const [name, value] of Object.entries(request.headers ?? {})) headers.set(name, value);
    if (request.idempotencyKey !== undefined) headers.set("Idempotency-Key", request.idempotencyKey);
    if (this.csrfToken && request.method !== "GET") headers.set("X-CSRF-Token", this.csrfToken);
    const { credentials } = this.#options;
    const init: RequestInit & { duplex?: "half" } = { method: request.method, headers, cache: "no-store", ...(credentials && { credentials }) };
    if (request.signal) init.signal = request.signal;
    if (request.body !== undefined) {
      init.body = typeof request.body === "function" ? request.body() : request.body;
      if (init.body instanceof ReadableStream) init.duplex = "half";
    }
    let response: Response;
    try {
      const url = this.gateway + request.path + queryString(request.query);
      response = request.onUpload ? await uploadWithProgress(url, init, request.onUpload) : await (this.#options.fetch ?? fetch)(url, init);
      if (request.whole && response.ok) response = new Response((await response.text()) || null, response);
    } catch (cause) {
      request.signal?.throwIfAborted();
      throw new ConnectionError(`${request.method} ${this.gateway}${request.path} failed: ${String(cause)}`, { cause });
    }
    if (response.ok || response.status === 304) return response;
    throw await errorOf(response);
  }

  /** Sends a request, and repeats it after failures that may pass. */
  async send(request: HttpRequest): Promise<Response> {
    let hasNewToken = false;
    for (let attempt = 0; ; attempt++) {
      const gateway = this.gateway;
      const { csrfToken } = this;
      try {
        return await this.once(request);
      } catch (error) {
        // The page was loaded again, or another one has signed in: the cookie has another token.
        if (error instanceof SpoolError && error.code === "CSRF_REFUSED" && !hasNewToken && !(request.body instanceof ReadableStream)) {
          await this.readCsrfToken(request.signal);
          hasNewToken = this.csrfToken !== csrfToken;
          if (hasNewToken) continue;
        }
        const wait = attempt < this.retry.retries ? this.#retryDelay(request, error, attempt) : undefined;
        if (wait === undefined) throw error;
        this.rotate(gateway);
        await sleep(wait, request.signal);
      }
    }
  }

  /** Returns how long to wait before a request is sent again, in milliseconds; undefined if it must not be. */
  #retryDelay(request: HttpRequest, error: unknown, attempt: number): number | undefined {
    if (request.body instanceof ReadableStream) return undefined; // it has been read
    const delay = this.backoff(attempt);
    if (error instanceof ConnectionError) return request.repeatable ? delay : undefined;
    if (!(error instanceof SpoolError) || !isTemporary(error)) return undefined;
    // After these answers nothing was done, so any request may be sent again.
    if (!request.repeatable && error.status !== 429 && error.code !== "OVERLOADED") return undefined;
    const wait = Math.max(delay, error.retryAfterMs ?? 0);
    return wait <= this.retry.maxDelayMs ? wait : undefined;
  }

  /** Returns a random wait in milliseconds, whose upper bound doubles with each attempt. */
  backoff(attempt: number): number {
    return Math.random() * Math.min(this.retry.maxDelayMs, this.retry.minDelayMs * 2 ** Math.min(attempt, 30));
  }

  /** Reads the session of the sign-in, and keeps its CSRF token. */
  async readCsrfToken(signal?: AbortSignal): Promise<Schemas["spool.v1.SignInSession"]> {
    const response = await this.send({ method: "GET", path: "/api/signin/session", signal, whole: true, repeatable: true });
    const session = (await response.json()) as Schemas["spool.v1.SignInSession"];
    this.csrfToken = session.csrfToken;
    return session;
  }

  /** Opens a WebSocket to the gateway. The first message, if there is one, has to be sent before all others. */
  async openWebSocket(): Promise<{ socket: WebSocket; firstMessage?: object }> {
    const headers = await this.headers();
    const url = this.#options.webSocketUrl ?? `${this.gateway.replace(/^http/, "ws")}/api/ws`;
    if (this.#options.openWebSocket) return { socket: this.#options.openWebSocket(url, Object.fromEntries(headers)) };
    const key = headers.get("Authorization")?.replace(/^Bearer /, "");
    if (!key) return { socket: new WebSocket(url) };
    return { socket: new WebSocket(`${url}?auth=message`), firstMessage: { type: "authenticate", requestId: "0", key } };
  }

  /** Returns the headers that all requests have. */
  private async headers(): Promise<Headers> {
    const headers = new Headers();
    const { apiKey, user } = this.#options;
    const key = typeof apiKey === "function" ? await apiKey() : apiKey;
    if (key) headers.set("Authorization", `Bearer ${key}`);
    if (user) headers.set("Spool-User", user);
    return headers;
  }
}

/** Returns the path of an operation with the values of its parameters. */
export function expandPath(template: string, values: Record<string, unknown> = {}): string {
  return template.replace(/\{(\w+)\}/g, (_, name: string) => {
    const value = String(values[name] ?? "");
    // The path of a file has several segments; every other parameter is one.
    const segments = name === "path" ? value.split("/") : [value];
    if (segments.some((s) => s === "" || s === "." || s === "..")) throw new TypeError(`parameter ${name} is not valid: ${JSON.stringify(value)}`);
    return segments.map(encodeURIComponent).join("/");
  });
}

function queryString(query: object = {}): string {
  const out = new URLSearchParams();
  for (const [name, value] of Object.entries(query)) {
    for (const one of Array.isArray(value) ? value : [value]) {
      if (one !== undefined && one !== null) out.append(name, String(one));
    }
  }
  const text = out.toString();
  return text && `?${text}`;
}

/** Waits. Rejects with the reason of the signal when it is aborted. */
export function sleep(ms: number, signal?: AbortSignal): Promise<void> {
  return new Promise((resolve, reject) => {
    if (signal?.aborted) return reject(signal.reason);
    const abort = () => {
      clearTimeout(timer);
      reject(signal?.reason);
    };
    const timer = setTimeout(() => {
      signal?.removeEventListener("abort", abort);
      resolve();
    }, ms);
    signal?.addEventListener("abort", abort, { once: true });
  });
}
