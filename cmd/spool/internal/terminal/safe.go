package terminal

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// escapePattern matches the escape sequences that a terminal interprets as commands: control sequences, operating
// system commands and device control strings.
var escapePattern = regexp.MustCompile(`\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)`)

// incompleteEscapePattern matches an incomplete escape sequence, or the first half of a line end, at the end of a piece
// of text.
var incompleteEscapePattern = regexp.MustCompile(`(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,1000}\x1b?)?|\r)$`)

// SafeText returns a text of an agent in a form that is safe to show on a terminal. It removes escape sequences, makes
// other control characters and direction marks visible, and replaces invalid UTF-8. Line ends and tabs stay.
func SafeText(s string) string {
	if !isUnsafeText(s) {
		return s
	}
	s = strings.ReplaceAll(escapePattern.ReplaceAllString(s, ""), "\r\n", "\n")
	var b strings.Builder
	for _, r := range s {
		b.WriteString(visibleForm(r))
	}
	return b.String()
}

// SafeLine returns the text that SafeText returns on one line, with single spaces.
func SafeLine(s string) string {
	return strings.Join(strings.Fields(SafeText(s)), " ")
}

// isUnsafeText reports whether SafeText would change s.
func isUnsafeText(s string) bool {
	return !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return visibleForm(r) != string(r) })
}

// visibleForm returns the text that shows a rune: a visible replacement for a control character or a direction mark,
// and the rune itself otherwise.
func visibleForm(r rune) string {
	switch {
	case r == '\n' || r == '\t':
		return string(r)
	case r < 0x20:
		return string(0x2400 + r)
	case r == 0x7f:
		return "\u2421"
	case r >= 0x80 && r < 0xa0, r == 0x2028, r == 0x2029, r == 0xfeff,
		r >= 0x202a && r <= 0x202e, r >= 0x2066 && r <= 0x2069, r == 0x200e, r == 0x200f, r == 0x061c:
		return "\ufffd"
	}
	return string(r)
}

// applyOverwrites returns what a terminal shows of lines that a program has overwritten with carriage returns, as
// progress bars do.
func applyOverwrites(s string) string {
	s = strings.ReplaceAll(s, "\r\n", "\n")
	if !strings.Contains(s, "\r") {
		return s
	}
	lines := strings.Split(s, "\n")
	for i, l := range lines {
		l = strings.TrimRight(l, "\r")
		lines[i] = l[strings.LastIndexByte(l, '\r')+1:]
	}
	return strings.Join(lines, "\n")
}

// runeColumns returns the number of terminal columns that a rune needs. The number may be too large, but is never too
// small.
func runeColumns(r rune) int {
	switch {
	case r < 0x20:
		return 0
	case r < 0x300:
		return 1
	case unicode.In(r, unicode.Mn, unicode.Me, unicode.Cf):
		return 0
	case r < 0x1100, r >= 0x2000 && r < 0x2300, r >= 0x2400 && r < 0x2600, r >= 0x2800 && r < 0x2900:
		return 1
	}
	return 2
}

// textColumns returns the number of terminal columns that a text without line ends needs.
func textColumns(s string) int {
	n := 0
	for _, r := range s {
		n += runeColumns(r)
	}
	return n
}

// FitLine returns s if it needs at most the given number of columns, and otherwise its beginning followed by "…".
func FitLine(s string, columns int) string {
	if textColumns(s) <= columns {
		return s
	}
	n := 0
	for i, r := range s {
		if n += runeColumns(r); n > columns-1 {
			return s[:i] + "…"
		}
	}
	return s
}
