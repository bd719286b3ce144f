package store

import (
	"time"

	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector/internal/fold"
)

// Postgres's names of the column types.
const (
	text        = "text"
	int2        = "int2"
	int4        = "int4"
	int8        = "int8"
	float8      = "float8"
	boolean     = "bool"
	timestamptz = "timestamptz"
)

// newTables returns the tables of the read models, with their columns as in the migrations of package readmodel.
func newTables() *tables {
	return &tables{
		sessions: sessionTable(), executions: executionTable(), blocks: blockTable(),
		calls: callTable(), conversations: conversationTable(), approvals: approvalTable(), sandboxes: sandboxTable(), files: fileTable(), usage: usageTable(),
		entries: entryTable(), versions: versionTable(), tenantUsage: tenantUsageTable(), tenantBudgets: tenantBudgetTable(), tenantLimits: tenantLimitsTable(), audit: auditTable(),
		states: newTable(readmodel.TableSessionStates, 3,
			col("tenant", text, func(r *fold.SavedState) *string { return &r.Tenant }),
			col("session", text, func(r *fold.SavedState) *string { return &r.Session }),
			col("seq", int8, func(r *fold.SavedState) *int64 { return &r.Seq }),
			col("version", int2, func(r *fold.SavedState) *int16 { return &r.Version }),
			col("state", text, func(r *fold.SavedState) *string { return &r.JSON })),
		deleted: newTable(readmodel.TableDeletedSessions, 2,
			col("tenant", text, func(r *fold.Deleted) *string { return &r.Tenant }),
			col("id", text, func(r *fold.Deleted) *string { return &r.ID }),
			col("grp", int2, func(r *fold.Deleted) *int16 { return &r.Group }),
			col("deleted_at", timestamptz, func(r *fold.Deleted) *time.Time { return &r.At }),
			col("spent", text, func(r *fold.Deleted) *string { return &r.Spent }),
			col("removed", boolean, func(r *fold.Deleted) *bool { return &r.Removed }),
			col("parent", text, func(r *fold.Deleted) *string { return &r.Parent }),
			col("forked", text, func(r *fold.Deleted) *string { return &r.Forked })),
		events: newTable(readmodel.TableEvents, 3,
			col("tenant", text, func(r *fold.Event) *string { return &r.Tenant }),
			col("session", text, func(r *fold.Event) *string { return &r.Session }),
			col("seq", int8, func(r *fold.Event) *int64 { return &r.Seq }),
			col("type", text, func(r *fold.Event) *string { return &r.Type }),
			col("event", text, func(r *fold.Event) *string { return &r.JSON })),
		keys: newTable(readmodel.TableKeys, 2,
			col("tenant", text, func(r *fold.APIKey) *string { return &r.Tenant }),
			col("id", text, func(r *fold.APIKey) *string { return &r.ID }),
			col("grp", int2, func(r *fold.APIKey) *int16 { return &r.Group }),
			col("name", text, func(r *fold.APIKey) *string { return &r.Name }),
			col("prefix", text, func(r *fold.APIKey) *string { return &r.Prefix }),
			col("sha256", text, func(r *fold.APIKey) *string { return &r.SHA256 }),
			col("created_at", timestamptz, func(r *fold.APIKey) *time.Time { return &r.CreatedAt }),
			col("revoked_at", timestamptz, func(r *fold.APIKey) **time.Time { return &r.RevokedAt }),
			col("role", text, func(r *fold.APIKey) *string { return &r.Role }),
			col("agents", text, func(r *fold.APIKey) *string { return &r.Agents }),
			col("expires_at", timestamptz, func(r *fold.APIKey) **time.Time { return &r.ExpiresAt }),
			col("created_by", text, func(r *fold.APIKey) *string { return &r.CreatedBy })),
		poison: newTable(readmodel.TablePoison, 1,
			col("position", text, func(r *fold.Poison) *string { return &r.Position }),
			col("grp", int2, func(r *fold.Poison) *int16 { return &r.Group }),
			col("subject", text, func(r *fold.Poison) *string { return &r.Subject }),
			col("reason", text, func(r *fold.Poison) *string { return &r.Reason }),
			col("at", timestamptz, func(r *fold.Poison) *time.Time { return &r.At })),
	}
}

