// Package truncate limits the length of texts that come from outside, before an error quotes them, a log line shows
// them or an event stores them. Limits are bytes. No function splits a UTF-8 character.
package truncate

import (
	"strconv"
	"strings"
	"unicode/utf8"
)

// ellipsis is appended to a truncated text.
const ellipsis = "…"

// Prefix returns the longest prefix of s that has at most limit bytes and ends at the end of a character. A byte that
// is not part of a valid character counts as a character. A []byte result shares the memory of s.
func Prefix[S string | []byte](s S, limit int) S {
	if len(s) <= limit {
		return s
	}
	limit = max(limit, 0)
	for start := limit - 1; start >= max(limit-utf8.UTFMax+1, 0); start-- {
		if utf8.RuneStart(s[start]) {
			if _, size := utf8.DecodeRuneInString(string(s[start:min(start+utf8.UTFMax, len(s))])); start+size > limit {
				return s[:start]
			}
			break
		}
	}
	return s[:limit]
}

// Text returns s if it has at most limit bytes, and otherwise its Prefix followed by "…", which the limit does not
// include. Invalid UTF-8 stays as it is: print the result with %q or %+q.
func Text(s string, limit int) string {
	if len(s) <= limit {
		return s
	}
	return Prefix(s, limit) + ellipsis
}

// ValidText is like Text, but first replaces each run of invalid bytes by U+FFFD, so that the result can be stored as
// JSON or sent in a protobuf message.
func ValidText(s string, limit int) string { return Text(strings.ToValidUTF8(s, "\uFFFD"), limit) }

// Quote returns Prefix(s, limit) as a Go string literal in ASCII, followed by "…" outside the quotes if s is longer.
func Quote(s string, limit int) string {
	quoted := strconv.QuoteToASCII(Prefix(s, limit))
	if len(s) > limit {
		quoted += ellipsis
	}
	return quoted
}
