package modelbody

import (
	"bytes"
	"encoding/json"
	"fmt"
	"unicode/utf8"
)

// Bounds of a body.
const (
	maxNestingDepth = 512
	maxLinearKeys   = 16 // largest number of keys of an object that are compared one by one
)

// UnreadableError is returned for the body of a model request that two JSON parsers could read differently.
type UnreadableError struct {
	Offset int // in bytes
	Reason string
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("the body cannot be read in one way alone: %s (at byte %d)", e.Reason, e.Offset)
}

// scanner reads and checks the JSON body of a model request in one pass. It is as strict as RFC 8259, and refuses duplicate keys.
type scanner struct {
	body   []byte
	at     int
	depth  int
	keys   [][]byte // of the objects that are open, the innermost last
	allows func(feature string) bool
	model  string
}

// scannedValue describes a JSON value that the scanner has read: its kind, and its text if it is a string.
type scannedValue struct {
	kind    byte   // the first byte: { [ " t f n, or 0 for a number
	text    []byte // of a string, with its escapes
	escaped bool   // text has escapes
	present bool   // it is not null, false, "" , [] or {}
}

// string returns the text of a JSON string, or "" for any other value.
func (v scannedValue) string() string {
	if !v.escaped {
		return string(v.text)
	}
	return string(unescape(v.text))
}

// unescape returns the text of a JSON string, given the bytes between its quotes, whose escapes must be valid.
func unescape(text []byte) []byte {
	quoted := append(append([]byte{'"'}, text...), '"')
	var s string
	if json.Unmarshal(quoted, &s) != nil {
		return text // the scanner takes no such string
	}
	return []byte(s)
}

// unreadableError returns an *UnreadableError with a reason and the scanner's position.
func (s *scanner) unreadableError(reason string) error {
	return &UnreadableError{Offset: s.at, Reason: reason}
}

// readDocument reads the whole body of a request, which must be one JSON object. in is the location of the object.
func (s *scanner) readDocument(in location) error {
	if !utf8.Valid(s.body) {
		return s.unreadableError("it is not UTF-8")
	}
	s.skipSpace()
	if s.peekByte() != '{' {
		return s.unreadableError("it is not an object")
	}
	if _, err := s.readValue(in); err != nil {
		return err
	}
	s.skipSpace()
	if s.at < len(s.body) {
		return s.unreadableError("something follows the document")
	}
	return nil
}

// peekByte returns the next byte without reading it, or 0 at the end of the body.
func (s *scanner) peekByte() byte {
	if s.at < len(s.body) {
		return s.body[s.at]
	}
	return 0
}

// skipSpace skips white space.
func (s *scanner) skipSpace() {
	for s.at < len(s.body) {
		switch s.body[s.at] {
		case ' ', '\t', '\r', '\n':
			s.at++
		default:
			return
		}
	}
}

// readValue reads a JSON value. in is the location of the value in the request.
func (s *scanner) readValue(in location) (scannedValue, error) {
	switch c := s.peekByte(); {
	case c == '"':
		text, escaped, err := s.readString()
		return scannedValue{kind: '"', text: text, escaped: escaped, present: len(text) > 0}, err
	case c == '{':
		return s.readObject(in)
	case c == '[':
		return s.readArray(in)
	case c == 't':
		return scannedValue{kind: c, present: true}, s.skipLiteral("true")
	case c == 'f':
		return scannedValue{kind: c}, s.skipLiteral("false")
	case c == 'n':
		return scannedValue{kind: c}, s.skipLiteral("null")
	}
	return scannedValue{present: true}, s.skipNumber()
}

// skipLiteral reads the literal w: true, false or null.
func (s *scanner) skipLiteral(w string) error {
	if !bytes.HasPrefix(s.body[s.at:], []byte(w)) {
		return s.unreadableError("an unknown word")
	}
	s.at += len(w)
	return nil
}

// skipDigits reads decimal digits, and reports whether there was one.
func (s *scanner) skipDigits() bool {
	from := s.at
	for c := s.peekByte(); c >= '0' && c <= '9'; c = s.peekByte() {
		s.at++
	}
	return s.at > from
}

// skipNumber reads a JSON number.
func (s *scanner) skipNumber() error {
	if s.peekByte() == '-' {
		s.at++
	}
	if s.peekByte() == '0' {
		s.at++
	} else if !s.skipDigits() {
		return s.unreadableError("no value")
	}
	if s.peekByte() == '.' {
		s.at++
		if !s.skipDigits() {
			return s.unreadableError("a number without its digits")
		}
	}
	if c := s.peekByte(); c == 'e' || c == 'E' {
		s.at++
		if c := s.peekByte(); c == '+' || c == '-' {
			s.at++
		}
		if !s.skipDigits() {
			return s.unreadableError("a number without its exponent")
		}
	}
	return nil
}

// unescapedBytes[b] is true for each byte b that a JSON string may contain without an escape.
var unescapedBytes = func() (t [256]bool) {
	for c := range t {
		t[c] = c >= ' ' && c != '"' && c != '\\'
	}
	return t
}()

