// Package compact reads and writes JSON of a known layout without reflection: no spaces, and the keys in the order in which Spool's
// own encoders write them. A Reader accepts only JSON that encoding/json decodes to the same value. It refuses everything else, so the
// caller has to decode refused input with encoding/json.
package compact

import (
	"encoding/binary"
	"math/bits"
	"strconv"
	"strings"
	"time"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"
)

// maxNesting is the deepest nesting of arrays and objects that Reader.Raw accepts.
const maxNesting = 100

// Reader reads one value of JSON without spaces, in a known order of members, from its beginning to its end. After the
// first failure every call fails. The zero Reader has no input.
type Reader struct {
	data   []byte
	pos    int
	failed bool
}

// NewReader returns a Reader of data, which must not be changed while it is used.
func NewReader(data []byte) Reader { return Reader{data: data} }

// AtEnd reports whether all input was read and no call has failed.
func (r *Reader) AtEnd() bool { return !r.failed && r.pos == len(r.data) }

// Failed reports whether a call has failed.
func (r *Reader) Failed() bool { return r.failed }

// SkipOptional skips text if text comes next, and reports whether it does. It never makes the Reader fail.
func (r *Reader) SkipOptional(text string) bool {
	if r.failed || len(r.data)-r.pos < len(text) || string(r.data[r.pos:r.pos+len(text)]) != text {
		return false
	}
	r.pos += len(text)
	return true
}

// Expect skips text. The Reader fails if text does not come next.
func (r *Reader) Expect(text string) {
	if !r.SkipOptional(text) {
		r.failed = true
	}
}

// String reads a JSON string. Like encoding/json, it replaces bytes and escapes that are not UTF-8 by U+FFFD.
func (r *Reader) String() string {
	from := r.pos + 1
	plain := r.skipString()
	if r.failed {
		return ""
	}
	raw := r.data[from : r.pos-1]
	if plain || utf8.Valid(raw) && !hasEscape(raw) {
		return string(raw)
	}
	return unquote(raw)
}

// OptionalString reads the JSON string after key, or returns "" if key does not come next.
func (r *Reader) OptionalString(key string) string {
	if !r.SkipOptional(key) {
		return ""
	}
	return r.String()
}

// Uint reads a JSON number from 0 to limit.
func (r *Reader) Uint(limit uint64) (n uint64) {
	from := r.pos
	for !r.failed && r.pos < len(r.data) && isDigit(r.data[r.pos]) {
		high, low := bits.Mul64(n, 10)
		sum, carry := bits.Add64(low, uint64(r.data[r.pos]-'0'), 0)
		if n = sum; high != 0 || carry != 0 {
			r.failed = true
		}
		r.pos++
	}
	if r.pos == from || r.pos > from+1 && r.data[from] == '0' || n > limit {
		r.failed = true
	}
	if r.failed {
		return 0
	}
	return n
}

// Time reads a time as time.Time.UnmarshalJSON does.
func (r *Reader) Time() (t time.Time) {
	from := r.pos
	if r.skipString(); r.failed {
		return time.Time{}
	}
	if err := t.UnmarshalJSON(r.data[from:r.pos]); err != nil {
		r.failed = true
		return time.Time{}
	}
	return t
}

// Raw reads any JSON value that has no spaces outside of strings, and returns its bytes, which are part of the input.
// Like encoding/json, it does not check the UTF-8 of the strings in the value.
func (r *Reader) Raw() []byte {
	from := r.pos
	if r.skipValue(maxNesting); r.failed {
		return nil
	}
	return r.data[from:r.pos:r.pos]
}

// skipByte skips c if c is the next byte, and reports whether it is.
func (r *Reader) skipByte(c byte) bool {
	if r.failed || r.pos >= len(r.data) || r.data[r.pos] != c {
		return false
	}
	r.pos++
	return true
}

