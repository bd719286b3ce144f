package events

// FilePut records that a client put a file or an archive into the workspace. The executor that holds the session
// applies it at once, or before the next turn.
type FilePut struct {
	N       uint32 `json:"n"`                 // number of the change within its session: 1, 2, …
	Path    string `json:"path"`              // slash-separated, relative to the workspace; for an archive the folder into which it is unpacked, "" for the workspace itself
	Object  string `json:"object"`            // name of the content in the bucket workspaces
	Size    uint64 `json:"size"`              // bytes
	SHA256  string `json:"sha256"`            // hex, of the content
	Mode    uint32 `json:"mode,omitempty"`    // permission bits; 0 means 0644
	Archive bool   `json:"archive,omitempty"` // the content is a tar
	Held    uint32 `json:"held,omitempty"`    // number of the last change that a snapshot was known to contain
}

// FileRemoved records that a client removed a file, or a folder with everything below it, from the workspace.
type FileRemoved struct {
	N    uint32 `json:"n"`
	Path string `json:"path"`
	Held uint32 `json:"held,omitempty"` // number of the last change that a snapshot was known to contain
}

// SyncRequested requests a snapshot of the workspace.
type SyncRequested struct {
	Sync uint32 `json:"sync"` // number of the request within its session: 1, 2, …
}

// PauseRequested requests that the execution pause; its processes keep their memory.
type PauseRequested struct {
	Control uint32 `json:"control"`
}

// ResumeRequested requests that a paused execution resume.
type ResumeRequested struct {
	Control uint32 `json:"control"`
}

// TerminateRequested requests that the sandbox, and everything that runs in it, end at once.
type TerminateRequested struct {
	Control uint32 `json:"control"`
	Reason  string `json:"reason"` // terminated
}

// FileCreated records that a file appeared in the workspace.
type FileCreated struct {
	Path   string `json:"path"`
	Size   uint64 `json:"size"` // bytes
	Binary bool   `json:"binary,omitempty"`
}

// FileModified records that the content of a file changed.
type FileModified struct {
	Path   string `json:"path"`
	Size   uint64 `json:"size"`
	Binary bool   `json:"binary,omitempty"`
}

// FileDeleted records that a file was removed from the workspace.
type FileDeleted struct {
	Path string `json:"path"`
}

// WorkspaceSyncStarted records that an executor started to apply file changes to a sandbox between turns and to
// store its workspace. Until files_applied and workspace_synced follow, other executors ask that executor before
// they use the sandbox.
type WorkspaceSyncStarted struct {
	SandboxID string `json:"sandboxId"`
	Executor  string `json:"executor"`
}

// WorkspaceSynced records that the workspace and the agent's records are in the object store.
type WorkspaceSynced struct {
	Snapshot   string `json:"snapshot"`          // name of its manifest in the bucket workspaces
	Reason     string `json:"reason"`            // turn, interval, idle, requested, terminated, max_age, tenant_limit, stopped
	Request    uint32 `json:"request,omitempty"` // number of the last sync_requested that it answers
	Applied    uint32 `json:"applied,omitempty"` // number of the last file change that it contains
	Files      uint32 `json:"files"`
	Bytes      uint64 `json:"bytes"`             // total size of the files
	NewBytes   uint64 `json:"newBytes"`          // size of the files that were not stored before
	Skipped    uint32 `json:"skipped,omitempty"` // files that it does not contain: unreadable files, sockets, devices
	DurationMs uint32 `json:"durationMs"`
	Stored     uint64 `json:"stored,omitempty"` // size of the objects that it added: packs, including those that were packed again, and the manifest
}

// WorkspaceTrimmed records that unreferenced objects of the session's workspace were removed: snapshots beyond the
// retention, and uploaded files that a snapshot contains.
type WorkspaceTrimmed struct {
	Objects uint32 `json:"objects"`
	Bytes   uint64 `json:"bytes"`
}

