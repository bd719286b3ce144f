package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"reflect"
	"strconv"
	"unsafe"

	"github.com/spoolhq/spool/pkg/events/compact"
)

// Commits are encoded by this code, field by field, and not by encoding/json, which would scan nested JSON again on each
// level. Every append encodes a commit. The output is identical to the output of encoding/json for the struct tags; the
// golden files test that.

// storedForm is the JSON form in which an event is stored.
type storedForm struct {
	event Event  // as it was encoded; its field stored is nil
	bytes []byte // must not be changed
	from  int    // index of the data in bytes; the data ends before the last byte
}

// data returns the part of the stored form that is the JSON of the event's data.
func (f *storedForm) data() json.RawMessage { return f.bytes[f.from : len(f.bytes)-1] }

// isFormOf reports whether f is the stored form of e. The data must be the same value in memory, because comparing it
// by content would cost as much as encoding it.
func (f *storedForm) isFormOf(e *Event) bool {
	o := &f.event
	return isSamePayload(e.Data, o.Data) && e.ID == o.ID && e.Time == o.Time && e.ExecutionID == o.ExecutionID &&
		e.ConversationID == o.ConversationID && e.Source == o.Source && e.N == o.N
}

// isSamePayload reports whether a and b are one value in memory. A value inside an interface cannot be changed, only
// replaced by another one, which is at another address as long as the first one is referred to. Pointers are never the
// same: what they point to can be changed.
func isSamePayload(a, b Payload) bool {
	return *(*[2]unsafe.Pointer)(unsafe.Pointer(&a)) == *(*[2]unsafe.Pointer)(unsafe.Pointer(&b)) && a != nil && reflect.TypeOf(a).Kind() != reflect.Pointer
}

// storedForm returns the stored form of the event. It encodes the event unless the event is a result of Encoded.
func (e Event) storedForm() (*storedForm, error) {
	if e.stored != nil && e.stored.isFormOf(&e) {
		return e.stored, nil
	}
	e.stored = nil
	b, from, err := e.appendEncoded(nil)
	if err != nil {
		return nil, err
	}
	return &storedForm{event: e, bytes: b, from: from}, nil
}

// Encoded returns the event together with its stored form, and the size of the stored form in bytes. StoredSize,
// MarshalJSON and Seal then encode neither the event nor its copies again. A copy whose fields are changed is encoded
// again. What Data refers to, such as the elements of a slice, must not be changed.
func (e Event) Encoded() (Event, int, error) {
	f, err := e.storedForm()
	if err != nil {
		return e, 0, err
	}
	e.stored = f
	return e, len(f.bytes), nil
}

// EncodedData returns the event's data in its stored form. The caller must not change the bytes.
func (e Event) EncodedData() (json.RawMessage, error) {
	f, err := e.storedForm()
	if err != nil {
		return nil, err
	}
	return f.data(), nil
}

// MarshalJSON returns the stored form of the event.
func (e Event) MarshalJSON() ([]byte, error) { return e.appendStored(nil) }

// appendStored appends the stored form of the event to b.
func (e Event) appendStored(b []byte) ([]byte, error) {
	if e.stored != nil && e.stored.isFormOf(&e) {
		return append(b, e.stored.bytes...), nil
	}
	b, _, err := e.appendEncoded(b)
	return b, err
}

// appendEncoded encodes the event and appends the JSON to b. from is the index of the event's data in the result.
func (e Event) appendEncoded(b []byte) (out []byte, from int, err error) {
	if e.Data == nil {
		return nil, 0, fmt.Errorf("event %s has no data", e.ID)
	}
	data, err := appendPayloadJSON(nil, e.Data)
	if err != nil {
		return nil, 0, fmt.Errorf("encode %s: %w", e.Data.EventType(), err)
	}
	at, err := e.Time.UTC().MarshalJSON()
	if err != nil {
		return nil, 0, fmt.Errorf("encode time of %s: %w", e.Data.EventType(), err)
	}
	if b == nil {
		b = make([]byte, 0, len(data)+encodedOverheadBytes)
	}
	b = compact.AppendString(append(b, `{"id":`...), e.ID)
	b = compact.AppendString(append(b, `,"type":`...), string(e.Data.EventType()))
	b = append(append(b, `,"time":`...), at...)
	if e.ExecutionID != "" {
		b = compact.AppendString(append(b, `,"executionId":`...), e.ExecutionID)
	}
	if e.ConversationID != "" {
		b = compact.AppendString(append(b, `,"conversationId":`...), e.ConversationID)
	}
	b = compact.AppendString(append(b, `,"source":`...), string(e.Source))
	if e.N != 0 {
		b = strconv.AppendUint(append(b, `,"n":`...), e.N, 10)
	}
	b = append(b, `,"data":`...)
	from = len(b)
	return append(append(b, data...), '}'), from, nil
}

// encodedOverheadBytes is about the size in bytes of the stored form of an event without its data.
const encodedOverheadBytes = 224

// marshalEvents returns the JSON list of events that a commit stores and hashes.
func marshalEvents(list []Event) (json.RawMessage, error) {
	b := append(make([]byte, 0, 512*len(list)), '[')
	for i, e := range list {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = e.appendStored(b); err != nil {
			return nil, err
		}
	}
	return append(b, ']'), nil
}

// Encode returns the commit as a message of the log. Events and State must be compact JSON, which holds for the
// results of Seal and DecodeCommit.
func (c Commit) Encode() ([]byte, error) {
	b := make([]byte, 0, len(c.Events)+len(c.State)+512)
	b = strconv.AppendInt(append(b, `{"v":`...), int64(c.V), 10)
	b = compact.AppendString(append(b, `,"id":`...), c.ID)
	b = compact.AppendString(append(b, `,"actor":{"kind":`...), c.Actor.Kind)
	for _, f := range [...]struct{ name, value string }{
		{`,"id":`, c.Actor.ID}, {`,"key":`, c.Actor.Key}, {`,"user":`, c.Actor.User}, {`,"service":`, c.Actor.Service}, {`,"address":`, c.Actor.Address},
	} {
		if f.value != "" {
			b = compact.AppendString(append(b, f.name...), f.value)
		}
	}
	b = append(b, '}')
	if c.Epoch != 0 {
		b = strconv.AppendUint(append(b, `,"epoch":`...), c.Epoch, 10)
	}
	b = compact.AppendString(append(b, `,"prev":`...), c.Prev)
	b = compact.AppendString(append(b, `,"hash":`...), c.Hash)
	b = append(append(b, `,"events":`...), nullIfEmpty(c.Events)...)
	if len(c.State) > 0 {
		b = append(append(b, `,"state":`...), c.State...)
	}
	if c.Command != "" {
		b = compact.AppendString(append(b, `,"command":`...), c.Command)
	}
	return append(b, '}'), nil
}

// nullIfEmpty returns raw, or null if raw is empty.
func nullIfEmpty(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("null")
	}
	return raw
}

// marshalJSON returns JSON without HTML escapes, so that stored text stays readable.
func marshalJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
