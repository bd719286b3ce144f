package store

import (
	"time"

	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// Postgres's names of the column types.
const (
	pgText        = "text"
	pgInt2        = "int2"
	pgInt4        = "int4"
	pgInt8        = "int8"
	pgFloat8      = "float8"
	pgBoolean     = "bool"
	pgTimestamptz = "timestamptz"
)

// newTables returns all tables of the read models, with the columns that the migrations of package readmodel create.
func newTables() *readModelTables {
	return &readModelTables{
		sessions: sessionTable(), executions: executionTable(), blocks: blockTable(),
		calls: toolCallTable(), conversations: conversationTable(), approvals: approvalTable(), sandboxes: sandboxTable(), files: fileTable(), usage: modelUsageTable(),
		entries: catalogueEntryTable(), versions: catalogueVersionTable(), tenantUsage: tenantUsageTable(), tenantBudgets: tenantBudgetTable(), tenantLimits: tenantLimitsTable(), audit: auditTable(),
		states: newTable(readmodel.TableSessionStates, 3,
			newColumn("tenant", pgText, func(r *fold.SavedSessionState) *string { return &r.Tenant }),
			newColumn("session", pgText, func(r *fold.SavedSessionState) *string { return &r.Session }),
			newColumn("seq", pgInt8, func(r *fold.SavedSessionState) *int64 { return &r.Seq }),
			newColumn("version", pgInt2, func(r *fold.SavedSessionState) *int16 { return &r.Version }),
			newColumn("state", pgText, func(r *fold.SavedSessionState) *string { return &r.JSON })),
		deleted: newTable(readmodel.TableDeletedSessions, 2,
			newColumn("tenant", pgText, func(r *fold.DeletedSession) *string { return &r.Tenant }),
			newColumn("id", pgText, func(r *fold.DeletedSession) *string { return &r.ID }),
			newColumn("grp", pgInt2, func(r *fold.DeletedSession) *int16 { return &r.Group }),
			newColumn("deleted_at", pgTimestamptz, func(r *fold.DeletedSession) *time.Time { return &r.At }),
			newColumn("spent", pgText, func(r *fold.DeletedSession) *string { return &r.Spent }),
			newColumn("removed", pgBoolean, func(r *fold.DeletedSession) *bool { return &r.Removed }),
			newColumn("parent", pgText, func(r *fold.DeletedSession) *string { return &r.Parent }),
			newColumn("forked", pgText, func(r *fold.DeletedSession) *string { return &r.Forked }),
			newColumn("agent", pgText, func(r *fold.DeletedSession) *string { return &r.Agent }),
			newColumn("changed_at", pgInt8, func(r *fold.DeletedSession) *int64 { return &r.ChangedAt })),
		events: newTable(readmodel.TableEvents, 3,
			newColumn("tenant", pgText, func(r *fold.Event) *string { return &r.Tenant }),
			newColumn("session", pgText, func(r *fold.Event) *string { return &r.Session }),
			newColumn("seq", pgInt8, func(r *fold.Event) *int64 { return &r.Seq }),
			newColumn("type", pgText, func(r *fold.Event) *string { return &r.Type }),
			newColumn("event", pgText, func(r *fold.Event) *string { return &r.JSON })),
		keys: newTable(readmodel.TableKeys, 2,
			newColumn("tenant", pgText, func(r *fold.APIKey) *string { return &r.Tenant }),
			newColumn("id", pgText, func(r *fold.APIKey) *string { return &r.ID }),
			newColumn("grp", pgInt2, func(r *fold.APIKey) *int16 { return &r.Group }),
			newColumn("name", pgText, func(r *fold.APIKey) *string { return &r.Name }),
			newColumn("prefix", pgText, func(r *fold.APIKey) *string { return &r.Prefix }),
			newColumn("sha256", pgText, func(r *fold.APIKey) *string { return &r.SHA256 }),
			newColumn("created_at", pgTimestamptz, func(r *fold.APIKey) *time.Time { return &r.CreatedAt }),
			newColumn("revoked_at", pgTimestamptz, func(r *fold.APIKey) **time.Time { return &r.RevokedAt }),
			newColumn("role", pgText, func(r *fold.APIKey) *string { return &r.Role }),
			newColumn("agents", pgText, func(r *fold.APIKey) *string { return &r.Agents }),
			newColumn("expires_at", pgTimestamptz, func(r *fold.APIKey) **time.Time { return &r.ExpiresAt }),
			newColumn("created_by", pgText, func(r *fold.APIKey) *string { return &r.CreatedBy })),
		poison: newTable(readmodel.TablePoison, 1,
			newColumn("position", pgText, func(r *fold.PoisonCommit) *string { return &r.Position }),
			newColumn("grp", pgInt2, func(r *fold.PoisonCommit) *int16 { return &r.Group }),
			newColumn("subject", pgText, func(r *fold.PoisonCommit) *string { return &r.Subject }),
			newColumn("reason", pgText, func(r *fold.PoisonCommit) *string { return &r.Reason }),
			newColumn("at", pgTimestamptz, func(r *fold.PoisonCommit) *time.Time { return &r.At })),
	}
}

func sessionTable() table[fold.Session] {
	return newTable(readmodel.TableSessions, 2,
		newColumn("tenant", pgText, func(r *fold.Session) *string { return &r.Tenant }),
		newColumn("id", pgText, func(r *fold.Session) *string { return &r.ID }),
		newColumn("grp", pgInt2, func(r *fold.Session) *int16 { return &r.Group }),
		newColumn("status", pgText, func(r *fold.Session) *string { return &r.Status }),
		newColumn("agent", pgText, func(r *fold.Session) *string { return &r.Agent }),
		newColumn("agent_version", pgText, func(r *fold.Session) *string { return &r.AgentVersion }),
		newColumn("architecture", pgText, func(r *fold.Session) *string { return &r.Architecture }),
		newColumn("provider", pgText, func(r *fold.Session) *string { return &r.Provider }),
		newColumn("options", pgText, func(r *fold.Session) *string { return &r.Options }),
		newColumn("metadata", pgText, func(r *fold.Session) **string { return &r.Metadata }),
		newColumn("created_at", pgTimestamptz, func(r *fold.Session) *time.Time { return &r.CreatedAt }),
		newColumn("updated_at", pgTimestamptz, func(r *fold.Session) *time.Time { return &r.UpdatedAt }),
		newColumn("tip", pgInt8, func(r *fold.Session) *int64 { return &r.Tip }),
		newColumn("tip_position", pgText, func(r *fold.Session) *string { return &r.TipPosition }),
		newColumn("active_execution", pgText, func(r *fold.Session) *string { return &r.ActiveExecution }),
		newColumn("queued", pgInt4, func(r *fold.Session) *int32 { return &r.Queued }),
		newColumn("executions", pgInt4, func(r *fold.Session) *int32 { return &r.Executions }),
		newColumn("idle", pgBoolean, func(r *fold.Session) *bool { return &r.Idle }),
		newColumn("snapshot", pgText, func(r *fold.Session) *string { return &r.Snapshot }),
		newColumn("snapshot_at", pgTimestamptz, func(r *fold.Session) **time.Time { return &r.SnapshotAt }),
		newColumn("workspace_files", pgInt8, func(r *fold.Session) *int64 { return &r.WorkspaceFiles }),
		newColumn("workspace_bytes", pgInt8, func(r *fold.Session) *int64 { return &r.WorkspaceBytes }),
		newColumn("agent_ref", pgText, func(r *fold.Session) *string { return &r.AgentRef }),
		newColumn("instance", pgText, func(r *fold.Session) *string { return &r.Instance }),
		newColumn("spent", pgText, func(r *fold.Session) *string { return &r.Spent }),
		newColumn("environments", pgText, func(r *fold.Session) *string { return &r.Environments }),
		newColumn("title", pgText, func(r *fold.Session) *string { return &r.Title }),
		newColumn("parent", pgText, func(r *fold.Session) *string { return &r.Parent }),
		newColumn("forked", pgText, func(r *fold.Session) *string { return &r.Forked }),
		newColumn("sandbox_ms", pgInt8, func(r *fold.Session) *int64 { return &r.SandboxMs }),
		newColumn("sandbox_cost_usd", pgFloat8, func(r *fold.Session) *float64 { return &r.SandboxCostUSD }),
		newColumn("changed_at", pgInt8, func(r *fold.Session) *int64 { return &r.ChangedAt }))
}

func executionTable() table[fold.Execution] {
	return newTable(readmodel.TableExecutions, 3,
		newColumn("tenant", pgText, func(r *fold.Execution) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.Execution) *string { return &r.Session }),
		newColumn("id", pgText, func(r *fold.Execution) *string { return &r.ID }),
		newColumn("ord", pgInt4, func(r *fold.Execution) *int32 { return &r.Ord }),
		newColumn("phase", pgText, func(r *fold.Execution) *string { return &r.Phase }),
		newColumn("code", pgText, func(r *fold.Execution) *string { return &r.Code }),
		newColumn("message", pgText, func(r *fold.Execution) *string { return &r.Message }),
		newColumn("reason", pgText, func(r *fold.Execution) *string { return &r.Reason }),
		newColumn("attempt", pgInt4, func(r *fold.Execution) *int32 { return &r.Attempt }),
		newColumn("executor", pgText, func(r *fold.Execution) *string { return &r.Executor }),
		newColumn("model", pgText, func(r *fold.Execution) *string { return &r.Model }),
		newColumn("input_tokens", pgInt8, func(r *fold.Execution) *int64 { return &r.Input }),
		newColumn("output_tokens", pgInt8, func(r *fold.Execution) *int64 { return &r.Output }),
		newColumn("cache_read_tokens", pgInt8, func(r *fold.Execution) *int64 { return &r.CacheRead }),
		newColumn("cache_write_tokens", pgInt8, func(r *fold.Execution) *int64 { return &r.CacheWrite }),
		newColumn("cost_usd", pgFloat8, func(r *fold.Execution) *float64 { return &r.CostUSD }),
		newColumn("result", pgText, func(r *fold.Execution) *string { return &r.Result }),
		newColumn("metadata", pgText, func(r *fold.Execution) **string { return &r.Metadata }),
		newColumn("queued_at", pgTimestamptz, func(r *fold.Execution) *time.Time { return &r.QueuedAt }),
		newColumn("dispatched_at", pgTimestamptz, func(r *fold.Execution) **time.Time { return &r.DispatchedAt }),
		newColumn("started_at", pgTimestamptz, func(r *fold.Execution) **time.Time { return &r.StartedAt }),
		newColumn("ended_at", pgTimestamptz, func(r *fold.Execution) **time.Time { return &r.EndedAt }),
		newColumn("duration_ms", pgInt8, func(r *fold.Execution) *int64 { return &r.DurationMs }),
		newColumn("first_seq", pgInt8, func(r *fold.Execution) *int64 { return &r.FirstSeq }),
		newColumn("resolved", pgText, func(r *fold.Execution) **string { return &r.Resolved }),
		newColumn("metered", pgBoolean, func(r *fold.Execution) *bool { return &r.Metered }),
		newColumn("query", pgText, func(r *fold.Execution) *string { return &r.Query }),
		newColumn("sandbox_ms", pgInt8, func(r *fold.Execution) *int64 { return &r.SandboxMs }),
		newColumn("sandbox_cost_usd", pgFloat8, func(r *fold.Execution) *float64 { return &r.SandboxCostUSD }),
		newColumn("recovered_from", pgText, func(r *fold.Execution) *string { return &r.RecoveredFrom }),
		newColumn("open_approvals", pgInt4, func(r *fold.Execution) *int32 { return &r.OpenApprovals }))
}

