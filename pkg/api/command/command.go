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
)

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
}

// CreateSession makes a session. Empty fields mean the server's defaults.
type CreateSession struct {
	Agent        string          `json:"agent,omitempty"`
	Architecture string          `json:"architecture,omitempty"`
	Provider     string          `json:"provider,omitempty"`
	Options      events.Options  `json:"options"`
	Metadata     json.RawMessage `json:"metadata,omitempty"`
	Files        []File          `json:"files,omitempty"` // of the workspace; StartExecution takes those of its Post
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
}

// RevokeKey ends an API key; it goes where CreateKey went.
type RevokeKey struct {
	KeyID string `json:"keyId"`
}

// Answer is the result of a command: either Error is set or the command is stored.
type Answer struct {
	SessionID   string `json:"sessionId,omitempty"`
	ExecutionID string `json:"executionId,omitempty"`
	Position    string `json:"position,omitempty"` // of the commit; as eventlog.Position writes it
	Error       *Error `json:"error,omitempty"`
}

// Error is a refused command.
type Error struct {
	Code   string `json:"code"`            // stable, as in docs/errors.md
	Field  string `json:"field,omitempty"` // of the request, where one is at fault
	Detail string `json:"detail"`          // one sentence
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }
