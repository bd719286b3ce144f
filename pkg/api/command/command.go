// Package command defines the requests that gateways send to the session and skills services over COMMANDS, and the
// answers. Both are JSON. A command is sent to topology.CommandSubject(topology.ServiceSession, tenant, id), where id
// is the id of the session, or the catalogue id of the entry, that the command concerns.
package command

import (
	"encoding/json"

	"github.com/spoolhq/spool/pkg/events"
)

// Type is the type of a command, as sent to a service. It determines the type of Command.Body.
type Type string

// The types of command, each with its body and the ids of Command that it requires.
const (
	TypeCreateSession    Type = "create_session"  // CreateSession; SessionID is the new session's
	TypeForkSession      Type = "fork_session"    // ForkSession; SessionID is the new session's
	TypeUpdateSession    Type = "update_session"  // UpdateSession; SessionID
	TypePostMessage      Type = "post_message"    // PostMessage; SessionID, and ExecutionID of the new execution
	TypeStartExecution   Type = "start_execution" // StartExecution; SessionID and ExecutionID, both new
	TypeRecoverExecution Type = "recover"         // RecoverExecution; SessionID, and ExecutionID of the new execution
	TypeInterrupt        Type = "interrupt"       // no body; SessionID
	TypeCancel           Type = "cancel"          // no body; SessionID and ExecutionID
	TypePause            Type = "pause"           // no body; SessionID and ExecutionID
	TypeResume           Type = "resume"          // no body; SessionID and ExecutionID
	TypeTerminate        Type = "terminate"       // no body; SessionID, and ExecutionID unless the environment is meant
	TypeSyncWorkspace    Type = "sync"            // no body; SessionID
	TypePutFile          Type = "put_file"        // PutFile; SessionID
	TypeRemoveFile       Type = "remove_file"     // RemoveFile; SessionID
	TypeDecideApproval   Type = "decide_approval" // DecideApproval; SessionID, and ExecutionID of the request's execution
	TypeDeleteSession    Type = "delete_session"  // no body; SessionID
	TypeCreateKey        Type = "create_key"      // CreateKey; no ids
	TypeRevokeKey        Type = "revoke_key"      // RevokeKey; no ids
	TypeSetBudget        Type = "set_budget"      // SetBudget; no ids
	TypeRemoveBudget     Type = "remove_budget"   // RemoveBudget; no ids
	TypeSetLimits        Type = "set_limits"      // SetLimits; no ids
	TypeRemoveLimits     Type = "remove_limits"   // no body, no ids

	TypeRetryDeadLetter Type = "retry_dead" // DeadLetter; no ids
	TypeDropDeadLetter  Type = "drop_dead"  // DeadLetter; no ids

	TypeApplyAgent        Type = "apply_agent"        // ApplyAgent; no ids
	TypeApplyInstance     Type = "apply_instance"     // ApplyInstance; no ids
	TypeApplyEnvironment  Type = "apply_environment"  // ApplyEnvironment; no ids
	TypeRemoveAgent       Type = "remove_agent"       // RemoveEntry; no ids
	TypeRemoveInstance    Type = "remove_instance"    // RemoveEntry; no ids
	TypeRemoveEnvironment Type = "remove_environment" // RemoveEntry; no ids

	// TypePushSkill and the types below it are sent to the skills service.
	TypePushSkill   Type = "push_skill"   // PushSkill; no ids
	TypeTagSkill    Type = "tag_skill"    // TagSkill; no ids
	TypeRemoveSkill Type = "remove_skill" // RemoveEntry; no ids
)

// IsRefusedWhenFull reports whether services refuse a command of this type while only the reserve of the NATS store is
// left and, if the command concerns a session, while the tenant has reached its daily limit of events. Commands that
// end, remove or govern something are never refused for these reasons.
func (t Type) IsRefusedWhenFull() bool {
	switch t {
	case TypeCreateSession, TypeForkSession, TypeUpdateSession, TypePostMessage, TypeStartExecution, TypeRecoverExecution, TypePutFile, TypeSyncWorkspace,
		TypeApplyAgent, TypeApplyInstance, TypeApplyEnvironment, TypePushSkill, TypeTagSkill:
		return true
	}
	return false
}

// CodeStorageFull is the error code of a command that is refused because only the reserve of the NATS store is left.
const CodeStorageFull = "STORAGE_FULL"

// CodeTranscriptMismatch is the error code of a command whose transcript belongs to another architecture than the
// session's agent.
const CodeTranscriptMismatch = "TRANSCRIPT_MISMATCH"

// CodeConversationLost is the error code of a fork whose agent would not know the conversation.
const CodeConversationLost = "CONVERSATION_LOST"

// CodeSnapshotGone is the error code of a fork that needs a snapshot which no longer exists in the object store or
// cannot be read.
const CodeSnapshotGone = "SNAPSHOT_GONE"

