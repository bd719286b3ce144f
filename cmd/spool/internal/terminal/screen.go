package terminal

import (
	"bytes"
	"io"
	"strconv"
	"strings"
)

// textStyle holds the parameters of an SGR sequence, which sets the colour and weight of text. The empty style is the
// terminal's default.
type textStyle string

const (
	styleNormal textStyle = ""
	styleBold   textStyle = "1"
	styleDim    textStyle = "2"
	styleRed    textStyle = "31"
	styleGreen  textStyle = "32"
	styleYellow textStyle = "33"
	stylePrompt textStyle = "1;36"
	styleTool   textStyle = "1;35"
)

// minWidth is the minimum number of columns at which lines are wrapped.
const minWidth = 20

// styledRune is a character of a line with its style.
type styledRune struct {
	r rune
	s textStyle
}

// screen is text to which lines are appended and, on a terminal, a status line below the text.
//
// On a terminal, screen itself wraps long lines, so that each line takes one row. The unfinished line and the status
// line are the live rows. They are always erased and drawn together, so that they do not mix.
type screen struct {
	out       io.Writer
	tty       bool
	color     bool
	width     func() int
	prefix    []styledRune // written before each line
	line      []styledRune // the unfinished line, with its prefix
	broken    bool         // the previous line was wrapped at its last space, so the current line is empty
	status    string       // without line ends; "" for none
	drawn     []int        // columns of the live rows on the terminal
	buf       bytes.Buffer
	shown     textStyle // style at the end of the written text
	suspended bool      // nothing is written to out
	err       error     // the first write error
}

// appendText appends text in a style. Each line feed in it ends a line.
func (s *screen) appendText(st textStyle, text string) {
	for _, r := range text {
		switch {
		case r == '\n':
			s.endLine()
		case r == '\t' && s.tty:
			for range 4 {
				s.putRune(styledRune{' ', st})
			}
		default:
			s.putRune(styledRune{r, st})
		}
	}
}

// endNonEmptyLine ends the current line unless it is empty.
func (s *screen) endNonEmptyLine() {
	if len(s.line) > 0 {
		s.endLine()
	}
}

// endLine ends the current line.
func (s *screen) endLine() {
	if s.broken {
		s.broken = false
		return
	}
	if len(s.line) == 0 {
		s.line = append(s.line, trimTrailingSpaces(s.prefix)...)
	}
	s.writeFinishedLine(s.line)
	s.line = s.line[:0]
}

// putRune appends a character to the current line, and wraps the line if it is too long.
func (s *screen) putRune(c styledRune) {
	s.broken = false
	if len(s.line) == 0 {
		s.line = append(s.line, s.prefix...)
		if !s.tty {
			s.writeRunes(s.line)
		}
	}
	s.line = append(s.line, c)
	if !s.tty {
		s.writeRunes(s.line[len(s.line)-1:])
		return
	}
	if lineColumns(s.line) > s.wrapColumn() {
		s.wrapLine()
	}
}

// wrapLine moves the last word of a line that is too long to a new line.
func (s *screen) wrapLine() {
	from := len(s.prefix)
	cut, next := len(s.line)-1, len(s.line)-1
	for i := len(s.line) - 1; i > from; i-- {
		if s.line[i].r == ' ' {
			cut, next = i, i+1
			break
		}
	}
	rest := append([]styledRune(nil), s.line[next:]...)
	s.writeFinishedLine(s.line[:cut])
	s.line = s.line[:0]
	if s.broken = len(rest) == 0; !s.broken {
		s.line = append(append(s.line, s.prefix...), rest...)
	}
}

// writeFinishedLine writes a line that will not change any more above the live rows.
func (s *screen) writeFinishedLine(line []styledRune) {
	if s.tty {
		s.eraseLiveRows()
		s.writeRunes(line)
	}
	s.setStyle(styleNormal)
	s.buf.WriteByte('\n')
}

// eraseLiveRows removes the live rows from the terminal. If the terminal has become narrower, it has wrapped them into
// more rows.
func (s *screen) eraseLiveRows() {
	if len(s.drawn) == 0 {
		return
	}
	rows, columns := 0, max(s.width(), 1)
	for _, n := range s.drawn {
		rows += max(1, (n+columns-1)/columns)
	}
	s.buf.WriteByte('\r')
	if rows > 1 {
		s.buf.WriteString("\x1b[" + strconv.Itoa(rows-1) + "A")
	}
	s.buf.WriteString("\x1b[J")
	s.drawn = s.drawn[:0]
}

// flush redraws the live rows, and writes all buffered output at once.
func (s *screen) flush() {
	if s.suspended {
		return
	}
	if s.tty {
		s.eraseLiveRows()
		if len(s.line) > 0 {
			s.writeRunes(s.line)
			s.setStyle(styleNormal)
			s.drawn = append(s.drawn, lineColumns(s.line))
		}
		if s.status != "" {
			if len(s.line) > 0 {
				s.buf.WriteString("\r\n")
			}
			line := FitLine(s.status, s.wrapColumn())
			s.setStyle(styleDim)
			s.buf.WriteString(line)
			s.setStyle(styleNormal)
			s.drawn = append(s.drawn, textColumns(line))
		}
	}
	if s.buf.Len() > 0 && s.err == nil {
		_, s.err = s.out.Write(s.buf.Bytes())
	}
	s.buf.Reset()
}

// suspend removes the live rows, and holds all further output back.
func (s *screen) suspend() {
	s.eraseLiveRows()
	if s.err == nil {
		_, s.err = s.out.Write(s.buf.Bytes())
	}
	s.buf.Reset()
	s.suspended = true
}

// close removes the status line, ends the current line and flushes the output.
func (s *screen) close() error {
	s.status, s.suspended = "", false
	s.endNonEmptyLine()
	s.flush()
	return s.err
}

// wrapColumn returns the column at which lines are wrapped. The last column of the terminal stays free, because the
// terminal itself wraps there.
func (s *screen) wrapColumn() int { return max(s.width(), minWidth) - 1 }

// writeRunes writes styled characters to the buffer.
func (s *screen) writeRunes(line []styledRune) {
	for _, c := range line {
		s.setStyle(c.s)
		s.buf.WriteRune(c.r)
	}
}

// setStyle writes the sequence that changes the style of the text that follows.
func (s *screen) setStyle(st textStyle) {
	if !s.color || st == s.shown {
		return
	}
	s.buf.WriteString("\x1b[0m")
	if st != styleNormal {
		s.buf.WriteString("\x1b[" + string(st) + "m")
	}
	s.shown = st
}

// lineColumns returns the number of terminal columns that a line needs.
func lineColumns(line []styledRune) int {
	n := 0
	for _, c := range line {
		n += runeColumns(c.r)
	}
	return n
}

// trimTrailingSpaces returns the prefix of lines without the spaces at its end, for an empty line.
func trimTrailingSpaces(prefix []styledRune) []styledRune {
	for len(prefix) > 0 && prefix[len(prefix)-1].r == ' ' {
		prefix = prefix[:len(prefix)-1]
	}
	return prefix
}

// toStyledRunes returns the characters of a text, all in one style. Line ends become spaces.
func toStyledRunes(st textStyle, text string) []styledRune {
	var out []styledRune
	for _, r := range strings.ReplaceAll(text, "\n", " ") {
		out = append(out, styledRune{r, st})
	}
	return out
}