func blockTable() table[fold.Block] {
	return newTable(readmodel.TableBlocks, 3,
		newColumn("tenant", pgText, func(r *fold.Block) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.Block) *string { return &r.Session }),
		newColumn("id", pgText, func(r *fold.Block) *string { return &r.ID }),
		newColumn("execution", pgText, func(r *fold.Block) *string { return &r.Execution }),
		newColumn("conversation", pgText, func(r *fold.Block) *string { return &r.Conversation }),
		newColumn("kind", pgText, func(r *fold.Block) *string { return &r.Kind }),
		newColumn("status", pgText, func(r *fold.Block) *string { return &r.Status }),
		newColumn("execution_ord", pgInt4, func(r *fold.Block) *int32 { return &r.ExecutionOrd }),
		newColumn("first_seq", pgInt8, func(r *fold.Block) *int64 { return &r.FirstSeq }),
		newColumn("last_seq", pgInt8, func(r *fold.Block) *int64 { return &r.LastSeq }),
		newColumn("block", pgText, func(r *fold.Block) *string { return &r.JSON }))
}

func toolCallTable() table[fold.ToolCall] {
	return newTable(readmodel.TableToolCalls, 3,
		newColumn("tenant", pgText, func(r *fold.ToolCall) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.ToolCall) *string { return &r.Session }),
		newColumn("tool_use_id", pgText, func(r *fold.ToolCall) *string { return &r.ID }),
		newColumn("block", pgText, func(r *fold.ToolCall) *string { return &r.Block }),
		newColumn("execution", pgText, func(r *fold.ToolCall) *string { return &r.Execution }),
		newColumn("conversation", pgText, func(r *fold.ToolCall) *string { return &r.Conversation }),
		newColumn("tool_name", pgText, func(r *fold.ToolCall) *string { return &r.ToolName }),
		newColumn("decision", pgText, func(r *fold.ToolCall) *string { return &r.Decision }),
		newColumn("status", pgText, func(r *fold.ToolCall) *string { return &r.Status }),
		newColumn("started_at", pgTimestamptz, func(r *fold.ToolCall) *time.Time { return &r.StartedAt }),
		newColumn("ended_at", pgTimestamptz, func(r *fold.ToolCall) **time.Time { return &r.EndedAt }),
		newColumn("duration_ms", pgInt8, func(r *fold.ToolCall) *int64 { return &r.DurationMs }),
		newColumn("first_seq", pgInt8, func(r *fold.ToolCall) *int64 { return &r.FirstSeq }))
}

func conversationTable() table[fold.Conversation] {
	return newTable(readmodel.TableConversations, 3,
		newColumn("tenant", pgText, func(r *fold.Conversation) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.Conversation) *string { return &r.Session }),
		newColumn("id", pgText, func(r *fold.Conversation) *string { return &r.ID }),
		newColumn("parent", pgText, func(r *fold.Conversation) *string { return &r.Parent }),
		newColumn("execution", pgText, func(r *fold.Conversation) *string { return &r.Execution }),
		newColumn("subagent", pgText, func(r *fold.Conversation) *string { return &r.Subagent }),
		newColumn("tool_use_id", pgText, func(r *fold.Conversation) *string { return &r.ToolUseID }),
		newColumn("name", pgText, func(r *fold.Conversation) *string { return &r.Name }),
		newColumn("status", pgText, func(r *fold.Conversation) *string { return &r.Status }),
		newColumn("started_at", pgTimestamptz, func(r *fold.Conversation) *time.Time { return &r.StartedAt }),
		newColumn("ended_at", pgTimestamptz, func(r *fold.Conversation) **time.Time { return &r.EndedAt }),
		newColumn("duration_ms", pgInt8, func(r *fold.Conversation) *int64 { return &r.DurationMs }),
		newColumn("first_seq", pgInt8, func(r *fold.Conversation) *int64 { return &r.FirstSeq }))
}

