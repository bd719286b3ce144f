package terminal

import (
	"bytes"
	"io"
	"strconv"
	"strings"
)

// style holds the parameters of an SGR sequence; "" is the terminal's default.
type style string

const (
	normal style = ""
	bold   style = "1"
	dim    style = "2"
	red    style = "31"
	green  style = "32"
	yellow style = "33"
	prompt style = "1;36"
	tool   style = "1;35"
)

// minWidth is the minimum number of columns at which lines are wrapped.
const minWidth = 20

// cell is a rune with its style on the current line.
type cell struct {
	r rune
	s style
}

// screen is text that only grows and, on a terminal, a status line below it.
//
// On a terminal screen wraps lines itself, so that each takes one row. The unfinished line and the status are the
// live rows: they are always erased and drawn together, so that they cannot be mixed up.
type screen struct {
	out       io.Writer
	tty       bool
	color     bool
	width     func() int
	prefix    []cell // written before each line
	line      []cell // the unfinished line, with its prefix
	broken    bool   // the previous line was wrapped at its last space: this one is empty
	status    string // without line ends; "" for none
	drawn     []int  // columns of the live rows on the terminal
	buf       bytes.Buffer
	shown     style // style at the end of the written text
	suspended bool  // nothing is written to out
	err       error // the first write error
}

// appendText appends text.
func (s *screen) appendText(st style, text string) {
	for _, r := range text {
		switch {
		case r == '\n':
			s.end()
		case r == '\t' && s.tty:
			for range 4 {
				s.put(cell{' ', st})
			}
		default:
			s.put(cell{r, st})
		}
	}
}

// freshLine ends the line unless it is empty.
func (s *screen) freshLine() {
	if len(s.line) > 0 {
		s.end()
	}
}

// end ends the present line.
func (s *screen) end() {
	if s.broken {
		s.broken = false
		return
	}
	if len(s.line) == 0 {
		s.line = append(s.line, trimPrefix(s.prefix)...)
	}
	s.commit(s.line)
	s.line = s.line[:0]
}

func (s *screen) put(c cell) {
	s.broken = false
	if len(s.line) == 0 {
		s.line = append(s.line, s.prefix...)
		if !s.tty {
			s.emit(s.line)
		}
	}
	s.line = append(s.line, c)
	if !s.tty {
		s.emit(s.line[len(s.line)-1:])
		return
	}
	if columns(s.line) > s.columns() {
		s.wrap()
	}
}

// wrap moves the last word of a too long line to a new line.
func (s *screen) wrap() {
	from := len(s.prefix)
	cut, next := len(s.line)-1, len(s.line)-1
	for i := len(s.line) - 1; i > from; i-- {
		if s.line[i].r == ' ' {
			cut, next = i, i+1
			break
		}
	}
	rest := append([]cell(nil), s.line[next:]...)
	s.commit(s.line[:cut])
	s.line = s.line[:0]
	if s.broken = len(rest) == 0; !s.broken {
		s.line = append(append(s.line, s.prefix...), rest...)
	}
}

// commit writes a line, which does not change any more, to the output.
func (s *screen) commit(line []cell) {
	if s.tty {
		s.erase()
		s.emit(line)
	}
	s.set(normal)
	s.buf.WriteByte('\n')
}

// erase removes the live rows from the terminal. A terminal that became narrower has wrapped them into more rows.
func (s *screen) erase() {
	if len(s.drawn) == 0 {
		return
	}
	rows := 0
	for _, n := range s.drawn {
		rows += max(1, (n+s.columns())/(s.columns()+1))
	}
	s.buf.WriteByte('\r')
	if rows > 1 {
		s.buf.WriteString("\x1b[" + strconv.Itoa(rows-1) + "A")
	}
	s.buf.WriteString("\x1b[J")
	s.drawn = s.drawn[:0]
}

// flush redraws the live rows and writes everything at once.
func (s *screen) flush() {
	if s.suspended {
		return
	}
	if s.tty {
		s.erase()
		if len(s.line) > 0 {
			s.emit(s.line)
			s.set(normal)
			s.drawn = append(s.drawn, columns(s.line))
		}
		if s.status != "" {
			if len(s.line) > 0 {
				s.buf.WriteString("\r\n")
			}
			line := Fit(s.status, s.columns())
			s.set(dim)
			s.buf.WriteString(line)
			s.set(normal)
			s.drawn = append(s.drawn, width(line))
		}
	}
	if s.buf.Len() > 0 && s.err == nil {
		_, s.err = s.out.Write(s.buf.Bytes())
	}
	s.buf.Reset()
}

// suspend removes the live rows and holds all further output back.
func (s *screen) suspend() {
	s.erase()
	if s.err == nil {
		_, s.err = s.out.Write(s.buf.Bytes())
	}
	s.buf.Reset()
	s.suspended = true
}

// close removes the status line and finishes the line.
func (s *screen) close() error {
	s.status, s.suspended = "", false
	s.freshLine()
	s.flush()
	return s.err
}

// columns returns the column at which lines are wrapped. The last column stays free, because the terminal itself
// wraps there.
func (s *screen) columns() int { return max(s.width(), minWidth) - 1 }

func (s *screen) emit(line []cell) {
	for _, c := range line {
		s.set(c.s)
		s.buf.WriteRune(c.r)
	}
}

func (s *screen) set(st style) {
	if !s.color || st == s.shown {
		return
	}
	s.buf.WriteString("\x1b[0m")
	if st != normal {
		s.buf.WriteString("\x1b[" + string(st) + "m")
	}
	s.shown = st
}

func columns(line []cell) int {
	n := 0
	for _, c := range line {
		n += cells(c.r)
	}
	return n
}

// trimPrefix returns a prefix for an empty line, without trailing spaces.
func trimPrefix(prefix []cell) []cell {
	for len(prefix) > 0 && prefix[len(prefix)-1].r == ' ' {
		prefix = prefix[:len(prefix)-1]
	}
	return prefix
}

// styledCells returns the cells of a text.
func styledCells(st style, text string) []cell {
	var out []cell
	for _, r := range strings.ReplaceAll(text, "\n", " ") {
		out = append(out, cell{r, st})
	}
	return out
}
