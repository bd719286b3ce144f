import type { Schemas } from "@spoolhq/client";
import { StatusMark, type Status } from "./conversation/status";

type SessionRow = Schemas["spool.v1.Session"];

const marks: Record<string, [Status, string]> = {
  queued: ["running", "queued"],
  starting: ["running", "starting"],
  running: ["running", "running"],
  waiting_for_approval: ["waiting", "waiting for approval"],
  paused: ["waiting", "paused"],
  completed: ["done", "completed"],
  idle: ["done", "idle"],
  failed: ["failed", "failed"],
  cancelled: ["cancelled", "cancelled"],
  closed: ["cancelled", "closed"],
};

/** Returns the words for a phase of a session or of an execution. */
export function phaseWords(phase: string | undefined): string {
  return marks[phase ?? "idle"]?.[1] ?? phase ?? "";
}

/** Returns the phase of a session for people: the phase, or closed. */
export function phaseOf(session: SessionRow): string {
  return session.status === "closed" ? "closed" : (session.phase ?? "idle");
}

/** The mark of a phase. */
export function PhaseMark({ phase }: { phase: string | undefined }) {
  return <StatusMark status={marks[phase ?? "idle"]?.[0] ?? "done"} word={phaseWords(phase)} />;
}