// Command is one request of a gateway to a service. The gateway generates the ids in the command, so that sending the
// same command again changes nothing.
type Command struct {
	Type        Type            `json:"type"`
	ID          string          `json:"id"` // cmd_…
	Tenant      string          `json:"tenant"`
	SessionID   string          `json:"sessionId,omitempty"`
	ExecutionID string          `json:"executionId,omitempty"`
	Actor       events.Actor    `json:"actor"`
	Body        json.RawMessage `json:"body,omitempty"`

	// Agents are the slugs of the only agents that the actor's key may use; empty means all. The service that
	// executes the command treats anything of another agent as not found.
	Agents []string `json:"agents,omitempty"`
}

// DeadLetter identifies a dead letter by its sequence in the stream DEAD.
type DeadLetter struct {
	Sequence uint64 `json:"sequence"`
}

// CreateSession creates a session. Empty fields mean the server's defaults.
type CreateSession struct {
	Agent        string          `json:"agent,omitempty"`
	Architecture string          `json:"architecture,omitempty"`
	Provider     string          `json:"provider,omitempty"`
	Options      events.Options  `json:"options"`
	Metadata     json.RawMessage `json:"metadata,omitempty"`
	Files        []File          `json:"files,omitempty"` // files to put into the workspace; StartExecution uses Post.Files instead

	// HostPathIdentity is the identity of Options.HostPath as the client sees it, see hostpath.FolderIdentity; "" disables
	// the check.
	HostPathIdentity string `json:"hostPathIdentity,omitempty"`

	Instance     string   `json:"instance,omitempty"`     // a reference, in place of Agent
	Environments []string `json:"environments,omitempty"` // references, layered above the instance's environments

	Transcript *events.Transcript `json:"transcript,omitempty"` // the transcript that the agent continues; stored in the session's folder of the bucket workspaces
}

// ForkSession creates a session that continues after an event of another session of the same tenant.
type ForkSession struct {
	Parent   string          `json:"parent"`
	At       *uint32         `json:"at,omitempty"`       // seq in the parent; nil means its last event
	Metadata json.RawMessage `json:"metadata,omitempty"` // replaces the parent's metadata; nil keeps it
	Agent    string          `json:"agent,omitempty"`    // a reference to another version, or to another agent of the same architecture; "" means the parent's agent

	AllowConversationLoss bool `json:"allowConversationLoss,omitempty"` // fork although the agent's conversation is lost
	Preview               bool `json:"preview,omitempty"`               // only answer where the fork would begin
}

// UpdateSession changes a session. Nil options, empty fields of options, and nil metadata leave the present values
// unchanged.
type UpdateSession struct {
	Options  *events.Options `json:"options,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
	Clear    []string        `json:"clear,omitempty"` // JSON names of the options to reset to the server's default
}

// PostMessage sends a query to a session, as text content or as a list of parts.
type PostMessage struct {
	Content  string          `json:"content,omitempty"`
	Parts    []events.Part   `json:"parts,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
	Files    []File          `json:"files,omitempty"` // files that must be in the workspace before the agent starts

	Environment map[string]events.Variable `json:"environment,omitempty"` // variables of this execution only; secrets are already sealed

	Permissions events.ExecutionPermissions `json:"permissions,omitzero"` // adapt the agent's permission policy to this execution
}

// RecoverExecution continues a failed execution in a new one, which has the content, the metadata and the variables of the failed one.
type RecoverExecution struct {
	ExecutionID string `json:"executionId"` // the failed execution

	Environment map[string]events.Variable `json:"environment,omitempty"` // override the failed execution's variables; secrets are already sealed
}

// DecideApproval decides an approval request of the active execution. The gateway has checked arguments, answers and
// content against the request.
type DecideApproval struct{ events.ApprovalDecided }

// File is a file, or a tar archive, to put into a workspace. Its content is already stored in the bucket workspaces,
// under Object.
type File struct {
	Path    string `json:"path"`             // relative to the workspace; for an archive, the folder to extract to, "" for the workspace
	Object  string `json:"object,omitempty"` // "" means FileObject(tenant, session, SHA256)
	Size    uint64 `json:"size"`             // bytes
	SHA256  string `json:"sha256"`           // hex
	Mode    uint32 `json:"mode,omitempty"`   // permission bits; 0 means 0644
	Archive bool   `json:"archive,omitempty"`
}

// PutFile puts a file or an archive into a session's workspace.
type PutFile struct{ File }

// RemoveFile removes a file, or a folder with everything below it.
type RemoveFile struct {
	Path string `json:"path"`
}

// StartExecution creates a session and posts its first message in one command.
type StartExecution struct {
	Create CreateSession `json:"create"`
	Post   PostMessage   `json:"post"`
}

