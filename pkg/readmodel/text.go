package readmodel

import (
	"crypto/sha256"
	"encoding/hex"
	"strings"
	"unicode/utf8"
)

// maxKey is the longest value of a primary key, in bytes. Agents choose some of these values, and an index refuses
// long ones.
const maxKey = 200

// Key returns an id as the columns of the read models have it: valid text, and a long id cut and with a hash at its end.
func Key(id string) string {
	id = Text(id)
	if len(id) <= maxKey {
		return id
	}
	sum := sha256.Sum256([]byte(id))
	return strings.ToValidUTF8(id[:maxKey-65], "") + "~" + hex.EncodeToString(sum[:])
}

// Text returns s as the columns of the read models have it: Postgres accepts neither NUL nor invalid UTF-8.
func Text(s string) string {
	if !utf8.ValidString(s) {
		s = strings.ToValidUTF8(s, "\uFFFD")
	}
	if strings.IndexByte(s, 0) >= 0 {
		s = strings.ReplaceAll(s, "\x00", "\uFFFD")
	}
	return s
}
