package command

import (
	"context"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
)

type deadCommand struct {
	Ls    deadLs    `cmd:"" help:"List dead letters, oldest first."`
	Show  deadShow  `cmd:"" help:"Show a dead letter and its message."`
	Retry deadRetry `cmd:"" help:"Process the sessions of dead letters again, and remove the letters."`
	Drop  deadDrop  `cmd:"" help:"Remove dead letters."`
}

type deadLs struct {
	server
	Limit int `default:"100" help:"Maximum number of entries; 0 means all."`
}

// Run lists dead letters.
func (c *deadLs) Run(a *app) error {
	if c.Limit < 0 {
		return usage("limit: %d is less than 0", c.Limit)
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	return list(a, c.JSON, c.Limit, cl.DeadLetters(ctx), []any{"ID", "TIME", "SUBJECT", "SESSION", "RETRY", "REASON"}, func(d client.DeadLetter) []any {
		retry := "no"
		if d.Retryable {
			retry = "yes"
		}
		return []any{d.ID, d.Time, d.Subject, d.SessionID, retry, d.Reason}
	})
}

type deadShow struct {
	server
	ID string `arg:"" help:"Id of the letter, from dead ls."`
}

// Run shows a dead letter.
func (c *deadShow) Run(a *app) error {
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	d, err := cl.DeadLetter(ctx, c.ID)
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(d)
	}
	_, err = fmt.Fprintf(a.Out, "moved to DEAD at %s by %s after %d deliveries\nsubject: %s\nsession: %s\nreason: %s\n\n%s\n",
		d.Value.Time, d.Value.Handler, d.Value.Delivered, d.Value.Subject, d.Value.SessionID, d.Value.Reason, d.Value.Message)
	return err
}

type deadRetry struct {
	server
	IDs []string `arg:"" name:"id" help:"Ids of the letters, from dead ls."`
}

// Run retries dead letters.
func (c *deadRetry) Run(a *app) error {
	return c.every(a, c.IDs, "retried", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.RetryDeadLetter(ctx, id)
	})
}

type deadDrop struct {
	server
	IDs []string `arg:"" name:"id" help:"Ids of the letters, from dead ls."`
}

// Run removes dead letters.
func (c *deadDrop) Run(a *app) error {
	return c.every(a, c.IDs, "dropped", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return cl.DropDeadLetter(ctx, id)
	})
}