// WorkspaceRestored records that a new sandbox was filled from a snapshot.
type WorkspaceRestored struct {
	SandboxID  string `json:"sandboxId"`
	Snapshot   string `json:"snapshot"` // "" if only the files of the agent's definition were written
	Files      uint32 `json:"files"`
	DurationMs uint32 `json:"durationMs"`

	Session        string `json:"session,omitempty"`        // session that owns the snapshot, if not this one: a fork is filled from its parent's
	Records        string `json:"records,omitempty"`        // snapshot that the agent's records came from, if it is not Snapshot or belongs to another session
	RecordsSession string `json:"recordsSession,omitempty"` // session that owns Records
}

// FilesApplied records that the changes of file_put and file_removed were applied to the workspace.
type FilesApplied struct {
	N     uint32 `json:"n"`               // number of the last applied change
	Error string `json:"error,omitempty"` // one sentence for each change that could not be applied
}

// ExecutionPaused records that the execution is paused.
type ExecutionPaused struct{}

// ExecutionResumed records that the execution was resumed.
type ExecutionResumed struct {
	PausedMs uint32 `json:"pausedMs"` // duration of the pause in milliseconds; the turn limit is extended by it
}

// SandboxPaused records that the processes of a sandbox were paused.
type SandboxPaused struct {
	SandboxID string `json:"sandboxId"`
}

// SandboxResumed records that the processes of a sandbox were resumed.
type SandboxResumed struct {
	SandboxID string `json:"sandboxId"`
}

// The statuses of SandboxHealth.
const (
	Healthy   = "healthy"
	Unhealthy = "unhealthy"
)

// SandboxHealth records a change of a sandbox's health.
type SandboxHealth struct {
	SandboxID   string `json:"sandboxId"`
	Status      string `json:"status"` // healthy, unhealthy
	Reason      string `json:"reason,omitempty"`
	MemoryBytes uint64 `json:"memoryBytes,omitempty"` // memory of the agent's processes
	DiskBytes   uint64 `json:"diskBytes,omitempty"`   // disk usage of the workspace and the agent's records
}

// EgressDenied records that the egress proxy refused a connection or a request.
type EgressDenied struct {
	Journal string `json:"journal"` // name of the proxy's journal
	Line    uint64 `json:"line"`    // number of the line in that journal
	Host    string `json:"host"`    // as requested
	Port    uint32 `json:"port,omitempty"`
	Method  string `json:"method,omitempty"`  // CONNECT, GET, …
	Address string `json:"address,omitempty"` // address of the host, if it was the reason
	Code    string `json:"code"`              // NOT_ALLOWED, PRIVATE_ADDRESS, BAD_HOST, UNRESOLVED, BAD_TOKEN, METHOD_NOT_ALLOWED, UNTRUSTED (a program in the sandbox does not trust the proxy's certificate), UNKNOWN_SERVER, BUDGET_EXHAUSTED, PROVIDER_SIDE (a tool, URL or stored object that the model's provider would act on), UNREADABLE_BODY, NO_EXECUTION (a model is called while no execution runs)
	Message string `json:"message"`
	Count   uint32 `json:"count"` // number of equal refusals within a second that this line represents
}

// ModelCalled records a request to a model, as the egress proxy observed it.
type ModelCalled struct {
	Journal     string  `json:"journal"`
	Line        uint64  `json:"line"`
	Provider    string  `json:"provider"` // anthropic, openai, nvidia, or the name of a custom host
	Model       string  `json:"model,omitempty"`
	Status      uint32  `json:"status"` // HTTP status; 0 if there was no response
	Usage       Usage   `json:"usage"`
	CostUSD     float64 `json:"costUsd,omitempty"`
	Prices      string  `json:"prices,omitempty"` // version of the price table; "" if it has no price for the model
	FirstByteMs uint32  `json:"firstByteMs"`
	DurationMs  uint32  `json:"durationMs"`
	Error       string  `json:"error,omitempty"`

	Betas []string `json:"betas,omitempty"` // values of the headers Anthropic-Beta and OpenAI-Beta
}

// Answered reports whether the model answered without an error.
func (m ModelCalled) Answered() bool { return m.Status > 0 && m.Status < 400 }
