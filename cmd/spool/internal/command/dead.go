package command

import (
	"context"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
)

type deadCommand struct {
	Ls    deadLsCommand    `cmd:"" help:"List dead letters, oldest first."`
	Show  deadShowCommand  `cmd:"" help:"Show a dead letter and its message."`
	Retry deadRetryCommand `cmd:"" help:"Process the sessions of dead letters again, and remove the letters."`
	Drop  deadDropCommand  `cmd:"" help:"Remove dead letters."`
}

type deadLsCommand struct {
	serverFlags
	Limit int `default:"100" help:"Maximum number of entries; 0 means all."`
}

// Run prints the dead letters of the caller's tenant, at most c.Limit.
func (c *deadLsCommand) Run(a *app) error {
	if c.Limit < 0 {
		return usageError("limit: %d is less than 0", c.Limit)
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		letters := client.List[*spoolv1.DeadLetter](ctx, cl.DeadLetters.ListDeadLetters, &spoolv1.ListDeadLettersRequest{})
		return printList(a, c.JSON, c.Limit, letters, []any{"ID", "TIME", "SUBJECT", "SESSION", "RETRY", "REASON"}, func(d *spoolv1.DeadLetter) []any {
			retry := "no"
			if d.Retryable {
				retry = "yes"
			}
			return []any{d.Id, formatExactTime(d.Time), d.Subject, d.SessionId, retry, d.Reason}
		})
	})
}

type deadShowCommand struct {
	serverFlags
	ID string `arg:"" help:"Id of the letter, from dead ls."`
}

// Run prints a dead letter: the message, and why a service gave it up.
func (c *deadShowCommand) Run(a *app) error {
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.DeadLetters.GetDeadLetter, &spoolv1.GetDeadLetterRequest{Id: c.ID})
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		d := doc.Value
		_, err = terminal.Fprintf(a.Out, "moved to DEAD at %s by %s after %d deliveries\nsubject: %s\nsession: %s\nreason: %s\n\n%s\n",
			formatExactTime(d.Time), d.Handler, d.Delivered, d.Subject, d.SessionId, d.Reason, terminal.Lines(d.GetMessage()))
		return err
	})
}

type deadRetryCommand struct {
	serverFlags
	IDs []string `arg:"" name:"id" help:"Ids of the letters, from dead ls."`
}

// Run removes dead letters, and makes the services process the sessions of the letters again.
func (c *deadRetryCommand) Run(a *app) error {
	return forEachName(c.serverFlags, a, c.IDs, "retried", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.DeadLetters.RetryDeadLetter, &spoolv1.RetryDeadLetterRequest{Id: id})
	})
}

type deadDropCommand struct {
	serverFlags
	IDs []string `arg:"" name:"id" help:"Ids of the letters, from dead ls."`
}

// Run removes dead letters without any other effect.
func (c *deadDropCommand) Run(a *app) error {
	return forEachName(c.serverFlags, a, c.IDs, "dropped", func(ctx context.Context, cl *client.Client, id string) (any, error) {
		return client.Call(ctx, cl.DeadLetters.DropDeadLetter, &spoolv1.DropDeadLetterRequest{Id: id})
	})
}
