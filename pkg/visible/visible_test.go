package visible_test

import (
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
	for name, c := range map[string]struct{ in, want string }{
		"printable text":               {"plain ü 四 é 👍\n\ttext", "plain ü 四 é 👍\n\ttext"},
		"escape sequence":              {"\x1b[31mred\x1b[0m", `\u{1b}[31mred\u{1b}[0m`},
		"operating system command":     {"a\x1b]0;b\nrm -rf ~\nc\x07d", "a\\u{1b}]0;b\nrm -rf ~\nc\\u{7}d"},
		"unterminated device control":  {"a\x1bPhidden\nlines", "a\\u{1b}Phidden\nlines"},
		"control sequence of C1":       {"\u009b31m", `\u{9b}31m`},
		"bell, null and delete":        {"\x07\x00\x7f", `\u{7}\u{0}\u{7f}`},
		"carriage return":              {"rm -rf ~\rls", `rm -rf ~\u{d}ls`},
		"line end of Windows":          {"a\r\nb", "a\\u{d}\nb"},
		"line and paragraph separator": {"\u2028\u2029", `\u{2028}\u{2029}`},
		"bidirectional controls":       {"\u202e\u2066\u2069\u200e\u200f\u061c", `\u{202e}\u{2066}\u{2069}\u{200e}\u{200f}\u{61c}`},
		"zero width characters":        {"a\u200bb\u200cc\u200dd\u2060e\ufefff", `a\u{200b}b\u{200c}c\u{200d}d\u{2060}e\u{feff}f`},
		"soft hyphen":                  {"a\u00adb", `a\u{ad}b`},
		"combining grapheme joiner":    {"a\u034fb", `a\u{34f}b`},
		"fillers of Hangul":            {"\u115f\u1160\u3164\uffa0", `\u{115f}\u{1160}\u{3164}\u{ffa0}`},
		"inherent vowels of Khmer":     {"\u17b4\u17b5", `\u{17b4}\u{17b5}`},
		"variation selectors":          {"a\ufe0f\U000e0100\u180b", `a\u{fe0f}\u{e0100}\u{180b}`},
		"tag characters":               {"\U000e0001\U000e0061", `\u{e0001}\u{e0061}`},
		"spaces other than the ASCII":  {"a\u00a0b\u2003c\u3000d\u1680e", `a\u{a0}b\u{2003}c\u{3000}d\u{1680}e`},
		"characters without ink":       {"\u2800\U0001d159\U00013441", `\u{2800}\u{1d159}\u{13441}`},
		"musical format character":     {"\U0001d173", `\u{1d173}`},
		"private use and unassigned":   {"\ue000\U000f0000\u0378\ufffe", `\u{e000}\u{f0000}\u{378}\u{fffe}`},
		"marks above a letter":         {"e\u0301 " + "\u0e01\u0e34\u0e48", "e\u0301 " + "\u0e01\u0e34\u0e48"},
		"a flood of marks":             {"a" + strings.Repeat("\u0301", 10) + "b\u0301", "a" + strings.Repeat("\u0301", 8) + `\u{301}\u{301}` + "b\u0301"},
		"invalid UTF-8":                {"a\xff\xc3b", `a\x{ff}\x{c3}b`},
		"replacement character":        {"a\ufffdb", "a\ufffdb"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			if got := visible.Text(c.in); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
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
