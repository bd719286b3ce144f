import { SpoolClient } from "@spoolhq/client";
import { AgentServiceProvider, isToolUseBlock, useAgentSession, useApprovals, useMessages, useSessionList } from "@spoolhq/react";

export function Chat({ id }: { id?: string }) {
  const { blocks, sendMessage, streamingBlockIds, connection } = useMessages(id);
  const { session, createSession } = useAgentSession(id);
  const { sessions } = useSessionList({ phase: "running", search: "fix" });
  const { approvals, decide } = useApprovals(id);
  // @ts-expect-error the decision does not exist
  void decide("apr_1", { decision: "perhaps" });
  // @ts-expect-error the filter does not exist
  useSessionList({ colour: "red" });
  return (
    <main onClick={() => void createSession("agent", "spool", { metadata: { a: 1 } }).then((created: string) => created)}>
      {connection.status} {connection.reason} {session?.phase} {sessions.length} {approvals[0]?.title}
      {blocks.map((b) => (
        <p key={b.id} onClick={() => void sendMessage("hi")}>
          {isToolUseBlock(b) ? b.toolName : b.kind} {streamingBlockIds.has(b.id)}
        </p>
      ))}
    </main>
  );
}

export const byClient = <AgentServiceProvider client={new SpoolClient({ baseUrl: "http://x" })}><Chat /></AgentServiceProvider>;
export const bySettings = <AgentServiceProvider apiUrl="http://x" apiKey="key" debug><Chat id="ses_1" /></AgentServiceProvider>;
// @ts-expect-error there is no client and no URL
export const byNothing = <AgentServiceProvider><Chat /></AgentServiceProvider>;