func approvalTable() table[fold.Approval] {
	return newTable(readmodel.TableApprovals, 3,
		newColumn("tenant", pgText, func(r *fold.Approval) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.Approval) *string { return &r.Session }),
		newColumn("id", pgText, func(r *fold.Approval) *string { return &r.ID }),
		newColumn("execution", pgText, func(r *fold.Approval) *string { return &r.Execution }),
		newColumn("conversation", pgText, func(r *fold.Approval) *string { return &r.Conversation }),
		newColumn("kind", pgText, func(r *fold.Approval) *string { return &r.Kind }),
		newColumn("tool_name", pgText, func(r *fold.Approval) *string { return &r.ToolName }),
		newColumn("tool_use_id", pgText, func(r *fold.Approval) *string { return &r.ToolUseID }),
		newColumn("title", pgText, func(r *fold.Approval) *string { return &r.Title }),
		newColumn("status", pgText, func(r *fold.Approval) *string { return &r.Status }),
		newColumn("cause", pgText, func(r *fold.Approval) *string { return &r.Cause }),
		newColumn("request", pgText, func(r *fold.Approval) *string { return &r.Request }),
		newColumn("verdict", pgText, func(r *fold.Approval) *string { return &r.Verdict }),
		newColumn("decision", pgText, func(r *fold.Approval) **string { return &r.Decision }),
		newColumn("actor", pgText, func(r *fold.Approval) **string { return &r.Actor }),
		newColumn("requested_seq", pgInt8, func(r *fold.Approval) *int64 { return &r.RequestedSeq }),
		newColumn("requested_at", pgTimestamptz, func(r *fold.Approval) *time.Time { return &r.RequestedAt }),
		newColumn("decided_seq", pgInt8, func(r *fold.Approval) *int64 { return &r.DecidedSeq }),
		newColumn("decided_at", pgTimestamptz, func(r *fold.Approval) **time.Time { return &r.DecidedAt }),
		newColumn("ended_seq", pgInt8, func(r *fold.Approval) *int64 { return &r.EndedSeq }),
		newColumn("ended_at", pgTimestamptz, func(r *fold.Approval) **time.Time { return &r.EndedAt }))
}

