package readmodel

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"unicode/utf8"
)

// maxKeyLength is the maximum length of a primary key's value, in bytes. Agents choose some of these values, and an
// index refuses long ones.
const maxKeyLength = 200

// KeyValue returns an id as key columns of the read models store it: valid text, and a long id truncated with a hash at
// its end.
func KeyValue(id string) string {
	id = TextValue(id)
	if len(id) <= maxKeyLength {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return strings.ToValidUTF8(id[:maxKeyLength-65], "") + "~" + hex.EncodeToString(sum[:])
}

// TextValue returns s as text columns of the read models store it, with replacements for NUL and invalid UTF-8, which
// Postgres does not accept.
func TextValue(s string) string {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	if strings.IndexByte(s, 0) >= 0 {
		s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	}
	return s
}
