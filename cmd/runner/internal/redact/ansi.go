package redact

// escapeCode is the state of a parser of terminal escape codes (ECMA-48), such as a change of colour. The zero value is
// the state outside of a code.
type escapeCode int

const (
	outside   escapeCode = iota
	begun                // after ESC, or after an intermediate byte that follows it
	parameter            // in a control sequence: ESC [
	command              // in a control string, such as a link or a title: ESC ] and similar
	ending               // in a control string, after the ESC of its end ESC \
)

const (
	bell   = 0x07
	escape = 0x1b
)

// step reads the next byte and reports whether it belongs to an escape code. A byte that cannot continue the code ends
// it.
func (e *escapeCode) step(b byte) bool {
	if b == escape {
		if *e == command {
			*e = ending
		} else {
			*e = begun
		}
		return true
	}
	switch *e {
	case begun, ending:
		return e.afterEscape(b)
	case parameter:
		switch {
		case b >= 0x20 && b < 0x40:
			return true
		case b >= 0x40 && b < 0x7f:
			*e = outside
			return true
		}
	case command:
		switch {
		case b == bell:
			*e = outside
			return true
		case b >= 0x20:
			return true
		}
	}
	*e = outside
	return false
}

// afterEscape reads the byte after ESC.
func (e *escapeCode) afterEscape(b byte) bool {
	switch {
	case b == '[':
		*e = parameter
	case b == ']' || b == 'P' || b == 'X' || b == '^' || b == '_':
		*e = command
	case b >= 0x20 && b < 0x30:
		*e = begun
	default:
		*e = outside
		return b >= 0x30 && b < 0x7f
	}
	return true
}