func sandboxTable() table[fold.Sandbox] {
	return newTable(readmodel.TableSandboxes, 3,
		newColumn("tenant", pgText, func(r *fold.Sandbox) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.Sandbox) *string { return &r.Session }),
		newColumn("id", pgText, func(r *fold.Sandbox) *string { return &r.ID }),
		newColumn("provider", pgText, func(r *fold.Sandbox) *string { return &r.Provider }),
		newColumn("engine", pgText, func(r *fold.Sandbox) *string { return &r.Engine }),
		newColumn("status", pgText, func(r *fold.Sandbox) *string { return &r.Status }),
		newColumn("reason", pgText, func(r *fold.Sandbox) *string { return &r.Reason }),
		newColumn("created_at", pgTimestamptz, func(r *fold.Sandbox) *time.Time { return &r.CreatedAt }),
		newColumn("ready_at", pgTimestamptz, func(r *fold.Sandbox) **time.Time { return &r.ReadyAt }),
		newColumn("ended_at", pgTimestamptz, func(r *fold.Sandbox) **time.Time { return &r.EndedAt }),
		newColumn("image", pgText, func(r *fold.Sandbox) *string { return &r.Image }),
		newColumn("health", pgText, func(r *fold.Sandbox) *string { return &r.Health }),
		newColumn("health_why", pgText, func(r *fold.Sandbox) *string { return &r.HealthWhy }),
		newColumn("memory_bytes", pgInt8, func(r *fold.Sandbox) *int64 { return &r.MemoryBytes }),
		newColumn("disk_bytes", pgInt8, func(r *fold.Sandbox) *int64 { return &r.DiskBytes }))
}

func fileTable() table[fold.File] {
	return newTable(readmodel.TableFiles, 3,
		newColumn("tenant", pgText, func(r *fold.File) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.File) *string { return &r.Session }),
		newColumn("id", pgText, func(r *fold.File) *string { return &r.ID }),
		newColumn("path", pgText, func(r *fold.File) *string { return &r.Path }),
		newColumn("size", pgInt8, func(r *fold.File) *int64 { return &r.Size }),
		newColumn("binary", pgBoolean, func(r *fold.File) *bool { return &r.Binary }),
		newColumn("deleted", pgBoolean, func(r *fold.File) *bool { return &r.Deleted }),
		newColumn("execution", pgText, func(r *fold.File) *string { return &r.Execution }),
		newColumn("changed_at", pgTimestamptz, func(r *fold.File) *time.Time { return &r.ChangedAt }),
		newColumn("last_seq", pgInt8, func(r *fold.File) *int64 { return &r.LastSeq }))
}

