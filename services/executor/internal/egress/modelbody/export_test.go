package modelbody

import "unicode/utf8"

// FoldKey returns the form in which the keys of interpreted objects are compared.
func FoldKey(key string) string { return string(foldKey(nil, []byte(key))) }

// Unescape returns the text of a JSON string, given the bytes between its quotes.
func Unescape(text string) string {
	var out []byte
	var buf [utf8.UTFMax]byte
	for part, rest := []byte(nil), []byte(text); len(rest) > 0; {
		part, rest = unescapePart(rest, buf[:])
		out = append(out, part...)
	}
	return string(out)
}
