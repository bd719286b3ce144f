package meter

import "bytes"

// sse is an io.Writer that hands the data of each server-sent event to doc, and
// calls done after each.
type sse struct {
	doc  *fields
	done func()

	head   []byte // of the line that is read, until it is known to be data or not
	isData bool
	known  bool // whether the line is data or not
	some   bool // the event has data
}

var dataPrefix = []byte("data:")

// Write never fails.
func (s *sse) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		line := p
		i := bytes.IndexByte(p, '\n')
		if i >= 0 {
			line = p[:i]
		}
		s.piece(line)
		if i < 0 {
			break
		}
		s.endLine()
		p = p[i+1:]
	}
	return n, nil
}

// piece takes a part of a line.
func (s *sse) piece(p []byte) {
	if !s.known {
		take := min(len(p), len(dataPrefix)-len(s.head))
		s.head, p = append(s.head, p[:take]...), p[take:]
		if len(s.head) < len(dataPrefix) {
			return
		}
		s.known, s.isData = true, bytes.Equal(s.head, dataPrefix)
	}
	if s.isData && len(p) > 0 {
		s.some = true
		s.doc.Write(p) //nolint:errcheck // it never fails
	}
}

func (s *sse) endLine() {
	blank := !s.known && len(bytes.TrimRight(s.head, "\r")) == 0
	s.head, s.known, s.isData = s.head[:0], false, false
	if blank {
		s.endEvent()
	}
}

func (s *sse) endEvent() {
	if s.some {
		s.done()
		s.doc.reset()
	}
	s.some = false
}
