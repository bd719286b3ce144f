package problem

import (
	"net/http"

	"google.golang.org/grpc/codes"
)

//go:generate go run ./gen ../../../../docs/errors.md

// Code is a stable error code. It is the same for REST, SSE, WebSocket and gRPC.
type Code string

// The codes. AllCodes documents them.
const (
	InvalidRequest      Code = "INVALID_REQUEST"
	Unauthenticated     Code = "UNAUTHENTICATED"
	Forbidden           Code = "FORBIDDEN"
	OriginRefused       Code = "ORIGIN_REFUSED"
	NotFound            Code = "NOT_FOUND"
	SessionNotFound     Code = "SESSION_NOT_FOUND"
	ExecutionNotFound   Code = "EXECUTION_NOT_FOUND"
	ApprovalNotFound    Code = "APPROVAL_NOT_FOUND"
	KeyNotFound         Code = "KEY_NOT_FOUND"
	BudgetNotFound      Code = "BUDGET_NOT_FOUND"
	LimitsNotFound      Code = "LIMITS_NOT_FOUND"
	DeadLetterNotFound  Code = "DEAD_LETTER_NOT_FOUND"
	DeadLetterFinal     Code = "DEAD_LETTER_FINAL"
	AgentNotFound       Code = "AGENT_NOT_FOUND"
	InstanceNotFound    Code = "INSTANCE_NOT_FOUND"
	EnvironmentNotFound Code = "ENVIRONMENT_NOT_FOUND"
	SkillNotFound       Code = "SKILL_NOT_FOUND"
	MethodNotAllowed    Code = "METHOD_NOT_ALLOWED"
	FileNotFound        Code = "FILE_NOT_FOUND"
	NoSnapshot          Code = "NO_SNAPSHOT"
	SnapshotGone        Code = "SNAPSHOT_GONE"
	ConversationLost    Code = "CONVERSATION_LOST"
	TranscriptInvalid   Code = "TRANSCRIPT_INVALID"
	TranscriptMismatch  Code = "TRANSCRIPT_MISMATCH"
	TranscriptNotFound  Code = "TRANSCRIPT_NOT_FOUND"
	NoLiveSandbox       Code = "NO_LIVE_SANDBOX"
	FileTooLarge        Code = "FILE_TOO_LARGE"
	SessionExists       Code = "SESSION_EXISTS"
	SessionClosed       Code = "SESSION_CLOSED"
	ExecutionNotRunning Code = "EXECUTION_NOT_RUNNING"
	ExecutionNotFailed  Code = "EXECUTION_NOT_FAILED"
	ExecutionNotLast    Code = "EXECUTION_NOT_LAST"
	ExecutionRecovered  Code = "EXECUTION_RECOVERED"
	SecretsRequired     Code = "SECRETS_REQUIRED"
	ApprovalDecided     Code = "APPROVAL_DECIDED"
	ApprovalNotOpen     Code = "APPROVAL_NOT_OPEN"
	ArgumentsFixed      Code = "ARGUMENTS_NOT_SUPPORTED"
	CursorAhead         Code = "CURSOR_AHEAD"
	CursorExpired       Code = "CURSOR_EXPIRED"
	IdempotencyMismatch Code = "IDEMPOTENCY_MISMATCH"
	AlreadyJoined       Code = "ALREADY_JOINED"
	NotJoined           Code = "NOT_JOINED"
	PayloadTooLarge     Code = "PAYLOAD_TOO_LARGE"
	QueueFull           Code = "QUEUE_FULL"
	TooManyFiles        Code = "TOO_MANY_FILES"
	TooManySessions     Code = "TOO_MANY_SESSIONS"
	TooManyStreams      Code = "TOO_MANY_STREAMS"
	TooManyKeys         Code = "TOO_MANY_KEYS"
	TooMuchInFlight     Code = "TOO_MUCH_IN_FLIGHT"
	RateLimited         Code = "RATE_LIMITED"
	TenantSessions      Code = "TENANT_SESSIONS"
	TenantEvents        Code = "TENANT_EVENTS"
	TenantStorage       Code = "TENANT_STORAGE"
	Overloaded          Code = "OVERLOADED"
	StorageFull         Code = "STORAGE_FULL"
	TooManyTags         Code = "TOO_MANY_TAGS"
	EnvironmentConflict Code = "ENVIRONMENT_CONFLICT"
	EnvironmentMissing  Code = "ENVIRONMENT_MISSING"
	EnvironmentReserved Code = "ENVIRONMENT_RESERVED"
	EgressInvalid       Code = "EGRESS_INVALID"
	SkillZIPInvalid     Code = "SKILL_ZIP_INVALID"
	SkillEntryRefused   Code = "SKILL_ENTRY_REFUSED"
	SkillTooLarge       Code = "SKILL_TOO_LARGE"
	SkillDocument       Code = "SKILL_DOCUMENT_INVALID"
	SkillDigest         Code = "SKILL_DIGEST_MISMATCH"
	SkillUpload         Code = "SKILL_UPLOAD_MISSING"
	SecretsUnavailable  Code = "SECRETS_UNAVAILABLE"
	HostPathUnsupported Code = "HOST_PATH_UNSUPPORTED"
	HostPathRefused     Code = "HOST_PATH_REFUSED"
	ImageNotAllowed     Code = "IMAGE_NOT_ALLOWED"
	SlowClient          Code = "SLOW_CLIENT"
	Internal            Code = "INTERNAL"
	Unavailable         Code = "UNAVAILABLE"
	ReadModelBehind     Code = "READ_MODEL_BEHIND"
)

