package events

// FilePut says that a file, or a whole archive, is to be in the workspace; the
// holder of the session applies it before the next turn, or at once.
type FilePut struct {
	N       uint32 `json:"n"`                 // number of the change within its session: 1, 2, …
	Path    string `json:"path"`              // slash-separated, relative to the workspace; of an archive the folder it goes into, "" for the workspace
	Object  string `json:"object"`            // name of the content in the bucket workspaces
	Size    uint64 `json:"size"`              // bytes
	SHA256  string `json:"sha256"`            // hex, of the content
	Mode    uint32 `json:"mode,omitempty"`    // permission bits; 0 means 0644
	Archive bool   `json:"archive,omitempty"` // the content is a tar
	Held    uint32 `json:"held,omitempty"`    // the last change that a snapshot was known to hold
}

// FileRemoved says that a file, or a folder with all below it, is not to be in the workspace any more.
type FileRemoved struct {
	N    uint32 `json:"n"`
	Path string `json:"path"`
	Held uint32 `json:"held,omitempty"` // the last change that a snapshot was known to hold
}

// SyncRequested asks for a snapshot of the workspace.
type SyncRequested struct {
	Sync uint32 `json:"sync"` // number of the request within its session: 1, 2, …
}

// PauseRequested asks that the execution stop where it is, with all it has in memory.
type PauseRequested struct {
	Control uint32 `json:"control"`
}

// ResumeRequested asks that a paused execution go on.
type ResumeRequested struct {
	Control uint32 `json:"control"`
}

// TerminateRequested asks that the sandbox end at once, and what runs in it.
type TerminateRequested struct {
	Control uint32 `json:"control"`
	Reason  string `json:"reason"` // terminated
}

// FileCreated says that a file appeared in the workspace.
type FileCreated struct {
	Path   string `json:"path"`
	Size   uint64 `json:"size"` // bytes
	Binary bool   `json:"binary,omitempty"`
}

// FileModified says that a file's content changed.
type FileModified struct {
	Path   string `json:"path"`
	Size   uint64 `json:"size"`
	Binary bool   `json:"binary,omitempty"`
}

// FileDeleted says that a file is gone from the workspace.
type FileDeleted struct {
	Path string `json:"path"`
}

// WorkspaceSyncStarted says that an executor begins to put file changes into the workspace of a sandbox in which nothing
// runs, and to store it. Until files_applied and workspace_synced follow, others ask that executor before they use the sandbox.
type WorkspaceSyncStarted struct {
	SandboxID string `json:"sandboxId"`
	Executor  string `json:"executor"`
}

// WorkspaceSynced says that workspace and agent's records are in the object store.
type WorkspaceSynced struct {
	Snapshot   string `json:"snapshot"`          // name of its manifest in the bucket workspaces
	Reason     string `json:"reason"`            // turn, interval, idle, requested, terminated, max_age, tenant_limit, stopped
	Request    uint32 `json:"request,omitempty"` // the last sync_requested that it answers
	Applied    uint32 `json:"applied,omitempty"` // the last file change that it contains
	Files      uint32 `json:"files"`
	Bytes      uint64 `json:"bytes"`             // of all files
	NewBytes   uint64 `json:"newBytes"`          // that had to be stored
	Skipped    uint32 `json:"skipped,omitempty"` // files that it does not hold: unreadable, sockets, devices
	DurationMs uint32 `json:"durationMs"`
	Stored     uint64 `json:"stored,omitempty"` // bytes of the objects that it added: packs, those that were packed again too, and the manifest
}

// WorkspaceTrimmed says that objects of the session's workspace were removed that nothing needs any more: snapshots beyond the
// retention, and files that a snapshot holds.
type WorkspaceTrimmed struct {
	Objects uint32 `json:"objects"`
	Bytes   uint64 `json:"bytes"`
}

