package events

import (
	"encoding/json"
	"time"
)

// ExecutionClaimed records that an executor claimed the execution and now writes the session's run subject.
type ExecutionClaimed struct {
	Epoch    uint64 `json:"epoch"`
	Executor string `json:"executor"` // the executor's id, or the id of the session service's replica that ends an execution that nobody claimed
	Turn     uint32 `json:"turn"`     // number of the execution's dispatch within its session: 1, 2, …
}

// ExecutionAttached records that an executor which took over a running execution is attached to the runner, and
// that all entries of the runner's journal are in the log.
type ExecutionAttached struct {
	Epoch     uint64 `json:"epoch"` // epoch of the claim
	SandboxID string `json:"sandboxId"`
}

// ExecutionHandedOver records that the executor is shutting down and leaves the execution to the next executor.
type ExecutionHandedOver struct {
	Epoch uint64 `json:"epoch"` // epoch of the claim that ends
}

// ExecutionStarted records one attempt: a start of the agent for an execution.
type ExecutionStarted struct {
	Attempt uint32 `json:"attempt"` // 1, 2, …
	Warm    bool   `json:"warm"`    // the agent's process was already running
	PID     uint32 `json:"pid"`     // process id of the agent inside the sandbox
	Policy  string `json:"policy"`  // the permission policy that applies
}

// AttemptFailed records that an attempt died during the turn and that another one follows.
type AttemptFailed struct {
	Attempt  uint32 `json:"attempt"`  // 1, 2, …
	Attempts uint32 `json:"attempts"` // how many attempts the execution may have
	Code     string `json:"code"`     // AGENT_EXITED, AGENT_SILENT, OUT_OF_MEMORY, SANDBOX_LOST
	Message  string `json:"message"`
	WaitMs   uint32 `json:"waitMs,omitempty"` // milliseconds until the next attempt
}

// Usage counts the tokens of model requests.
type Usage struct {
	InputTokens      uint32 `json:"inputTokens"`
	OutputTokens     uint32 `json:"outputTokens"`
	CacheReadTokens  uint32 `json:"cacheReadTokens,omitempty"`
	CacheWriteTokens uint32 `json:"cacheWriteTokens,omitempty"`
}

// Tokens returns the total of input and output tokens, including those read from and written to a cache.
func (u Usage) Tokens() uint64 {
	return uint64(u.InputTokens) + uint64(u.OutputTokens) + uint64(u.CacheReadTokens) + uint64(u.CacheWriteTokens)
}

// ExecutionCompleted ends an execution whose query was answered.
type ExecutionCompleted struct {
	DurationMs uint32  `json:"durationMs"` // since the first claim
	Usage      Usage   `json:"usage"`
	CostUSD    float64 `json:"costUsd,omitempty"` // as the agent computes it
	Result     string  `json:"result,omitempty"`  // the agent's whole last answer
}

// ExecutionFailed ends an execution whose query was not answered.
type ExecutionFailed struct {
	Code       string `json:"code"`
	Message    string `json:"message"`
	DurationMs uint32 `json:"durationMs"`
	Usage      Usage  `json:"usage"`
	Unstopped  bool   `json:"unstopped,omitempty"` // the stop request did not reach the runner: the agent may continue until an executor reaches its sandbox
}

// WithStopFailure returns f with Unstopped set, and with a message that states why the agent could not be stopped.
func (f ExecutionFailed) WithStopFailure(why error) ExecutionFailed {
	f.Unstopped = true
	f.Message += "; the agent could not be stopped and may continue until an executor reaches its sandbox: " + why.Error()
	return f
}

// ExecutionCancelled ends an execution that a control stopped.
type ExecutionCancelled struct {
	Reason     string `json:"reason"` // interrupted, cancelled, terminated, session_deleted, session_closed
	DurationMs uint32 `json:"durationMs"`
	Usage      Usage  `json:"usage"`
}

// SandboxCreating records that the creation of a sandbox started.
type SandboxCreating struct {
	SandboxID string `json:"sandboxId"`
	Provider  string `json:"provider"`
	Engine    string `json:"engine"`
}