func sessionTable() table[fold.Session] {
	return newTable(readmodel.TableSessions, 2,
		col("tenant", text, func(r *fold.Session) *string { return &r.Tenant }),
		col("id", text, func(r *fold.Session) *string { return &r.ID }),
		col("grp", int2, func(r *fold.Session) *int16 { return &r.Group }),
		col("status", text, func(r *fold.Session) *string { return &r.Status }),
		col("agent", text, func(r *fold.Session) *string { return &r.Agent }),
		col("agent_version", text, func(r *fold.Session) *string { return &r.AgentVersion }),
		col("architecture", text, func(r *fold.Session) *string { return &r.Architecture }),
		col("provider", text, func(r *fold.Session) *string { return &r.Provider }),
		col("options", text, func(r *fold.Session) *string { return &r.Options }),
		col("metadata", text, func(r *fold.Session) **string { return &r.Metadata }),
		col("created_at", timestamptz, func(r *fold.Session) *time.Time { return &r.CreatedAt }),
		col("updated_at", timestamptz, func(r *fold.Session) *time.Time { return &r.UpdatedAt }),
		col("tip", int8, func(r *fold.Session) *int64 { return &r.Tip }),
		col("tip_position", text, func(r *fold.Session) *string { return &r.TipPosition }),
		col("active_execution", text, func(r *fold.Session) *string { return &r.ActiveExecution }),
		col("queued", int4, func(r *fold.Session) *int32 { return &r.Queued }),
		col("executions", int4, func(r *fold.Session) *int32 { return &r.Executions }),
		col("idle", boolean, func(r *fold.Session) *bool { return &r.Idle }),
		col("snapshot", text, func(r *fold.Session) *string { return &r.Snapshot }),
		col("snapshot_at", timestamptz, func(r *fold.Session) **time.Time { return &r.SnapshotAt }),
		col("workspace_files", int8, func(r *fold.Session) *int64 { return &r.WorkspaceFiles }),
		col("workspace_bytes", int8, func(r *fold.Session) *int64 { return &r.WorkspaceBytes }),
		col("agent_ref", text, func(r *fold.Session) *string { return &r.AgentRef }),
		col("instance", text, func(r *fold.Session) *string { return &r.Instance }),
		col("spent", text, func(r *fold.Session) *string { return &r.Spent }),
		col("environments", text, func(r *fold.Session) *string { return &r.Environments }),
		col("title", text, func(r *fold.Session) *string { return &r.Title }),
		col("parent", text, func(r *fold.Session) *string { return &r.Parent }),
		col("forked", text, func(r *fold.Session) *string { return &r.Forked }),
		col("sandbox_ms", int8, func(r *fold.Session) *int64 { return &r.SandboxMs }),
		col("sandbox_cost_usd", float8, func(r *fold.Session) *float64 { return &r.SandboxCostUSD }))
}

func executionTable() table[fold.Execution] {
	return newTable(readmodel.TableExecutions, 3,
		col("tenant", text, func(r *fold.Execution) *string { return &r.Tenant }),
		col("session", text, func(r *fold.Execution) *string { return &r.Session }),
		col("id", text, func(r *fold.Execution) *string { return &r.ID }),
		col("ord", int4, func(r *fold.Execution) *int32 { return &r.Ord }),
		col("phase", text, func(r *fold.Execution) *string { return &r.Phase }),
		col("code", text, func(r *fold.Execution) *string { return &r.Code }),
		col("message", text, func(r *fold.Execution) *string { return &r.Message }),
		col("reason", text, func(r *fold.Execution) *string { return &r.Reason }),
		col("attempt", int4, func(r *fold.Execution) *int32 { return &r.Attempt }),
		col("executor", text, func(r *fold.Execution) *string { return &r.Executor }),
		col("model", text, func(r *fold.Execution) *string { return &r.Model }),
		col("input_tokens", int8, func(r *fold.Execution) *int64 { return &r.Input }),
		col("output_tokens", int8, func(r *fold.Execution) *int64 { return &r.Output }),
		col("cache_read_tokens", int8, func(r *fold.Execution) *int64 { return &r.CacheRead }),
		col("cache_write_tokens", int8, func(r *fold.Execution) *int64 { return &r.CacheWrite }),
		col("cost_usd", float8, func(r *fold.Execution) *float64 { return &r.CostUSD }),
		col("result", text, func(r *fold.Execution) *string { return &r.Result }),
		col("metadata", text, func(r *fold.Execution) **string { return &r.Metadata }),
		col("queued_at", timestamptz, func(r *fold.Execution) *time.Time { return &r.QueuedAt }),
		col("dispatched_at", timestamptz, func(r *fold.Execution) **time.Time { return &r.DispatchedAt }),
		col("started_at", timestamptz, func(r *fold.Execution) **time.Time { return &r.StartedAt }),
		col("ended_at", timestamptz, func(r *fold.Execution) **time.Time { return &r.EndedAt }),
		col("duration_ms", int8, func(r *fold.Execution) *int64 { return &r.DurationMs }),
		col("first_seq", int8, func(r *fold.Execution) *int64 { return &r.FirstSeq }),
		col("resolved", text, func(r *fold.Execution) **string { return &r.Resolved }),
		col("metered", boolean, func(r *fold.Execution) *bool { return &r.Metered }),
		col("query", text, func(r *fold.Execution) *string { return &r.Query }),
		col("sandbox_ms", int8, func(r *fold.Execution) *int64 { return &r.SandboxMs }),
		col("sandbox_cost_usd", float8, func(r *fold.Execution) *float64 { return &r.SandboxCostUSD }),
		col("recovered_from", text, func(r *fold.Execution) *string { return &r.RecoveredFrom }),
		col("open_approvals", int4, func(r *fold.Execution) *int32 { return &r.OpenApprovals }))
}

