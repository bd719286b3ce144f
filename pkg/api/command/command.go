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
}

// UpdateSession changes a session. Nil options or nil metadata leave what was there.
type UpdateSession struct {
	Options  *events.Options `json:"options,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
}

// PostMessage is a query: content, or parts in its place.
type PostMessage struct {
	Content  string          `json:"content,omitempty"`
	Parts    []events.Part   `json:"parts,omitempty"`
	Metadata json.RawMessage `json:"metadata,omitempty"`
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
