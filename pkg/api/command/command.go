// Package command is what a gateway asks of the session service over COMMANDS,
// and what it is answered. Both are JSON. A command goes to
// topology.CommandSubject(topology.ServiceSession, tenant, id), where id is the
// session's, or the catalogue id of the key that the command is about.
package command

import (
	"encoding/json"

	"github.com/spoolhq/spool/pkg/events"
)

// Type says what is asked; it decides the type of Command.Body.
type Type string

// The types of command, each with its body and with the ids of Command that it takes.
const (
	TypeCreateSession  Type = "create_session"  // CreateSession; SessionID is the new session's
	TypeForkSession    Type = "fork_session"    // ForkSession; SessionID is the new session's
	TypeUpdateSession  Type = "update_session"  // UpdateSession; SessionID
	TypePostMessage    Type = "post_message"    // PostMessage; SessionID, and ExecutionID of the new execution
	TypeStartExecution Type = "start_execution" // StartExecution; SessionID and ExecutionID, both new
	TypeInterrupt      Type = "interrupt"       // no body; SessionID
	TypeCancel         Type = "cancel"          // no body; SessionID and ExecutionID
	TypePause          Type = "pause"           // no body; SessionID and ExecutionID
	TypeResume         Type = "resume"          // no body; SessionID and ExecutionID
	TypeTerminate      Type = "terminate"       // no body; SessionID, and ExecutionID unless the environment is meant
	TypeSync           Type = "sync"            // no body; SessionID
	TypePutFile        Type = "put_file"        // PutFile; SessionID
	TypeRemoveFile     Type = "remove_file"     // RemoveFile; SessionID
	TypeDeleteSession  Type = "delete_session"  // no body; SessionID
	TypeCreateKey      Type = "create_key"      // CreateKey; no ids
	TypeRevokeKey      Type = "revoke_key"      // RevokeKey; no ids
	TypeSetBudget      Type = "set_budget"      // SetBudget; no ids
	TypeRemoveBudget   Type = "remove_budget"   // RemoveBudget; no ids
	TypeSetLimits      Type = "set_limits"      // SetLimits; no ids
	TypeRemoveLimits   Type = "remove_limits"   // no body, no ids

	TypeRetryDead Type = "retry_dead" // DeadLetter; no ids
	TypeDropDead  Type = "drop_dead"  // DeadLetter; no ids

	TypeApplyAgent        Type = "apply_agent"        // ApplyAgent; no ids
	TypeApplyInstance     Type = "apply_instance"     // ApplyInstance; no ids
	TypeApplyEnvironment  Type = "apply_environment"  // ApplyEnvironment; no ids
	TypeRemoveAgent       Type = "remove_agent"       // Remove; no ids
	TypeRemoveInstance    Type = "remove_instance"    // Remove; no ids
	TypeRemoveEnvironment Type = "remove_environment" // Remove; no ids

	// These go to the skills service.
	TypePushSkill   Type = "push_skill"   // PushSkill; no ids
	TypeTagSkill    Type = "tag_skill"    // TagSkill; no ids
	TypeRemoveSkill Type = "remove_skill" // Remove; no ids
)

// NeedsRoom reports whether a command is refused while only the reserve of the store is left, and, if it is about a session, while
// the tenant is at its limit of events. Those that end, remove or govern are not.
func (t Type) NeedsRoom() bool {
	switch t {
	case TypeCreateSession, TypeForkSession, TypeUpdateSession, TypePostMessage, TypeStartExecution, TypePutFile, TypeSync,
		TypeApplyAgent, TypeApplyInstance, TypeApplyEnvironment, TypePushSkill, TypeTagSkill:
		return true
	}
	return false
}

// CodeStorageFull is the code of such a refusal.
const CodeStorageFull = "STORAGE_FULL"

// CodeTranscriptMismatch refuses a transcript of another agent than the session's.
const CodeTranscriptMismatch = "TRANSCRIPT_MISMATCH"

// CodeSnapshotGone refuses a fork: a snapshot that it needs is not in the object store any more, or cannot be read.
const CodeSnapshotGone = "SNAPSHOT_GONE"

// Command is one request. Its ids are minted by the gateway, so that sending it
// again, with the same ids, changes nothing.
type Command struct {
	Type        Type            `json:"type"`
	ID          string          `json:"id"` // cmd_…
	Tenant      string          `json:"tenant"`
	SessionID   string          `json:"sessionId,omitempty"`
	ExecutionID string          `json:"executionId,omitempty"`
	Actor       events.Actor    `json:"actor"`
	Body        json.RawMessage `json:"body,omitempty"`

	// Agents are the slugs of the only agents that the actor's key may use; empty means all. The service that carries the command out
	// takes what is another agent's for something that does not exist.
	Agents []string `json:"agents,omitempty"`
}

// DeadLetter names a dead letter by its sequence in DEAD.
type DeadLetter struct {
	Sequence uint64 `json:"sequence"`
}

// CreateSession makes a session. Empty fields mean the server's defaults.
type CreateSession struct {
	Agent        string          `json:"agent,omitempty"`
	Architecture string          `json:"architecture,omitempty"`
	Provider     string          `json:"provider,omitempty"`
	Options      events.Options  `json:"options"`
	Metadata     json.RawMessage `json:"metadata,omitempty"`
	Files        []File          `json:"files,omitempty"` // of the workspace; StartExecution takes those of its Post

	// HostPathIdentity is Options.HostPath as the client sees it, see hostpath.Identity; "" is not checked.
	HostPathIdentity string `json:"hostPathIdentity,omitempty"`

	Instance     string   `json:"instance,omitempty"`     // a reference, in place of Agent
	Environments []string `json:"environments,omitempty"` // references: layers above the instance's

	Transcript *events.Transcript `json:"transcript,omitempty"` // that the agent begins with; in the session's folder of the bucket workspaces
}

// ForkSession makes a session that goes on from an event of another one of the same tenant.
type ForkSession struct {
	Parent   string          `json:"parent"`
	At       *uint32         `json:"at,omitempty"`       // seq in the parent; nil for its last event
	Metadata json.RawMessage `json:"metadata,omitempty"` // in place of the parent's; nil keeps that
	Agent    string          `json:"agent,omitempty"`    // a reference: another version or another agent of the same architecture; "" for the parent's
}

// UpdateSession changes a session. Nil options or nil metadata, and options
// that are empty, leave what was there.
type UpdateSession struct {
	Options  *events.Options `json:"options,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
	Clear    []string        `json:"clear,omitempty"` // options that go back to the server's default, by their JSON names
}

// PostMessage is a query: content, or parts in its place.
type PostMessage struct {
	Content  string          `json:"content,omitempty"`
	Parts    []events.Part   `json:"parts,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
	Files    []File          `json:"files,omitempty"` // that are to be in the workspace before the agent begins

	Environment map[string]events.Variable `json:"environment,omitempty"` // of this execution alone; secrets are sealed already
}

// File is a file, or a tar, on its way into a workspace. Its content is in the
// bucket workspaces already, under Object.
type File struct {
	Path    string `json:"path"`             // relative to the workspace; of an archive the folder that it goes into, "" for the workspace
	Object  string `json:"object,omitempty"` // "" for FileObject of the session and SHA256
	Size    uint64 `json:"size"`             // bytes
	SHA256  string `json:"sha256"`           // hex
	Mode    uint32 `json:"mode,omitempty"`   // permission bits; 0 means 0644
	Archive bool   `json:"archive,omitempty"`
}

// PutFile puts a file or an archive into a session's workspace.
type PutFile struct{ File }

// RemoveFile removes a file, or a folder with all below it.
type RemoveFile struct {
	Path string `json:"path"`
}

// StartExecution makes a session and posts its first message, as one command.
type StartExecution struct {
	Create CreateSession `json:"create"`
	Post   PostMessage   `json:"post"`
}

// CreateKey stores an API key, of which only the hash is sent. It goes to
// events.CatalogueID(events.Key, tenant, "", "", keyId).
type CreateKey struct {
	KeyID  string `json:"keyId"`
	Name   string `json:"name"`
	Prefix string `json:"prefix"` // the first characters, to recognise it by
	SHA256 string `json:"sha256"` // hex, of the whole key

	Rights events.KeyRights `json:"rights,omitzero"` // what is empty is as the actor's key has it
}

// RevokeKey ends an API key, and the keys that it made; it goes where CreateKey went.
type RevokeKey struct {
	KeyID string `json:"keyId"`
}

// SetBudget gives the command's tenant a budget for a period. It goes to
// events.BudgetOf(tenant, period), as RemoveBudget does.
type SetBudget struct {
	Period events.Period `json:"period"`
	Budget events.Budget `json:"budget"`
}

// RemoveBudget ends the command's tenant's budget for a period.
type RemoveBudget struct {
	Period events.Period `json:"period"`
}

// SetLimits gives the command's tenant limits. It goes to events.LimitsOf(tenant), as TypeRemoveLimits does.
type SetLimits struct {
	Limits events.TenantLimits `json:"limits"`
}

// ApplyAgent makes a version of an agent. It goes to the id of Ref's subject, as all commands about the catalogue do.
type ApplyAgent struct {
	Ref  events.Reference `json:"ref"` // without a version
	Tags []string         `json:"tags,omitempty"`
	Spec events.AgentSpec `json:"spec"`
}

// ApplyInstance makes a version of an agent instance.
type ApplyInstance struct {
	Ref  events.Reference    `json:"ref"`
	Tags []string            `json:"tags,omitempty"`
	Spec events.InstanceSpec `json:"spec"`
}

// ApplyEnvironment makes a version of an environment, whose secrets are sealed already.
type ApplyEnvironment struct {
	Ref  events.Reference       `json:"ref"`
	Tags []string               `json:"tags,omitempty"`
	Spec events.EnvironmentSpec `json:"spec"`
}

// Remove hides an entry of the catalogue, or, of a skill, one version.
type Remove struct {
	Ref events.Reference `json:"ref"`
}

// PushSkill makes a version of a skill of the ZIP that lies in bucket skills under Object.
type PushSkill struct {
	Ref    events.Reference `json:"ref"`    // without a version; a slug of "" means the name in the front matter
	Object string           `json:"object"` // SkillUpload of tenant and command
	SHA256 string           `json:"sha256"` // hex, of the ZIP as the client means it
	Tags   []string         `json:"tags,omitempty"`
	DryRun bool             `json:"dryRun,omitempty"` // check only
}

// TagSkill moves a tag.
type TagSkill struct {
	Ref events.Reference `json:"ref"` // the version that the tag is to name
	Tag string           `json:"tag"`
}

// SkillUpload is the name of a ZIP on its way in.
func SkillUpload(tenant, command string) string { return "upload/" + tenant + "/" + command }

// Answer is the result of a command: either Error is set or the command is stored.
type Answer struct {
	SessionID   string `json:"sessionId,omitempty"`
	ExecutionID string `json:"executionId,omitempty"`
	Position    string `json:"position,omitempty"` // of the commit; as eventlog.Position writes it
	Error       *Error `json:"error,omitempty"`

	Forked *events.SessionForked `json:"forked,omitempty"` // of a fork: where it begins

	Rights  *events.KeyRights `json:"rights,omitempty"`  // of a key that was created
	Revoked []RevokedKey      `json:"revoked,omitempty"` // the keys that a revocation revoked with the one that it names

	Ref    *events.Reference   `json:"ref,omitempty"`    // of a catalogue entry: with the version that now holds
	Same   bool                `json:"same,omitempty"`   // the version, or the whole change, was there already
	Pushed *events.SkillPushed `json:"pushed,omitempty"` // what a push, or its dry run, found
}

// RevokedKey is a key that was revoked with the key that made it.
type RevokedKey struct {
	KeyID    string `json:"keyId"`
	Position string `json:"position"` // of the commit
}

// Error is a refused command.
type Error struct {
	Code   string `json:"code"`            // stable, as in docs/errors.md
	Field  string `json:"field,omitempty"` // of the request, where one is at fault
	Detail string `json:"detail"`          // one sentence

	Tip *uint32 `json:"tip,omitempty"` // seq of the session's last event, where a seq is ahead of it
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }
