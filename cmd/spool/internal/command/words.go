package command

import (
	"errors"
	"strings"
)

// splitWords splits a command line into words as a shell without expansions does: at white space outside of quotes. A
// backslash escapes the next character.
func splitWords(line string) ([]string, error) {
	var out []string
	var word strings.Builder
	begun, quote, escaped := false, rune(0), false
	for _, c := range line {
		switch {
		case escaped:
			word.WriteRune(c)
			escaped = false
		case c == '\\' && quote != '\'':
			begun, escaped = true, true
		case quote != 0 && c == quote:
			quote = 0
		case quote != 0:
			word.WriteRune(c)
		case c == '\'' || c == '"':
			begun, quote = true, c
		case c == ' ' || c == '\t' || c == '\n':
			if begun {
				out = append(out, word.String())
				word.Reset()
				begun = false
			}
		default:
			begun = true
			word.WriteRune(c)
		}
	}
	switch {
	case quote != 0:
		return nil, errors.New("a quote is not closed")
	case escaped:
		return nil, errors.New("the last character is a backslash")
	case begun:
		out = append(out, word.String())
	}
	return out, nil
}
