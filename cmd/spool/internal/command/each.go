package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/events"
)

// each calls do for every id that the user named and prints done. It checks all ids before the first call. After a
// failure it continues, and returns the joined errors at the end.
func (s server) each(a *app, kind events.Kind, what string, ids []string, done string, do func(context.Context, *client.Client, string) (any, error)) error {
	for _, id := range ids {
		if err := checkID(what, kind, id); err != nil {
			return err
		}
	}
	return s.every(a, ids, done, do)
}

// every is like each, for names that are not ids.
func (s server) every(a *app, ids []string, done string, do func(context.Context, *client.Client, string) (any, error)) error {
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := s.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	var failed []error
	for _, id := range ids {
		answer, err := do(ctx, cl, id)
		switch {
		case err != nil:
			err = fmt.Errorf("%s: %w", id, err)
		case s.JSON:
			err = a.json(answer)
		default:
			_, err = fmt.Fprintln(a.Out, done, id)
		}
		failed = append(failed, err)
	}
	return errors.Join(failed...)
}
