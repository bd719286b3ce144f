package events

import (
	"bytes"
	"encoding/json"
	"fmt"
	"strconv"
)

// Commits are encoded by this code, field by field, and not by encoding/json, which would scan nested JSON again on each
// level. Every append encodes a commit. The output is identical to the output of encoding/json for the struct tags; the
// golden files test that.

// MarshalJSON returns the stored form.
func (e Event) MarshalJSON() ([]byte, error) { return e.append(nil) }

// append appends the stored form to b.
func (e Event) append(b []byte) ([]byte, error) {
	if e.Data == nil {
		return nil, fmt.Errorf("event %s has no data", e.ID)
	}
	data, err := marshal(e.Data)
	if err != nil {
		return nil, fmt.Errorf("encode %s: %w", e.Data.EventType(), err)
	}
	at, err := e.Time.UTC().MarshalJSON()
	if err != nil {
		return nil, fmt.Errorf("encode time of %s: %w", e.Data.EventType(), err)
	}
	b = appendString(append(b, `{"id":`...), e.ID)
	b = appendString(append(b, `,"type":`...), string(e.Data.EventType()))
	b = append(append(b, `,"time":`...), at...)
	if e.ExecutionID != "" {
		b = appendString(append(b, `,"executionId":`...), e.ExecutionID)
	}
	if e.ConversationID != "" {
		b = appendString(append(b, `,"conversationId":`...), e.ConversationID)
	}
	b = appendString(append(b, `,"source":`...), string(e.Source))
	if e.N != 0 {
		b = strconv.AppendUint(append(b, `,"n":`...), e.N, 10)
	}
	b = append(append(b, `,"data":`...), data...)
	return append(b, '}'), nil
}

// marshalEvents returns the JSON list of events that a commit stores and hashes.
func marshalEvents(list []Event) (json.RawMessage, error) {
	b := append(make([]byte, 0, 512*len(list)), '[')
	for i, e := range list {
		if i > 0 {
			b = append(b, ',')
		}
		var err error
		if b, err = e.append(b); err != nil {
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
	b = appendString(append(b, `,"id":`...), c.ID)
	b = appendString(append(b, `,"actor":{"kind":`...), c.Actor.Kind)
	for _, f := range [...]struct{ name, value string }{
		{`,"id":`, c.Actor.ID}, {`,"key":`, c.Actor.Key}, {`,"user":`, c.Actor.User}, {`,"service":`, c.Actor.Service}, {`,"address":`, c.Actor.Address},
	} {
		if f.value != "" {
			b = appendString(append(b, f.name...), f.value)
		}
	}
	b = append(b, '}')
	if c.Epoch != 0 {
		b = strconv.AppendUint(append(b, `,"epoch":`...), c.Epoch, 10)
	}
	b = appendString(append(b, `,"prev":`...), c.Prev)
	b = appendString(append(b, `,"hash":`...), c.Hash)
	b = append(append(b, `,"events":`...), orNull(c.Events)...)
	if len(c.State) > 0 {
		b = append(append(b, `,"state":`...), c.State...)
	}
	if c.Command != "" {
		b = appendString(append(b, `,"command":`...), c.Command)
	}
	return append(b, '}'), nil
}

func orNull(raw json.RawMessage) json.RawMessage {
	if len(raw) == 0 {
		return json.RawMessage("null")
	}
	return raw
}

// appendString appends s as a JSON string, as encoding/json does without HTML escapes.
func appendString(b []byte, s string) []byte {
	for i := range len(s) {
		if c := s[i]; c < ' ' || c >= 0x7f || c == '"' || c == '\\' {
			quoted, err := marshal(s)
			if err != nil {
				panic(err) // unreachable: a string always encodes
			}
			return append(b, quoted...)
		}
	}
	b = append(b, '"')
	b = append(b, s...)
	return append(b, '"')
}

// marshal returns JSON without HTML escapes, so that stored text stays readable.
func marshal(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
