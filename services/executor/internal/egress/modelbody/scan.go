package modelbody

import (
	"bytes"
	"fmt"
	"hash/maphash"
	"slices"
	"unicode/utf8"
)

// Limits of a body. They bound the memory that Check allocates, whatever the size of the body.
const (
	maxNestingDepth = 512
	maxOpenKeys     = 1 << 16 // of all objects that are open at one place of the body
	maxKeyBytes     = 1 << 10 // of a key of an interpreted object
	maxTextBytes    = 1 << 10 // of the beginning of a string that is kept
	maxFoldedBytes  = 1 << 16 // of all keys of interpreted objects that are not ASCII, which are slow to compare
)

// UnreadableError is returned for the body of a model request that two JSON parsers could read differently.
type UnreadableError struct {
	Offset int // in bytes
	Reason string
}

func (e *UnreadableError) Error() string {
	return fmt.Sprintf("the body cannot be read in one way alone: %s (at byte %d)", e.Reason, e.Offset)
}

// scanner reads and checks the JSON body of a model request in one pass. It is as strict as RFC 8259, and refuses duplicate keys. It
// allocates no memory in proportion to the body.
type scanner struct {
	body    []byte
	at      int
	depth   int
	seed    maphash.Seed
	keys    []uint64       // hashes of the keys of the objects that are open, the innermost last
	objects []*objectState // by depth - 1; used again by later objects
	text    []byte         // the last result of prefix
	folded  int            // bytes of the keys that foldKey has folded
	allows  func(feature string) bool
	model   string
}

// scannedValue describes a JSON value that the scanner has read: its kind, and its text if it is a string.
type scannedValue struct {
	kind    byte   // the first byte: { [ " t f n, or 0 for a number
	text    []byte // of a string, with its escapes
	escaped bool   // text has escapes
	present bool   // it is not null, false, "" , [] or {}
}

// prefix returns the first maxTextBytes of the text of a JSON string, or nothing for any other value. whole reports whether that is
// the whole text. The text is valid until the next call.
func (s *scanner) prefix(v scannedValue) (text []byte, whole bool) {
	if !v.escaped {
		return v.text[:min(len(v.text), maxTextBytes)], len(v.text) <= maxTextBytes
	}
	s.text = s.text[:0]
	var buf [utf8.UTFMax]byte
	for part, rest := []byte(nil), v.text; len(rest) > 0 && len(s.text) <= maxTextBytes; {
		part, rest = unescapePart(rest, buf[:])
		s.text = append(s.text, part[:min(len(part), maxTextBytes+1-len(s.text))]...)
	}
	return s.text[:min(len(s.text), maxTextBytes)], len(s.text) <= maxTextBytes
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
	o := s.openObject()
	if s.peekByte() == '}' {
		s.at++
		return scannedValue{kind: '{'}, s.checkObjectEnd(in, o)
	}
	for {
		if err := s.readKey(in, o); err != nil {
			return scannedValue{}, err
		}
		if err := s.checkMember(in, o); err != nil {
			return scannedValue{}, err
		}
		more, err := s.readSeparator('}')
		if err != nil {
			return scannedValue{}, err
		}
		if more {
			continue
		}
		if err := s.checkDuplicates(s.keys[outer:]); err != nil {
			return scannedValue{}, err
		}
		return scannedValue{kind: '{', present: true}, s.checkObjectEnd(in, o)
	}
}

// openObject returns the state of the object that has just been opened. Objects at the same depth share it, one after the other.
func (s *scanner) openObject() *objectState {
	for len(s.objects) < s.depth {
		s.objects = append(s.objects, &objectState{})
	}
	o := s.objects[s.depth-1]
	o.typ, o.typed, o.marks = o.typ[:0], false, 0
	return o
}

// checkDuplicates returns an error if two keys of an object are equal. It sorts their hashes.
func (s *scanner) checkDuplicates(own []uint64) error {
	slices.Sort(own)
	for i := 1; i < len(own); i++ {
		if own[i] == own[i-1] {
			return s.unreadableError("an object has two keys that are equal, or that differ only in their case or their Unicode form")
		}
	}
	return nil
}

// readKey reads a key of the object o at the location in and the colon after the key, and adds the hash of the key to s.keys. If the
// object is interpreted, it sets o.key; the keys of other objects are only compared byte by byte.
func (s *scanner) readKey(in location, o *objectState) error {
	if s.peekByte() != '"' {
		return s.unreadableError("no key")
	}
	key, escaped, err := s.readString()
	switch {
	case err != nil:
		return err
	case len(s.keys) == maxOpenKeys:
		return s.unreadableError(fmt.Sprintf("more than %d keys in objects within each other", maxOpenKeys))
	}
	hash := uint64(0)
	if g := grammars[in]; g == nil {
		hash = s.hashKey(key, escaped)
	} else {
		if err := s.interpretKey(g, o, key, escaped); err != nil {
			return err
		}
		hash = maphash.Bytes(s.seed, o.key)
	}
	s.keys = append(s.keys, hash)
	s.skipSpace()
	if s.peekByte() != ':' {
		return s.unreadableError("no colon")
	}
	s.at++
	s.skipSpace()
	return nil
}

// hashKey returns the hash of a key. Two keys of a body may have the same hash by chance, with a probability below 2^-31: the
// body is then refused. A client cannot choose such keys, because it does not know the seed.
func (s *scanner) hashKey(key []byte, escaped bool) uint64 {
	if !escaped {
		return maphash.Bytes(s.seed, key)
	}
	var h maphash.Hash
	h.SetSeed(s.seed)
	var buf [utf8.UTFMax]byte
	for part, rest := []byte(nil), key; len(rest) > 0; {
		part, rest = unescapePart(rest, buf[:])
		h.Write(part) //nolint:errcheck // it never fails
	}
	return h.Sum64()
}

// interpretKey sets o.key to the folded form of a key of the object o with the grammar g. It refuses a key that has another spelling
// than the field of the grammar to which it folds: servers that tell the spellings apart would read another request than those that do
// not.
func (s *scanner) interpretKey(g *grammar, o *objectState, key []byte, escaped bool) error {
	if len(key) > maxKeyBytes {
		return s.unreadableError(fmt.Sprintf("a key of more than %d bytes", maxKeyBytes))
	}
	if escaped {
		o.raw = o.raw[:0]
		var buf [utf8.UTFMax]byte
		for part, rest := []byte(nil), key; len(rest) > 0; {
			part, rest = unescapePart(rest, buf[:])
			o.raw = append(o.raw, part...)
		}
		key = o.raw
	}
	if !isASCII(key) {
		if s.folded += len(key); s.folded > maxFoldedBytes {
			return s.unreadableError(fmt.Sprintf("keys that are not ASCII with more than %d bytes", maxFoldedBytes))
		}
	}
	o.key = foldKey(o.key[:0], key)
	if _, known := g.fields[string(o.key)]; g.exact && (known || string(o.key) == "type") && !bytes.Equal(o.key, key) {
		return s.unreadableError("the key " + printableText(string(key)) + " is spelled " + string(o.key))
	}
	return nil
}
