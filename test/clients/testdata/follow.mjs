// Follows a session until some executions have ended, and prints what a client has received.
import { BlockView, SpoolClient, isTerminal } from "../../../clients/typescript/dist/index.js";

const { SPOOL_URLS, SESSION, TURNS, TRANSPORT } = process.env;
const client = new SpoolClient({ baseUrl: SPOOL_URLS.split(","), retry: { minDelayMs: 2 } });
const session = client.session(SESSION);
const view = new BlockView();
const seqs = [];
const texts = {};
let ended = 0;
for await (const event of session.follow({ transport: TRANSPORT })) {
  view.apply(event);
  if (event.type === "text_delta") {
    texts[event.data.blockId] = (texts[event.data.blockId] ?? "") + event.data.delta;
    continue;
  }
  seqs.push(event.seq);
  if (isTerminal(event) && ++ended === Number(TURNS)) {
    const { phase } = await session.waitForEnd(event.executionId);
    console.log(JSON.stringify({ seqs, texts, blocks: view.blocks(), execution: phase }));
    break;
  }
}
