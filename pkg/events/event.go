package events

import (
	"encoding/json"
	"fmt"
	"math"
	"time"

	"github.com/spoolhq/spool/pkg/events/compact"
)

// Type is the wire name of an event type, in snake case. The name of a fact is in the past tense.
type Type string

// Source is the kind of process that created an event.
type Source string

// The sources.
const (
	FromRunner Source = "runner" // the runner inside the sandbox: activity of an agent
	FromServer Source = "server" // a service
)

// MainConversation is the conversation id of the main agent. Each sub-agent has its own.
const MainConversation = "main"

// Payload is the data of one event type. The interface is sealed: the types that implement it are those that EventTypes
// lists, and OpaquePayload for types that a newer version wrote.
type Payload interface {
	// EventType returns the payload's wire name.
	EventType() Type
	sealed()
}

// Event is an immutable fact, as stored inside a commit.
type Event struct {
	ID             string
	Time           time.Time
	ExecutionID    string // "" for a fact about the session
	ConversationID string // "" for server events outside any conversation
	Source         Source
	N              uint64 // sequence number in the runner's journal; 0 for server events
	Data           Payload

	stored *storedForm // of this event, or of one that this event is a changed copy of; nil if it was not encoded
}

// Type returns the type of the event's data.
func (e Event) Type() Type { return e.Data.EventType() }

// OpaquePayload holds the data of an event whose type this version does not know, byte for byte.
type OpaquePayload struct {
	Name Type
	Raw  json.RawMessage
}

// EventType returns the unknown type name.
func (o OpaquePayload) EventType() Type { return o.Name }
func (OpaquePayload) sealed()           {}

// MarshalJSON returns the bytes that were read.
func (o OpaquePayload) MarshalJSON() ([]byte, error) {
	if len(o.Raw) == 0 {
		return []byte("{}"), nil
	}
	return o.Raw, nil
}

// storedEvent is the JSON form of an event inside a commit.
type storedEvent struct {
	ID             string          `json:"id"`
	Type           Type            `json:"type"`
	Time           time.Time       `json:"time"`
	ExecutionID    string          `json:"executionId,omitempty"`
	ConversationID string          `json:"conversationId,omitempty"`
	Source         Source          `json:"source"`
	N              uint64          `json:"n,omitempty"`
	Data           json.RawMessage `json:"data"`
}

// toEvent returns the Event with the fields of the stored form.
func (s storedEvent) toEvent() Event {
	return Event{ID: s.ID, Time: s.Time, ExecutionID: s.ExecutionID, ConversationID: s.ConversationID, Source: s.Source, N: s.N, Data: DecodePayload(s.Type, s.Data)}
}

// UnmarshalJSON decodes the stored form. An unknown type, or a known type whose data does not decode, becomes an
// OpaquePayload, so that one event cannot block a reader of the log.
func (e *Event) UnmarshalJSON(b []byte) error {
	var s storedEvent
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("decode event: %w", err)
	}
	*e = s.toEvent()
	return nil
}

// DecodePayload decodes the data of an event type. It returns an OpaquePayload for an unknown type, for data that does
// not decode, and for a reference to the object store.
func DecodePayload(t Type, data json.RawMessage) Payload {
	if p, ok := decodeCompactPayload(t, data); ok {
		return p
	}
	if entry, ok := LookupType(t); ok && !IsPayloadRef(data) {
		if p, err := entry.decode(data); err == nil {
			return p
		}
	}
	return OpaquePayload{Name: t, Raw: append(json.RawMessage(nil), data...)}
}

// WireEvent is an event as all clients receive it: over REST, SSE and WebSocket, and from the CLI with --json.
type WireEvent struct {
	Seq            uint32          `json:"seq"`
	Position       string          `json:"position"`
	ID             string          `json:"id,omitempty"`
	Type           Type            `json:"type"`
	Time           time.Time       `json:"time"`
	SessionID      string          `json:"sessionId"`
	ExecutionID    string          `json:"executionId,omitempty"`
	ConversationID string          `json:"conversationId,omitempty"`
	Source         Source          `json:"source"`
	Data           json.RawMessage `json:"data"`
}

