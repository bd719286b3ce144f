// Package redact takes values that nobody may see out of what an agent says, as
// they are and in the forms in which programs write them, also where escape codes of
// a terminal break them up. It takes time linear
// in the text, whatever the number of values.
package redact

import (
	"slices"
	"strings"
)

// Marker stands where something was found.
const Marker = "[redacted]"

// MinValue is the length in bytes from which on a value, or a form of one, is looked for.
const MinValue = 4

// maxHeld is from how many bytes on a value is not found any more that escape codes break up.
const maxHeld = 64 << 10

// Set is a set of values. A nil one finds nothing. Safe for concurrent use.
type Set struct {
	values  []string
	matcher *matcher
}

// New makes a set; nil when there is nothing to look for. A value that is a part
// of the Marker is left out: it would be found in every place where one was taken out.
func New(values ...string) *Set {
	var kept []string
	for _, v := range values {
		if len(v) >= MinValue && !strings.Contains(Marker, v) {
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
		all = append(all, forms(v)...)
	}
	return &Set{values: kept, matcher: newMatcher(all)}
}

// With is the set with more values: the same one if it has them all.
func (s *Set) With(values []string) *Set {
	if s == nil {
		return New(values...)
	}
	if !slices.ContainsFunc(values, func(v string) bool { _, has := slices.BinarySearch(s.values, v); return !has }) {
		return s
	}
	return New(slices.Concat(s.values, values)...)
}

// String gives the text with a Marker for every run of bytes that belong to something that was found.
func (s *Set) String(text string) string {
	if s == nil || !s.finds(text) {
		return text
	}
	x := s.Stream()
	out := x.Write([]byte(text))
	return string(append(out, x.Close()...))
}

// finds tells whether there is something to take out.
func (s *Set) finds(text string) bool {
	at, seen, code := int32(0), int32(0), outside
	for i := range len(text) {
		if at = s.matcher.step(at, text[i]); s.matcher.nodes[at].longest > 0 {
			return true
		}
		if code.step(text[i]) {
			continue
		}
		if seen = s.matcher.step(seen, text[i]); s.matcher.nodes[seen].longest > 0 {
			return true
		}
	}
	return false
}

// Stream redacts a text that comes in pieces. What it gives is together what
// String gives of the whole, wherever the text was split.
type Stream struct {
	m     *matcher // nil finds nothing
	at    int32    // the matcher's state after all that came
	seen  int32    // its state after all that came but escape codes
	code  escapeCode
	marks []int  // where the bytes begin in the text that are in held, without escape codes
	held  []byte // what may still be a part of something
	base  int    // where held begins in the text
	spans []span // what was found and reaches into held or beyond, apart from each other
	open  bool   // the byte before base was taken out: its Marker covers what touches it
}

// span is a part of the text, by its bytes' numbers.
type span struct{ from, to int }

// Stream begins a text.
func (s *Set) Stream() *Stream {
	if s == nil {
		return &Stream{}
	}
	return &Stream{m: s.matcher}
}

// Write takes the next piece and gives what is certain by now. What it holds back
// is the longest end of the text that could be the beginning of something.
func (x *Stream) Write(piece []byte) []byte {
	if x.m == nil {
		return piece
	}
	for _, b := range piece {
		x.held = append(x.held, b)
		x.at = x.m.step(x.at, b)
		if n := int(x.m.nodes[x.at].longest); n > 0 {
			x.found(span{x.base + len(x.held) - n, x.base + len(x.held)})
		}
		x.look(b)
	}
	end := x.base + len(x.held)
	return x.release(min(end-int(x.m.nodes[x.at].open), x.opens(end)))
}

// look takes the byte that came last as a reader of the terminal sees it, who does not see escape codes.
func (x *Stream) look(b byte) {
	if x.code.step(b) {
		return
	}
	end := x.base + len(x.held)
	x.marks = append(x.marks, end-1)
	x.seen = x.m.step(x.seen, b)
	if n := int(x.m.nodes[x.seen].longest); n > 0 {
		x.found(span{x.marks[len(x.marks)-n], end})
	}
	if end-x.opens(end) > maxHeld {
		x.seen = 0
	}
}

// opens returns where the longest end of the text without escape codes begins that could be the beginning of something.
func (x *Stream) opens(end int) int {
	open := int(x.m.nodes[x.seen].open)
	if open == 0 {
		return end
	}
	return x.marks[len(x.marks)-open]
}

// Close gives the rest.
func (x *Stream) Close() []byte {
	rest := x.release(x.base + len(x.held))
	x.at, x.seen, x.code, x.open = 0, 0, outside, false
	return rest
}

// found joins a span with those that it touches. Spans come in the order of their ends.
func (x *Stream) found(s span) {
	for len(x.spans) > 0 && x.spans[len(x.spans)-1].to >= s.from {
		s.from = min(s.from, x.spans[len(x.spans)-1].from)
		x.spans = x.spans[:len(x.spans)-1]
	}
	x.spans = append(x.spans, s)
}

// release gives what is held before a place in the text.
func (x *Stream) release(to int) []byte {
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
