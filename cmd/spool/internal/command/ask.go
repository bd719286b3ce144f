package command

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
)

// askUser prints a question and returns the line that the user types, in lower case. It drops what was typed before. The
// end of the input is an empty answer. It must be called only if InTTY is set. When ctx ends, askUser returns the cause at once; its goroutine that
// reads the terminal remains until the program ends.
func (a *app) askUser(ctx context.Context, question string) (string, error) {
	if a.DropInput != nil {
		if err := a.DropInput(); err != nil {
			return "", fmt.Errorf("drop what was typed before the question: %w", err)
		}
	}
	terminal.Fprintf(a.Err, "%s ", question)
	if a.lines == nil {
		a.lines = bufio.NewReader(a.In)
	}
	type reply struct {
		line string
		err  error
	}
	replied := make(chan reply, 1)
	go func() {
		line, err := a.lines.ReadString('\n')
		replied <- reply{line, err}
	}()
	select {
	case <-ctx.Done():
		terminal.Fprintln(a.Err)
		return "", context.Cause(ctx)
	case r := <-replied:
		if r.err != nil && !errors.Is(r.err, io.EOF) {
			return "", fmt.Errorf("read the answer: %w", r.err)
		}
		return strings.ToLower(strings.TrimSpace(r.line)), nil
	}
}

// isYes reports whether an answer of the user means yes.
func isYes(answer string) bool { return answer == "y" || answer == "yes" }