// WorkspaceRestored says that a new sandbox was filled from a snapshot.
type WorkspaceRestored struct {
	SandboxID  string `json:"sandboxId"`
	Snapshot   string `json:"snapshot"` // "" for the files that the agent's definition has
	Files      uint32 `json:"files"`
	DurationMs uint32 `json:"durationMs"`

	Session        string `json:"session,omitempty"`        // that the snapshot is of, if it is another one: a fork is filled from its parent's
	Records        string `json:"records,omitempty"`        // the snapshot that the agent's records came from, if it is another one than Snapshot or of another session
	RecordsSession string `json:"recordsSession,omitempty"` // the session that Records is of
}

// FilesApplied says that the changes of file_put and file_removed are in the workspace.
type FilesApplied struct {
	N     uint32 `json:"n"`               // the last one
	Error string `json:"error,omitempty"` // of those that could not be applied, one sentence each
}

// ExecutionPaused says that the execution stands still.
type ExecutionPaused struct{}

// ExecutionResumed says that the execution goes on.
type ExecutionResumed struct {
	PausedMs uint32 `json:"pausedMs"` // how long it stood still; its turn limit is that much later
}

// SandboxPaused says that a sandbox's processes stand still.
type SandboxPaused struct {
	SandboxID string `json:"sandboxId"`
}

// SandboxResumed says that a sandbox's processes go on.
type SandboxResumed struct {
	SandboxID string `json:"sandboxId"`
}

// The statuses of SandboxHealth.
const (
	Healthy   = "healthy"
	Unhealthy = "unhealthy"
)

// SandboxHealth says that a sandbox's health changed.
type SandboxHealth struct {
	SandboxID   string `json:"sandboxId"`
	Status      string `json:"status"` // healthy, unhealthy
	Reason      string `json:"reason,omitempty"`
	MemoryBytes uint64 `json:"memoryBytes,omitempty"` // of the agent's processes
	DiskBytes   uint64 `json:"diskBytes,omitempty"`   // of workspace and agent's records
}

// EgressDenied says that the egress proxy refused a connection or a request.
type EgressDenied struct {
	Journal string `json:"journal"` // of the proxy
	Line    uint64 `json:"line"`    // its number there
	Host    string `json:"host"`    // as asked for
	Port    uint32 `json:"port,omitempty"`
	Method  string `json:"method,omitempty"`  // CONNECT, GET, …
	Address string `json:"address,omitempty"` // that the host resolved to, when that was the reason
	Code    string `json:"code"`              // NOT_ALLOWED, PRIVATE_ADDRESS, BAD_HOST, UNRESOLVED, BAD_TOKEN, METHOD_NOT_ALLOWED, UNTRUSTED (a program in the sandbox does not trust the proxy's certificate), UNKNOWN_SERVER, BUDGET_EXHAUSTED, PROVIDER_SIDE (a tool, URL or stored object that the model's provider would act on), UNREADABLE_BODY, NO_EXECUTION (a model is called while no execution runs)
	Message string `json:"message"`
	Count   uint32 `json:"count"` // how many alike within a second this line stands for
}

// ModelCalled is a request to a model, as the egress proxy saw it.
type ModelCalled struct {
	Journal     string  `json:"journal"`
	Line        uint64  `json:"line"`
	Provider    string  `json:"provider"` // anthropic, openai, nvidia, or the name of a custom host
	Model       string  `json:"model,omitempty"`
	Status      uint32  `json:"status"` // of HTTP; 0 when none came
	Usage       Usage   `json:"usage"`
	CostUSD     float64 `json:"costUsd,omitempty"`
	Prices      string  `json:"prices,omitempty"` // version of the price table; "" where it has no price for the model
	FirstByteMs uint32  `json:"firstByteMs"`
	DurationMs  uint32  `json:"durationMs"`
	Error       string  `json:"error,omitempty"`

	Betas []string `json:"betas,omitempty"` // of the headers Anthropic-Beta and OpenAI-Beta
}

// Answered tells whether the model gave an answer that is none of an error.
func (m ModelCalled) Answered() bool { return m.Status > 0 && m.Status < 400 }