// readString reads a JSON string, and returns the bytes between its quotes and whether they contain escapes. The next byte must be a
// quote.
func (s *scanner) readString() (text []byte, escaped bool, err error) {
	s.at++
	from := s.at
	for {
		i, body := s.at, s.body
		for i < len(body) && unescapedBytes[body[i]] {
			i++
		}
		s.at = i
		switch s.peekByte() {
		case '"':
			s.at++
			return s.body[from : s.at-1], escaped, nil
		case '\\':
			escaped = true
			if err := s.skipEscape(); err != nil {
				return nil, false, err
			}
		default:
			return nil, false, s.unreadableError("a string that does not end, or has a control character")
		}
	}
}

// skipEscape reads an escape of a JSON string. The next byte must be a backslash.
func (s *scanner) skipEscape() error {
	s.at++
	switch s.peekByte() {
	case '"', '\\', '/', 'b', 'f', 'n', 'r', 't':
		s.at++
		return nil
	case 'u':
		for range 4 {
			s.at++
			c := s.peekByte() | 0x20
			if (c < '0' || c > '9' || s.peekByte() < '0') && (c < 'a' || c > 'f') {
				return s.unreadableError("an escape that is none")
			}
		}
		s.at++
		return nil
	}
	return s.unreadableError("an escape that is none")
}

// enterNesting reads the bracket that opens an object or an array, and increases s.depth up to maxNestingDepth. The caller decreases
// s.depth at the end of the object or array.
func (s *scanner) enterNesting() error {
	s.at++
	if s.depth++; s.depth > maxNestingDepth {
		return s.unreadableError(fmt.Sprintf("more than %d levels", maxNestingDepth))
	}
	s.skipSpace()
	return nil
}

// readArray reads a JSON array. The array's elements have the same location in as the array. The next byte must be '['.
func (s *scanner) readArray(in location) (scannedValue, error) {
	if err := s.enterNesting(); err != nil {
		return scannedValue{}, err
	}
	defer func() { s.depth-- }()
	if s.peekByte() == ']' {
		s.at++
		return scannedValue{kind: '['}, nil
	}
	for {
		if _, err := s.readValue(in); err != nil {
			return scannedValue{}, err
		}
		more, err := s.readSeparator(']')
		if err != nil || !more {
			return scannedValue{kind: '[', present: true}, err
		}
	}
}

// readSeparator reads the comma or the closing bracket end after an element or a member, and reports whether another one follows.
func (s *scanner) readSeparator(end byte) (bool, error) {
	s.skipSpace()
	switch s.peekByte() {
	case ',':
		s.at++
		s.skipSpace()
		return true, nil
	case end:
		s.at++
		return false, nil
	}
	return false, s.unreadableError("no comma and no end")
}

// readObject reads a JSON object at the location in, and checks its members by the grammar of that location. The next byte must be '{'.
func (s *scanner) readObject(in location) (scannedValue, error) {
	if err := s.enterNesting(); err != nil {
		return scannedValue{}, err
	}
	outer := len(s.keys)
	defer func() {
		s.depth--
		s.keys = s.keys[:outer]
	}()
	if s.peekByte() == '}' {
		s.at++
		return scannedValue{kind: '{'}, s.checkObjectEnd(in, &objectState{})
	}
	var o objectState
	var seen map[string]bool // of the keys, once there are many
	for {
		key, err := s.readKey(outer, &seen)
		if err != nil {
			return scannedValue{}, err
		}
		if err := s.checkMember(in, key, &o); err != nil {
			return scannedValue{}, err
		}
		more, err := s.readSeparator('}')
		if err != nil {
			return scannedValue{}, err
		}
		if !more {
			return scannedValue{kind: '{', present: true}, s.checkObjectEnd(in, &o)
		}
	}
}

// readKey reads a key of an object and the colon after the key. It returns an error if the object already has the key. The object's
// earlier keys are in s.keys from index outer on, and also in seen if there are more than maxLinearKeys.
func (s *scanner) readKey(outer int, seen *map[string]bool) ([]byte, error) {
	if s.peekByte() != '"' {
		return nil, s.unreadableError("no key")
	}
	key, escaped, err := s.readString()
	if err != nil {
		return nil, err
	}
	if escaped {
		key = unescape(key)
	}
	if *seen == nil {
		own := s.keys[outer:]
		for _, k := range own {
			if bytes.Equal(k, key) {
				return nil, s.unreadableError("a key that stands there twice")
			}
		}
		if len(own) == maxLinearKeys {
			*seen = make(map[string]bool, 4*maxLinearKeys)
			for _, k := range own {
				(*seen)[string(k)] = true
			}
		}
	}
	if *seen == nil {
		s.keys = append(s.keys, key)
	} else {
		if (*seen)[string(key)] {
			return nil, s.unreadableError("a key that stands there twice")
		}
		(*seen)[string(key)] = true
	}
	s.skipSpace()
	if s.peekByte() != ':' {
		return nil, s.unreadableError("no colon")
	}
	s.at++
	s.skipSpace()
	return key, nil
}