// skipValue skips a JSON value. depth is the number of arrays and objects that contain it.
func (r *Reader) skipValue(depth int) {
	if r.failed || depth == 0 || r.pos >= len(r.data) {
		r.failed = true
		return
	}
	switch c := r.data[r.pos]; {
	case c == '"':
		r.skipString()
	case c == '{':
		r.skipList('}', func() {
			r.skipString()
			r.Expect(":")
			r.skipValue(depth - 1)
		})
	case c == '[':
		r.skipList(']', func() { r.skipValue(depth - 1) })
	case c == '-' || isDigit(c):
		r.skipNumber()
	default:
		r.failed = !r.SkipOptional("null") && !r.SkipOptional("true") && !r.SkipOptional("false")
	}
}

// skipList skips an array or an object, whose opening bracket comes next. It calls item to skip each element.
func (r *Reader) skipList(end byte, item func()) {
	r.pos++
	if r.skipByte(end) {
		return
	}
	for !r.failed {
		item()
		if r.skipByte(end) {
			return
		}
		r.Expect(",")
	}
}

func (r *Reader) skipNumber() {
	r.skipByte('-')
	if !r.skipByte('0') {
		r.skipDigits()
	}
	if r.skipByte('.') {
		r.skipDigits()
	}
	if r.skipByte('e') || r.skipByte('E') {
		if !r.skipByte('+') {
			r.skipByte('-')
		}
		r.skipDigits()
	}
}

func (r *Reader) skipDigits() {
	from := r.pos
	for r.pos < len(r.data) && isDigit(r.data[r.pos]) {
		r.pos++
	}
	r.failed = r.failed || r.pos == from
}

// skipString skips a JSON string, and reports whether the string has only ASCII and no escapes. The Reader fails at
// control characters and unknown escapes.
func (r *Reader) skipString() (plain bool) {
	if !r.skipByte('"') {
		r.failed = true
		return false
	}
	plain = true
	for {
		i, ascii := indexSpecial(r.data[r.pos:])
		plain = plain && ascii
		if r.pos += i; r.pos >= len(r.data) {
			break
		}
		switch r.data[r.pos] {
		case '"':
			r.pos++
			return plain
		case '\\':
			plain = false
			n := escapeLength(r.data[r.pos:])
			if n == 0 {
				r.failed = true
				return false
			}
			r.pos += n
		default: // a control character
			r.failed = true
			return false
		}
	}
	r.failed = true
	return false
}

// indexSpecial returns the index of the first quote, backslash or control character in b, or the length of b if there
// is none. ascii reports whether all bytes before the index are ASCII; it may be false if only a few bytes after the
// index are not.
func indexSpecial(b []byte) (i int, ascii bool) {
	const ones, highs = 0x0101010101010101, 0x8080808080808080
	var seen uint64
	for ; len(b)-i >= 8; i += 8 {
		x := binary.LittleEndian.Uint64(b[i:])
		quote, slash := x^(ones*'"'), x^(ones*'\\')
		// The subtraction may borrow from the next byte and mark it wrongly, but only after a byte that is marked
		// rightly. So the first mark is always right.
		found := ((x - ones*' ') &^ x) | ((quote - ones) &^ quote) | ((slash - ones) &^ slash)
		seen |= x
		if found &= highs; found != 0 {
			return i + bits.TrailingZeros64(found)/8, seen&highs == 0
		}
	}
	for ; i < len(b); i++ {
		if c := b[i]; c < ' ' || c == '"' || c == '\\' {
			break
		}
		seen |= uint64(b[i])
	}
	return i, seen&highs == 0
}

// escapeLength returns the length of the JSON escape at the beginning of b, or 0 if b does not begin with a valid
// escape.
func escapeLength(b []byte) int {
	if len(b) < 2 {
		return 0
	}
	switch b[1] {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		return 2
	case 'u':
		if parseUnicodeEscape(b) >= 0 {
			return 6
		}
	}
	return 0
}

