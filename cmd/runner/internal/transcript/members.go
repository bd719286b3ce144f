package transcript

import "encoding/json"

// ParseMembers returns the members of the JSON object raw by their exact names, as the CLIs read them, or nil if raw is
// not an object.
func ParseMembers(raw []byte) map[string]json.RawMessage {
	var m map[string]json.RawMessage
	if json.Unmarshal(raw, &m) != nil {
		return nil
	}
	return m
}

// ParseString returns the value of the JSON string raw, or "" if raw is not a string.
func ParseString(raw json.RawMessage) string {
	var s string
	if json.Unmarshal(raw, &s) != nil {
		return ""
	}
	return s
}

// EncodeJSON returns a text, or the members of an object, as JSON.
func EncodeJSON[T string | map[string]json.RawMessage](v T) json.RawMessage {
	raw, err := json.Marshal(v)
	if err != nil {
		panic("transcript: " + err.Error()) // members are JSON already
	}
	return raw
}
