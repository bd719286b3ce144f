package events

import "time"

// ExecutionClaimed says which executor now writes for the session's runs.
type ExecutionClaimed struct {
	Epoch    uint64 `json:"epoch"`
	Executor string `json:"executor"` // or the copy of the session service that ends what nobody claimed
	Turn     uint32 `json:"turn"`     // number of the execution's dispatch within its session: 1, 2, …
}

// ExecutionAttached says that the holder which took a running execution over follows its agent:
// it is attached to the runner, and what the runner's journal held is in the log.
type ExecutionAttached struct {
	Epoch     uint64 `json:"epoch"` // of the claim
	SandboxID string `json:"sandboxId"`
}

// ExecutionHandedOver says that the holder stops, and leaves the execution to the next one.
type ExecutionHandedOver struct {
	Epoch uint64 `json:"epoch"` // of the claim that ends
}

// ExecutionStarted is one start of the agent for an execution.
type ExecutionStarted struct {
	Attempt uint32 `json:"attempt"` // 1, 2, …
	Warm    bool   `json:"warm"`    // the agent's process was running already
	PID     uint32 `json:"pid"`     // of the agent's process, inside the sandbox
	Policy  string `json:"policy"`  // the permission policy in force
}

// AttemptFailed says that a start of the agent died amid the turn, and that another one follows.
type AttemptFailed struct {
	Attempt  uint32 `json:"attempt"`  // 1, 2, …
	Attempts uint32 `json:"attempts"` // how many the execution may have
	Code     string `json:"code"`     // AGENT_EXITED, AGENT_SILENT, OUT_OF_MEMORY, SANDBOX_LOST
	Message  string `json:"message"`
	WaitMs   uint32 `json:"waitMs,omitempty"` // milliseconds that pass before the next start
}

// Usage counts what a model took.
type Usage struct {
	InputTokens      uint32 `json:"inputTokens"`
	OutputTokens     uint32 `json:"outputTokens"`
	CacheReadTokens  uint32 `json:"cacheReadTokens,omitempty"`
	CacheWriteTokens uint32 `json:"cacheWriteTokens,omitempty"`
}

// Tokens is all that went in and came out, what came from or went into a cache too.
func (u Usage) Tokens() uint64 {
	return uint64(u.InputTokens) + uint64(u.OutputTokens) + uint64(u.CacheReadTokens) + uint64(u.CacheWriteTokens)
}

// ExecutionCompleted is the end of a query that was answered.
type ExecutionCompleted struct {
	DurationMs uint32  `json:"durationMs"` // since it was first claimed
	Usage      Usage   `json:"usage"`
	CostUSD    float64 `json:"costUsd,omitempty"` // as the agent reckons it
	Result     string  `json:"result,omitempty"`  // the agent's last words
}

// ExecutionFailed is the end of a query that was not answered.
type ExecutionFailed struct {
	Code       string `json:"code"`
	Message    string `json:"message"`
	DurationMs uint32 `json:"durationMs"`
	Usage      Usage  `json:"usage"`
	Unstopped  bool   `json:"unstopped,omitempty"` // the runner could not be told to stop: the agent may go on until an executor reaches its sandbox
}

// NotStopped returns the end with the statement that the agent could not be told to stop, and why.
func (f ExecutionFailed) NotStopped(why error) ExecutionFailed {
	f.Unstopped = true
	f.Message += "; the agent could not be told to stop, and may go on until an executor reaches its sandbox: " + why.Error()
	return f
}

// ExecutionCancelled is the end of a query that was stopped by a control.
type ExecutionCancelled struct {
	Reason     string `json:"reason"` // interrupted, cancelled, terminated, session_deleted, session_closed
	DurationMs uint32 `json:"durationMs"`
	Usage      Usage  `json:"usage"`
}

// SandboxCreating says that a sandbox is being made.
type SandboxCreating struct {
	SandboxID string `json:"sandboxId"`
	Provider  string `json:"provider"`
	Engine    string `json:"engine"`
}

// SandboxReady says that the runner in a sandbox answers.
type SandboxReady struct {
	SandboxID  string `json:"sandboxId"`
	Provider   string `json:"provider"`
	Engine     string `json:"engine"`
	Journal    string `json:"journal"` // name of the runner's journal; its numbers start at 1
	DurationMs uint32 `json:"durationMs"`
	Workspace  string `json:"workspace,omitempty"` // the sandbox whose workspace this one has, if not its own
	Image      string `json:"image,omitempty"`
	Pooled     bool   `json:"pooled,omitempty"` // it was made beforehand
	Empty      bool   `json:"empty,omitempty"`  // its workspace is new: what snapshots and file changes say is to be applied
}

// SandboxReplaced says that a sandbox was lost and another takes its place.
type SandboxReplaced struct {
	SandboxID string `json:"sandboxId"`      // the one that is gone
	Lost      string `json:"lost"`           // what is known to be lost with it
	Kept      bool   `json:"kept,omitempty"` // its workspace is still on its engine, for the sandbox that comes next
}