// parseUnicodeEscape returns the value of the escape \uXXXX at the beginning of b, or -1 if b does not begin with one.
func parseUnicodeEscape(b []byte) rune {
	if len(b) < 6 || b[0] != '\\' || b[1] != 'u' {
		return -1
	}
	var n rune
	for _, c := range b[2:6] {
		switch {
		case isDigit(c):
			c -= '0'
		case 'a' <= c && c <= 'f':
			c -= 'a' - 10
		case 'A' <= c && c <= 'F':
			c -= 'A' - 10
		default:
			return -1
		}
		n = n<<4 | rune(c)
	}
	return n
}

func hasEscape(raw []byte) bool {
	for i := 0; i < len(raw); i++ {
		if raw[i] == '\\' {
			return true
		}
	}
	return false
}

// unquote returns the text of a string between its quotes, whose escapes skipString has checked.
func unquote(raw []byte) string {
	var out strings.Builder
	out.Grow(len(raw))
	for len(raw) > 0 {
		switch c := raw[0]; {
		case c == '\\' && raw[1] == 'u':
			r := parseUnicodeEscape(raw)
			raw = raw[6:]
			if utf16.IsSurrogate(r) {
				if r = utf16.DecodeRune(r, parseUnicodeEscape(raw)); r != unicode.ReplacementChar {
					raw = raw[6:]
				}
			}
			out.WriteRune(r)
		case c == '\\':
			out.WriteByte(unescape(raw[1]))
			raw = raw[2:]
		case c < utf8.RuneSelf:
			n := 1
			for n < len(raw) && raw[n] < utf8.RuneSelf && raw[n] != '\\' {
				n++
			}
			out.Write(raw[:n])
			raw = raw[n:]
		default:
			r, size := utf8.DecodeRune(raw)
			out.WriteRune(r)
			raw = raw[size:]
		}
	}
	return out.String()
}

// unescape returns the character that a backslash and c stand for.
func unescape(c byte) byte {
	switch c {
	case 'b':
		return '\b'
	case 'f':
		return '\f'
	case 'n':
		return '\n'
	case 'r':
		return '\r'
	case 't':
		return '\t'
	}
	return c
}

func isDigit(c byte) bool { return '0' <= c && c <= '9' }

// AppendString appends s as a JSON string, byte for byte as encoding/json does without HTML escapes.
func AppendString(b []byte, s string) []byte {
	const hex = "0123456789abcdef"
	b = append(b, '"')
	start := 0
	for i := 0; i < len(s); {
		if c := s[i]; c < utf8.RuneSelf {
			if c >= ' ' && c != '"' && c != '\\' {
				i++
				continue
			}
			b = append(b, s[start:i]...)
			switch c {
			case '"', '\\':
				b = append(b, '\\', c)
			case '\b':
				b = append(b, '\\', 'b')
			case '\f':
				b = append(b, '\\', 'f')
			case '\n':
				b = append(b, '\\', 'n')
			case '\r':
				b = append(b, '\\', 'r')
			case '\t':
				b = append(b, '\\', 't')
			default:
				b = append(b, '\\', 'u', '0', '0', hex[c>>4], hex[c&15])
			}
			i++
			start = i
			continue
		}
		r, size := utf8.DecodeRuneInString(s[i:])
		switch {
		case r == utf8.RuneError && size == 1:
			b = append(append(b, s[start:i]...), `\ufffd`...)
			start = i + size
		case r == '\u2028' || r == '\u2029':
			b = append(append(b, s[start:i]...), `\u202`...)
			b = append(b, hex[r&15])
			start = i + size
		}
		i += size
	}
	return append(append(b, s[start:]...), '"')
}

// AppendUint appends key and then n in decimal.
func AppendUint(b []byte, key string, n uint64) []byte {
	return strconv.AppendUint(append(b, key...), n, 10)
}

// AppendTime appends t in the form of time.Time.MarshalJSON, and returns an error where MarshalJSON does.
func AppendTime(b []byte, t time.Time) ([]byte, error) {
	b, err := t.AppendText(append(b, '"'))
	if err != nil {
		return nil, err
	}
	return append(b, '"'), nil
}
