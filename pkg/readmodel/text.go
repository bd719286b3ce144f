package readmodel

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"unicode/utf8"
)

// maxKeyLength is the longest value of a primary key, in bytes. Agents choose some of these values, and an index refuses
// long ones.
const maxKeyLength = 200

// KeyValue returns an id as the columns of the read models have it: valid text, and a long id cut and with a hash at its end.
func KeyValue(id string) string {
	id = TextValue(id)
	if len(id) <= maxKeyLength {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return strings.ToValidUTF8(id[:maxKeyLength-65], "") + "~" + hex.EncodeToString(sum[:])
}

// TextValue returns s as the columns of the read models have it: Postgres accepts neither NUL nor invalid UTF-8.
func TextValue(s string) string {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	if strings.IndexByte(s, 0) >= 0 {
		s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	}
	return s
}
