import type { Block } from "./blocks.js";
import { call, type CallParams, type CallResult, type Operation } from "./call.js";
import { isTerminal, type ReplayNotice, type SessionEvent } from "./events.js";
import type { components } from "./generated/schema.js";
import { expandPath, type CallOptions, type Http, type HttpRequest } from "./http.js";
import { EventStream, type FollowOptions, type ReplayOptions } from "./stream.js";
import { hasUploadProgress } from "./upload.js";

/** The schemas of the API, by name. */
export type Schemas = components["schemas"];

/** A session as it was after one of its events. */
export type SessionState = Omit<Schemas["spool.v1.SessionState"], "blocks" | "nextPageToken"> & { blocks: Block[] };

/** A page of blocks. */
export interface BlockPage {
  blocks: Block[];
  /** Seq of the last event that is folded into these blocks. */
  tip: number;
  /** The value of `before` for the next page; undefined on the last page. */
  next: string | undefined;
  truncated: Schemas["spool.v1.TruncatedField"][];
}

type BodyOf<O extends Operation> = CallParams<O> extends { body?: infer B } ? NonNullable<B> : never;

/** One session: a handle that holds its id and makes no request by itself. */
export class Session {
  /** The files of the session's workspace. */
  readonly files: SessionFiles;

  /** @internal */
  constructor(
    private readonly http: Http,
    readonly id: string,
  ) {
    this.files = new SessionFiles(http, id);
  }

  /** Returns the session. */
  get(options?: CallOptions): Promise<CallResult<"Sessions_GetSession">> {
    return this.#call("Sessions_GetSession", {}, options);
  }

  /** Deletes the session. */
  delete(options?: CallOptions): Promise<CallResult<"Sessions_DeleteSession">> {
    return this.#call("Sessions_DeleteSession", {}, options);
  }

  /** Posts a message: a text, or the body of PostMessage. Returns the id of its execution, which runs or waits. */
  post(message: string | BodyOf<"Sessions_PostMessage">, options?: CallOptions): Promise<CallResult<"Sessions_PostMessage">> {
    return this.#call("Sessions_PostMessage", { body: typeof message === "string" ? { content: message } : message }, options);
  }

  /** Stops the present turn; the agent's process stays. */
  interrupt(options?: CallOptions): Promise<CallResult<"Sessions_InterruptSession">> {
    return this.#call("Sessions_InterruptSession", {}, options);
  }

  /** Follows the session: returns its events after a cursor, and then new ones as they come. */
  follow(options: FollowOptions = {}): EventStream {
    return new EventStream(this.http, this.id, options, false);
  }

  /** Plays the session again, with the original times between the events. */
  replay(options: ReplayOptions = {}): EventStream<SessionEvent | ReplayNotice> {
    return new EventStream(this.http, this.id, options, true);
  }

  /** Returns the blocks of the session, and the seq of the last event that is folded into them. */
  async blocks(query: { conversationId?: string; minPosition?: string } = {}, options?: CallOptions): Promise<{ blocks: Block[]; tip: number }> {
    const { blocks = [], tip = 0 } = await this.#call("Events_ListBlocks", { query }, options);
    return { blocks: blocks as Block[], tip };
  }

  /**
   * Returns a page of the last blocks, the newest first. `before` is `next` of the page before. Long fields are cut, as
   * `truncated` says; `block` returns them whole. A stream that follows after `tip` of the first page continues it.
   */
  async newestBlocks(query: { before?: string | undefined; limit?: number; conversationId?: string; minPosition?: string | undefined } = {}, options?: CallOptions): Promise<BlockPage> {
    const { blocks = [], tip = 0, next = "", truncated = [] } = await this.#call("Events_ListBlocks", { query: { ...query, order: "newest" } }, options);
    return { blocks: blocks as Block[], tip, next: next || undefined, truncated };
  }

  /** Returns a block, whole, and the seq of the last event that is folded into it. */
  async block(blockId: string, options?: CallOptions): Promise<{ block: Block; tip: number }> {
    const { block, tip = 0 } = await call(this.http, "Events_GetBlock", { path: { session_id: this.id, block_id: blockId } }, options);
    return { block: block as Block, tip };
  }

  /** Returns when something happened in the session: numbers of events in up to 1,000 buckets of time, and marks. */
  timeline(query: { buckets?: number; minPosition?: string } = {}, options?: CallOptions): Promise<Schemas["spool.v1.Timeline"]> {
    return this.#call("Events_GetTimeline", { query }, options);
  }

  /** Returns the session as it was after event `at`, with all blocks; without `at`, after its last event. */
  async state(at?: number, options?: CallOptions): Promise<SessionState> {
    const blocks: Block[] = [];
    const incompleteText: Schemas["spool.v1.IncompleteText"][] = [];
    for (let pageToken: string | undefined; ; ) {
      const { nextPageToken, ...page } = await this.#call("Sessions_GetSessionState", { query: { at, pageToken } }, options);
      for (const block of page.blocks ?? []) blocks.push(block as Block);
      for (const text of page.incompleteText ?? []) incompleteText.push(text);
      if (!nextPageToken) return { ...page, blocks, incompleteText };
      pageToken = nextPageToken;
    }
  }

  /** Returns what changed from one event to another. */
  diff(from: number, to: number, options?: CallOptions): Promise<CallResult<"Sessions_DiffSession">> {
    return this.#call("Sessions_DiffSession", { query: { from, to } }, options);
  }

