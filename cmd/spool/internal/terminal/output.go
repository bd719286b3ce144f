package terminal

import (
	"fmt"
	"io"
	"reflect"
)

// Lines is a text of an untrusted source whose line ends Fprintf keeps.
type Lines string

// Fprintf formats and writes like fmt.Fprintf, with the texts among args in the form of SafeLine: they may come from an
// untrusted source. All output of commands for people goes through Fprintf, Fprintln or a table.
func Fprintf(w io.Writer, format string, args ...any) (int, error) {
	return fmt.Fprintf(w, format, safeArguments(args)...)
}

// Fprintln writes args like fmt.Fprintln, in the form that Fprintf uses.
func Fprintln(w io.Writer, args ...any) (int, error) { return fmt.Fprintln(w, safeArguments(args)...) }

// safeArguments returns args with everything but numbers as texts that are safe to show.
func safeArguments(args []any) []any {
	safe := make([]any, len(args))
	for i, arg := range args {
		text, hasLines := arg.(Lines)
		_, formatsItself := arg.(fmt.Stringer)
		switch v := reflect.ValueOf(arg); {
		case hasLines:
			safe[i] = SafeText(string(text))
		case !formatsItself && (v.CanInt() || v.CanUint() || v.CanFloat()):
			safe[i] = arg
		default:
			safe[i] = SafeLine(fmt.Sprint(arg))
		}
	}
	return safe
}
