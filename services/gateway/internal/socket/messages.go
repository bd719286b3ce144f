package socket

import (
	"bytes"
	"encoding/json"
	"errors"
	"strconv"
	"unicode/utf8"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/replay"
)

// The types of message.
const (
	typeJoin     = "session:join"
	typeLeave    = "session:leave"
	typeDecide   = "approval:decide"
	typeDecided  = "approval:decided"
	typeJoined   = "session:joined"
	typeEvent    = "session:event"
	typeLag      = "session:lag"
	typeSnapshot = "session:snapshot"
	typeLeft     = "session:left"
	typeError    = "error"

	typeJoinSessions   = "sessions:join"
	typeLeaveSessions  = "sessions:leave"
	typeJoinedSessions = "sessions:joined"
	typeChanged        = "sessions:changed"
	typeDeleted        = "sessions:deleted"
	typeLeftSessions   = "sessions:left"
)

// clientRequest is a message that a client sends on a WebSocket.
type clientRequest struct {
	Type      string `json:"type"`
	RequestID string `json:"requestId"`
	SessionID string `json:"sessionId"`
	After     uint32 `json:"after"`
	Cursor    string `json:"cursor"`   // for sessions:join
	Metadata  *bool  `json:"metadata"` // for a join: false omits metadata from the events

	Replay bool            `json:"replay"` // for a join: replay past events instead of streaming new ones
	Speed  json.RawMessage `json:"speed"`  // for a replay: a number, or "max"; nil means 1
	From   *uint32         `json:"from"`   // for a replay: seq of the first event; nil means 1
	To     *uint32         `json:"to"`     // for a replay: seq of the last event; nil means the session's last event
	// ExecutionID restricts a replay to the events of one execution; nil means all events.
	ExecutionID *string `json:"executionId"`

	decision *spoolv1.DecideApprovalRequest // of approval:decide
}

// wantsMetadata reports whether the events that a join sends include their metadata.
func (r clientRequest) wantsMetadata() bool { return r.Metadata == nil || *r.Metadata }

// replayRequest returns the replay that a message session:join asks for, or nil for a join that streams new events.
func (r clientRequest) replayRequest() (*replay.Request, error) {
	if !r.Replay {
		for name, given := range map[string]bool{"speed": r.Speed != nil, "from": r.From != nil, "to": r.To != nil, "executionId": r.ExecutionID != nil} {
			if given {
				return nil, problem.Invalid(name, "the field applies to replays only; add \"replay\":true")
			}
		}
		return nil, nil
	}
	if r.After != 0 {
		return nil, problem.Invalid("after", "a replay begins at from, not after an event")
	}
	ask := &replay.Request{Session: r.SessionID, From: 1, To: r.To, Speed: 1}
	if r.From != nil {
		ask.From = *r.From
	}
	if r.ExecutionID != nil {
		ask.Execution = *r.ExecutionID
		if err := reads.CheckExecutionID(ask.Execution); err != nil {
			return nil, err
		}
	}
	if r.Speed == nil {
		return ask, nil
	}
	text := string(r.Speed)
	if quoted := ""; json.Unmarshal(r.Speed, &quoted) == nil {
		text = quoted
	}
	var err error
	if ask.Speed, err = pace.ParseSpeed(text); err != nil {
		return nil, problem.Invalid("speed", "%s", err)
	}
	return ask, nil
}

// errMalformedMessage is returned for a message that is not JSON. It ends the connection.
type errMalformedMessage struct{ detail string }

func (e errMalformedMessage) Error() string { return e.detail }

// maxRequestIDBytes is the largest length of a requestId, in bytes.
const maxRequestIDBytes = 128