// SandboxTerminated is a sandbox's end.
type SandboxTerminated struct {
	SandboxID string `json:"sandboxId"`
	Reason    string `json:"reason"`         // idle, terminated, manual, unhealthy, max_age, tenant_limit, session_deleted, session_closed
	Kept      bool   `json:"kept,omitempty"` // its workspace is still on its engine, for the sandbox that comes next
}

// SandboxFailed says that no sandbox could be made.
type SandboxFailed struct {
	SandboxID string `json:"sandboxId"`
	Code      string `json:"code"`
	Message   string `json:"message"`
}

// SandboxUsage is a stretch of time that a metered sandbox ran, up to the event's time. Of a session the stretches follow one another: none
// overlaps another one. With an execution, it is time within that execution; without one, time between executions.
type SandboxUsage struct {
	SandboxID  string  `json:"sandboxId"`
	Provider   string  `json:"provider"`
	DurationMs uint64  `json:"durationMs"`        // milliseconds
	CostUSD    float64 `json:"costUsd,omitempty"` // dollars, by the executor's price; absent where it has none
}

// BlockStart opens a block, or states one that is whole at once.
type BlockStart struct {
	Block Block `json:"block"`
}

// BlockUpdate changes an open block.
type BlockUpdate struct {
	BlockID string       `json:"blockId"`
	Updates BlockUpdates `json:"updates"`
}

// BlockComplete is the whole block, final; it replaces what was known of it.
type BlockComplete struct {
	Block Block `json:"block"`
}

// SubagentSpawned opens a conversation of its own.
type SubagentSpawned struct {
	SubagentID   string `json:"subagentId"`
	Conversation string `json:"subConversationId"`
	ToolUseID    string `json:"toolUseId"`
	Name         string `json:"name,omitempty"`
	Parent       string `json:"parentConversationId"`
	Prompt       string `json:"prompt,omitempty"`
}

// SubagentCompleted is a sub-agent's end.
type SubagentCompleted struct {
	SubagentID   string `json:"subagentId"`
	Conversation string `json:"subConversationId"`
	IsError      bool   `json:"isError,omitempty"`
	DurationMs   uint32 `json:"durationMs,omitempty"`
}

// PermissionDecided records how a permission request inside the sandbox was answered, and by which rule.
type PermissionDecided struct {
	ToolName  string `json:"toolName"`
	ToolUseID string `json:"toolUseId,omitempty"`
	Decision  string `json:"decision"` // allow, deny
	Rule      string `json:"rule"`     // the rule of the policy that decided
	Reason    string `json:"reason,omitempty"`
}

// TranscriptWritten says where the agent keeps its own record, so that it can resume it.
type TranscriptWritten struct {
	AgentSessionID string `json:"agentSessionId"` // the CLI's own id
	Path           string `json:"path,omitempty"`
	Bytes          uint32 `json:"bytes,omitempty"`
}

// MetadataUpdate tells usage, cost and model of the running execution so far.
type MetadataUpdate struct {
	Usage   Usage   `json:"usage"`
	CostUSD float64 `json:"costUsd,omitempty"`
	Model   string  `json:"model,omitempty"`
}

// Log is a line that is not an agent's message.
type Log struct {
	Level   string `json:"level"`  // debug, info, warn, error
	Stream  string `json:"stream"` // stdout, stderr, runner
	Message string `json:"message"`
}

// Error says that something went wrong that did not end the execution by itself.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// WatchdogWarned says that an agent has been silent, or hangs after its result.
type WatchdogWarned struct {
	Watchdog string `json:"watchdog"` // silence, after_result
	AfterMs  uint32 `json:"afterMs"`
	Action   string `json:"action"` // none, killed
}

// RunRetired ends the run subject of a deleted session: every reader of the log
// has passed what is before it, and a writer that is late is refused by the
// guard. Everything before it on both subjects of the session, session_deleted
// apart, may be removed.
type RunRetired struct {
	Usage []DayUsage `json:"usage,omitempty"` // what the session took up to its deletion, ascending by day
	Life  uint32     `json:"life,omitempty"`  // commits of the life subject before session_deleted
	Runs  uint32     `json:"runs,omitempty"`  // commits of the run subject before this one

	Stored uint64    `json:"stored,omitempty"` // bytes that the session's events and objects take until content_removed, as they were counted
	Audit  []Audited `json:"audit,omitempty"`  // who did what on the life subject before session_deleted, ascending by seq; of many the newest
}

// Audited is who did what by a commit, without its content.
type Audited struct {
	Seq         uint64    `json:"seq"`  // of the commit, in the stream of its shard
	Time        time.Time `json:"time"` // when the log stored it
	Actor       Actor     `json:"actor"`
	ExecutionID string    `json:"executionId,omitempty"` // that the first event with one names
	Types       []Type    `json:"types"`                 // of its events, each once
}

// DayUsage is what a session took on a day.
type DayUsage struct {
	Day   string `json:"day"` // in UTC, as 2026-01-31
	Spent Spent  `json:"spent"`

	Logged Output `json:"logged,omitzero"` // events that the session added to the log
}

// ContentRemoved says that nothing of the session's content is left in streams and buckets.
type ContentRemoved struct {
	Messages uint32 `json:"messages,omitempty"` // of the log
	Objects  uint32 `json:"objects,omitempty"`  // of the buckets workspaces and payloads
}