func modelUsageTable() table[fold.ModelUsage] {
	return newTable(readmodel.TableUsage, 3,
		newColumn("tenant", pgText, func(r *fold.ModelUsage) *string { return &r.Tenant }),
		newColumn("session", pgText, func(r *fold.ModelUsage) *string { return &r.Session }),
		newColumn("id", pgText, func(r *fold.ModelUsage) *string { return &r.ID }),
		newColumn("execution", pgText, func(r *fold.ModelUsage) *string { return &r.Execution }),
		newColumn("provider", pgText, func(r *fold.ModelUsage) *string { return &r.Provider }),
		newColumn("model", pgText, func(r *fold.ModelUsage) *string { return &r.Model }),
		newColumn("day", pgText, func(r *fold.ModelUsage) *string { return &r.Day }),
		newColumn("requests", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.Requests }),
		newColumn("failed", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.Failed }),
		newColumn("input_tokens", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.Input }),
		newColumn("output_tokens", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.Output }),
		newColumn("cache_read_tokens", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.CacheRead }),
		newColumn("cache_write_tokens", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.CacheWrite }),
		newColumn("cost_usd", pgFloat8, func(r *fold.ModelUsage) *float64 { return &r.CostUSD }),
		newColumn("prices", pgText, func(r *fold.ModelUsage) *string { return &r.Prices }),
		newColumn("first_byte_ms", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.FirstByteMs }),
		newColumn("duration_ms", pgInt8, func(r *fold.ModelUsage) *int64 { return &r.DurationMs }))
}

func catalogueEntryTable() table[fold.CatalogueEntry] {
	return newTable(readmodel.TableCatalogueEntries, 2,
		newColumn("tenant", pgText, func(r *fold.CatalogueEntry) *string { return &r.Tenant }),
		newColumn("id", pgText, func(r *fold.CatalogueEntry) *string { return &r.ID }),
		newColumn("grp", pgInt2, func(r *fold.CatalogueEntry) *int16 { return &r.Group }),
		newColumn("kind", pgText, func(r *fold.CatalogueEntry) *string { return &r.Kind }),
		newColumn("scope", pgText, func(r *fold.CatalogueEntry) *string { return &r.Scope }),
		newColumn("org", pgText, func(r *fold.CatalogueEntry) *string { return &r.Org }),
		newColumn("slug", pgText, func(r *fold.CatalogueEntry) *string { return &r.Slug }),
		newColumn("latest", pgText, func(r *fold.CatalogueEntry) *string { return &r.Latest }),
		newColumn("state", pgText, func(r *fold.CatalogueEntry) *string { return &r.State }),
		newColumn("removed", pgBoolean, func(r *fold.CatalogueEntry) *bool { return &r.Removed }),
		newColumn("created_at", pgTimestamptz, func(r *fold.CatalogueEntry) *time.Time { return &r.CreatedAt }),
		newColumn("updated_at", pgTimestamptz, func(r *fold.CatalogueEntry) *time.Time { return &r.UpdatedAt }))
}

func catalogueVersionTable() table[fold.CatalogueVersion] {
	return newTable(readmodel.TableCatalogueVersions, 3,
		newColumn("tenant", pgText, func(r *fold.CatalogueVersion) *string { return &r.Tenant }),
		newColumn("id", pgText, func(r *fold.CatalogueVersion) *string { return &r.Entry }),
		newColumn("version", pgText, func(r *fold.CatalogueVersion) *string { return &r.ID }),
		newColumn("grp", pgInt2, func(r *fold.CatalogueVersion) *int16 { return &r.Group }),
		newColumn("spec", pgText, func(r *fold.CatalogueVersion) *string { return &r.Spec }),
		newColumn("document", pgText, func(r *fold.CatalogueVersion) *string { return &r.Document }),
		newColumn("created_at", pgTimestamptz, func(r *fold.CatalogueVersion) *time.Time { return &r.CreatedAt }),
		newColumn("position", pgText, func(r *fold.CatalogueVersion) *string { return &r.Position }),
		newColumn("removed", pgBoolean, func(r *fold.CatalogueVersion) *bool { return &r.Removed }))
}

