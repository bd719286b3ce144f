package transcript

import "encoding/json"

// Members returns the members of a JSON object by their exact names, as the CLIs read them; nil for anything else.
func Members(raw []byte) map[string]json.RawMessage {
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil {
		return nil
	}
	return m
}

// Text returns the value of a JSON string; "" for anything else.
func Text(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// JSON returns a text, or members, as JSON.
func JSON[T string | map[string]json.RawMessage](v T) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic("transcript: " + err.Error()) // members are JSON already
	}
	return raw
}
