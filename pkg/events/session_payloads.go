package events

import (
	"cmp"
	"encoding/json"
)

// Options are what a session may set for itself; 0 or "" means the agent's, then the server's default.
type Options struct {
	Model          string `json:"model,omitempty"`
	ModelProvider  string `json:"modelProvider,omitempty"`  // the API by which the model is reached: anthropic, openai or nvidia; default the executor's for the architecture
	IdleTimeoutMs  uint32 `json:"idleTimeoutMs,omitempty"`  // milliseconds without a turn until the sandbox is given up; default 15 min
	TurnLimitMs    uint32 `json:"turnLimitMs,omitempty"`    // milliseconds one execution may take; default 1 h
	SessionLimitMs uint32 `json:"sessionLimitMs,omitempty"` // milliseconds a session lives; default 24 h

	SyncIntervalMs   uint32        `json:"syncIntervalMs,omitempty"`   // milliseconds between snapshots of the workspace while a turn runs; default 30 s
	HealthIntervalMs uint32        `json:"healthIntervalMs,omitempty"` // milliseconds between health checks of the sandbox; default 30 s
	SandboxMaxAgeMs  uint32        `json:"sandboxMaxAgeMs,omitempty"`  // milliseconds after which a sandbox is replaced between two turns; default 24 h
	Image            string        `json:"image,omitempty"`            // of the sandbox; default the executor's
	Command          []string      `json:"command,omitempty"`          // of architecture acp: the agent's program and its arguments
	ModelSettings    ModelSettings `json:"modelSettings,omitzero"`     // of architecture acp: how the agent is given its model
	Budget           Budget        `json:"budget,omitzero"`            // of the whole session
	Egress           []string      `json:"egress,omitempty"`           // hosts beside the models' that the sandbox may reach: host, host:port or *.host, after methods and a space where not all are allowed (GET,HEAD host)

	HostPath string `json:"hostPath,omitempty"` // absolute path of a folder of the executor's machine in which the session works, in place of a workspace of its own; set when the session is created, local sandboxes only
}

// ModelSettings are how an agent of architecture acp is given its model. In
// values, ${MODEL} is replaced by the model, ${MODEL_BASE_URL} by the base URL of
// its API and ${MODEL_KEY} by the key; $$ is a dollar sign.
type ModelSettings struct {
	Preset string            `json:"preset,omitempty"` // settings of a known agent: claude, opencode or qwen
	Env    map[string]string `json:"env,omitempty"`    // variables of the agent's process; they override those of the preset
	Args   []string          `json:"args,omitempty"`   // arguments after the command; never the key
}

// SessionCreated is the first event of a session.
type SessionCreated struct {
	Agent        string          `json:"agent"`        // the agent's slug; "default" is built in
	AgentVersion string          `json:"agentVersion"` // pinned
	Architecture string          `json:"architecture"`
	Provider     string          `json:"provider"`
	Options      Options         `json:"options"` // resolved: no field is empty but model and modelProvider
	Metadata     json.RawMessage `json:"metadata,omitempty"`

	AgentRef     Reference   `json:"agentRef,omitzero"`      // with the pinned version; zero for the built-in agent
	Instance     Reference   `json:"instance,omitzero"`      // with the version; zero for none
	Environments []Reference `json:"environments,omitempty"` // layers above the instance's

	Transcript *Transcript `json:"transcript,omitempty"` // of the conversation that the agent begins with; nil for a new one
}

// Transcript is a conversation that was held outside of Spool, in the form in which the agent's own command line keeps it.
type Transcript struct {
	Architecture   string `json:"architecture"`   // claude-code, codex or opencode
	Object         string `json:"object"`         // in the bucket workspaces
	Size           uint64 `json:"size"`           // bytes
	SHA256         string `json:"sha256"`         // hex
	AgentSessionID string `json:"agentSessionId"` // the agent's own session in it; the session goes on with a copy under another id
	Messages       uint32 `json:"messages"`       // of user and agent
}

// SessionForked says that a session goes on from an event of another one, its parent. It is the second event of the
// session, in one commit with session_created. The parent's log does not mention its forks.
type SessionForked struct {
	Parent         string `json:"parent"`
	Asked          uint32 `json:"asked"`                    // seq in the parent that was asked for
	Effective      uint32 `json:"effective"`                // seq in the parent up to which the history is the fork's too; at most Asked
	Snapshot       string `json:"snapshot,omitempty"`       // of the files; "" for an empty workspace
	SnapshotSeq    uint32 `json:"snapshotSeq,omitempty"`    // seq in the parent of the workspace_synced of Snapshot; 0 if the parent has none
	Records        string `json:"records,omitempty"`        // the snapshot that has the agent's own records; "" for a new conversation
	AgentSessionID string `json:"agentSessionId,omitempty"` // the agent's own session in Records
	Anchor         string `json:"anchor,omitempty"`         // after which the conversation is cut; "" for the whole of it
	Reason         string `json:"reason,omitempty"`         // why Effective is lower than Asked

	SnapshotSession string `json:"snapshotSession,omitempty"` // the session that Snapshot is of, if it is not the parent
	RecordsSession  string `json:"recordsSession,omitempty"`  // the session that Records is of, if it is not the parent
}

// Files returns the session that the snapshot of the files is of.
func (f SessionForked) Files() string { return cmp.Or(f.SnapshotSession, f.Parent) }

// State returns the session that the snapshot of the agent's records is of.
func (f SessionForked) State() string { return cmp.Or(f.RecordsSession, f.Parent) }

// SessionOptionsUpdated replaces options and metadata.
type SessionOptionsUpdated struct {
	Options  Options         `json:"options"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
}

// SessionIdle says that the idle timeout passed: what is warm is given up.
type SessionIdle struct {
	IdleMs uint32 `json:"idleMs"`
}

// SessionClosed says that the session takes no more messages.
type SessionClosed struct {
	Reason string `json:"reason"` // limit
}

// SessionDeleted is the last event of a session.
type SessionDeleted struct{}

// MessageAccepted is a query as it came; it is also the user_message block of its execution.
type MessageAccepted struct {
	BlockID  string          `json:"blockId"`
	Content  string          `json:"content,omitempty"`
	Parts    []Part          `json:"parts,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`

	Environment map[string]Variable `json:"environment,omitempty"` // of this execution alone: the highest layer
}

// ExecutionQueued says that a query waits its turn.
type ExecutionQueued struct {
	Ahead uint32 `json:"ahead"` // how many executions stand before it
}

// ExecutionDispatched says that an executor may claim the execution.
type ExecutionDispatched struct{}

// ExecutionWithdrawn ends an execution that was not dispatched.
type ExecutionWithdrawn struct {
	Reason string `json:"reason"` // cancelled, interrupted, session_deleted, session_closed
}

// InterruptRequested asks that the turn stop; the agent stays warm.
type InterruptRequested struct {
	Control uint32 `json:"control"` // number of the control within its session: 1, 2, …
}

// CancelRequested asks that the turn stop; what does not stop in time is ended.
type CancelRequested struct {
	Control uint32 `json:"control"`
	Reason  string `json:"reason"` // cancelled, session_deleted, session_closed
}
