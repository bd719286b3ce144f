package command

import (
	"context"
	"errors"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type attachCommand struct {
	serverFlags
	Session string `arg:"" help:"The session's id."`
}

// Run shows a session from its first event on, and then live until the session ends.
func (c *attachCommand) Run(a *app) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error { return c.followSession(ctx, a, cl) })
}

func (c *attachCommand) followSession(ctx context.Context, a *app, cl *client.Client) (err error) {
	if _, err := cl.Sessions.GetSession(ctx, &spoolv1.GetSessionRequest{SessionId: c.Session}); err != nil {
		return err
	}
	w := &sessionWatcher{app: a, client: cl, session: c.Session, json: c.JSON}
	closeRenderer := w.startRenderer(ctx)
	defer func() { err = errors.Join(err, closeRenderer()) }()
	if w.renderer != nil {
		w.renderer.SetHint("Ctrl-C detaches; the agent continues")
	}
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	stopPrompts := w.startPrompts(ctx, func() *client.Client { return cl }, func() { cancel(errInterrupted) })
	_, err = w.followToEnd(ctx, 0)
	stopPrompts()
	if errors.Is(err, errInterrupted) {
		err = errors.Join(err, closeRenderer())
		terminal.Fprintln(a.Err, "spool: detached; the session continues")
	}
	return err
}
