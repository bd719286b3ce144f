package live

import (
	"bytes"
	"encoding/json"
	"strconv"
)

// liveMessage is readmodel.LiveMessage with the raw bytes of each event, which refer to the bytes of the message. Projectors of
// earlier builds also announce text, which is ignored.
type liveMessage struct {
	Tip    uint32            `json:"tip"`
	Events []json.RawMessage `json:"events"`
}

// decodeLiveMessage decodes a message of LIVE, but not its events, which may be invalid JSON.
func decodeLiveMessage(data []byte) (liveMessage, error) {
	if m, ok := splitLiveMessage(data); ok {
		return m, nil
	}
	var m liveMessage
	err := json.Unmarshal(data, &m)
	return m, err
}

// splitLiveMessage decodes a message without a JSON decoder, which is much faster. ok is false if the message does not have exactly the form that
// projectors write.
func splitLiveMessage(data []byte) (m liveMessage, ok bool) {
	rest, ok := bytes.CutPrefix(data, []byte(`{"sessionId":"`))
	session, rest, found := bytes.Cut(rest, []byte(`","tip":`))
	if !ok || !found || !isPlainID(session) {
		return m, false
	}
	tip, rest, found := bytes.Cut(rest, []byte(`,"events":`))
	n, err := strconv.ParseUint(string(tip), 10, 32)
	if !found || err != nil || string(tip) != strconv.FormatUint(n, 10) {
		return m, false
	}
	m.Tip = uint32(n)
	if m.Events, rest, ok = splitObjectList(rest); !ok {
		return m, false
	}
	return m, string(rest) == "}"
}

// isPlainID reports whether the content of a JSON string consists of letters, digits and underscores, like an id.
func isPlainID(s []byte) bool {
	for _, c := range s {
		if c != '_' && (c < '0' || c > '9') && (c < 'A' || c > 'Z') && (c < 'a' || c > 'z') {
			return false
		}
	}
	return true
}

// splitObjectList divides a JSON list of objects without white space between them, and returns the bytes after the
// list as rest.
func splitObjectList(b []byte) (list []json.RawMessage, rest []byte, ok bool) {
	b, ok = bytes.CutPrefix(b, []byte("["))
	if rest, empty := bytes.CutPrefix(b, []byte("]")); !ok || empty {
		return nil, rest, ok
	}
	for {
		n := objectLen(b)
		if n == 0 || n == len(b) {
			return nil, nil, false
		}
		list = append(list, b[:n:n])
		next := b[n]
		b = b[n+1:]
		switch next {
		case ',':
		case ']':
			return list, b, true
		default:
			return nil, nil, false
		}
	}
}

// objectLen returns the length of the JSON object at the beginning of b, or 0 if there is none.
func objectLen(b []byte) int {
	if len(b) == 0 || b[0] != '{' {
		return 0
	}
	depth, quoted := 0, false
	for i := 0; i < len(b); i++ {
		switch c := b[i]; {
		case quoted && c == '\\':
			i++
		case c == '"':
			quoted = !quoted
		case quoted:
		case c == '{' || c == '[':
			depth++
		case c == '}' || c == ']':
			if depth--; depth == 0 {
				return i + 1
			}
		}
	}
	return 0
}
