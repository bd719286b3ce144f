package terminal

import "github.com/spoolhq/spool/pkg/visible"

// SafeText returns a text of an untrusted source in the form in which the CLI shows it. It removes nothing: it escapes
// the characters that a terminal would obey or not show. Line feeds and tabs stay.
func SafeText(s string) string { return visible.Text(s) }

// SafeLine is like SafeText, and also escapes line feeds and tabs.
func SafeLine(s string) string { return visible.Line(s) }

// runeColumns returns the number of terminal columns that a rune needs. The number may be too large, but is never too
// small. A combining mark counts as one column, so that a row has a limited number of them.
func runeColumns(r rune) int {
	switch {
	case r < 0x20:
		return 0
	case r < 0x1100, r >= 0x2000 && r < 0x2300, r >= 0x2400 && r < 0x25fd, r >= 0x2800 && r < 0x2900:
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
