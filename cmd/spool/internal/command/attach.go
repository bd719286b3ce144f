package command

import (
	"errors"
	"fmt"

	"github.com/spoolhq/spool/pkg/events"
)

type attachCommand struct {
	server
	Session string `arg:"" help:"The session's id."`
}

// Run shows a session from its first event, and then live.
func (c *attachCommand) Run(a *app) (err error) {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	if _, err := cl.Session(ctx, c.Session); err != nil {
		return err
	}
	w := &watcher{app: a, client: cl, session: c.Session, json: c.JSON}
	shown := w.show(ctx)
	defer func() { err = errors.Join(err, shown()) }()
	if w.shown != nil {
		w.shown.Hint("Ctrl-C detaches; the agent continues")
	}
	_, err = w.watch(ctx, 0)
	if errors.Is(err, errInterrupted) {
		err = errors.Join(err, shown())
		fmt.Fprintln(a.Err, "spool: detached; the session continues")
	}
	return err
}
