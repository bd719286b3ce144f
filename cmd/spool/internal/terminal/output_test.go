package terminal

import (
	"bytes"
	"errors"
	"testing"
	"time"
)

// TestFprintf_MakesArgumentsVisible tests that texts of any type lose no character and obtain no control over the
// terminal, and that the format itself is written as it is.
func TestFprintf_MakesArgumentsVisible(t *testing.T) {
	t.Parallel()
	var out bytes.Buffer
	if _, err := Fprintf(&out, "\x1b[31m%s|%v|%s|%5d|%v|%s|%-6s|\n", "a\x1b]0;\nb\x07", errors.New("c\u202e\nd"), Lines("e\r\nf"), 7, struct{ Name string }{"g\u3164"}, 3*time.Second, "h"); err != nil {
		t.Fatal(err)
	}
	if _, err := Fprintln(&out, "i\n", uint32(8)); err != nil {
		t.Fatal(err)
	}
	want := "\x1b[31ma\\u{1b}]0;\\u{a}b\\u{7}|c\\u{202e}\\u{a}d|e\\u{d}\nf|    7|{g\\u{3164}}|3s|h     |\ni\\u{a} 8\n"
	if out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}
