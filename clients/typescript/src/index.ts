export { BlockView, foldBlocks, type Block, type LoadedSkill, type Part, type Plan, type PlanItem, type Step, type TodoItem } from "./blocks.js";
export type { CallParams, CallResult, Operation } from "./call.js";
export { SpoolClient } from "./client.js";
export { ConnectionError, SpoolError, StreamEndedError, type Problem, type StreamEndReason } from "./errors.js";
export { isTerminal, type ReplayNotice, type SessionEvent } from "./events.js";
export type { CallOptions, ClientOptions, RetryOptions } from "./http.js";
export { Session, SessionFiles, type Schemas, type SessionState, type UploadOptions } from "./session.js";
export { EventStream, type FollowOptions, type ReplayOptions, type StreamStatus } from "./stream.js";