// ToWire returns the event in the form for clients. seq and position are those of the event in the session and in the
// log.
func (e Event) ToWire(session string, seq uint32, position string) (WireEvent, error) {
	data, err := appendPayloadJSON(nil, e.Data)
	if err != nil {
		return WireEvent{}, fmt.Errorf("encode %s %s: %w", e.Type(), e.ID, err)
	}
	return WireEvent{seq, position, e.ID, e.Type(), e.Time.UTC(), session, e.ExecutionID, e.ConversationID, e.Source, data}, nil
}

// Event converts the client form back into a stored event. The field N of the result is 0, because the client form does
// not contain it.
func (w WireEvent) Event() Event {
	return Event{ID: w.ID, Time: w.Time, ExecutionID: w.ExecutionID, ConversationID: w.ConversationID, Source: w.Source, Data: DecodePayload(w.Type, w.Data)}
}

// TextDelta is the wire type of a delta. Deltas are never stored in the log.
const TextDelta Type = "text_delta"

// Delta is a piece of streamed text of an open block. Offset makes its application idempotent.
type Delta struct {
	BlockID        string    `json:"blockId"`
	ExecutionID    string    `json:"executionId"`
	ConversationID string    `json:"conversationId"`
	Epoch          uint64    `json:"epoch"`
	Offset         uint32    `json:"offset"` // in UTF-8 bytes from the start of the block
	Text           string    `json:"delta"`
	Time           time.Time `json:"time"`
}

// Encode returns the JSON of the delta, as encoding/json writes it without HTML escapes.
func (d Delta) Encode() ([]byte, error) {
	b, err := d.AppendJSON(make([]byte, 0, len(d.Text)+len(d.Text)/8+256))
	if err != nil {
		return nil, fmt.Errorf("encode delta of %s: %w", d.BlockID, err)
	}
	return b, nil
}

// DecodeDelta decodes the JSON of a delta, with the same result as encoding/json.
func DecodeDelta(b []byte) (Delta, error) {
	if d, ok := decodeCompactDelta(b); ok {
		return d, nil
	}
	var d Delta
	if err := json.Unmarshal(b, &d); err != nil {
		return Delta{}, fmt.Errorf("decode delta: %w", err)
	}
	return d, nil
}

// decodeCompactDelta decodes a delta in the form that Delta.Encode writes. If ok is false, b has another form and the
// result is not valid.
func decodeCompactDelta(b []byte) (d Delta, ok bool) {
	r := compact.NewReader(b)
	r.Expect(`{"blockId":`)
	d.BlockID = r.String()
	r.Expect(`,"executionId":`)
	d.ExecutionID = r.String()
	r.Expect(`,"conversationId":`)
	d.ConversationID = r.String()
	r.Expect(`,"epoch":`)
	d.Epoch = r.Uint(math.MaxUint64)
	r.Expect(`,"offset":`)
	d.Offset = uint32(r.Uint(math.MaxUint32)) //nolint:gosec // limited
	r.Expect(`,"delta":`)
	d.Text = r.String()
	r.Expect(`,"time":`)
	d.Time = r.Time()
	r.Expect(`}`)
	return d, r.AtEnd()
}

// ToWire returns the delta in the form for clients. seq and position are those of the last stored event.
func (d Delta) ToWire(session string, seq uint32, position string) (WireEvent, error) {
	data, err := marshalJSON(struct {
		BlockID string `json:"blockId"`
		Offset  uint32 `json:"offset"`
		Delta   string `json:"delta"`
	}{d.BlockID, d.Offset, d.Text})
	if err != nil {
		return WireEvent{}, fmt.Errorf("encode delta of %s: %w", d.BlockID, err)
	}
	return WireEvent{seq, position, "", TextDelta, d.Time.UTC(), session, d.ExecutionID, d.ConversationID, FromRunner, data}, nil
}