// parseRequest decodes a message of a client. With an error it returns the fields that could be decoded, so that the
// answer can name the request.
func parseRequest(data []byte) (clientRequest, error) {
	var r clientRequest
	if !utf8.Valid(data) {
		return r, errMalformedMessage{"the message is not valid UTF-8"}
	}
	var deep *wirejson.FieldError
	if errors.As(wirejson.CheckDepth(data), &deep) {
		return r, errMalformedMessage{"the message is " + deep.Detail}
	}
	if !json.Valid(data) {
		return r, errMalformedMessage{"the message is not valid JSON"}
	}
	var head struct {
		Type string `json:"type"`
	}
	if json.Unmarshal(data, &head) == nil && head.Type == typeDecide {
		return parseDecision(data)
	}
	dec := json.NewDecoder(bytes.NewReader(data))
	dec.DisallowUnknownFields()
	err := dec.Decode(&r)
	var wrong *json.UnmarshalTypeError
	switch {
	case errors.As(err, &wrong) && wrong.Field == "":
		return r, problem.Invalid("type", "the message must be an object like {\"type\":\"session:join\",\"requestId\":\"1\",\"sessionId\":\"ses_…\",\"after\":0}")
	case errors.As(err, &wrong) && wrong.Field == "after":
		return r, problem.Invalid("after", "must be a whole number from 0 to 4294967295, not %s", wrong.Value)
	case errors.As(err, &wrong) && (wrong.Field == "from" || wrong.Field == "to"):
		return r, problem.Invalid(wrong.Field, "must be a whole number from 1 to 4294967295, not %s", wrong.Value)
	case errors.As(err, &wrong) && (wrong.Field == "metadata" || wrong.Field == "replay"):
		return r, problem.Invalid(wrong.Field, "must be true or false, not %s", wrong.Value)
	case errors.As(err, &wrong):
		return r, problem.Invalid(wrong.Field, "must be a string, not %s", wrong.Value)
	case err != nil:
		return r, problem.Invalid("type", "there are the fields type, requestId, sessionId, after, cursor, metadata, replay, speed, from, to and executionId, and no others")
	case len(r.RequestID) > maxRequestIDBytes:
		r.RequestID = ""
		return r, problem.Invalid("requestId", "value is longer than %d bytes", maxRequestIDBytes)
	}
	return r, nil
}

// serverMessage is a message that the gateway sends on a WebSocket, except for messages with events.
type serverMessage struct {
	Type       string            `json:"type"`
	RequestID  string            `json:"requestId,omitempty"`
	SessionID  string            `json:"sessionId,omitempty"`
	ApprovalID string            `json:"approvalId,omitempty"`
	Position   string            `json:"position,omitempty"`
	Cursor     string            `json:"cursor,omitempty"`
	Session    json.RawMessage   `json:"session,omitempty"`
	Deleted    json.RawMessage   `json:"deleted,omitempty"`
	Code       problem.Code      `json:"code,omitempty"`
	Message    string            `json:"message,omitempty"`
	Field      string            `json:"field,omitempty"`
	Tip        *uint32           `json:"tip,omitempty"`
	Seq        *uint32           `json:"seq,omitempty"`
	Blocks     []json.RawMessage `json:"blocks,omitzero"`
	Lagging    *bool             `json:"lagging,omitempty"`
	LagMs      *uint32           `json:"lagMs,omitempty"`
}

// encode returns the JSON of the message.
func (m serverMessage) encode() []byte {
	b, err := json.Marshal(m)
	if err != nil { // strings, numbers and valid JSON always encode
		panic(err)
	}
	return b
}

// errorMessage encodes the message with the error p. about is the request that p answers, or the zero request if p
// concerns the connection.
func errorMessage(p *problem.Error, about clientRequest) []byte {
	return serverMessage{
		Type: typeError, RequestID: about.RequestID, SessionID: about.SessionID, Code: p.Code, Message: p.Detail, Field: p.Field, Tip: p.Tip,
	}.encode()
}

// snapshotMessage encodes the blocks of a session as of the event seq.
func snapshotMessage(about clientRequest, seq uint32, blocks []*spoolv1.Block) []byte {
	m := serverMessage{Type: typeSnapshot, RequestID: about.RequestID, SessionID: about.SessionID, Seq: &seq, Blocks: []json.RawMessage{}}
	for _, b := range blocks {
		m.Blocks = append(m.Blocks, wirejson.Marshal(b))
	}
	return m.encode()
}

// noticeMessage encodes a notice of a replay: type and sessionId, followed by the notice's own fields.
func noticeMessage(session string, n pace.Notice) []byte {
	data, err := json.Marshal(n.Data)
	if err != nil { // strings and numbers always encode
		panic(err)
	}
	b := serverMessage{Type: "session:" + string(n.Kind), SessionID: session}.encode()
	return append(append(b[:len(b)-1], ','), data[1:]...)
}

// frameMessage encodes a message with a frame of a session. It does not change the bytes of the event.
func frameMessage(session string, f live.Frame, metadata bool) []byte {
	if f.Lag != nil {
		return serverMessage{Type: typeLag, SessionID: session, Lagging: &f.Lag.Lagging, LagMs: &f.Lag.LagMs}.encode()
	}
	if f.Notice != nil {
		return noticeMessage(session, *f.Notice)
	}
	b := make([]byte, 0, f.Len(metadata)+80)
	b = append(b, `{"type":"`+typeEvent+`","sessionId":`...)
	b = strconv.AppendQuote(b, session) // an id has only letters, digits and underscores
	b = append(b, `,"event":`...)
	return append(f.Append(b, metadata), '}')
}