// CreateKey stores an API key. Only the key's hash is sent. The command is sent to the catalogue id
// events.CatalogueID(events.Key, tenant, "", "", keyId).
type CreateKey struct {
	KeyID  string `json:"keyId"`
	Name   string `json:"name"`
	Prefix string `json:"prefix"` // the first characters of the key, to recognise it by
	SHA256 string `json:"sha256"` // hex SHA-256 of the whole key

	Rights events.KeyRights `json:"rights,omitzero"` // empty fields are copied from the actor's key
}

// RevokeKey revokes an API key and the keys that descend from it. RevokeKey is sent to the same catalogue id as
// CreateKey.
type RevokeKey struct {
	KeyID string `json:"keyId"`
}

// SetBudget sets the budget of the command's tenant for a period. It is sent to the catalogue id
// events.BudgetSubject(tenant, period), and so is RemoveBudget.
type SetBudget struct {
	Period events.Period `json:"period"`
	Budget events.Budget `json:"budget"`
}

// RemoveBudget removes the budget of the command's tenant for a period.
type RemoveBudget struct {
	Period events.Period `json:"period"`
}

// SetLimits sets the limits of the command's tenant. It is sent to the catalogue id events.LimitsSubject(tenant), and so is
// TypeRemoveLimits.
type SetLimits struct {
	Limits events.TenantLimits `json:"limits"`
}

// ApplyAgent creates a version of an agent. Like all commands about catalogue entries, ApplyAgent is sent to the
// catalogue id of the entry, which Ref names.
type ApplyAgent struct {
	Ref  events.Reference `json:"ref"` // without a version
	Tags []string         `json:"tags,omitempty"`
	Spec events.AgentSpec `json:"spec"`
}

// ApplyInstance creates a version of an agent instance.
type ApplyInstance struct {
	Ref  events.Reference    `json:"ref"`
	Tags []string            `json:"tags,omitempty"`
	Spec events.InstanceSpec `json:"spec"`
}

// ApplyEnvironment creates a version of an environment. The environment's secrets are already sealed.
type ApplyEnvironment struct {
	Ref  events.Reference       `json:"ref"`
	Tags []string               `json:"tags,omitempty"`
	Spec events.EnvironmentSpec `json:"spec"`
}

// RemoveEntry hides a catalogue entry, or one version of a skill.
type RemoveEntry struct {
	Ref events.Reference `json:"ref"`
}

// PushSkill creates a version of a skill from the ZIP that is stored in the bucket skills under Object.
type PushSkill struct {
	Ref    events.Reference `json:"ref"`    // without a version; if the slug is "", the name in the front matter is used
	Object string           `json:"object"` // the result of SkillUpload
	SHA256 string           `json:"sha256"` // hex SHA-256 of the ZIP, as stated by the client
	Tags   []string         `json:"tags,omitempty"`
	DryRun bool             `json:"dryRun,omitempty"` // only check the ZIP
}

// TagSkill lets a tag name another version of a skill.
type TagSkill struct {
	Ref events.Reference `json:"ref"` // the version to tag
	Tag string           `json:"tag"`
}

// SkillUpload returns the object name, in the bucket skills, of a skill's ZIP that was uploaded but not pushed yet.
func SkillUpload(tenant, command string) string { return "upload/" + tenant + "/" + command }

// Answer is a service's result of a command. If Error is nil, the log has stored the command's events.
type Answer struct {
	SessionID   string `json:"sessionId,omitempty"`
	ExecutionID string `json:"executionId,omitempty"`
	Position    string `json:"position,omitempty"` // position of the commit, in the text form of eventlog.Position
	Error       *Error `json:"error,omitempty"`

	Forked *events.SessionForked `json:"forked,omitempty"` // where a fork begins

	Rights  *events.KeyRights `json:"rights,omitempty"`  // rights of a created key
	Revoked []RevokedKey      `json:"revoked,omitempty"` // the descendants that were revoked together with the named key

	Ref    *events.Reference   `json:"ref,omitempty"`    // reference of a catalogue entry, with its current version
	Same   bool                `json:"same,omitempty"`   // whether the version, or the whole change, existed already
	Pushed *events.SkillPushed `json:"pushed,omitempty"` // result of a push or its dry run
}

// RevokedKey is an API key that was revoked together with the key from which it descends.
type RevokedKey struct {
	KeyID    string `json:"keyId"`
	Position string `json:"position"` // position of the commit
}

// Error reports that a command was refused.
type Error struct {
	Code   string `json:"code"`            // stable, as in docs/errors.md
	Field  string `json:"field,omitempty"` // the invalid field of the request, if any
	Detail string `json:"detail"`          // one sentence for the user

	Tip *uint32 `json:"tip,omitempty"` // seq of the session's last event, if the request named a later one
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }
