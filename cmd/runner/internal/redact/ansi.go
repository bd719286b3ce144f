package redact

// escapeCode is where a text is in an escape code of a terminal (ECMA-48), such as a change of colour. The zero value is
// outside of any.
type escapeCode int

const (
	outside   escapeCode = iota
	begun                // after ESC, or after an intermediate byte that follows it
	parameter            // of a control sequence: ESC [
	command              // of a control string, such as a link or a title: ESC ] and the like
	ending               // of a control string, after the ESC of its ESC \
)

const (
	bell   = 0x07
	escape = 0x1b
)

// step takes the next byte and reports whether it belongs to an escape code. A byte that cannot go on with the code ends it.
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
		return e.second(b)
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

// second takes a byte after ESC.
func (e *escapeCode) second(b byte) bool {
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
