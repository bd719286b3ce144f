package events

import (
	"cmp"
	"encoding/json"
)

// Options are the settings of a session. 0 or "" means the agent's value, then the server's default.
type Options struct {
	Model          string `json:"model,omitempty"`
	ModelProvider  string `json:"modelProvider,omitempty"`  // the API through which the model is reached: anthropic, openai or nvidia; default the executor's for the architecture
	IdleTimeoutMs  uint32 `json:"idleTimeoutMs,omitempty"`  // milliseconds without a turn until the sandbox is released; default 15 min
	TurnLimitMs    uint32 `json:"turnLimitMs,omitempty"`    // maximum duration of an execution in milliseconds; default 1 h
	SessionLimitMs uint32 `json:"sessionLimitMs,omitempty"` // maximum lifetime of a session in milliseconds; default 24 h

	SyncIntervalMs   uint32        `json:"syncIntervalMs,omitempty"`   // milliseconds between snapshots of the workspace while a turn runs; default 30 s
	HealthIntervalMs uint32        `json:"healthIntervalMs,omitempty"` // milliseconds between health checks of the sandbox; default 30 s
	SandboxMaxAgeMs  uint32        `json:"sandboxMaxAgeMs,omitempty"`  // age in milliseconds at which a sandbox is replaced, between two turns; default 24 h
	Image            string        `json:"image,omitempty"`            // image of the sandbox; default the executor's
	Command          []string      `json:"command,omitempty"`          // architecture acp: the agent's program and its arguments
	ModelSettings    ModelSettings `json:"modelSettings,omitzero"`     // architecture acp: how the agent receives its model
	Budget           Budget        `json:"budget,omitzero"`            // budget of the whole session
	Egress           []string      `json:"egress,omitempty"`           // hosts besides the model APIs that the sandbox may reach: host, host:port or *.host; a prefix of HTTP methods restricts the host to these methods (GET,HEAD host)

	OnConversationLoss string `json:"onConversationLoss,omitempty"` // what happens to a turn whose agent cannot continue the conversation: fail or continue; default the agent's conversation.onLoss

	HostPath string `json:"hostPath,omitempty"` // absolute path of a folder on the executor's machine in which the session works, instead of a workspace of its own; set when the session is created, local sandboxes only
}

// ModelSettings define how an agent of architecture acp receives its model. In values, ${MODEL} is replaced by the
// model, ${MODEL_BASE_URL} by the base URL of its API and ${MODEL_KEY} by the key; $$ is a dollar sign.
type ModelSettings struct {
	Preset string            `json:"preset,omitempty"` // settings of a known agent: claude, opencode or qwen
	Env    map[string]string `json:"env,omitempty"`    // variables of the agent's process; they override the variables of the preset
	Args   []string          `json:"args,omitempty"`   // appended to the command; must not contain the key
}

// SessionCreated is the first event of a session.
type SessionCreated struct {
	Agent        string          `json:"agent"`        // the agent's slug; "default" is built in
	AgentVersion string          `json:"agentVersion"` // the version that the session pins
	Architecture string          `json:"architecture"`
	Provider     string          `json:"provider"`
	Options      Options         `json:"options"` // resolved: only model and modelProvider may be empty
	Metadata     json.RawMessage `json:"metadata,omitempty"`

	AgentRef     Reference   `json:"agentRef,omitzero"`      // with the pinned version; zero for the built-in agent
	Instance     Reference   `json:"instance,omitzero"`      // with the pinned version; zero if the session uses no instance
	Environments []Reference `json:"environments,omitempty"` // layers above those of the instance

	Transcript *Transcript `json:"transcript,omitempty"` // the conversation that the session starts with; nil for a new one
}

// Transcript is a conversation that was held outside Spool, in the format of the agent's own CLI.
type Transcript struct {
	Architecture   string `json:"architecture"`   // claude-code, codex or opencode
	Object         string `json:"object"`         // name in the bucket workspaces
	Size           uint64 `json:"size"`           // bytes
	SHA256         string `json:"sha256"`         // hex
	AgentSessionID string `json:"agentSessionId"` // the agent's own session id in it; the session continues with a copy under another id
	Messages       uint32 `json:"messages"`       // number of messages of user and agent
}