// SandboxReady records that the runner in a sandbox responds.
type SandboxReady struct {
	SandboxID  string `json:"sandboxId"`
	Provider   string `json:"provider"`
	Engine     string `json:"engine"`
	Journal    string `json:"journal"` // name of the runner's journal, whose numbers start at 1
	DurationMs uint32 `json:"durationMs"`
	Workspace  string `json:"workspace,omitempty"` // id of the sandbox whose workspace this one uses, if not its own
	Image      string `json:"image,omitempty"`
	Pooled     bool   `json:"pooled,omitempty"` // it was created in advance, in the warm pool
	Empty      bool   `json:"empty,omitempty"`  // its workspace is new: snapshots and file changes have to be applied
}

// SandboxReplaced records that a sandbox was lost and that another one replaces it.
type SandboxReplaced struct {
	SandboxID string `json:"sandboxId"`      // the lost sandbox
	Lost      string `json:"lost"`           // description of what was lost with it
	Kept      bool   `json:"kept,omitempty"` // its workspace is still on its engine, for the next sandbox
}

// SandboxTerminated records the end of a sandbox.
type SandboxTerminated struct {
	SandboxID string `json:"sandboxId"`
	Reason    string `json:"reason"`         // idle, terminated, manual, unhealthy, max_age, tenant_limit, session_deleted, session_closed
	Kept      bool   `json:"kept,omitempty"` // its workspace is still on its engine, for the next sandbox
}

// SandboxFailed records that no sandbox could be created.
type SandboxFailed struct {
	SandboxID string `json:"sandboxId"`
	Code      string `json:"code"`
	Message   string `json:"message"`
}

// SandboxUsage records a period of time during which a metered sandbox ran. The period ends at the event's time.
// The periods of a session do not overlap. If the event names an execution, the time is within that execution;
// otherwise it is between executions.
type SandboxUsage struct {
	SandboxID  string  `json:"sandboxId"`
	Provider   string  `json:"provider"`
	DurationMs uint64  `json:"durationMs"`        // milliseconds
	CostUSD    float64 `json:"costUsd,omitempty"` // US dollars, by the executor's price; absent if no price is set
}

// BlockStart opens a block, or holds a block that is already complete.
type BlockStart struct {
	Block Block `json:"block"`
	// TextAfter is a sequence of the stream DELTAS: the text in flight of the block comes after it. 0 means that it is not known.
	TextAfter uint64 `json:"textAfter,omitempty"`
}

// BlockUpdate changes fields of an open block.
type BlockUpdate struct {
	BlockID string       `json:"blockId"`
	Updates BlockUpdates `json:"updates"`
}

// BlockComplete holds the complete, final block. It replaces everything known about the block.
type BlockComplete struct {
	Block Block `json:"block"`
}

// SubagentSpawned records the start of a sub-agent and opens its conversation.
type SubagentSpawned struct {
	SubagentID   string `json:"subagentId"`
	Conversation string `json:"subConversationId"`
	ToolUseID    string `json:"toolUseId"`
	Name         string `json:"name,omitempty"`
	Parent       string `json:"parentConversationId"`
	Prompt       string `json:"prompt,omitempty"`
	Depth        uint32 `json:"depth,omitempty"` // levels below the main agent: 1 for its sub-agents, 2 for those that they start; 0 or absent if unknown
}

// SubagentCompleted records the end of a sub-agent.
type SubagentCompleted struct {
	SubagentID   string `json:"subagentId"`
	Conversation string `json:"subConversationId"`
	IsError      bool   `json:"isError,omitempty"`
	DurationMs   uint32 `json:"durationMs,omitempty"`
}

// PermissionDecided records how a permission request inside the sandbox was answered, and which rule decided.
type PermissionDecided struct {
	ToolName  string `json:"toolName"`
	ToolUseID string `json:"toolUseId,omitempty"`
	Decision  string `json:"decision"` // allow, deny
	Rule      string `json:"rule"`     // the rule of the policy that matched
	Reason    string `json:"reason,omitempty"`

	Command string          `json:"command,omitempty"` // the command that the call runs
	Paths   []string        `json:"paths,omitempty"`   // the files that the call reads or changes
	Hosts   []string        `json:"hosts,omitempty"`   // the hosts that the call connects to
	Input   json.RawMessage `json:"input,omitempty"`   // the arguments of a call without command, paths and hosts; absent if they have more than 4 KiB
}

