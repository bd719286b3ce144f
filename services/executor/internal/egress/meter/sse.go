package meter

import "bytes"

// sseParser is an io.Writer that parses a stream of server-sent events, whose lines end with LF, CR LF or CR. It writes the data of each event to
// doc, and calls done after each event.
type sseParser struct {
	doc  *fieldScanner
	done func()

	kind string // the field event of the current event
	text []byte // the beginning of the data of an event of kind error, which may be no JSON

	head    []byte // of the current line: up to and with its field's name
	field   lineField
	skipLF  bool // the line before ended with CR
	hasData bool // the current event has data
}

// lineField is the field that a line of a stream has.
type lineField int

const (
	fieldUnknown lineField = iota // the line is too short to tell
	fieldOther
	fieldData
	fieldEvent
)

const (
	dataField  = "data:"
	eventField = "event:"
)

// Write parses the next part of the stream. It never fails.
func (s *sseParser) Write(p []byte) (int, error) {
	n := len(p)
	for len(p) > 0 {
		if s.skipLF {
			s.skipLF = false
			if p[0] == '\n' {
				p = p[1:]
				continue
			}
		}
		i := bytes.IndexByte(p, '\n')
		line := p
		if i >= 0 {
			line = p[:i]
		}
		if j := bytes.IndexByte(line, '\r'); j >= 0 {
			i, line, s.skipLF = j, p[:j], true
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
	if s.field == fieldUnknown {
		take := min(len(p), len(eventField)-len(s.head))
		s.head, p = append(s.head, p[:take]...), p[take:]
		switch {
		case len(s.head) < len(eventField):
			return
		case bytes.HasPrefix(s.head, []byte(dataField)):
			s.field = fieldData
			s.parseData(s.head[len(dataField):])
		case string(s.head) == eventField:
			s.field, s.kind = fieldEvent, ""
		default:
			s.field = fieldOther
		}
	}
	switch s.field {
	case fieldData:
		s.parseData(p)
	case fieldEvent:
		s.kind += string(p[:min(len(p), max(0, maxKeyBytes-len(s.kind)))])
	default:
	}
}

// parseData parses a part of the data of an event.
func (s *sseParser) parseData(p []byte) {
	if len(p) == 0 {
		return
	}
	s.hasData = true
	s.doc.Write(p) //nolint:errcheck // it never fails
	if s.kind == "error" {
		s.text = append(s.text, p[:min(len(p), max(0, maxErrorBytes-len(s.text)))]...)
	}
}

// endLine handles the end of a line of the stream.
func (s *sseParser) endLine() {
	blank := len(s.head) == 0
	s.kind = string(bytes.TrimSpace([]byte(s.kind)))
	s.head, s.field = s.head[:0], fieldUnknown
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
	s.hasData, s.kind, s.text = false, "", s.text[:0]
}
