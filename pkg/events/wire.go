package events

import (
	"encoding/json"
	"fmt"
	"math"
	"strconv"

	"github.com/spoolhq/spool/pkg/events/compact"
)

// What projectors announce and gateways send to clients is encoded and decoded here, field by field, because it happens
// for each event and each delta. The results are those of encoding/json, without HTML escapes; the tests compare them.

// AppendJSON appends the JSON of the event to b. Data must be compact JSON, because its bytes are not changed.
func (w WireEvent) AppendJSON(b []byte) ([]byte, error) {
	b, err := w.appendBeforeData(b)
	if err != nil {
		return nil, err
	}
	return append(append(b, nullIfEmpty(w.Data)...), '}'), nil
}

// appendBeforeData appends the JSON of the event up to its member data.
func (w WireEvent) appendBeforeData(b []byte) ([]byte, error) {
	b = strconv.AppendUint(append(b, `{"seq":`...), uint64(w.Seq), 10)
	b = compact.AppendString(append(b, `,"position":`...), w.Position)
	if w.ID != "" {
		b = compact.AppendString(append(b, `,"id":`...), w.ID)
	}
	b = compact.AppendString(append(b, `,"type":`...), string(w.Type))
	b, err := compact.AppendTime(append(b, `,"time":`...), w.Time)
	if err != nil {
		return nil, err
	}
	b = compact.AppendString(append(b, `,"sessionId":`...), w.SessionID)
	if w.ExecutionID != "" {
		b = compact.AppendString(append(b, `,"executionId":`...), w.ExecutionID)
	}
	if w.ConversationID != "" {
		b = compact.AppendString(append(b, `,"conversationId":`...), w.ConversationID)
	}
	b = compact.AppendString(append(b, `,"source":`...), string(w.Source))
	return append(b, `,"data":`...), nil
}

// AppendWire appends the JSON of the WireEvent that ToWire returns to b.
func (e Event) AppendWire(b []byte, session string, seq uint32, position string) ([]byte, error) {
	b, err := WireEvent{seq, position, e.ID, e.Type(), e.Time.UTC(), session, e.ExecutionID, e.ConversationID, e.Source, nil}.appendBeforeData(b)
	if err != nil {
		return nil, err
	}
	if b, err = appendPayloadJSON(b, e.Data); err != nil {
		return nil, fmt.Errorf("encode %s %s: %w", e.Type(), e.ID, err)
	}
	return append(b, '}'), nil
}

// AppendWire appends the JSON of the WireEvent that ToWire returns to b.
func (d Delta) AppendWire(b []byte, session string, seq uint32, position string) ([]byte, error) {
	b, err := WireEvent{seq, position, "", TextDelta, d.Time.UTC(), session, d.ExecutionID, d.ConversationID, FromRunner, nil}.appendBeforeData(b)
	if err != nil {
		return nil, err
	}
	b = compact.AppendString(append(b, `{"blockId":`...), d.BlockID)
	b = strconv.AppendUint(append(b, `,"offset":`...), uint64(d.Offset), 10)
	b = compact.AppendString(append(b, `,"delta":`...), d.Text)
	return append(b, '}', '}'), nil
}

// AppendJSON appends the JSON of the delta to b.
func (d Delta) AppendJSON(b []byte) ([]byte, error) {
	b = compact.AppendString(append(b, `{"blockId":`...), d.BlockID)
	b = compact.AppendString(append(b, `,"executionId":`...), d.ExecutionID)
	b = compact.AppendString(append(b, `,"conversationId":`...), d.ConversationID)
	b = strconv.AppendUint(append(b, `,"epoch":`...), d.Epoch, 10)
	b = strconv.AppendUint(append(b, `,"offset":`...), uint64(d.Offset), 10)
	b = compact.AppendString(append(b, `,"delta":`...), d.Text)
	b, err := compact.AppendTime(append(b, `,"time":`...), d.Time)
	if err != nil {
		return nil, err
	}
	return append(b, '}'), nil
}

// DecodeWireEvent decodes the JSON of a WireEvent as json.Unmarshal does. The data of the result may refer to the bytes
// of raw.
func DecodeWireEvent(raw []byte) (WireEvent, error) {
	if w, ok := decodeCompactWireEvent(raw); ok {
		return w, nil
	}
	var w WireEvent
	err := json.Unmarshal(raw, &w)
	return w, err
}

// decodeCompactWireEvent decodes a WireEvent in the form that AppendJSON writes. If ok is false, raw has another form
// and the result is not valid.
func decodeCompactWireEvent(raw []byte) (w WireEvent, ok bool) {
	r := compact.NewReader(raw)
	r.Expect(`{"seq":`)
	w.Seq = uint32(r.Uint(math.MaxUint32)) //nolint:gosec // limited
	r.Expect(`,"position":`)
	w.Position = r.String()
	w.ID = r.OptionalString(`,"id":`)
	r.Expect(`,"type":`)
	w.Type = Type(r.String())
	r.Expect(`,"time":`)
	w.Time = r.Time()
	r.Expect(`,"sessionId":`)
	w.SessionID = r.String()
	w.ExecutionID = r.OptionalString(`,"executionId":`)
	w.ConversationID = r.OptionalString(`,"conversationId":`)
	r.Expect(`,"source":`)
	w.Source = Source(r.String())
	r.Expect(`,"data":`)
	w.Data = r.Raw()
	r.Expect(`}`)
	return w, r.AtEnd()
}
