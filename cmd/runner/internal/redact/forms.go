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

// minLine is from how many bytes on a line of a value of several lines is looked
// for by itself: what is printed line by line never has the whole.
const minLine = 8

// forms returns the texts by which a value is found: as it is, in upper and in lower case as a whole, and as encoders
// write it.
func forms(value string) []string {
	all := []string{value}
	for line := range strings.Lines(value) {
		if line = strings.TrimSpace(line); len(line) >= minLine && line != value {
			all = append(all, line)
		}
	}
	for _, v := range slices.Clone(all) {
		all = append(all, strings.ToUpper(v), strings.ToLower(v))
	}
	slices.Sort(all)
	for _, v := range slices.Compact(slices.Clone(all)) {
		for _, escaped := range escapes(v) {
			all = append(all, escaped)
			if escaped != v {
				all = append(all, escapes(escaped)...) // JSON as a text in JSON
			}
		}
		all = append(all, percents(v)...)
	}
	for _, e := range []*base64.Encoding{base64.RawStdEncoding, base64.RawURLEncoding} {
		for _, encoded := range aligned(e, value) {
			all = append(all, encoded, strings.ReplaceAll(encoded, "/", `\/`))
		}
	}
	low := hex.EncodeToString([]byte(value))
	all = append(all, low, strings.ToUpper(low))
	slices.Sort(all)
	return slices.DeleteFunc(slices.Compact(all), func(f string) bool { return len(f) < MinValue || strings.Contains(Marker, f) })
}

// escapes are the inner parts of the JSON strings that encoders make of a text:
// with as few escapes as may be, safe for HTML, in ASCII alone, and with slashes escaped.
func escapes(text string) []string {
	out := []string{unquoted(text, false), unquoted(text, true), ascii(unquoted(text, false))}
	for _, o := range slices.Clone(out) {
		out = append(out, strings.ReplaceAll(o, "/", `\/`))
	}
	slices.Sort(out)
	return slices.Compact(out)
}

func unquoted(text string, html bool) string {
	var out bytes.Buffer
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(html)
	if err := enc.Encode(text); err != nil {
		return text // a string can be encoded
	}
	return strings.TrimSuffix(strings.TrimPrefix(strings.TrimSuffix(out.String(), "\n"), `"`), `"`)
}

// ascii escapes what is beyond ASCII.
func ascii(text string) string {
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

// percents are the text in a URL: as a query has it, as a path has it, and as
// JavaScript's encodeURIComponent does, in both cases of the digits.
func percents(text string) []string {
	query := url.QueryEscape(text)
	component := strings.NewReplacer("+", "%20", "%21", "!", "%27", "'", "%28", "(", "%29", ")", "%2A", "*").Replace(query)
	out := []string{query, strings.ReplaceAll(query, "+", "%20"), url.PathEscape(text), component}
	for _, o := range slices.Clone(out) {
		out = append(out, lowerDigits(o))
	}
	return out
}

// lowerDigits writes the digits after each percent sign in lower case.
func lowerDigits(escaped string) string {
	b := []byte(escaped)
	for i := 0; i+2 < len(b); i++ {
		if b[i] == '%' {
			copy(b[i+1:i+3], bytes.ToLower(b[i+1:i+3]))
		}
	}
	return string(b)
}

// aligned are the characters that a value leaves in the base 64 of a text around
// it: those that its bytes alone decide, for each of the three places in a group
// that it may begin at; and the same with the last one, where the text ends with it.
func aligned(e *base64.Encoding, value string) []string {
	var out []string
	for before := range 3 {
		encoded := e.EncodeToString(append(make([]byte, before), value...))
		encoded = encoded[[]int{0, 2, 3}[before]:] // without what the bytes before have a part in
		inner := encoded
		if rest := (before + len(value)) % 3; rest != 0 {
			inner = encoded[:len(encoded)-1] // without what the bytes after have a part in
			out = append(out, encoded, encoded+strings.Repeat("=", 3-rest))
		}
		out = append(out, inner)
	}
	return out
}