// SessionForked records that a session continues from an event of another session, its parent. It is the second
// event of the session, in one commit with session_created. The parent's log does not mention its forks.
type SessionForked struct {
	Parent         string `json:"parent"`
	Asked          uint32 `json:"asked"`                    // the requested seq in the parent
	Effective      uint32 `json:"effective"`                // seq in the parent up to which the fork shares the history; at most Asked
	Snapshot       string `json:"snapshot,omitempty"`       // snapshot of the files; "" for an empty workspace
	SnapshotSeq    uint32 `json:"snapshotSeq,omitempty"`    // seq in the parent of the workspace_synced of Snapshot; 0 if the parent has none
	Records        string `json:"records,omitempty"`        // snapshot that holds the agent's own records; "" for a new conversation
	AgentSessionID string `json:"agentSessionId,omitempty"` // the agent's own session id in Records
	Anchor         string `json:"anchor,omitempty"`         // position after which the conversation is cut; "" for the whole conversation
	Reason         string `json:"reason,omitempty"`         // why Effective is lower than Asked

	SnapshotSession string `json:"snapshotSession,omitempty"` // session that owns Snapshot, if not the parent
	RecordsSession  string `json:"recordsSession,omitempty"`  // session that owns Records, if not the parent

	Conversation string `json:"conversation,omitempty"` // what becomes of the agent's conversation: new, continued, unverified or lost; "" in forks of earlier builds
}

// Values of SessionForked.Conversation.
const (
	ForkConversationNew        = "new"        // there is none at the event
	ForkConversationContinued  = "continued"  // the agent continues a copy
	ForkConversationUnverified = "unverified" // the agent has to find its records in another folder; if it does not, the first turn ends with CONVERSATION_LOST
	ForkConversationLost       = "lost"       // the agent begins a new one, although the parent has one
)

// FilesOwner returns the id of the session that owns the snapshot with the files of the fork.
func (f SessionForked) FilesOwner() string { return cmp.Or(f.SnapshotSession, f.Parent) }

// RecordsOwner returns the id of the session that owns the snapshot with the agent's records for the fork.
func (f SessionForked) RecordsOwner() string { return cmp.Or(f.RecordsSession, f.Parent) }

// SessionOptionsUpdated replaces options and metadata of the session.
type SessionOptionsUpdated struct {
	Options  Options         `json:"options"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
}

// SessionIdle records that the idle timeout passed; the sandbox and the agent's process are released.
type SessionIdle struct {
	IdleMs uint32 `json:"idleMs"`
}

// SessionClosed records that the session accepts no more messages.
type SessionClosed struct {
	Reason string `json:"reason"` // limit
}

// SessionDeleted is the last event of a session.
type SessionDeleted struct{}

// MessageAccepted records a query as the client sent it. It is also the user_message block of its execution.
type MessageAccepted struct {
	BlockID  string          `json:"blockId"`
	Content  string          `json:"content,omitempty"`
	Parts    []Part          `json:"parts,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`

	Environment map[string]Variable `json:"environment,omitempty"` // variables of this execution only: the highest layer

	Permissions ExecutionPermissions `json:"permissions,omitzero"` // adapt the agent's permission policy to this execution

	RecoveredFrom string `json:"recoveredFrom,omitempty"` // the failed execution that this one recovers; the content is that execution's
	Continue      bool   `json:"continue,omitempty"`      // with recoveredFrom: the agent had received the content before, and is asked to continue its turn
}

// ExecutionQueued records that an execution waits in the session's queue.
type ExecutionQueued struct {
	Ahead uint32 `json:"ahead"` // number of executions before it
}

// ExecutionDispatched records that an executor may claim the execution.
type ExecutionDispatched struct{}

// ExecutionWithdrawn ends an execution that was never dispatched.
type ExecutionWithdrawn struct {
	Reason string `json:"reason"` // cancelled, interrupted, session_deleted, session_closed
}

// InterruptRequested requests that the turn stop; the agent's process is kept.
type InterruptRequested struct {
	Control uint32 `json:"control"` // number of the control within its session: 1, 2, …
}

// CancelRequested requests that the turn stop; the agent's process is killed if it does not stop in time.
type CancelRequested struct {
	Control uint32 `json:"control"`
	Reason  string `json:"reason"` // cancelled, session_deleted, session_closed
}
