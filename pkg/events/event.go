package events

import (
	"encoding/json"
	"fmt"
	"time"
)

// Type is the wire name of an event's type, in snake case and past tense where it is a fact.
type Type string

// Source says where an event was born.
type Source string

// The sources.
const (
	FromRunner Source = "runner" // inside the sandbox: what an agent did
	FromServer Source = "server" // a service
)

// MainConversation is the conversation of the agent itself; sub-agents have their own.
const MainConversation = "main"

// Payload is the data of one type of event. The set is sealed: the types of the
// catalogue, and Opaque for what a newer version wrote.
type Payload interface {
	// EventType is the payload's wire name.
	EventType() Type
	sealed()
}

// Event is an immutable fact, as it is stored inside a commit.
type Event struct {
	ID             string
	Time           time.Time
	ExecutionID    string // "" for a fact about the session
	ConversationID string // "" for server facts outside any conversation
	Source         Source
	N              uint64 // number in the runner's journal; 0 for server facts
	Data           Payload
}

// Type of the event's data.
func (e Event) Type() Type { return e.Data.EventType() }

// Opaque keeps an event whose type this version does not know, byte for byte.
type Opaque struct {
	Name Type
	Raw  json.RawMessage
}

// EventType is the unknown name.
func (o Opaque) EventType() Type { return o.Name }
func (Opaque) sealed()           {}

// MarshalJSON gives back what was read.
func (o Opaque) MarshalJSON() ([]byte, error) {
	if len(o.Raw) == 0 {
		return []byte("{}"), nil
	}
	return o.Raw, nil
}

// stored is an event's shape inside a commit.
type stored struct {
	ID             string          `json:"id"`
	Type           Type            `json:"type"`
	Time           time.Time       `json:"time"`
	ExecutionID    string          `json:"executionId,omitempty"`
	ConversationID string          `json:"conversationId,omitempty"`
	Source         Source          `json:"source"`
	N              uint64          `json:"n,omitempty"`
	Data           json.RawMessage `json:"data"`
}

// UnmarshalJSON reads the stored shape. An unknown type, or a known one whose
// data no longer decodes, becomes Opaque: it is kept and stops nobody.
func (e *Event) UnmarshalJSON(b []byte) error {
	var s stored
	if err := json.Unmarshal(b, &s); err != nil {
		return fmt.Errorf("decode event: %w", err)
	}
	*e = Event{s.ID, s.Time, s.ExecutionID, s.ConversationID, s.Source, s.N, DecodePayload(s.Type, s.Data)}
	return nil
}

// DecodePayload decodes the data of a type; see Event.UnmarshalJSON for what it does with the unknown.
func DecodePayload(t Type, data json.RawMessage) Payload {
	if entry, ok := Lookup(t); ok && !IsPayloadRef(data) {
		if p, err := entry.decode(data); err == nil {
			return p
		}
	}
	return Opaque{Name: t, Raw: append(json.RawMessage(nil), data...)}
}

// Wire is an event as every client sees it: REST, SSE, WebSocket, --json.
type Wire struct {
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

// ToWire dresses a stored event for clients.
func (e Event) ToWire(session string, seq uint32, position string) (Wire, error) {
	data, err := marshal(e.Data)
	if err != nil {
		return Wire{}, fmt.Errorf("encode %s %s: %w", e.Type(), e.ID, err)
	}
	return Wire{seq, position, e.ID, e.Type(), e.Time.UTC(), session, e.ExecutionID, e.ConversationID, e.Source, data}, nil
}

// Event turns what a client sees back into a stored event (without N).
func (w Wire) Event() Event {
	return Event{w.ID, w.Time, w.ExecutionID, w.ConversationID, w.Source, 0, DecodePayload(w.Type, w.Data)}
}

// TextDelta is the type of text in flight; it is never kept in the log.
const TextDelta Type = "text_delta"

// Delta is text in flight: a piece of an open block. It is idempotent by its offset.
type Delta struct {
	BlockID        string    `json:"blockId"`
	ExecutionID    string    `json:"executionId"`
	ConversationID string    `json:"conversationId"`
	Epoch          uint64    `json:"epoch"`
	Offset         uint32    `json:"offset"` // in UTF-8 bytes from the block's start
	Text           string    `json:"delta"`
	Time           time.Time `json:"time"`
}

// ToWire dresses a delta; seq and position are those of the last kept event.
func (d Delta) ToWire(session string, seq uint32, position string) (Wire, error) {
	data, err := marshal(struct {
		BlockID string `json:"blockId"`
		Offset  uint32 `json:"offset"`
		Delta   string `json:"delta"`
	}{d.BlockID, d.Offset, d.Text})
	if err != nil {
		return Wire{}, fmt.Errorf("encode delta of %s: %w", d.BlockID, err)
	}
	return Wire{seq, position, "", TextDelta, d.Time.UTC(), session, d.ExecutionID, d.ConversationID, FromRunner, data}, nil
}
