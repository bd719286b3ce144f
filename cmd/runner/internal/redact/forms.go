package redact

import (
	"bytes"
	"encoding/base64"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"net/url"
	"slices"
	"strings"
	"unicode/utf16"
)

// minSearchedLine is the minimum length in bytes of a line of a secret of several lines that is searched as a value of its own. Output is often
// redacted line by line, and a line never holds the whole secret.
const minSearchedLine = 8

// searchedForms returns the texts by which the secret value is searched: the value as it is, entirely in upper and in lower case, and in the forms
// in which encoders write it.
func searchedForms(value string) []string {
	all := []string{value}
	for line := range strings.Lines(value) {
		if line = strings.TrimSpace(line); len(line) >= minSearchedLine && line != value {
			all = append(all, line)
		}
	}
	for _, v := range slices.Clone(all) {
		all = append(all, strings.ToUpper(v), strings.ToLower(v))
	}
	slices.Sort(all)
	for _, v := range slices.Compact(slices.Clone(all)) {
		for _, escaped := range jsonEscapedForms(v) {
			all = append(all, escaped)
			if escaped != v {
				all = append(all, jsonEscapedForms(escaped)...) // JSON in a JSON string
			}
		}
		all = append(all, percentEncodedForms(v)...)
	}
	for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for _, encoded := range base64Fragments(e, value) {
			all = append(all, encoded, strings.ReplaceAll(encoded, "/", `\/`))
		}
	}
	low := hex.EncodeToString([]byte(value))
	all = append(all, low, strings.ToUpper(low))
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(f string) bool { return len(f) < MinValueLength || strings.Contains(Marker, f) })
}

// jsonEscapedForms returns the inner parts of the JSON strings that encoders produce for a text: with as few escapes as possible, safe for HTML, in
// ASCII only, and with escaped slashes.
func jsonEscapedForms(text string) []string {
	out := []string{jsonStringBody(text, false), jsonStringBody(text, true), escapeNonASCII(jsonStringBody(text, false))}
	for _, o := range slices.Clone(out) {
		out = append(out, strings.ReplaceAll(o, "/", `\/`))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

// jsonStringBody returns the JSON string of a text without its quotes. html escapes the characters <, > and &.
func jsonStringBody(text string, html bool) string {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(html)
	if err := enc.Encode(text); err != nil {
		return text // strings always marshal
	}
	return strings.TrimSuffix(strings.TrimPrefix(strings.TrimSuffix(out.String(), "\n"), `"`), `"`)
}

// escapeNonASCII returns a JSON text with the characters that are not ASCII as \u escapes.
func escapeNonASCII(text string) string {
	var out strings.Builder
	for _, r := range text {
		if r < 0x80 {
			out.WriteRune(r)
			continue
		}
		for _, u := range utf16.Encode([]rune{r}) {
			fmt.Fprintf(&out, `\u%04x`, u)
		}
	}
	return out.String()
}

// percentEncodedForms returns the text as encoded in a URL: in a query, in a path, and by JavaScript's encodeURIComponent, with hexadecimal digits
// in either case.
func percentEncodedForms(text string) []string {
	query := url.QueryEscape(text)
	component := strings.NewReplacer("+", "%20", "%21", "!", "%27", "'", "%28", "(", "%29", ")", "%2A", "*").Replace(query)
	out := []string{query, strings.ReplaceAll(query, "+", "%20"), url.PathEscape(text), component}
	for _, o := range slices.Clone(out) {
		out = append(out, lowerHexDigits(o))
	}
	return out
}

// lowerHexDigits converts the two digits after each percent sign to lower case.
func lowerHexDigits(escaped string) string {
	b := []byte(escaped)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:i+3], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return string(b)
}

// base64Fragments returns the characters that the secret value contributes to the base64 encoding of a text that contains the value, for each of
// the three offsets in a group at which the value may begin: only those characters that depend on no other bytes. It also returns them with the
// last character, for a text that ends with the value.
func base64Fragments(e *base64.Encoding, value string) []string {
	var out []string
	for before := range 3 {
		encoded := e.EncodeToString(append(make([]byte, before), value...))
		encoded = encoded[[]int{0, 2, 3}[before]:] // without the characters that depend on the bytes before
		inner := encoded
		if rest := (before + len(value)) % 3; rest != 0 {
			inner = encoded[:len(encoded)-1] // without the character that depends on the bytes after
			out = append(out, encoded, encoded+strings.Repeat("=", 3-rest))
		}
		out = append(out, inner)
	}
	return out
}