// TranscriptWritten records where the agent stores its own record of the conversation, from which it can resume.
type TranscriptWritten struct {
	AgentSessionID string `json:"agentSessionId"` // the agent's own session id
	Path           string `json:"path,omitempty"`
	Bytes          uint32 `json:"bytes,omitempty"`
	Volatile       bool   `json:"volatile,omitempty"` // the agent cannot continue the session in another process
}

// MetadataUpdate holds the usage, cost and model of the running execution so far.
type MetadataUpdate struct {
	Usage   Usage   `json:"usage"`
	CostUSD float64 `json:"costUsd,omitempty"`
	Model   string  `json:"model,omitempty"`
}

// Log is a line of output that is not a message of the agent's protocol.
type Log struct {
	Level   string `json:"level"`  // debug, info, warn, error
	Stream  string `json:"stream"` // stdout, stderr, runner
	Message string `json:"message"`
}

// Error records a failure that does not end the execution by itself.
type Error struct {
	Code    string `json:"code"`
	Message string `json:"message"`
}

// WatchdogWarned records that an agent sent nothing for too long, or did not exit after its result.
type WatchdogWarned struct {
	Watchdog string `json:"watchdog"` // silence, after_result
	AfterMs  uint32 `json:"afterMs"`
	Action   string `json:"action"` // none, killed
}

// LoopDetected records that an agent repeats a tool call: the last calls of the event's conversation are the same call,
// with the same result. It comes once for each series of such calls.
type LoopDetected struct {
	ToolName string `json:"toolName"`
	Calls    uint32 `json:"calls"`            // number of equal calls in a row
	Limit    uint32 `json:"limit"`            // number of equal calls after which the event is written, from the agent's loops.warn
	StopAt   uint32 `json:"stopAt,omitempty"` // number of equal calls after which the execution fails with LOOP_DETECTED, from loops.stop; absent if it does not
}

// RunRetired ends the run subject of a deleted session. It is appended after all readers of the log have processed
// the earlier commits; a late writer is rejected by the expected-sequence check. All earlier commits on both
// subjects of the session, except session_deleted, may be removed.
type RunRetired struct {
	Usage []DayUsage `json:"usage,omitempty"` // usage of the session up to its deletion, ascending by day
	Life  uint32     `json:"life,omitempty"`  // commits of the life subject before session_deleted
	Runs  uint32     `json:"runs,omitempty"`  // commits of the run subject before this one

	Stored uint64       `json:"stored,omitempty"` // bytes that the session's events and objects occupy until content_removed, as counted at this time
	Audit  []AuditEntry `json:"audit,omitempty"`  // who made which commits on the life subject before session_deleted, ascending by seq; the newest entries if there are too many
}

// AuditEntry records who made a commit and which event types it has, without its content.
type AuditEntry struct {
	Seq         uint64    `json:"seq"`  // sequence number of the commit in the stream of its shard
	Time        time.Time `json:"time"` // when the log stored it
	Actor       Actor     `json:"actor"`
	ExecutionID string    `json:"executionId,omitempty"` // of the first event that names an execution
	Types       []Type    `json:"types"`                 // the event types of the commit, without duplicates
}

// DayUsage is the usage of a session on one day.
type DayUsage struct {
	Day   string      `json:"day"` // in UTC, as 2026-01-31
	Spent BudgetUsage `json:"spent"`

	Logged OutputSize `json:"logged,omitzero"` // events that the session appended to the log
}

// ContentRemoved records that all content of the session was removed from streams and buckets.
type ContentRemoved struct {
	Messages uint32 `json:"messages,omitempty"` // removed messages of the log
	Objects  uint32 `json:"objects,omitempty"`  // removed objects of the buckets workspaces and payloads
}
