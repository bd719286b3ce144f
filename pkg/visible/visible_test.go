package visible_test

import (
	"encoding/json"
	"os"
	"strings"
	"testing"
	"unicode"
	"unicode/utf8"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/visible"
)

// TestText_EscapesCharactersThatATerminalHidesOrObeys tests one character of each kind that a reader cannot see, or that
// changes how the text around it is shown.
func TestText_EscapesCharactersThatATerminalHidesOrObeys(t *testing.T) {
	t.Parallel()
	raw, err := os.ReadFile("testdata/text.json")
	if err != nil {
		t.Fatal(err)
	}
	// The inspector reads the same file: web/test/text.test.ts.
	cases := map[string]struct{ In, Want string }{}
	if err := json.Unmarshal(raw, &cases); err != nil || len(cases) < 20 {
		t.Fatalf("%d cases, %v", len(cases), err)
	}
	cases["invalid UTF-8"] = struct{ In, Want string }{"a\xff\xc3b", `a\x{ff}\x{c3}b`}
	for name, c := range cases {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := visible.Text(c.In); got != c.Want {
				t.Errorf("got %q, want %q", got, c.Want)
			}
		})
	}
}

// TestText_EscapesAllDefaultIgnorableCharacters tests every character that Unicode lets a program leave out of the output.
func TestText_EscapesAllDefaultIgnorableCharacters(t *testing.T) {
	t.Parallel()
	for r := rune(0); r <= unicode.MaxRune; r++ {
		ignorable := unicode.In(r, unicode.Cc, unicode.Cf, unicode.Zl, unicode.Zp, unicode.Zs, unicode.Other_Default_Ignorable_Code_Point, unicode.Variation_Selector, unicode.Bidi_Control)
		if ignorable && r != ' ' && r != '\n' && r != '\t' && visible.Text(string(r)) == string(r) {
			t.Errorf("U+%04X is not escaped", r)
		}
	}
}

// TestLine_EscapesLineEndsAndTabs tests that a text of several lines becomes one line, in which every character is left.
func TestLine_EscapesLineEndsAndTabs(t *testing.T) {
	t.Parallel()
	if got, want := visible.Line("  a\n\tb  c\r\n"), `  a\u{a}\u{9}b  c\u{d}\u{a}`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}

// TestText_RemovesNothing tests for any bytes that the printable characters of the input are in the output, in order,
// that the output has no character that is escaped, and that pieces of a text give the same output as the whole.
func TestText_RemovesNothing(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		in := string(rapid.SliceOf(rapid.Byte()).Draw(t, "bytes")) + rapid.String().Draw(t, "text")
		out := visible.Text(in)
		if !utf8.ValidString(out) || visible.Text(out) != out {
			t.Fatalf("%q became %q, which is not stable", in, out)
		}
		rest := out
		for _, r := range strings.ToValidUTF8(in, "") {
			if visible.Text(string(r)) != string(r) || unicode.In(r, unicode.Mn, unicode.Me) {
				continue
			}
			_, after, found := strings.Cut(rest, string(r))
			if !found {
				t.Fatalf("%q lost %q: %q", in, r, out)
			}
			rest = after
		}
		if lines := strings.Count(in, "\n"); strings.Count(out, "\n") != lines {
			t.Fatalf("%q has %d line ends, the output %q another number", in, lines, out)
		}
		runes := []rune(strings.ToValidUTF8(in, "?"))
		i := rapid.IntRange(0, len(runes)).Draw(t, "cut")
		if a, b := string(runes[:i]), string(runes[i:]); (b == "" || !unicode.In(runes[i], unicode.Mn, unicode.Me)) && visible.Text(a)+visible.Text(b) != visible.Text(a+b) {
			t.Fatalf("%q and %q differ from the whole", a, b)
		}
	})
}
