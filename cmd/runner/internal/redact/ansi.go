package redact

// escapeState is the state of a parser of terminal escape codes (ECMA-48), such as a change of colour. The zero value
// is the state outside of a code.
type escapeState int

const (
	escapeOutside   escapeState = iota
	escapeStarted               // after ESC, or after an intermediate byte that follows it
	escapeParameter             // in a control sequence: ESC [
	escapeString                // in a control string, such as a link or a title: ESC ] and similar
	escapeStringEnd             // in a control string, after the ESC of its end ESC \
)

const (
	byteBell   = 0x07
	byteEscape = 0x1b
)

// readByte advances the parser by the byte b, and reports whether b belongs to an escape code. A byte that cannot
// continue the code ends it.
func (e *escapeState) readByte(b byte) bool {
	if b == byteEscape {
		if *e == escapeString {
			*e = escapeStringEnd
		} else {
			*e = escapeStarted
		}
		return true
	}
	switch *e {
	case escapeStarted, escapeStringEnd:
		return e.readByteAfterEscape(b)
	case escapeParameter:
		switch {
		case b >= 0x20 && b < 0x40:
			return true
		case b >= 0x40 && b < 0x7f:
			*e = escapeOutside
			return true
		}
	case escapeString:
		switch {
		case b == byteBell:
			*e = escapeOutside
			return true
		case b >= 0x20:
			return true
		}
	}
	*e = escapeOutside
	return false
}

// readByteAfterEscape advances the parser by the byte after ESC, and reports whether b belongs to the escape code.
func (e *escapeState) readByteAfterEscape(b byte) bool {
	switch {
	case b == '[':
		*e = escapeParameter
	case b == ']' || b == 'P' || b == 'X' || b == '^' || b == '_':
		*e = escapeString
	case b >= 0x20 && b < 0x30:
		*e = escapeStarted
	default:
		*e = escapeOutside
		return b >= 0x30 && b < 0x7f
	}
	return true
}