func blockTable() table[fold.Block] {
	return newTable(readmodel.TableBlocks, 3,
		col("tenant", text, func(r *fold.Block) *string { return &r.Tenant }),
		col("session", text, func(r *fold.Block) *string { return &r.Session }),
		col("id", text, func(r *fold.Block) *string { return &r.ID }),
		col("execution", text, func(r *fold.Block) *string { return &r.Execution }),
		col("conversation", text, func(r *fold.Block) *string { return &r.Conversation }),
		col("kind", text, func(r *fold.Block) *string { return &r.Kind }),
		col("status", text, func(r *fold.Block) *string { return &r.Status }),
		col("execution_ord", int4, func(r *fold.Block) *int32 { return &r.ExecutionOrd }),
		col("first_seq", int8, func(r *fold.Block) *int64 { return &r.FirstSeq }),
		col("last_seq", int8, func(r *fold.Block) *int64 { return &r.LastSeq }),
		col("block", text, func(r *fold.Block) *string { return &r.JSON }))
}

func callTable() table[fold.ToolCall] {
	return newTable(readmodel.TableToolCalls, 3,
		col("tenant", text, func(r *fold.ToolCall) *string { return &r.Tenant }),
		col("session", text, func(r *fold.ToolCall) *string { return &r.Session }),
		col("tool_use_id", text, func(r *fold.ToolCall) *string { return &r.ID }),
		col("block", text, func(r *fold.ToolCall) *string { return &r.Block }),
		col("execution", text, func(r *fold.ToolCall) *string { return &r.Execution }),
		col("conversation", text, func(r *fold.ToolCall) *string { return &r.Conversation }),
		col("tool_name", text, func(r *fold.ToolCall) *string { return &r.ToolName }),
		col("decision", text, func(r *fold.ToolCall) *string { return &r.Decision }),
		col("status", text, func(r *fold.ToolCall) *string { return &r.Status }),
		col("started_at", timestamptz, func(r *fold.ToolCall) *time.Time { return &r.StartedAt }),
		col("ended_at", timestamptz, func(r *fold.ToolCall) **time.Time { return &r.EndedAt }),
		col("duration_ms", int8, func(r *fold.ToolCall) *int64 { return &r.DurationMs }),
		col("first_seq", int8, func(r *fold.ToolCall) *int64 { return &r.FirstSeq }))
}

func conversationTable() table[fold.Conversation] {
	return newTable(readmodel.TableConversations, 3,
		col("tenant", text, func(r *fold.Conversation) *string { return &r.Tenant }),
		col("session", text, func(r *fold.Conversation) *string { return &r.Session }),
		col("id", text, func(r *fold.Conversation) *string { return &r.ID }),
		col("parent", text, func(r *fold.Conversation) *string { return &r.Parent }),
		col("execution", text, func(r *fold.Conversation) *string { return &r.Execution }),
		col("subagent", text, func(r *fold.Conversation) *string { return &r.Subagent }),
		col("tool_use_id", text, func(r *fold.Conversation) *string { return &r.ToolUseID }),
		col("name", text, func(r *fold.Conversation) *string { return &r.Name }),
		col("status", text, func(r *fold.Conversation) *string { return &r.Status }),
		col("started_at", timestamptz, func(r *fold.Conversation) *time.Time { return &r.StartedAt }),
		col("ended_at", timestamptz, func(r *fold.Conversation) **time.Time { return &r.EndedAt }),
		col("duration_ms", int8, func(r *fold.Conversation) *int64 { return &r.DurationMs }),
		col("first_seq", int8, func(r *fold.Conversation) *int64 { return &r.FirstSeq }))
}

func approvalTable() table[fold.Approval] {
	return newTable(readmodel.TableApprovals, 3,
		col("tenant", text, func(r *fold.Approval) *string { return &r.Tenant }),
		col("session", text, func(r *fold.Approval) *string { return &r.Session }),
		col("id", text, func(r *fold.Approval) *string { return &r.ID }),
		col("execution", text, func(r *fold.Approval) *string { return &r.Execution }),
		col("conversation", text, func(r *fold.Approval) *string { return &r.Conversation }),
		col("kind", text, func(r *fold.Approval) *string { return &r.Kind }),
		col("tool_name", text, func(r *fold.Approval) *string { return &r.ToolName }),
		col("tool_use_id", text, func(r *fold.Approval) *string { return &r.ToolUseID }),
		col("title", text, func(r *fold.Approval) *string { return &r.Title }),
		col("status", text, func(r *fold.Approval) *string { return &r.Status }),
		col("cause", text, func(r *fold.Approval) *string { return &r.Cause }),
		col("request", text, func(r *fold.Approval) *string { return &r.Request }),
		col("verdict", text, func(r *fold.Approval) *string { return &r.Verdict }),
		col("decision", text, func(r *fold.Approval) **string { return &r.Decision }),
		col("actor", text, func(r *fold.Approval) **string { return &r.Actor }),
		col("requested_seq", int8, func(r *fold.Approval) *int64 { return &r.RequestedSeq }),
		col("requested_at", timestamptz, func(r *fold.Approval) *time.Time { return &r.RequestedAt }),
		col("decided_seq", int8, func(r *fold.Approval) *int64 { return &r.DecidedSeq }),
		col("decided_at", timestamptz, func(r *fold.Approval) **time.Time { return &r.DecidedAt }),
		col("ended_seq", int8, func(r *fold.Approval) *int64 { return &r.EndedSeq }),
		col("ended_at", timestamptz, func(r *fold.Approval) **time.Time { return &r.EndedAt }))
}

func sandboxTable() table[fold.Sandbox] {
	return newTable(readmodel.TableSandboxes, 3,
		col("tenant", text, func(r *fold.Sandbox) *string { return &r.Tenant }),
		col("session", text, func(r *fold.Sandbox) *string { return &r.Session }),
		col("id", text, func(r *fold.Sandbox) *string { return &r.ID }),
		col("provider", text, func(r *fold.Sandbox) *string { return &r.Provider }),
		col("engine", text, func(r *fold.Sandbox) *string { return &r.Engine }),
		col("status", text, func(r *fold.Sandbox) *string { return &r.Status }),
		col("reason", text, func(r *fold.Sandbox) *string { return &r.Reason }),
		col("created_at", timestamptz, func(r *fold.Sandbox) *time.Time { return &r.CreatedAt }),
		col("ready_at", timestamptz, func(r *fold.Sandbox) **time.Time { return &r.ReadyAt }),
		col("ended_at", timestamptz, func(r *fold.Sandbox) **time.Time { return &r.EndedAt }),
		col("image", text, func(r *fold.Sandbox) *string { return &r.Image }),
		col("health", text, func(r *fold.Sandbox) *string { return &r.Health }),
		col("health_why", text, func(r *fold.Sandbox) *string { return &r.HealthWhy }),
		col("memory_bytes", int8, func(r *fold.Sandbox) *int64 { return &r.MemoryBytes }),
		col("disk_bytes", int8, func(r *fold.Sandbox) *int64 { return &r.DiskBytes }))
}

