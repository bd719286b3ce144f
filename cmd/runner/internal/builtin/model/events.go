package model

import (
	"bufio"
	"bytes"
	"errors"
	"fmt"
	"io"
)

// maxEventBytes is the maximum size in bytes of an event of a stream.
const maxEventBytes = 32 << 20

// event is a server-sent event. kind is its field event, "" if it has none.
type event struct {
	kind string
	data []byte
}

// eventReader reads the events of a stream of server-sent events. It accepts a byte order mark, all three line ends, and a stream that ends within
// its last event. A body that is a JSON document instead of a stream is one event.
type eventReader struct {
	r       *bufio.Reader
	begun   bool // the first line was read
	skipLF  bool // the line before ended with a CR
	pending error
}

// newEventReader returns an eventReader for the body of an answer.
func newEventReader(body io.Reader) *eventReader { return &eventReader{r: bufio.NewReader(body)} }

// next returns the next event that has data. It returns io.EOF after the last one.
func (e *eventReader) next() (event, error) {
	var ev event
	for e.pending == nil {
		line, err := e.readLine()
		if err != nil {
			e.pending = err
		}
		if e.isDocument(line) {
			rest, err := io.ReadAll(io.LimitReader(e.r, maxEventBytes))
			e.pending = errors.Join(err, io.EOF)
			return event{data: append(append(line, '\n'), rest...)}, nil
		}
		switch name, value, _ := bytes.Cut(line, []byte(":")); {
		case len(line) == 0 && err == nil:
			if len(ev.data) > 0 {
				return ev, nil
			}
			ev = event{}
		case string(name) == "event":
			ev.kind = string(bytes.TrimPrefix(value, []byte(" ")))
		case string(name) == "data":
			ev.data = append(append(ev.data, bytes.TrimPrefix(value, []byte(" "))...), '\n')
		}
		if len(ev.data) > maxEventBytes {
			e.pending = fmt.Errorf("an event of the stream has more than %d bytes", maxEventBytes)
		}
	}
	if errors.Is(e.pending, io.EOF) && len(ev.data) > 0 {
		return ev, nil
	}
	return event{}, e.pending
}

// isDocument reports whether line, which was just read, is the first line of a JSON document.
func (e *eventReader) isDocument(line []byte) bool {
	first := !e.begun
	e.begun = e.begun || len(bytes.TrimSpace(line)) > 0
	return first && bytes.HasPrefix(bytes.TrimSpace(line), []byte("{"))
}

// readLine returns the next line without its end. With an error, it returns the part of the line before the error.
func (e *eventReader) readLine() ([]byte, error) {
	var line []byte
	for len(line) <= maxEventBytes {
		c, err := e.r.ReadByte()
		switch {
		case err != nil:
			return e.withoutByteOrderMark(line), err
		case c == '\n' && e.skipLF:
			e.skipLF = false
			continue
		case c == '\n', c == '\r':
			e.skipLF = c == '\r'
			return e.withoutByteOrderMark(line), nil
		}
		e.skipLF = false
		line = append(line, c)
	}
	return nil, fmt.Errorf("a line of the stream has more than %d bytes", maxEventBytes)
}

// withoutByteOrderMark returns the line without the byte order mark, which may precede the first line of a stream.
func (e *eventReader) withoutByteOrderMark(line []byte) []byte {
	if e.begun {
		return line
	}
	return bytes.TrimPrefix(line, []byte("\xef\xbb\xbf"))
}
