// Compiled, never run: what users write must have types, and mistakes must not compile.
import { BlockView, SpoolClient, SpoolError, StreamEndedError, type Block, type Schemas } from "../src/index.js";

export async function use(): Promise<void> {
  const client = new SpoolClient({ baseUrl: "http://127.0.0.1:7700", apiKey: "spool_sk_" });
  const session = await client.createSession({ architecture: "spool" });
  const { executionId } = await session.post("hello");
  const view = new BlockView();
  try {
    for await (const event of session.follow({ after: 0, signal: AbortSignal.timeout(1000) })) view.apply(event);
  } catch (error) {
    if (error instanceof StreamEndedError && error.reason === "cursor_ahead") console.log(error.tip);
    if (error instanceof SpoolError) console.log(error.code, error.field, error.status, error.detail);
  }
  for await (const item of session.replay({ speed: "max" })) if (item.type === "gap_shortened") console.log(item);
  const texts = view.blocks().map((block: Block) => (block.kind === "assistant_text" ? block.content : block.id));
  const execution: Schemas["spool.v1.Execution"] = await session.waitForEnd(executionId!);
  const sessions = await client.call("Sessions_ListSessions", { query: { pageSize: 10 } });
  await client.call("Agents_ListAgents");
  const archive: Response = await client.call("Skills_Archive", { path: { slug: "pdf" } });
  console.log(texts, execution.phase, sessions.sessions?.[0]?.sessionId, archive.body);

  // @ts-expect-error the operation does not exist
  await client.call("Sessions_Unknown", {});
  // @ts-expect-error the path is missing
  await client.call("Sessions_GetSession", {});
  // @ts-expect-error the parameter does not exist
  await client.call("Sessions_ListSessions", { query: { size: 10 } });
  // @ts-expect-error the field does not exist
  await session.fork({ where: 4 });
  // @ts-expect-error the speed is not a number
  session.replay({ speed: "fast" });
}
