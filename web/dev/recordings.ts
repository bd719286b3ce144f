import { foldBlocks, type Block, type SessionEvent } from "@spoolhq/client";
import type { Subagent } from "../src/conversation/rows";

/** A recorded conversation. */
export interface Recording {
  name: string;
  blocks: readonly Block[];
  subagents: ReadonlyMap<string, Subagent>;
}

const vectors = import.meta.glob<{ feed: SessionEvent[] }>("../../pkg/events/blocks/testdata/*.json", { import: "default" });
const journals = import.meta.glob<string>("../../cmd/runner/internal/*/testdata/*/journal.jsonl", { query: "?raw", import: "default" });

/** The names of all recordings: vectors of the block reducer, and journals of the runner with real agents. */
export const names: readonly string[] = [...Object.keys(vectors), ...Object.keys(journals)];

/** Loads a recording. */
export async function load(name: string): Promise<Recording> {
  const events = vectors[name] ? (await vectors[name]()).feed : (await journals[name]!()).trim().split("\n").map(journalEvent);
  return record(name, events);
}

/** Folds events into a recording: a block belongs to the conversation that began it. */
export function record(name: string, events: readonly SessionEvent[]): Recording {
  const blocks = foldBlocks(events);
  const subagents = new Map<string, Subagent>();
  for (const { type, data } of events) {
    if (type !== "subagent_spawned") continue;
    const own = blocks.filter((block) => block.conversationId === data.subConversationId);
    const end = events.find((event) => event.type === "subagent_completed" && event.data.subagentId === data.subagentId);
    subagents.set(data.subagentId, { id: data.subagentId, name: data.name, blocks: own, status: !end ? "running" : end.data.isError ? "failed" : "completed", streamingBlockIds: new Set() });
  }
  return { name, blocks: blocks.filter((block) => (block.conversationId ?? "main") === "main"), subagents };
}

/** Returns a line of a journal as the event that the executor makes of it. */
function journalEvent(line: string): SessionEvent {
  const { n, ...event } = JSON.parse(line);
  return { seq: n, position: `0-${n}`, id: `evt_${n}`, sessionId: "ses_1", source: "runner", ...event };
}