func fileTable() table[fold.File] {
	return newTable(readmodel.TableFiles, 3,
		col("tenant", text, func(r *fold.File) *string { return &r.Tenant }),
		col("session", text, func(r *fold.File) *string { return &r.Session }),
		col("id", text, func(r *fold.File) *string { return &r.ID }),
		col("path", text, func(r *fold.File) *string { return &r.Path }),
		col("size", int8, func(r *fold.File) *int64 { return &r.Size }),
		col("binary", boolean, func(r *fold.File) *bool { return &r.Binary }),
		col("deleted", boolean, func(r *fold.File) *bool { return &r.Deleted }),
		col("execution", text, func(r *fold.File) *string { return &r.Execution }),
		col("changed_at", timestamptz, func(r *fold.File) *time.Time { return &r.ChangedAt }),
		col("last_seq", int8, func(r *fold.File) *int64 { return &r.LastSeq }))
}

func usageTable() table[fold.Usage] {
	return newTable(readmodel.TableUsage, 3,
		col("tenant", text, func(r *fold.Usage) *string { return &r.Tenant }),
		col("session", text, func(r *fold.Usage) *string { return &r.Session }),
		col("id", text, func(r *fold.Usage) *string { return &r.ID }),
		col("execution", text, func(r *fold.Usage) *string { return &r.Execution }),
		col("provider", text, func(r *fold.Usage) *string { return &r.Provider }),
		col("model", text, func(r *fold.Usage) *string { return &r.Model }),
		col("day", text, func(r *fold.Usage) *string { return &r.Day }),
		col("requests", int8, func(r *fold.Usage) *int64 { return &r.Requests }),
		col("failed", int8, func(r *fold.Usage) *int64 { return &r.Failed }),
		col("input_tokens", int8, func(r *fold.Usage) *int64 { return &r.Input }),
		col("output_tokens", int8, func(r *fold.Usage) *int64 { return &r.Output }),
		col("cache_read_tokens", int8, func(r *fold.Usage) *int64 { return &r.CacheRead }),
		col("cache_write_tokens", int8, func(r *fold.Usage) *int64 { return &r.CacheWrite }),
		col("cost_usd", float8, func(r *fold.Usage) *float64 { return &r.CostUSD }),
		col("prices", text, func(r *fold.Usage) *string { return &r.Prices }),
		col("first_byte_ms", int8, func(r *fold.Usage) *int64 { return &r.FirstByteMs }),
		col("duration_ms", int8, func(r *fold.Usage) *int64 { return &r.DurationMs }))
}

func entryTable() table[fold.Entry] {
	return newTable(readmodel.TableCatalogueEntries, 2,
		col("tenant", text, func(r *fold.Entry) *string { return &r.Tenant }),
		col("id", text, func(r *fold.Entry) *string { return &r.ID }),
		col("grp", int2, func(r *fold.Entry) *int16 { return &r.Group }),
		col("kind", text, func(r *fold.Entry) *string { return &r.Kind }),
		col("scope", text, func(r *fold.Entry) *string { return &r.Scope }),
		col("org", text, func(r *fold.Entry) *string { return &r.Org }),
		col("slug", text, func(r *fold.Entry) *string { return &r.Slug }),
		col("latest", text, func(r *fold.Entry) *string { return &r.Latest }),
		col("state", text, func(r *fold.Entry) *string { return &r.State }),
		col("removed", boolean, func(r *fold.Entry) *bool { return &r.Removed }),
		col("created_at", timestamptz, func(r *fold.Entry) *time.Time { return &r.CreatedAt }),
		col("updated_at", timestamptz, func(r *fold.Entry) *time.Time { return &r.UpdatedAt }))
}

func versionTable() table[fold.Version] {
	return newTable(readmodel.TableCatalogueVersions, 3,
		col("tenant", text, func(r *fold.Version) *string { return &r.Tenant }),
		col("id", text, func(r *fold.Version) *string { return &r.Entry }),
		col("version", text, func(r *fold.Version) *string { return &r.ID }),
		col("grp", int2, func(r *fold.Version) *int16 { return &r.Group }),
		col("spec", text, func(r *fold.Version) *string { return &r.Spec }),
		col("document", text, func(r *fold.Version) *string { return &r.Document }),
		col("created_at", timestamptz, func(r *fold.Version) *time.Time { return &r.CreatedAt }),
		col("position", text, func(r *fold.Version) *string { return &r.Position }),
		col("removed", boolean, func(r *fold.Version) *bool { return &r.Removed }))
}

