package command

import (
	"fmt"
	"io"
	"reflect"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

// textLines is a text of an untrusted source whose line ends writef keeps.
type textLines string

// writef formats and writes like fmt.Fprintf, with the texts among args in the form of terminal.SafeLine: they may come
// from an untrusted source. All output of the commands for people goes through writef, writeln or a table.
func writef(w io.Writer, format string, args ...any) (int, error) {
	return fmt.Fprintf(w, format, safeArguments(args)...)
}

// writeln writes args like fmt.Fprintln, in the form that writef uses.
func writeln(w io.Writer, args ...any) (int, error) { return fmt.Fprintln(w, safeArguments(args)...) }

// safeArguments returns args with everything but numbers as texts that are safe to show.
func safeArguments(args []any) []any {
	safe := make([]any, len(args))
	for i, arg := range args {
		text, hasLines := arg.(textLines)
		_, formatsItself := arg.(fmt.Stringer)
		switch v := reflect.ValueOf(arg); {
		case hasLines:
			safe[i] = terminal.SafeText(string(text))
		case !formatsItself && (v.CanInt() || v.CanUint() || v.CanFloat()):
			safe[i] = arg
		default:
			safe[i] = terminal.SafeLine(fmt.Sprint(arg))
		}
	}
	return safe
}
