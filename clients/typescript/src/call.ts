import { operationTable } from "./generated/operations.js";
import type { operations } from "./generated/schema.js";
import { expandPath, type CallOptions, type Http } from "./http.js";

/** The name of an operation of the API, as in its OpenAPI document, such as Sessions_CreateSession. */
export type Operation = keyof typeof operationTable;

type Group<O extends Operation, G extends "path" | "query"> = NonNullable<operations[O]["parameters"][G]>;
type Content<R> = R extends { content: { "application/json": infer J } } ? J : never;
type JsonBody<O extends Operation> = operations[O] extends { requestBody: { content: { "application/json": infer B } } } ? B : never;

/** The parameters of an operation: those of its path, of its query, and its body. */
export type CallParams<O extends Operation> = ([Group<O, "path">] extends [never] ? unknown : { path: Group<O, "path"> }) &
  ([Group<O, "query">] extends [never] ? unknown : { query?: { [K in keyof Group<O, "query">]?: Group<O, "query">[K] | undefined } }) &
  ((typeof operationTable)[O]["body"] extends ""
    ? unknown
    : [JsonBody<O>] extends [never]
      ? { body: BodyInit }
      : { body?: JsonBody<O> });

type SuccessOf<R> = Content<R[keyof R & (200 | 201 | 202)]>;

/** The result of an operation: its JSON, or the response itself if it has another form. */
export type CallResult<O extends Operation> = (typeof operationTable)[O]["json"] extends true ? SuccessOf<operations[O]["responses"]> : Response;

/** Calls an operation. */
export async function call<O extends Operation>(http: Http, operation: O, params: CallParams<O>, options: CallOptions = {}): Promise<CallResult<O>> {
  const op = operationTable[operation];
  const { path, query, body } = params as { path?: Record<string, unknown>; query?: object; body?: unknown };
  const headers: Record<string, string> = { ...options.headers };
  if (op.body) headers["Content-Type"] ??= op.body;
  const response = await http.send({
    method: op.method,
    path: expandPath(op.path, path),
    query,
    body: op.body === "application/json" ? JSON.stringify(body ?? {}) : (body as BodyInit | undefined),
    headers,
    signal: options.signal,
    whole: op.json,
    // One key for all attempts, so that the operation happens once.
    idempotencyKey: op.idempotencyKey ? (options.idempotencyKey ?? newIdempotencyKey()) : undefined,
    repeatable: op.idempotencyKey || op.method !== "POST",
  });
  return (op.json ? await response.json() : response) as CallResult<O>;
}

function newIdempotencyKey(): string {
  // crypto.randomUUID does not exist in pages that were loaded without TLS.
  return Array.from(crypto.getRandomValues(new Uint8Array(16)), (byte) => byte.toString(16).padStart(2, "0")).join("");
}
