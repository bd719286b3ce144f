// Package redact removes secret values from the output of agents, as they are and in the forms in which programs write
// them, also if escape codes of a terminal interrupt them. The time is linear in the length of the text and does not
// depend on the number of values.
package redact

import (
	"slices"
	"strings"
)

// Marker is the text that replaces each value of a secret in redacted text.
const Marker = "[redacted]"

// MinValueLength is the length in bytes below which a secret value, or an encoded form of one, is not searched.
const MinValueLength = 4

// maxInterruptedValue is the length in bytes above which a secret value is not found if escape codes interrupt it.
const maxInterruptedValue = 64 << 10

// Set is a set of secret values to redact. A nil Set finds nothing. A Set is safe for concurrent use.
type Set struct {
	values  []string
	matcher *patternMatcher
}

// New returns a set of the secret values, nil if there is nothing to search. Values that are a part of the Marker are
// left out: they would be found in every Marker.
func New(values ...string) *Set {
	var kept []string
	for _, v := range values {
		if len(v) >= MinValueLength && !strings.Contains(Marker, v) {
			kept = append(kept, v)
		}
	}
	if len(kept) == 0 {
		return nil
	}
	slices.Sort(kept)
	kept = slices.Compact(kept)
	var all []string
	for _, v := range kept {
		all = append(all, searchedForms(v)...)
	}
	return &Set{values: kept, matcher: newPatternMatcher(all)}
}

// WithValues returns the set with additional values. It returns s itself if s has them all.
func (s *Set) WithValues(values []string) *Set {
	if s == nil {
		return New(values...)
	}
	if !slices.ContainsFunc(values, func(v string) bool { _, has := slices.BinarySearch(s.values, v); return !has }) {
		return s
	}
	return New(slices.Concat(s.values, values)...)
}

// RedactString returns the text with one Marker in place of every run of bytes that belong to values of the set.
func (s *Set) RedactString(text string) string {
	if s == nil || !s.containsValue(text) {
		return text
	}
	x := s.NewStream()
	out := x.Write([]byte(text))
	return string(append(out, x.Close()...))
}

// containsValue reports whether the text contains a value of the set.
func (s *Set) containsValue(text string) bool {
	at, seen, code := int32(0), int32(0), escapeOutside
	for i := range len(text) {
		if at = s.matcher.nextState(at, text[i]); s.matcher.nodes[at].longest > 0 {
			return true
		}
		if code.readByte(text[i]) {
			continue
		}
		if seen = s.matcher.nextState(seen, text[i]); s.matcher.nodes[seen].longest > 0 {
			return true
		}
	}
	return false
}

// Stream redacts a text that arrives in pieces. Its output is the same as that of Set.RedactString for the whole text,
// however the text is split.
type Stream struct {
	m     *patternMatcher // nil finds nothing
	at    int32           // the matcher's state after all bytes so far
	seen  int32           // the matcher's state after all bytes so far without escape codes
	code  escapeState
	marks []int      // positions in the text of the bytes in held that are not in escape codes
	held  []byte     // bytes that may be a part of a value
	base  int        // position of held in the text
	spans []textSpan // parts that were found and reach into held, disjoint
	open  bool       // the byte before base was redacted: its Marker also covers a part that touches it
}

// textSpan is a part of the text of a Stream, by byte positions.
type textSpan struct{ from, to int }

// NewStream returns a Stream that redacts a new text by the values of the set.
func (s *Set) NewStream() *Stream {
	if s == nil {
		return &Stream{}
	}
	return &Stream{m: s.matcher}
}

// Write adds the next piece of the text, and returns the redacted text that further pieces cannot change. It keeps the
// longest end of the text that may be the beginning of a value.
func (x *Stream) Write(piece []byte) []byte {
	if x.m == nil {
		return piece
	}
	for _, b := range piece {
		x.held = append(x.held, b)
		x.at = x.m.nextState(x.at, b)
		if n := int(x.m.nodes[x.at].longest); n > 0 {
			x.addSpan(textSpan{x.base + len(x.held) - n, x.base + len(x.held)})
		}
		x.searchAcrossEscapes(b)
	}
	end := x.base + len(x.held)
	return x.releaseUpTo(min(end-int(x.m.nodes[x.at].open), x.possibleValueStart(end)))
}

// searchAcrossEscapes advances the search for values that terminal escape codes interrupt by the byte b. It ignores the
// bytes of escape codes.
func (x *Stream) searchAcrossEscapes(b byte) {
	if x.code.readByte(b) {
		return
	}
	end := x.base + len(x.held)
	x.marks = append(x.marks, end-1)
	x.seen = x.m.nextState(x.seen, b)
	if n := int(x.m.nodes[x.seen].longest); n > 0 {
		x.addSpan(textSpan{x.marks[len(x.marks)-n], end})
	}
	if end-x.possibleValueStart(end) > maxInterruptedValue {
		x.seen = 0
	}
}

// possibleValueStart returns the first position from which the text up to end, without escape codes, may be the
// beginning of a value.
func (x *Stream) possibleValueStart(end int) int {
	open := int(x.m.nodes[x.seen].open)
	if open == 0 {
		return end
	}
	return x.marks[len(x.marks)-open]
}

// Close returns the redacted text that Write has kept.
func (x *Stream) Close() []byte {
	rest := x.releaseUpTo(x.base + len(x.held))
	x.at, x.seen, x.code, x.open = 0, 0, escapeOutside, false
	return rest
}

// addSpan records a span of the text to redact, and merges it with the spans that it touches. Spans come in the order
// of their ends.
func (x *Stream) addSpan(s textSpan) {
	for len(x.spans) > 0 && x.spans[len(x.spans)-1].to >= s.from {
		s.from = min(s.from, x.spans[len(x.spans)-1].from)
		x.spans = x.spans[:len(x.spans)-1]
	}
	x.spans = append(x.spans, s)
}

// releaseUpTo returns the redacted form of the kept text before the position to, and drops that text.
func (x *Stream) releaseUpTo(to int) []byte {
	var out []byte
	start := x.base
	for x.base < to {
		if len(x.spans) > 0 && x.spans[0].from <= x.base {
			if !x.open {
				out = append(out, Marker...)
			}
			x.open, x.base = true, min(to, x.spans[0].to)
			if x.base == x.spans[0].to {
				x.spans = x.spans[1:]
			}
			continue
		}
		end := to
		if len(x.spans) > 0 {
			end = min(end, x.spans[0].from)
		}
		out = append(out, x.held[x.base-start:end-start]...)
		x.open, x.base = false, end
	}
	x.held = append(x.held[:0], x.held[x.base-start:]...)
	kept, _ := slices.BinarySearch(x.marks, x.base)
	x.marks = append(x.marks[:0], x.marks[kept:]...)
	return out
}
