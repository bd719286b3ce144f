// Package visible returns texts from untrusted sources in a form in which a person sees all of their characters, and in
// which a terminal obeys none of them. It removes nothing: a character that would be invisible, or that would change
// how the text around it is shown, becomes an escape such as \u{1b}.
package visible

import (
	"fmt"
	"strings"
	"unicode"
	"unicode/utf8"
)

// blank are characters that Unicode counts as printable and that have no ink.
var blank = &unicode.RangeTable{
	R16: []unicode.Range16{{Lo: 0x2800, Hi: 0x2800, Stride: 1}, {Lo: 0xfffc, Hi: 0xfffc, Stride: 1}},
	R32: []unicode.Range32{{Lo: 0x13441, Hi: 0x13442, Stride: 1}, {Lo: 0x1d159, Hi: 0x1d159, Stride: 1}},
}

// maxMarks is the maximum number of combining marks on a character. No script needs more, and a terminal may show more of
// them across the lines above and below.
const maxMarks = 8

// Text returns s with all characters escaped that a reader cannot see: control and format characters, default-ignorable
// characters, spaces other than U+0020, unassigned and private characters, and combining marks after the eighth on a
// character. Line feeds and tabs stay. An invalid byte becomes \x{ff}. Text(a+b) equals Text(a)+Text(b) if both are valid
// UTF-8 and b does not begin with a combining mark, and Text(Text(a)) equals Text(a).
func Text(s string) string { return escape(s, "\n\t") }

// Line returns s on one line: it escapes the characters that Text escapes, line feeds and tabs.
func Line(s string) string { return escape(s, "") }

// escape escapes all characters of s that are neither visible nor in keep.
func escape(s, keep string) string {
	marks := 0 // on the last character
	isKept := func(r rune) bool {
		if marks++; !unicode.In(r, unicode.Mn, unicode.Me) {
			marks = 0
		}
		return marks <= maxMarks && isVisible(r) || strings.ContainsRune(keep, r)
	}
	if utf8.ValidString(s) && !strings.ContainsFunc(s, func(r rune) bool { return !isKept(r) }) {
		return s
	}
	var b strings.Builder
	marks = 0
	for len(s) > 0 {
		r, size := utf8.DecodeRuneInString(s)
		switch {
		case r == utf8.RuneError && size == 1:
			fmt.Fprintf(&b, `\x{%x}`, s[0])
		case isKept(r):
			b.WriteString(s[:size])
		default:
			fmt.Fprintf(&b, `\u{%x}`, r)
		}
		s = s[size:]
	}
	return b.String()
}

// isVisible reports whether a reader sees the character.
func isVisible(r rune) bool {
	return unicode.IsPrint(r) && !unicode.In(r, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector, blank)
}
