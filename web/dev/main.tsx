import type { Block } from "@spoolhq/client";
import { StrictMode, useEffect, useState } from "react";
import { createRoot } from "react-dom/client";
import { ApprovalCard } from "../src/conversation/approval";
import { ConversationList } from "../src/conversation/list";
import "../src/tokens.css";
import "../src/base.css";
import "../src/conversation/conversation.css";
import "../src/conversation/approval.css";
import "./dev.css";
import { load, names, type Recording } from "./recordings";
import { approvals, hostile, sample, turns } from "./samples";

const made: Record<string, readonly Block[]> = { sample, hostile, approvals: sample.slice(0, 2), streaming: [], long: longConversation(2000) };

/** Returns a conversation of many turns. */
function longConversation(count: number): Block[] {
  return Array.from({ length: count }, (_, i) => sample.map((block) => ({ ...block, id: `${block.id}_${i}`, executionId: `exe_${i}` }))).flat();
}

const nothing = new Set<string>();
const idOf = (block: Block) => block.id;

/** Shows the recording that the hash of the URL names. */
function Page() {
  const [name, setName] = useState(decodeURIComponent(location.hash.slice(1)) || "sample");
  const [recording, setRecording] = useState<Recording>();
  useEffect(() => {
    const listen = () => setName(decodeURIComponent(location.hash.slice(1)));
    addEventListener("hashchange", listen);
    return () => removeEventListener("hashchange", listen);
  }, []);
  useEffect(() => {
    if (made[name]) setRecording({ name, blocks: made[name], subagents: new Map() });
    else void load(name).then(setRecording);
  }, [name]);
  const streamed = useStreaming(name === "streaming");
  const blocks = name === "streaming" ? streamed : (recording?.blocks ?? []);
  return (
    <div className="dev">
      <select aria-label="Recording" value={name} onChange={(event) => (location.hash = encodeURIComponent(event.target.value))}>
        {[...Object.keys(made), ...names].map((each) => (
          <option key={each}>{each}</option>
        ))}
      </select>
      <ConversationList
        key={name}
        blocks={blocks}
        streamingBlockIds={new Set(blocks.filter((block) => block.status === "pending").map((block) => block.id))}
        subagents={recording?.subagents ?? new Map()}
        turns={name === "streaming" ? new Map() : turns}
        approvals={name === "approvals" ? approvals : []}
        renderApproval={(approval) => <ApprovalCard approval={approval} onDecide={() => Promise.reject(new Error("a page for development decides nothing"))} />}
        hasOlder={false}
        isLoading={false}
        loadOlder={() => Promise.resolve()}
        loadWhole={() => undefined}
        truncatedBlockIds={nothing}
        keyOf={idOf}
      />
    </div>
  );
}

/** Returns the sample as it grows, a few characters per frame. */
function useStreaming(enabled: boolean): readonly Block[] {
  const [shown, setShown] = useState(0);
  useEffect(() => {
    if (!enabled) return;
    let frame = requestAnimationFrame(function next() {
      setShown((n) => n + 5);
      frame = requestAnimationFrame(next);
    });
    return () => cancelAnimationFrame(frame);
  }, [enabled]);
  let left = shown;
  return Array.from({ length: 4 }, (_, i) => sample.map((block) => ({ ...block, id: `${block.id}_${i}` })))
    .flat()
    .flatMap((block): Block[] => {
      if (left <= 0) return [];
      const length = "content" in block ? (block.content?.length ?? 0) : 20;
      const known = left;
      left -= length;
      return left >= 0 ? [block] : [{ ...block, status: "pending", ..."content" in block && { content: block.content?.slice(0, known) } } as Block];
    });
}

createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <Page />
  </StrictMode>,
);