// CodeEntry describes one error code, as a row of docs/errors.md.
type CodeEntry struct {
	Code   Code
	Status int        // HTTP status; 0 for a code that only streams use
	GRPC   codes.Code // gRPC status code
	Title  string     // short title, constant for the code
	Doc    string     // meaning and remedy, for docs/errors.md
	Field  string     // the invalid field, if it is always the same
}

// AllCodes returns the rows of all error codes, in the order of docs/errors.md.
func AllCodes() []CodeEntry {
	return []CodeEntry{
		{InvalidRequest, http.StatusBadRequest, codes.InvalidArgument, "The request is not valid", "`field` names the invalid field and `detail` the reason. Correct the request; repeating it fails again.", ""},
		{Unauthenticated, http.StatusUnauthorized, codes.Unauthenticated, "No valid API key", "Send a valid key in the header `Authorization: Bearer spool_sk_…`. Requests without a key, or with a wrong, revoked or expired key, are refused. `spool keys local` prints the key of `spool up`. A key is revoked with the key that made it. A session credential is refused after 8 hours, and with the key from which it comes; a code (`field` is `code`) after 60 seconds or one exchange. A stream ends with this code when its key is revoked or expires.", ""},
		{Forbidden, http.StatusForbidden, codes.PermissionDenied, "Not allowed", "The key is valid but not allowed to do this: `detail` names the required role, or the agents that the key is limited to. For a file with `live=1`: the mode of the file, or of a folder above it, does not let the sandbox's user read it.", ""},
		{OriginRefused, http.StatusForbidden, codes.PermissionDenied, "Foreign origin", "The request came from a web page of another origin, or to a host name that is not the server's. Add a trusted origin to `--allowed-origins`.", ""},
		{NotFound, http.StatusNotFound, codes.NotFound, "No such route", "The API has no such path; /api/openapi.json lists all paths.", ""},
		{SessionNotFound, http.StatusNotFound, codes.NotFound, "No such session", "The session does not exist, was deleted, or belongs to another tenant; the answer is the same in all cases.", "sessionId"},
		{ExecutionNotFound, http.StatusNotFound, codes.NotFound, "No such execution", "Like SESSION_NOT_FOUND, for an execution.", "executionId"},
		{ApprovalNotFound, http.StatusNotFound, codes.NotFound, "No such approval request", "Like SESSION_NOT_FOUND, for an approval request.", "approvalId"},
		{KeyNotFound, http.StatusNotFound, codes.NotFound, "No such key", "Like SESSION_NOT_FOUND, for an API key.", "keyId"},
		{BudgetNotFound, http.StatusNotFound, codes.NotFound, "No such budget", "The tenant has no budget for that period.", "period"},
		{LimitsNotFound, http.StatusNotFound, codes.NotFound, "No limits of its own", "The tenant has no limits of its own: the services' settings apply.", "tenant"},
		{DeadLetterNotFound, http.StatusNotFound, codes.NotFound, "No such dead letter", "The dead letter does not exist, was retried or dropped, is older than 30 days, or belongs to another tenant; the answer is the same in all cases.", "id"},
		{DeadLetterFinal, http.StatusConflict, codes.FailedPrecondition, "The dead letter cannot be retried", "The letter belongs to no session, or it is a command, whose sender received an unknown outcome and may send it again. Drop the letter.", "id"},
		{AgentNotFound, http.StatusNotFound, codes.NotFound, "No such agent", "The agent or the version does not exist, was removed, or belongs to another tenant; the answer is the same in all cases. A digest also finds a removed version.", ""},
		{InstanceNotFound, http.StatusNotFound, codes.NotFound, "No such agent instance", "Like AGENT_NOT_FOUND, for an agent instance.", ""},
		{EnvironmentNotFound, http.StatusNotFound, codes.NotFound, "No such environment", "Like AGENT_NOT_FOUND, for an environment.", ""},
		{SkillNotFound, http.StatusNotFound, codes.NotFound, "No such skill", "Like AGENT_NOT_FOUND, for a skill.", ""},
		{FileNotFound, http.StatusNotFound, codes.NotFound, "No such file", "The session's last snapshot has no file of this path, or, with `live=1`, its sandbox has no regular file there. A file that the agent has just written is in the next snapshot: request one with POST /api/sessions/{id}/sync.", "path"},
		{NoSnapshot, http.StatusNotFound, codes.NotFound, "No snapshot yet", "Files are read from the last snapshot of the workspace, and there is none yet. A snapshot is taken at the end of each turn, and on request with POST /api/sessions/{id}/sync. With `at`: there was no snapshot at that event. Until its first snapshot, a fork has the files with which it began; it has none if its parent had no snapshot at that point.", "sessionId"},
		{NoLiveSandbox, http.StatusConflict, codes.FailedPrecondition, "No sandbox runs", "With `live=1` files are read in the session's sandbox. The session has no sandbox now, the sandbox is paused, or no executor of its engine answers. Without `live` the last snapshot is read.", "live"},
		{FileTooLarge, http.StatusUnprocessableEntity, codes.OutOfRange, "The file is too large to be read live", "With `live=1` a file may have 64 MiB, and a listing 20,000 files and folders. Request a new snapshot (POST /api/sessions/{id}/sync), and read without `live`; or list a folder.", ""},
		{MethodNotAllowed, http.StatusMethodNotAllowed, codes.Unimplemented, "Method not allowed", "The path exists with another method.", ""},
		{SessionExists, http.StatusConflict, codes.AlreadyExists, "The session exists", "A session with this id exists already.", "sessionId"},
		{SessionClosed, http.StatusConflict, codes.FailedPrecondition, "The session is closed", "The session accepts no more messages; create another session.", "sessionId"},
		{ExecutionNotRunning, http.StatusConflict, codes.FailedPrecondition, "The execution does not run", "The execution is queued. Pause it when it runs, or cancel it.", "executionId"},
		{ExecutionNotFailed, http.StatusConflict, codes.FailedPrecondition, "The execution has not failed", "Only a failed execution can be recovered. This one has not ended, has completed, or was cancelled: wait for its end, or post a message to continue the conversation.", "executionId"},
		{ExecutionNotLast, http.StatusConflict, codes.FailedPrecondition, "Not the session's last execution", "Only the last execution of a session can be recovered: later messages have changed the conversation or are queued. Post a message to continue the conversation.", "executionId"},
		{ExecutionRecovered, http.StatusConflict, codes.FailedPrecondition, "The execution is recovered already", "An execution is recovered once. `detail` names the execution that recovers it. If that one fails, recover it.", "executionId"},
		{SecretsRequired, http.StatusConflict, codes.FailedPrecondition, "Secrets must be sent again", "The message of the failed execution brought secrets, which were deleted when the execution ended. Send the secrets that `detail` names in `environment`.", "environment"},
		{ApprovalDecided, http.StatusConflict, codes.FailedPrecondition, "The request is decided already", "Somebody has decided the approval request. The first decision counts; GET /api/approvals/{id} shows it.", "approvalId"},
		{ApprovalNotOpen, http.StatusConflict, codes.FailedPrecondition, "The request is not open", "The agent no longer waits for a decision: the request was retracted, timed out or was approved with its class, or the execution has ended. If the agent still needs the call, it asks again.", "approvalId"},
		{ArgumentsFixed, http.StatusUnprocessableEntity, codes.FailedPrecondition, "The arguments cannot be changed", "The agent cannot run a call with changed arguments: `editable` of the request is not set. Reject the request with a comment that says what to change.", "arguments"},
		{ConversationLost, http.StatusConflict, codes.FailedPrecondition, "The conversation is lost", "The agent cannot continue its conversation in another process, so a fork would not know it. Set `allowConversationLoss` to fork with a new conversation.", "sessionId"},
		{SnapshotGone, http.StatusGone, codes.FailedPrecondition, "The snapshot is gone", "The files at an event, and the files with which a fork begins, are in a snapshot of the workspace. That snapshot was removed or cannot be read. Sessions keep their last SPOOL_GC_SNAPSHOTS snapshots. Use the nearest snapshot that still exists, which `detail` names, or fork at a later event.", "at"},
		{TranscriptInvalid, http.StatusUnprocessableEntity, codes.InvalidArgument, "The transcript is not valid", "The file is not a complete transcript of Claude Code, Codex or OpenCode. `detail` names the line (for OpenCode the message) and the error. Nothing is stored.", "transcript"},
		{TranscriptMismatch, http.StatusUnprocessableEntity, codes.FailedPrecondition, "The transcript belongs to another agent", "A conversation can only be continued in the architecture in which it was held. `detail` names both.", "transcript"},
		{TranscriptNotFound, http.StatusNotFound, codes.NotFound, "No such transcript", "The tenant has not uploaded a transcript with this reference within the last 10 minutes. Upload it again: POST /api/transcripts.", "transcript"},
		{CursorAhead, http.StatusConflict, codes.OutOfRange, "The cursor is in the future", "`after`, or the event that `at`, `from` or `to` names (a replay's as well), is greater than the session's last seq, which is `tip`. Read the blocks at the tip (GET /api/sessions/{id}/blocks) and continue from there; a WebSocket receives them as session:snapshot. The cursor of a stream of all sessions is not of this installation: list the sessions, and follow without it.", "after"},
		{CursorExpired, http.StatusGone, codes.OutOfRange, "The cursor is too old", "Events after `after` are no longer kept. Continue from the blocks at the tip, as with CURSOR_AHEAD.", "after"},
		{IdempotencyMismatch, http.StatusConflict, codes.AlreadyExists, "The Idempotency-Key was used for another request", "Within 24 hours a key identifies one request. Use a new key for a new request.", "Idempotency-Key"},
		{AlreadyJoined, http.StatusConflict, codes.AlreadyExists, "Joined already", "This WebSocket has already joined the session; leave it first.", "sessionId"},
		{NotJoined, http.StatusConflict, codes.FailedPrecondition, "Not joined", "This WebSocket has not joined the session.", "sessionId"},
		{PayloadTooLarge, http.StatusRequestEntityTooLarge, codes.InvalidArgument, "Too large", "`detail` gives the limit: messages up to 1 MiB, metadata up to 16 KiB, a request with files up to `--max-request`, an uploaded file or tar up to `--max-file`, a transcript up to `--max-transcript`, a definition up to 4 MiB, the ZIP of a skill up to 100 MiB, frames of a WebSocket up to 64 KiB.", ""},
		{QueueFull, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many messages wait", "The session's queue is full; try again when some have been answered.", ""},
		{TooManyFiles, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many file changes wait", "1,024 changes may wait for a snapshot that contains them. Upload many files as one tar (Content-Type application/x-tar), or run a turn first.", ""},
		{TooManySessions, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many sessions on one WebSocket", "Leave some sessions, or open another WebSocket.", ""},
		{TooManyStreams, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many streams", "The tenant has `--max-tenant-streams` streams open at this gateway, or as many as its own limit (docs/limits.md): SSE, WebSockets, gRPC and requests with `wait` together. Close some streams, use one WebSocket for many sessions, or send the request without `wait`.", ""},
		{TooManyKeys, http.StatusConflict, codes.FailedPrecondition, "Too many API keys", "The tenant has reached its number of keys that are not revoked: its limit `keys`, or the setting `--max-keys` of the session service. Revoke some keys. Keys that expired more than a day ago do not count.", ""},
		{TooMuchInFlight, http.StatusTooManyRequests, codes.ResourceExhausted, "Too much of the tenant is in flight", "The tenant's open requests hold `--max-tenant-bytes` at this gateway, or its streams hold half of that. Nothing was done: try again after `Retry-After`, with fewer requests at once. A stream waits for three times `--write-timeout` before it ends with this code; the client can continue with its cursor. A WebSocket whose message is refused is closed with 1013.", ""},
		{RateLimited, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many requests", "The tenant sends more requests to this gateway than allowed: `--max-tenant-requests` a second and `--max-tenant-burst` at once, or its own limits (docs/limits.md). Nothing was done: try again after `Retry-After`. Messages of a WebSocket count too; a message over the limit closes the WebSocket with 1013.", ""},
		{TenantSessions, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many sessions", "The tenant has reached its number of sessions: `--max-tenant-sessions`, or its own limit (docs/limits.md). Delete some sessions, or have the operator raise the limit.", ""},
		{TenantEvents, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many events on one day", "The sessions of the tenant have added as many events to the log on this UTC day, or as many bytes, as its limits `eventsPerDay` and `eventBytesPerDay` allow (docs/limits.md). New sessions, messages, files and changes of options are refused; controls and deletions are not. Try again on the next UTC day, or have the operator raise the limit.", ""},
		{TenantStorage, http.StatusTooManyRequests, codes.ResourceExhausted, "Too many bytes stored", "The tenant has reached its stored bytes, or would exceed them with this request: `--max-tenant-storage`, or its own limit `storageBytes` (docs/limits.md). New sessions, messages, files, definitions and skills are refused; running turns continue, and controls, deletions and reads are served. Delete sessions or versions of skills and try again when the janitor has removed them, or have the operator raise the limit.", ""},
		{Overloaded, http.StatusServiceUnavailable, codes.ResourceExhausted, "The gateway is full", "Open requests hold `--max-bytes`, streams hold half of that, or `--max-connections` connections are open. Nothing was done: try again after `Retry-After`, or at another gateway. A stream waits for three times `--write-timeout` before it ends with this code; the client can continue with its cursor. A WebSocket whose message is refused is closed with 1013.", ""},
		{StorageFull, http.StatusInsufficientStorage, codes.ResourceExhausted, "The store is full", "The streams and buckets of NATS have reached their limit, except for a reserve (`--store-reserve`) that is kept for ends of executions, controls and deletions. Requests that need room, such as a session, a message, a file or a skill, are refused; requests that end or remove something are not. Delete sessions, or have the operator raise the limit (`SPOOL_NATS_MAX_STORE`), and try again after `Retry-After`.", ""},
		{TooManyTags, http.StatusConflict, codes.FailedPrecondition, "Too many tags", "An entry of the catalogue has at most 64 tags. Move an existing tag.", ""},
		{EnvironmentConflict, http.StatusUnprocessableEntity, codes.FailedPrecondition, "The variables do not merge", "An environment is referenced in two versions, or the name of a variable is not allowed. `detail` lists all errors.", ""},
		{EnvironmentMissing, http.StatusUnprocessableEntity, codes.FailedPrecondition, "A variable has no value", "The agent requires the variable, and no environment sets it. `detail` lists all errors.", ""},
		{EnvironmentReserved, http.StatusUnprocessableEntity, codes.FailedPrecondition, "A variable is Spool's own", "The variable determines how a sandbox reaches models, or where agents store their files. `detail` lists all errors.", ""},
		{EgressInvalid, http.StatusUnprocessableEntity, codes.FailedPrecondition, "The allowlists cannot be combined", "The agent and the environments together name more than 256 hosts. `detail` names the one that exceeds the limit.", ""},
		{SkillZIPInvalid, http.StatusUnprocessableEntity, codes.InvalidArgument, "The ZIP is not valid", "The upload is not a ZIP, is damaged, or is inconsistent.", ""},
		{SkillEntryRefused, http.StatusUnprocessableEntity, codes.InvalidArgument, "An entry of the ZIP is refused", "The path of the entry leaves the skill, the entry is neither a file nor a folder, or two entries have the same path. `detail` names the entry.", ""},
		{SkillTooLarge, http.StatusRequestEntityTooLarge, codes.InvalidArgument, "The skill is too large", "`detail` gives the limit: of files, of unpacked bytes, of their ratio to packed ones, or of SKILL.md.", ""},
		{SkillDocument, http.StatusUnprocessableEntity, codes.InvalidArgument, "SKILL.md is not valid", "SKILL.md is missing at the root, exists twice, is too large, or has an invalid front matter. `field` names the line.", ""},
		{SkillDigest, http.StatusUnprocessableEntity, codes.InvalidArgument, "The ZIP has another SHA-256", "The SHA-256 of the request is not that of the received ZIP. Send it again.", "sha256"},
		{SkillUpload, http.StatusConflict, codes.Aborted, "The upload is gone", "The uploaded content was missing or incomplete when it was checked. Push it again.", ""},
		{SecretsUnavailable, http.StatusServiceUnavailable, codes.FailedPrecondition, "Secrets are not supported", "The server has no key to encrypt secrets; `detail` names the setting.", ""},
		{HostPathUnsupported, http.StatusUnprocessableEntity, codes.FailedPrecondition, "The sandbox has a workspace of its own", "Only local sandboxes work in a folder of the server's machine. Put the folder's files into the workspace, as `spool run --workspace` does.", "sessionOptions.hostPath"},
		{HostPathRefused, http.StatusForbidden, codes.PermissionDenied, "The session may not work in this folder", "The server's setting `host-paths` does not allow the folder; or the folder does not exist, cannot be written by the server or contains Spool's own data; or the server sees another folder at this path than the client. `detail` has the reason. Work on a copy (`spool run --workspace DIR --copy`), or have the operator allow it.", "sessionOptions.hostPath"},
		{ImageNotAllowed, http.StatusForbidden, codes.PermissionDenied, "The image is not allowed", "The server's setting `sandbox-images` does not contain the image of the session, of its agent or of an MCP server of type docker; `field` names it. Use another image, or have the operator add it. An execution whose image is no longer allowed fails with this code.", ""},
		{SlowClient, 0, codes.ResourceExhausted, "The client is too slow", "The client took longer than `--write-timeout` to read, so the stream was ended. Connect again with the seq of the last received event as cursor; WatchExecution needs no cursor.", ""},
		{Internal, http.StatusInternalServerError, codes.Internal, "Internal error", "An error in the server, which its log describes.", ""},
		{Unavailable, http.StatusServiceUnavailable, codes.Unavailable, "Not available now", "NATS, Postgres or a service does not answer. Wait for `Retry-After` and try again. When the outcome of a command is unknown, `detail` states this and `idempotencyKey` is the Idempotency-Key with which a retry is safe.", ""},
		{ReadModelBehind, http.StatusServiceUnavailable, codes.Unavailable, "The read models are behind", "The log is ahead of the read models: they did not reach `minPosition` in time, or do not contain the session or execution of the request yet. Nothing is lost: try again. Commands, such as a message, a file or a control, are still accepted.", ""},
	}
}

// entriesByCode maps each error code to its row of docs/errors.md; it is never changed.
var entriesByCode = func() map[Code]CodeEntry {
	m := map[Code]CodeEntry{}
	for _, e := range AllCodes() {
		m[e.Code] = e
	}
	return m
}()

// LookupCode returns the row of docs/errors.md for a code; ok is false for an unknown code.
func LookupCode(c Code) (CodeEntry, bool) {
	e, ok := entriesByCode[c]
	return e, ok
}
