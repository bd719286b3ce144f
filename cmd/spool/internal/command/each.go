package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
)

// forEachID calls do for every id that the user has named, and prints the text done for it, or the response with
// --json. It checks all ids before the first call. After a failure it continues, and returns the joined errors at the
// end.
func (s serverFlags) forEachID(a *app, kind events.IDKind, what string, ids []string, done string, do func(context.Context, *client.Client, string) (any, error)) error {
	for _, id := range ids {
		if err := checkID(what, kind, id); err != nil {
			return err
		}
	}
	return forEachName(s, a, ids, done, do)
}

// forEachName calls do for each name, and prints the text done for it, or the response with --json. Unlike forEachID it
// does not check the names.
func forEachName[N any](s serverFlags, a *app, names []N, done string, do func(context.Context, *client.Client, N) (any, error)) error {
	return s.withClient(a, func(ctx context.Context, cl *client.Client) error {
		var failed []error
		for _, name := range names {
			response, err := do(ctx, cl, name)
			switch {
			case err != nil:
				err = fmt.Errorf("%v: %w", name, err)
			case s.JSON:
				err = a.printJSON(response)
			default:
				_, err = terminal.Fprintln(a.Out, done, name)
			}
			failed = append(failed, err)
		}
		return errors.Join(failed...)
	})
}
