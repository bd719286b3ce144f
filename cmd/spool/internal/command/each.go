package command

import (
	"context"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/pkg/events"
)

// each does the same to every thing that the user named, and says so. Wrong ids
// are refused before anything is done; after a failure it goes on, and fails at the end.
func (s server) each(a *app, kind events.Kind, what string, ids []string, done string, do func(context.Context, *client.Client, string) (any, error)) error {
	for _, id := range ids {
		if err := checkID(what, kind, id); err != nil {
			return err
		}
	}
	return s.every(a, ids, done, do)
}

// every is each of what has no ids.
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
