// Package meter reads model, token usage and error from the answer to a model call while the answer streams through, and computes
// the cost. It holds only these fields, never a message.
package meter

import (
	"bytes"
	"encoding/json"
	"strings"
)

// maxValueBytes is the maximum size of a captured value in bytes. A longer value counts as absent.
const maxValueBytes = 16 << 10

// maxKeyBytes is the maximum length in bytes of the key of a field whose value is captured.
const maxKeyBytes = 32

// fieldScanner is an io.Writer that parses a JSON document of any size and captures the values of some fields: of the document
// itself ("usage"), and of objects directly in it ("response.usage"). In text that is not JSON it finds nothing.
type fieldScanner struct {
	want  map[string]bool
	texts map[string]bool // the wanted fields that are kept only if they are strings
	found map[string]json.RawMessage

	depth     int
	objects   uint64    // bit n: the nesting at depth n (1 to 63) is an object
	keys      [3]string // at depths 1 and 2: the key that is being read, or whose value is
	inString  bool
	escaped   bool
	isKey     bool // the string that is being read is a key
	expectKey bool

	text    []byte // of a key
	capture []byte
	path    string // of the captured field, "" if none is
	at      int    // its depth
}

// newFieldScanner returns a fieldScanner that captures the fields with the paths want. A path with the suffix ":text" captures
// the value only if it is a string.
func newFieldScanner(want ...string) *fieldScanner {
	f := &fieldScanner{want: map[string]bool{}, texts: map[string]bool{}}
	for _, w := range want {
		w, text := strings.CutSuffix(w, ":text")
		f.want[w] = true
		if text {
			f.texts[w] = true
		}
	}
	f.reset()
	return f
}

// reset discards all captured values, so that another document can be parsed.
func (f *fieldScanner) reset() {
	*f = fieldScanner{want: f.want, texts: f.texts, found: map[string]json.RawMessage{}, text: f.text[:0], capture: f.capture[:0]}
}

// Write parses the next part of the document. It never fails.
func (f *fieldScanner) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		if f.inString {
			p = p[f.parseString(p):]
			continue
		}
		f.handleStructural(p[0])
		p = p[1:]
	}
	return n, nil
}

// parseString parses the part of p that belongs to the current JSON string, and returns the number of bytes that it parsed.
func (f *fieldScanner) parseString(p []byte) int {
	n := 0
	for n < len(p) {
		c := p[n]
		n++
		if f.escaped {
			f.escaped = false
			continue
		}
		if c == '\\' {
			f.escaped = true
			continue
		}
		if c == '"' {
			f.inString = false
			break
		}
		// Most of a body is long strings: skip to the next byte that may end one.
		if i := bytes.IndexAny(p[n:], `"\`); i < 0 {
			n = len(p)
		} else {
			n += i
		}
	}
	f.captureBytes(p[:n])
	if f.isKey && len(f.text) <= maxKeyBytes+1 {
		f.text = append(f.text, p[:n]...)
	}
	if !f.inString && f.isKey {
		f.isKey = false
		if f.depth <= 2 {
			f.keys[f.depth] = ""
			if k := len(f.text) - 1; k >= 0 && k <= maxKeyBytes && f.text[k] == '"' { // no wanted key has an escape
				f.keys[f.depth] = string(f.text[:k])
			}
		}
	}
	return n
}

// captureBytes adds p to the value that is being captured, if there is one.
func (f *fieldScanner) captureBytes(p []byte) {
	if f.path != "" && len(f.capture) <= maxValueBytes {
		f.capture = append(f.capture, p...)
	}
}

// isObject reports whether the innermost open bracket is that of an object.
func (f *fieldScanner) isObject() bool {
	return f.depth > 0 && f.depth < 64 && f.objects&(1<<f.depth) != 0
}

// handleStructural handles a bracket, comma, colon or quote outside of strings.
func (f *fieldScanner) handleStructural(c byte) {
	switch c {
	case '"':
		f.inString, f.isKey, f.text = true, f.expectKey && f.isObject(), f.text[:0]
		f.expectKey = false
		f.captureBytes([]byte{c})
	case '{', '[':
		if f.depth == f.at && f.texts[f.path] { // not a string, so it is not captured: a field in it may be wanted
			f.path = ""
		}
		f.captureBytes([]byte{c})
		f.depth++
		if f.depth < 64 {
			f.objects &^= 1 << f.depth
			if c == '{' {
				f.objects |= 1 << f.depth
			}
		}
		f.expectKey = c == '{'
	case '}', ']':
		f.endCapture(f.depth)
		f.captureBytes([]byte{c})
		if f.depth--; f.depth < 0 {
			f.depth = 0
		}
		f.expectKey = false
	case ',':
		f.endCapture(f.depth)
		f.captureBytes([]byte{c})
		f.expectKey = f.isObject()
	case ':':
		f.captureBytes([]byte{c})
		f.beginCapture()
	default:
		f.captureBytes([]byte{c})
	}
}

// beginCapture begins to capture the value of a field if the key that was just parsed is wanted.
func (f *fieldScanner) beginCapture() {
	if f.path != "" || !f.isObject() || f.depth > 2 {
		return
	}
	path := f.keys[f.depth]
	if f.depth == 2 {
		if f.objects&(1<<1) == 0 {
			return
		}
		path = f.keys[1] + "." + path
	}
	if f.want[path] {
		f.path, f.at, f.capture = path, f.depth, f.capture[:0]
	}
}

// endCapture ends the capture if the value that has just ended at this depth is the captured one.
func (f *fieldScanner) endCapture(depth int) {
	if f.path == "" || depth != f.at {
		return
	}
	if v := bytes.TrimSpace(f.capture); len(v) <= maxValueBytes && json.Valid(v) {
		f.found[f.path] = append(json.RawMessage(nil), v...)
	}
	f.path = ""
}

// stringOf returns the captured value of a field if it is a string, and "" otherwise.
func (f *fieldScanner) stringOf(path string) string {
	var s string
	if json.Unmarshal(f.found[path], &s) != nil {
		return ""
	}
	return s
}
