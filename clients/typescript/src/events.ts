import type { components } from "./generated/schema.js";

/** One event of a session, the same on all transports; docs/events.md lists the types and their data. */
export interface SessionEvent {
  /** The number of the event in its session: 1, 2, 3, … A text_delta has the seq of the last stored event. */
  seq: number;
  position: string;
  /** Absent on a text_delta. */
  id?: string;
  /** The type, such as block_start. Types that this client does not know are passed on like all others. */
  type: string;
  time: string;
  sessionId: string;
  executionId?: string;
  conversationId?: string;
  source: string;
  data: any;
  metadata?: components["schemas"]["spool.v1.EventMetadata"];
}

/** What a replay says besides the events; docs/replay.md describes the fields. */
export type ReplayNotice =
  | { type: "replay_started"; from: number; to: number; tip: number; speed: number | string }
  | { type: "gap_shortened"; seq: number; gapMs: number; leftOutMs: number }
  | { type: "block_whole"; seq: number; blockId: string; shownBytes: number }
  | { type: "replay_ended"; seq: number };

const terminalTypes = new Set(["execution_completed", "execution_failed", "execution_cancelled", "execution_withdrawn"]);

/** Reports whether an event ends its execution. */
export function isTerminal(event: SessionEvent): boolean {
  return terminalTypes.has(event.type);
}
