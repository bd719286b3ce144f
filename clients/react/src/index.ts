export { useWorkspaceFiles, type UseWorkspaceFiles } from "./files-hook.js";
export * from "./guards.js";
export { useApprovals, useSessionList, type ApprovalDecision, type UseApprovals, type UseSessionList } from "./list-hooks.js";
export type { SessionFilters } from "./list-source.js";
export { AgentServiceContext, AgentServiceProvider, useClient, type AgentServiceProviderProps } from "./provider.js";
export { useReplay, type UseReplay } from "./replay-hook.js";
export {
  useAgentSession,
  useEvents,
  useExecution,
  useExecutions,
  useLogs,
  useMessages,
  usePlan,
  useSubagents,
  useUsage,
  type Subagent,
  type SubagentStatus,
  type UseAgentSession,
  type UseEvents,
  type UseExecution,
  type UseMessages,
  type UsePlan,
  type UseSubagents,
  type UseUsage,
} from "./session-hooks.js";
export type { ConversationMetadata, MessageOptions } from "./session-source.js";
export type { Connection } from "./source.js";