func tenantUsageTable() table[fold.TenantUsage] {
	return newTable(readmodel.TableTenantUsage, 2,
		col("tenant", text, func(r *fold.TenantUsage) *string { return &r.Tenant }),
		col("id", text, func(r *fold.TenantUsage) *string { return &r.ID }),
		col("grp", int2, func(r *fold.TenantUsage) *int16 { return &r.Group }),
		col("day", text, func(r *fold.TenantUsage) *string { return &r.Day }),
		col("turns", int8, func(r *fold.TenantUsage) *int64 { return &r.Turns }),
		col("tokens", int8, func(r *fold.TenantUsage) *int64 { return &r.Tokens }),
		col("cost_usd", float8, func(r *fold.TenantUsage) *float64 { return &r.CostUSD }),
		col("time_ms", int8, func(r *fold.TenantUsage) *int64 { return &r.TimeMs }),
		col("events", int8, func(r *fold.TenantUsage) *int64 { return &r.Events }),
		col("event_bytes", int8, func(r *fold.TenantUsage) *int64 { return &r.EventBytes }),
		col("stored_bytes", int8, func(r *fold.TenantUsage) *int64 { return &r.Stored }))
}

func tenantBudgetTable() table[fold.TenantBudget] {
	return newTable(readmodel.TableTenantBudgets, 2,
		col("tenant", text, func(r *fold.TenantBudget) *string { return &r.Tenant }),
		col("period", text, func(r *fold.TenantBudget) *string { return &r.ID }),
		col("grp", int2, func(r *fold.TenantBudget) *int16 { return &r.Group }),
		col("turns", int8, func(r *fold.TenantBudget) *int64 { return &r.Turns }),
		col("tokens", int8, func(r *fold.TenantBudget) *int64 { return &r.Tokens }),
		col("cost_usd", float8, func(r *fold.TenantBudget) *float64 { return &r.CostUSD }),
		col("time_ms", int8, func(r *fold.TenantBudget) *int64 { return &r.TimeMs }),
		col("set_at", timestamptz, func(r *fold.TenantBudget) *time.Time { return &r.SetAt }),
		col("removed", boolean, func(r *fold.TenantBudget) *bool { return &r.Removed }))
}

func tenantLimitsTable() table[fold.TenantLimits] {
	return newTable(readmodel.TableTenantLimits, 1,
		col("tenant", text, func(r *fold.TenantLimits) *string { return &r.Tenant }),
		col("grp", int2, func(r *fold.TenantLimits) *int16 { return &r.Group }),
		col("limits", text, func(r *fold.TenantLimits) *string { return &r.Limits }),
		col("set_at", timestamptz, func(r *fold.TenantLimits) *time.Time { return &r.SetAt }),
		col("removed", boolean, func(r *fold.TenantLimits) *bool { return &r.Removed }))
}

func auditTable() table[fold.AuditRow] {
	return newTable(readmodel.TableAudit, 3,
		col("tenant", text, func(r *fold.AuditRow) *string { return &r.Tenant }),
		col("shard", int2, func(r *fold.AuditRow) *int16 { return &r.Shard }),
		col("seq", int8, func(r *fold.AuditRow) *int64 { return &r.Seq }),
		col("grp", int2, func(r *fold.AuditRow) *int16 { return &r.Group }),
		col("at", timestamptz, func(r *fold.AuditRow) *time.Time { return &r.At }),
		col("aspect", text, func(r *fold.AuditRow) *string { return &r.Aspect }),
		col("subject", text, func(r *fold.AuditRow) *string { return &r.Subject }),
		col("about", text, func(r *fold.AuditRow) *string { return &r.About }),
		col("execution", text, func(r *fold.AuditRow) *string { return &r.Execution }),
		col("types", text, func(r *fold.AuditRow) *string { return &r.Types }),
		col("actor_kind", text, func(r *fold.AuditRow) *string { return &r.ActorKind }),
		col("actor", text, func(r *fold.AuditRow) *string { return &r.Actor }),
		col("key", text, func(r *fold.AuditRow) *string { return &r.Key }),
		col("end_user", text, func(r *fold.AuditRow) *string { return &r.User }),
		col("service", text, func(r *fold.AuditRow) *string { return &r.Service }),
		col("address", text, func(r *fold.AuditRow) *string { return &r.Address }))
}