func tenantUsageTable() table[fold.TenantUsage] {
	return newTable(readmodel.TableTenantUsage, 2,
		newColumn("tenant", pgText, func(r *fold.TenantUsage) *string { return &r.Tenant }),
		newColumn("id", pgText, func(r *fold.TenantUsage) *string { return &r.ID }),
		newColumn("grp", pgInt2, func(r *fold.TenantUsage) *int16 { return &r.Group }),
		newColumn("day", pgText, func(r *fold.TenantUsage) *string { return &r.Day }),
		newColumn("turns", pgInt8, func(r *fold.TenantUsage) *int64 { return &r.Turns }),
		newColumn("tokens", pgInt8, func(r *fold.TenantUsage) *int64 { return &r.Tokens }),
		newColumn("cost_usd", pgFloat8, func(r *fold.TenantUsage) *float64 { return &r.CostUSD }),
		newColumn("time_ms", pgInt8, func(r *fold.TenantUsage) *int64 { return &r.TimeMs }),
		newColumn("events", pgInt8, func(r *fold.TenantUsage) *int64 { return &r.Events }),
		newColumn("event_bytes", pgInt8, func(r *fold.TenantUsage) *int64 { return &r.EventBytes }),
		newColumn("stored_bytes", pgInt8, func(r *fold.TenantUsage) *int64 { return &r.Stored }))
}

func tenantBudgetTable() table[fold.TenantBudget] {
	return newTable(readmodel.TableTenantBudgets, 2,
		newColumn("tenant", pgText, func(r *fold.TenantBudget) *string { return &r.Tenant }),
		newColumn("period", pgText, func(r *fold.TenantBudget) *string { return &r.ID }),
		newColumn("grp", pgInt2, func(r *fold.TenantBudget) *int16 { return &r.Group }),
		newColumn("turns", pgInt8, func(r *fold.TenantBudget) *int64 { return &r.Turns }),
		newColumn("tokens", pgInt8, func(r *fold.TenantBudget) *int64 { return &r.Tokens }),
		newColumn("cost_usd", pgFloat8, func(r *fold.TenantBudget) *float64 { return &r.CostUSD }),
		newColumn("time_ms", pgInt8, func(r *fold.TenantBudget) *int64 { return &r.TimeMs }),
		newColumn("set_at", pgTimestamptz, func(r *fold.TenantBudget) *time.Time { return &r.SetAt }),
		newColumn("removed", pgBoolean, func(r *fold.TenantBudget) *bool { return &r.Removed }))
}

func tenantLimitsTable() table[fold.TenantLimits] {
	return newTable(readmodel.TableTenantLimits, 1,
		newColumn("tenant", pgText, func(r *fold.TenantLimits) *string { return &r.Tenant }),
		newColumn("grp", pgInt2, func(r *fold.TenantLimits) *int16 { return &r.Group }),
		newColumn("limits", pgText, func(r *fold.TenantLimits) *string { return &r.Limits }),
		newColumn("set_at", pgTimestamptz, func(r *fold.TenantLimits) *time.Time { return &r.SetAt }),
		newColumn("removed", pgBoolean, func(r *fold.TenantLimits) *bool { return &r.Removed }))
}

func auditTable() table[fold.AuditRow] {
	return newTable(readmodel.TableAudit, 3,
		newColumn("tenant", pgText, func(r *fold.AuditRow) *string { return &r.Tenant }),
		newColumn("shard", pgInt2, func(r *fold.AuditRow) *int16 { return &r.Shard }),
		newColumn("seq", pgInt8, func(r *fold.AuditRow) *int64 { return &r.Seq }),
		newColumn("grp", pgInt2, func(r *fold.AuditRow) *int16 { return &r.Group }),
		newColumn("at", pgTimestamptz, func(r *fold.AuditRow) *time.Time { return &r.At }),
		newColumn("aspect", pgText, func(r *fold.AuditRow) *string { return &r.Aspect }),
		newColumn("subject", pgText, func(r *fold.AuditRow) *string { return &r.Subject }),
		newColumn("about", pgText, func(r *fold.AuditRow) *string { return &r.About }),
		newColumn("execution", pgText, func(r *fold.AuditRow) *string { return &r.Execution }),
		newColumn("types", pgText, func(r *fold.AuditRow) *string { return &r.Types }),
		newColumn("actor_kind", pgText, func(r *fold.AuditRow) *string { return &r.ActorKind }),
		newColumn("actor", pgText, func(r *fold.AuditRow) *string { return &r.Actor }),
		newColumn("key", pgText, func(r *fold.AuditRow) *string { return &r.Key }),
		newColumn("end_user", pgText, func(r *fold.AuditRow) *string { return &r.User }),
		newColumn("service", pgText, func(r *fold.AuditRow) *string { return &r.Service }),
		newColumn("address", pgText, func(r *fold.AuditRow) *string { return &r.Address }))
}
