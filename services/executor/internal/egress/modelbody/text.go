package modelbody

import (
	"bytes"
	"unicode"
	"unicode/utf16"
	"unicode/utf8"

	"golang.org/x/text/cases"
	"golang.org/x/text/unicode/norm"
)

// unescapePart returns the beginning of the text of a JSON string without escapes, and the rest of the text. text is bytes between the
// quotes, not empty, and its escapes must be valid. The part may use buf, which has room for utf8.UTFMax bytes. Half of a surrogate pair
// becomes U+FFFD, as in encoding/json.
func unescapePart(text, buf []byte) (part, rest []byte) {
	switch n := bytes.IndexByte(text, '\\'); {
	case n < 0:
		return text, nil
	case n > 0:
		return text[:n], text[n:]
	}
	r, size := decodeEscape(text)
	return utf8.AppendRune(buf[:0], r), text[size:]
}

// escapes are the characters of the escapes of JSON that consist of two bytes.
var escapes = map[byte]rune{'"': '"', '\\': '\\', '/': '/', 'b': '\b', 'f': '\f', 'n': '\n', 'r': '\r', 't': '\t'}

// unicodeEscapeBytes is the length in bytes of an escape like \u00e9.
const unicodeEscapeBytes = 6

// decodeEscape returns the character of the escape with which text begins, and the number of bytes of the escape.
func decodeEscape(text []byte) (r rune, size int) {
	if text[1] != 'u' {
		return escapes[text[1]], 2
	}
	r = decodeUnicodeEscape(text)
	if !utf16.IsSurrogate(r) {
		return r, unicodeEscapeBytes
	}
	if next := text[unicodeEscapeBytes:]; bytes.HasPrefix(next, []byte(`\u`)) {
		if pair := utf16.DecodeRune(r, decodeUnicodeEscape(next)); pair != unicode.ReplacementChar {
			return pair, 2 * unicodeEscapeBytes
		}
	}
	return unicode.ReplacementChar, unicodeEscapeBytes
}

// decodeUnicodeEscape returns the number in the escape \uXXXX with which text begins.
func decodeUnicodeEscape(text []byte) (r rune) {
	for _, c := range text[2:unicodeEscapeBytes] {
		digit := c - '0'
		if c > '9' {
			digit = c | 0x20 - 'a' + 10
		}
		r = r<<4 | rune(digit)
	}
	return r
}

// isASCII reports whether a text has only ASCII characters.
func isASCII(text []byte) bool {
	for _, c := range text {
		if c >= utf8.RuneSelf {
			return false
		}
	}
	return true
}

// foldKey appends to dst a key without the differences that some model servers ignore: case, compatible forms of characters, and
// invisible characters.
func foldKey(dst, key []byte) []byte {
	if !isASCII(key) {
		visible := bytes.Map(func(r rune) rune {
			if unicode.In(r, unicode.Cf, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector) {
				return -1
			}
			return r
		}, key)
		key = norm.NFKC.Bytes(cases.Fold().Bytes(norm.NFKC.Bytes(visible)))
	}
	for _, c := range key {
		switch {
		case c < ' ' || c == 0x7f:
		case c >= 'A' && c <= 'Z':
			dst = append(dst, c|0x20)
		default:
			dst = append(dst, c)
		}
	}
	return dst
}
