package truncate_test

import (
	"fmt"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/truncate"
)

func ExampleText() {
	fmt.Println(truncate.Text("short", 10))
	fmt.Println(truncate.Text("naïve", 3))
	fmt.Println(truncate.Quote("naïve\n", 5))
	// Output:
	// short
	// na…
	// "na\u00efv"…
}

func TestPrefix_EndsAtACharacter(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		s     string
		limit int
		want  string
	}{
		"empty":                             {"", 3, ""},
		"shorter than the limit":            {"ab", 3, "ab"},
		"as long as the limit":              {"abc", 3, "abc"},
		"longer":                            {"abcd", 3, "abc"},
		"limit 0":                           {"abc", 0, ""},
		"negative limit":                    {"abc", -1, ""},
		"cut in two bytes":                  {"aé", 2, "a"},
		"cut before the last of four bytes": {"a😀", 4, "a"},
		"after four bytes":                  {"a😀b", 5, "a😀"},
		"first character does not fit":      {"😀", 3, ""},
		"only continuation bytes":           {"\x80\x80\x80\x80\x80\x80", 5, "\x80\x80\x80\x80\x80"},
		"a character before a stray byte":   {"ab\x80", 2, "ab"},
		"an unfinished character":           {"a\xf0\x9fbc", 3, "a\xf0\x9f"},
		"an unfinished character at the end, which a later byte does not finish": {"a\xf0\x9f\x98b", 4, "a\xf0\x9f\x98"},
	} {
		if got := truncate.Prefix(c.s, c.limit); got != c.want {
			t.Errorf("%s: Prefix(%q, %d) = %q, want %q", name, c.s, c.limit, got, c.want)
		}
		if got := truncate.Prefix([]byte(c.s), c.limit); string(got) != c.want {
			t.Errorf("%s: Prefix([]byte(%q), %d) = %q, want %q", name, c.s, c.limit, got, c.want)
		}
	}
}

func TestText_MarksOnlyWhatWasTruncated(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		got, want string
	}{
		"text as long as the limit":            {truncate.Text("héé", 5), "héé"},
		"longer text":                          {truncate.Text("hééé", 4), "hé…"},
		"text keeps invalid bytes":             {truncate.Text("a\xffbc", 3), "a\xffb…"},
		"valid replaces invalid bytes":         {truncate.ValidText("a\xff\xfeb", 10), "a\uFFFDb"},
		"valid measures after the replacement": {truncate.ValidText("\xffa\xffa\xffa", 8), "\uFFFDa\uFFFDa…"},
		"quote as long as the limit":           {truncate.Quote("é\n", 3), `"\u00e9\n"`},
		"longer quote":                         {truncate.Quote("aéé", 4), `"a\u00e9"…`},
		"quote escapes invalid bytes":          {truncate.Quote("a\xff", 4), `"a\xff"`},
	} {
		if c.got != c.want {
			t.Errorf("%s: got %q, want %q", name, c.got, c.want)
		}
	}
}

func FuzzPrefix(f *testing.F) {
	for _, s := range []string{"", "abc", "naïve", "a😀b", "\x80\x80\x80\x80", "a\xf0\x9f\x98b", "\xff\xfe"} {
		f.Add(s, 3)
	}
	f.Fuzz(func(t *testing.T, s string, limit int) {
		got := truncate.Prefix(s, limit)
		most := min(max(limit, 0), len(s))
		if !strings.HasPrefix(s, got) || len(got) > most {
			t.Fatalf("Prefix(%q, %d) = %q: not a prefix of at most %d bytes", s, limit, got, most)
		}
		// The position is the end of a character of s: decoding s from its start arrives there.
		end, next := 0, 0
		for next <= most {
			end = next
			if end == len(s) {
				break
			}
			_, size := utf8.DecodeRuneInString(s[end:])
			next += size
		}
		if len(got) != end {
			t.Fatalf("Prefix(%q, %d) has %d bytes, the characters that fit have %d", s, limit, len(got), end)
		}
		if same := string(truncate.Prefix([]byte(s), limit)); same != got {
			t.Fatalf("Prefix of bytes is %q, of the string %q", same, got)
		}
		if v := truncate.ValidText(s, limit); !utf8.ValidString(v) || len(v) > max(limit, 0)+len("…") {
			t.Fatalf("Valid(%q, %d) = %q", s, limit, v)
		}
	})
}
