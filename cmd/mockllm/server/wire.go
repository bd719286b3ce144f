package server

import (
	"bytes"
	"encoding/json"
	"fmt"
	"net/http"
	"strings"
)

// orderedObject is a JSON object as a list of alternating keys and values. It keeps its order, so that answers look
// like those of the real services.
type orderedObject []any

// MarshalJSON encodes the object with its keys in order.
func (o orderedObject) MarshalJSON() ([]byte, error) {
	var b bytes.Buffer
	b.WriteByte('{')
	for i := 0; i+1 < len(o); i += 2 {
		if i > 0 {
			b.WriteByte(',')
		}
		fmt.Fprintf(&b, "%q:", o[i])
		value, err := marshalUnescaped(o[i+1])
		if err != nil {
			return nil, err
		}
		b.Write(value)
	}
	b.WriteByte('}')
	return b.Bytes(), nil
}

// marshalUnescaped encodes v as JSON without escaping <, > and &. The real services do not escape them either, and
// clients show the input of a tool unchanged.
func marshalUnescaped(v any) ([]byte, error) {
	var b bytes.Buffer
	e := json.NewEncoder(&b)
	e.SetEscapeHTML(false)
	if err := e.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}

// sseWriter writes server-sent events to an HTTP response. The first event sends the response headers.
type sseWriter struct {
	w       http.ResponseWriter
	started bool
}

// sendJSON sends a server-sent event with data as JSON. An event with an empty name has no event line.
func (s *sseWriter) sendJSON(name string, data any) error {
	body, err := marshalUnescaped(data)
	if err != nil {
		return err
	}
	return s.sendRaw(name, string(body))
}

// sendRaw sends a server-sent event whose data is already encoded.
func (s *sseWriter) sendRaw(name, data string) error {
	if !s.started {
		s.started = true
		s.w.Header().Set("Content-Type", "text/event-stream; charset=utf-8")
		s.w.Header().Set("Cache-Control", "no-cache")
		s.w.WriteHeader(http.StatusOK)
	}
	if name != "" {
		name = "event: " + name + "\n"
	}
	if _, err := fmt.Fprintf(s.w, "%sdata: %s\n\n", name, data); err != nil {
		return err
	}
	return http.NewResponseController(s.w).Flush()
}

// textParts returns the texts of a message's content, which is a string or a list of parts.
func textParts(raw json.RawMessage) ([]string, error) {
	raw = bytes.TrimSpace(raw)
	if len(raw) == 0 || string(raw) == "null" {
		return nil, nil
	}
	if raw[0] == '"' {
		var s string
		err := json.Unmarshal(raw, &s)
		return []string{s}, err
	}
	var parts []struct {
		Text string `json:"text"`
	}
	if err := json.Unmarshal(raw, &parts); err != nil {
		return nil, err
	}
	var all []string
	for _, p := range parts {
		if p.Text != "" {
			all = append(all, p.Text)
		}
	}
	return all, nil
}

// joinTextParts returns the texts of a message's content, joined by newlines.
func joinTextParts(raw json.RawMessage) (string, error) {
	all, err := textParts(raw)
	return strings.Join(all, "\n"), err
}
