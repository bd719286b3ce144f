import { AgentServiceProvider, useExecution, useMessages } from "@spoolhq/react";
import { StrictMode, useState, type FormEvent } from "react";
import { createRoot } from "react-dom/client";

function Chat({ id }: { id: string }) {
  const { blocks, keyOf, sendMessage, isStreaming, hasOlder, loadOlder, connection, error } = useMessages(id);
  const { phase, interrupt } = useExecution(id);
  const [text, setText] = useState("");
  const send = (event: FormEvent) => {
    event.preventDefault();
    sendMessage(text).then(
      () => setText(""),
      () => undefined, // the hook returns the error
    );
  };
  return (
    <main>
      {hasOlder && <button onClick={() => void loadOlder()}>Earlier messages</button>}
      <ol role="log" aria-busy={isStreaming}>
        {blocks.map((block) =>
          block.kind === "user_message" || block.kind === "assistant_text" ? (
            <li key={keyOf(block)} data-kind={block.kind} data-status={block.status}>
              {block.content}
            </li>
          ) : block.kind === "tool_use" ? (
            <li key={block.id}>
              <code>{block.displayName ?? block.toolName}</code>
            </li>
          ) : null,
        )}
      </ol>
      <p role="status">{error ? error.message : connection.status === "reconnecting" ? "Reconnecting" : phase}</p>
      <form onSubmit={send}>
        <input aria-label="Message" value={text} onChange={(event) => setText(event.target.value)} required />
        <button>Send</button>
        {phase === "running" && (
          <button type="button" onClick={() => void interrupt()}>
            Stop
          </button>
        )}
      </form>
    </main>
  );
}

// The server of this page creates the conversation, and adds the API key to requests.
const response = await fetch("/conversation", { method: "POST" });
const { sessionId } = (await response.json()) as { sessionId: string };
createRoot(document.getElementById("root")!).render(
  <StrictMode>
    <AgentServiceProvider apiUrl={location.origin}>
      <Chat id={sessionId} />
    </AgentServiceProvider>
  </StrictMode>,
);
