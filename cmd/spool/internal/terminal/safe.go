package terminal

import (
	"regexp"
	"strings"
	"unicode"
	"unicode/utf8"
)

// escapes matches what terminals interpret as commands: control sequences, operating system commands and device
// control strings.
var escapes = regexp.MustCompile(`\x1b\[[0-?]*[ -/]*[@-~]|\x1b[\]PX^_][^\x07\x1b]*(?:\x07|\x1b\\)`)

// unfinished matches an incomplete escape, or half of a line end, at the end of a piece of text.
var unfinished = regexp.MustCompile(`(?:\x1b(?:\[[0-?]*[ -/]*|[\]PX^_][^\x07\x1b]{0,1000}\x1b?)?|\r)$`)

// Safe makes an agent's text safe to show on a terminal: it removes escapes, makes other control characters and
// direction marks visible, and replaces invalid UTF-8. Line ends and tabs stay.
func Safe(s string) string {
	if !dangerous(s) {
		return s
	}
	s = strings.ReplaceAll(escapes.ReplaceAllString(s, ""), "\r\n", "\n")
	var b strings.Builder
	for _, r := range s {
		b.WriteString(visible(r))
	}
	return b.String()
}

// Line returns Safe text on one line.
func Line(s string) string {
	return strings.Join(strings.Fields(Safe(s)), " ")
}

func dangerous(s string) bool {
	return !utf8.ValidString(s) || strings.ContainsFunc(s, func(r rune) bool { return visible(r) != string(r) })
}

func visible(r rune) string {
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

// applyOverwrites returns what a terminal shows of lines that a program overwrote, as progress bars do.
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

// cells returns the number of columns of a rune, or more: a line is never longer than computed.
func cells(r rune) int {
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

// width returns the number of columns of a text without line ends.
func width(s string) int {
	n := 0
	for _, r := range s {
		n += cells(r)
	}
	return n
}

// Fit returns a line that is at most columns wide on a terminal: s, or its beginning followed by "…".
func Fit(s string, columns int) string {
	if width(s) <= columns {
		return s
	}
	n := 0
	for i, r := range s {
		if n += cells(r); n > columns-1 {
			return s[:i] + "…"
		}
	}
	return s
}
