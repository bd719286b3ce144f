// Renders the hooks of @spoolhq/react in a page without a browser: creates a session, sends messages, and prints what the hooks show.
import { act, paintUntil, renderHook } from "../../../clients/react/test/dom.mjs";
import { SpoolClient } from "../../../clients/typescript/dist/index.js";
import * as spool from "../../../clients/react/dist/index.js";

const { SPOOL_URLS, TURNS } = process.env;
const client = new SpoolClient({ baseUrl: SPOOL_URLS.split(","), retry: { minDelayMs: 2 } });
const view = await renderHook({ after() {} }, client, (id) => ({
  list: spool.useSessionList(),
  created: spool.useAgentSession(id),
  messages: spool.useMessages(id),
  execution: spool.useExecution(id),
  usage: spool.useUsage(id),
  subagents: spool.useSubagents(id),
  files: spool.useWorkspaceFiles(id),
  replay: spool.useReplay(id, { speed: "max" }),
}), { strict: true });
await paintUntil(() => !view.last.list.isLoading);
let id;
await act(async () => (id = await view.last.created.createSession(undefined, "spool")));
await view.render(id);
const keys = new Set(); // of all user messages in all renders
for (let turn = 1; turn <= Number(TURNS); turn++) {
  const sent = view.last.messages.sendMessage("list the folder");
  await paintUntil(() => view.last.messages.blocks.filter((b) => b.kind === "user_message").length === turn);
  await sent;
  await paintUntil(() => view.last.execution.phase === "completed" && view.last.usage.byExecution.length === turn && !view.last.messages.isStreaming);
}
for (const { messages } of view.seen) messages.blocks.filter((b) => b.kind === "user_message").forEach((b) => keys.add(messages.keyOf(b)));
await paintUntil(() => view.last.list.getSession(id)?.executions === Number(TURNS) && view.last.list.getSession(id).phase === "idle");
await act(() => view.last.replay.seek(1));
await act(() => view.last.replay.play());
await paintUntil(() => view.last.replay.isPlaying);
await paintUntil(() => !view.last.replay.isPlaying);
console.log(JSON.stringify({
  session: id,
  blocks: view.last.messages.blocks,
  replayed: view.last.replay.blocks,
  keys: keys.size,
  streamed: view.seen.some((s) => s.messages.isStreaming),
  usage: view.last.usage.usage,
  errors: [view.last.list, view.last.created, view.last.files, view.last.replay].map((h) => h.error?.message).filter(Boolean),
}));
await view.unmount();