  /** Makes a session that continues from event `at` of this one; without `at`, from the last event. */
  fork(body: BodyOf<"Sessions_ForkSession"> = {}, options?: CallOptions): Promise<CallResult<"Sessions_ForkSession">> {
    return this.#call("Sessions_ForkSession", { body }, options);
  }

  /** Returns the approval requests of the session, the first page. */
  approvals(query: { status?: string; pageToken?: string } = {}, options?: CallOptions): Promise<CallResult<"Approvals_ListApprovals">> {
    return call(this.http, "Approvals_ListApprovals", { query: { ...query, sessionId: this.id } }, options);
  }

  /** Decides an approval request. */
  decide(approvalId: string, decision: BodyOf<"Approvals_DecideApproval">, options?: CallOptions): Promise<CallResult<"Approvals_DecideApproval">> {
    return call(this.http, "Approvals_DecideApproval", { path: { approval_id: approvalId }, body: decision }, options);
  }

  /** Waits until an execution of the session has ended, and returns it with its result. */
  async waitForEnd(executionId: string, options: CallOptions = {}): Promise<Schemas["spool.v1.Execution"]> {
    const read = (minPosition?: string) => call(this.http, "Executions_GetExecution", { path: { execution_id: executionId }, query: { minPosition } }, options);
    const { tip } = await this.#call("Events_ListEvents", { query: { limit: 1 } }, options);
    const execution = await read();
    if (/^(completed|failed|cancelled)$/.test(execution.phase ?? "")) return execution;
    for await (const event of this.follow({ after: tip, text: false, signal: options.signal })) {
      if (event.executionId === executionId && isTerminal(event)) return read(event.position);
    }
    throw new Error(`session ${this.id} was deleted before execution ${executionId} ended`);
  }

  #call<O extends SessionOperation>(operation: O, params: Omit<CallParams<O>, "path">, options?: CallOptions): Promise<CallResult<O>> {
    return call(this.http, operation, { ...params, path: { session_id: this.id } } as unknown as CallParams<O>, options);
  }
}

type SessionOperation = {
  [O in Operation]: CallParams<O> extends { path: { session_id: string } } ? O : never;
}[Operation];

/** Options of an upload. */
export interface UploadOptions extends CallOptions {
  /** Permission bits in octal, such as "755". */
  mode?: string;
  /** Called with the number of bytes that were sent, and the total, if it is known. */
  onProgress?: (sent: number, total: number | undefined) => void;
}

/** The files of a session's workspace. */
export class SessionFiles {
  /** @internal */
  constructor(
    private readonly http: Http,
    private readonly sessionId: string,
  ) {}

  /** Lists the files of the last snapshot; with `at`, of the last snapshot before an event; with `live`, of the sandbox. */
  list(query: { dir?: string; at?: number; live?: boolean; minPosition?: string } = {}, options?: CallOptions): Promise<Schemas["FileListing"]> {
    return this.#request("GET", undefined, { ...options, whole: true, query, headers: { Accept: "application/json", ...options?.headers } }).then((r) => r.json());
  }

  /** Returns a file as a response, whose body is a stream: `(await files.get("a.txt")).text()`. */
  get(path: string, query: { at?: number; live?: boolean; minPosition?: string } = {}, options?: CallOptions): Promise<Response> {
    return this.#request("GET", path, { ...options, query });
  }

  /** Puts a file into the workspace. A ReadableStream is sent once; other bodies are sent again after a failure. */
  async put(path: string, body: Blob | Uint8Array<ArrayBuffer> | string | ReadableStream<Uint8Array>, options: UploadOptions = {}): Promise<Schemas["FileAccepted"]> {
    const { mode, onProgress, ...rest } = options;
    const headers = { "Content-Type": "application/octet-stream", ...rest.headers };
    const request = { ...rest, whole: true, headers, query: { mode } };
    const upload = body instanceof ReadableStream ? body : new Blob([body]);
    const total = upload instanceof Blob ? upload.size : undefined;
    if (onProgress && upload instanceof Blob && hasUploadProgress) {
      return (await this.#request("PUT", path, { ...request, body: upload, onUpload: (sent) => onProgress(sent, total) })).json();
    }
    const counted = (stream: ReadableStream<Uint8Array>) => (onProgress ? countBytes(stream, (sent) => onProgress(sent, total)) : stream);
    const sent = upload instanceof ReadableStream ? counted(upload) : onProgress ? () => counted(upload.stream()) : upload;
    const response = await this.#request("PUT", path, { ...request, body: sent });
    return response.json();
  }

  /** Removes a file, or a folder with everything in it. */
  async remove(path: string, options?: CallOptions): Promise<Schemas["FileChange"]> {
    return (await this.#request("DELETE", path, { ...options, whole: true })).json();
  }

  #request(method: string, path: string | undefined, options: CallOptions & Pick<HttpRequest, "query" | "body" | "onUpload" | "whole"> = {}): Promise<Response> {
    const template = "/api/sessions/{id}/files" + (path === undefined ? "" : "/{path}");
    return this.http.send({ ...options, method, path: expandPath(template, { id: this.sessionId, path }), repeatable: true });
  }
}

function countBytes(body: ReadableStream<Uint8Array>, report: (sent: number) => void): ReadableStream<Uint8Array> {
  let sent = 0;
  return body.pipeThrough(
    new TransformStream<Uint8Array, Uint8Array>({
      transform(chunk, controller) {
        controller.enqueue(chunk);
        report((sent += chunk.byteLength));
      },
    }),
  );
}
