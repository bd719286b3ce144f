package meter

import "bytes"

// sseParser is an io.Writer that parses a stream of server-sent events. It writes the data of each event to doc,
// and calls done after each event.
type sseParser struct {
	doc  *fieldScanner
	done func()

	head    []byte // of the current line, until known is set
	isData  bool   // the current line is a data line
	known   bool   // isData is valid
	hasData bool   // the current event has data
}

var sseDataPrefix = []byte("data:")

// Write parses the next part of the stream. It never fails.
func (s *sseParser) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		line := p
		i := bytes.IndexByte(p, '\n')
		if i >= 0 {
			line = p[:i]
		}
		s.parsePiece(line)
		if i < 0 {
			break
		}
		s.endLine()
		p = p[i+1:]
	}
	return n, nil
}

// parsePiece parses a part of a line of the stream.
func (s *sseParser) parsePiece(p []byte) {
	if !s.known {
		take := min(len(p), len(sseDataPrefix)-len(s.head))
		s.head, p = append(s.head, p[:take]...), p[take:]
		if len(s.head) < len(sseDataPrefix) {
			return
		}
		s.known, s.isData = true, bytes.Equal(s.head, sseDataPrefix)
	}
	if s.isData && len(p) > 0 {
		s.hasData = true
		s.doc.Write(p) //nolint:errcheck // it never fails
	}
}

// endLine handles the end of a line of the stream.
func (s *sseParser) endLine() {
	blank := !s.known && len(bytes.TrimRight(s.head, "\r")) == 0
	s.head, s.known, s.isData = s.head[:0], false, false
	if blank {
		s.endEvent()
	}
}

// endEvent handles the empty line after a server-sent event.
func (s *sseParser) endEvent() {
	if s.hasData {
		s.done()
		s.doc.reset()
	}
	s.hasData = false
}
