package redact

import (
	"bytes"
	"encoding/json"
)

// RedactJSON redacts the strings in a JSON value, field names included, and the numbers. The result is valid JSON if
// raw is. If a secret is found across several strings, the whole JSON value is replaced.
func (s *Set) RedactJSON(raw json.RawMessage) json.RawMessage {
	if s == nil {
		return raw
	}
	var out []byte
	for i := 0; i < len(raw); {
		end := tokenEnd(raw, i)
		out = append(out, s.redactToken(raw[i:end])...)
		i = end
	}
	if s.containsValue(string(out)) {
		return json.RawMessage(`"` + Marker + `"`)
	}
	if bytes.Equal(out, raw) {
		return raw
	}
	return out
}

// tokenEnd returns the end of the JSON token that begins at raw[i]: a string, a number, or a single byte of anything
// else.
func tokenEnd(raw []byte, i int) int {
	switch c := raw[i]; {
	case c == '"':
		for i++; i < len(raw) && raw[i] != '"'; i++ {
			if raw[i] == '\\' {
				i++
			}
		}
		return min(i+1, len(raw))
	case c == '-' || c >= '0' && c <= '9':
		for i < len(raw) && bytes.IndexByte([]byte("+-.0123456789eE"), raw[i]) >= 0 {
			i++
		}
		return i
	}
	return i + 1
}

// redactToken returns a JSON string or number with its secrets redacted.
func (s *Set) redactToken(raw []byte) []byte {
	switch {
	case raw[0] == '"':
		var text string
		if json.Unmarshal(raw, &text) != nil {
			return raw // not JSON: the final search covers it
		}
		if clean := s.RedactString(text); clean != text {
			return []byte(`"` + jsonStringBody(clean, false) + `"`)
		}
	case len(raw) > 1 && s.containsValue(string(raw)):
		return []byte(`"` + Marker + `"`)
	}
	return raw
}
