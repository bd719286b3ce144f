import { useAgentSession, useUsage } from "@spoolhq/react";
import { count, formatCost, formatDuration, formatSize } from "./conversation/format";
import { Term } from "./term";
import { visible } from "./text";
import "./usage.css";

const number = (n: number | undefined) => (n ?? 0).toLocaleString("en");

/** Tokens and costs of the session and of each turn, as the agent reports them, and the use of its sandbox. */
export function UsageTab({ sessionId }: { sessionId: string }) {
  const { usage, costUsd, byExecution } = useUsage(sessionId);
  const { session, runtime } = useAgentSession(sessionId);
  return (
    <div className="usage">
      <dl className="usage-totals">
        <dt>Cost</dt>
        <dd>{formatCost(costUsd)}</dd>
        <dt>Input tokens</dt>
        <dd>{number(usage.inputTokens)}</dd>
        <dt>Output tokens</dt>
        <dd>{number(usage.outputTokens)}</dd>
        <dt>Read from cache</dt>
        <dd>{number(usage.cacheReadTokens)}</dd>
        <dt>Written to cache</dt>
        <dd>{number(usage.cacheWriteTokens)}</dd>
        {session?.sandboxMs ? (
          <>
            <dt>
              <Term name="sandbox">Sandbox</Term> time
            </dt>
            <dd>
              {formatDuration(session.sandboxMs)} · {formatCost(session.sandboxCostUsd ?? 0)}
            </dd>
          </>
        ) : null}
        {runtime && (
          <>
            <dt>
              <Term name="sandbox">Sandbox</Term>
            </dt>
            <dd>
              {runtime.provider}, {runtime.state}
              {runtime.memoryBytes ? `, ${formatSize(runtime.memoryBytes)} memory` : ""}
              {runtime.diskBytes ? `, ${formatSize(runtime.diskBytes)} disk` : ""}
            </dd>
          </>
        )}
        {session?.workspaceFiles ? (
          <>
            <dt>
              <Term name="workspace">Workspace</Term>
            </dt>
            <dd>
              {count(session.workspaceFiles, "file")}, {formatSize(session.workspaceBytes ?? 0)}
            </dd>
          </>
        ) : null}
      </dl>
      {byExecution.length > 0 && (
        <table className="usage-turns">
          <thead>
            <tr>
              <th scope="col">
                <Term name="execution">Turn</Term>
              </th>
              <th scope="col">Model</th>
              <th scope="col">In</th>
              <th scope="col">Out</th>
              <th scope="col">Cost</th>
            </tr>
          </thead>
          <tbody>
            {byExecution.map((e, index) => (
              <tr key={e.executionId}>
                <th scope="row" title={e.executionId}>
                  {index + 1}
                </th>
                <td className="truncate">{e.model ? visible(e.model) : ""}</td>
                <td>{number(e.usage.inputTokens)}</td>
                <td>{number(e.usage.outputTokens)}</td>
                <td>{formatCost(e.costUsd)}</td>
              </tr>
            ))}
          </tbody>
        </table>
      )}
    </div>
  );
}
