package bus

import (
	"fmt"
	"strings"
	"unicode/utf8"
)

// maxSubjectBytes is the maximum length of a subject in bytes: every acknowledgement and the server's index contain it.
const maxSubjectBytes = 512

// CheckSubject returns ErrInvalidMessage unless subject is a concrete subject: non-empty tokens separated by dots,
// without wildcards, spaces or control characters.
func CheckSubject(subject string) error {
	return checkSubject(subject, false)
}

// CheckFilter is like CheckSubject for a filter, in which a token may be `*` and the last one `>`.
func CheckFilter(filter string) error {
	return checkSubject(filter, true)
}

// checkSubject implements CheckSubject and, with wildcards, CheckFilter.
func checkSubject(subject string, wildcards bool) error {
	if subject == "" {
		return fmt.Errorf("%w: the subject is empty", ErrInvalidMessage)
	}
	if len(subject) > maxSubjectBytes {
		return fmt.Errorf("%w: the subject has %d bytes, at most %d are allowed", ErrInvalidMessage, len(subject), maxSubjectBytes)
	}
	if !utf8.ValidString(subject) {
		return fmt.Errorf("%w: the subject is not UTF-8", ErrInvalidMessage)
	}
	if i := strings.IndexFunc(subject, func(r rune) bool { return r <= ' ' || r == 0x7f }); i >= 0 {
		return fmt.Errorf("%w: subject %q has a space or control character at byte %d", ErrInvalidMessage, subject, i)
	}
	tokens := strings.Split(subject, ".")
	for i, token := range tokens {
		switch {
		case token == "":
			return fmt.Errorf("%w: subject %q has an empty token", ErrInvalidMessage, subject)
		case !strings.ContainsAny(token, "*>"):
		case !wildcards:
			return fmt.Errorf("%w: subject %q has a wildcard", ErrInvalidMessage, subject)
		case token == "*", token == ">" && i == len(tokens)-1:
		default:
			return fmt.Errorf("%w: token %q in %q: a wildcard stands alone, and `>` comes last", ErrInvalidMessage, token, subject)
		}
	}
	return nil
}
