package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/services/session/janitor"
)

type gcCommand struct {
	installationFlags
	Database string `name:"database-url" env:"SPOOL_DATABASE_URL" placeholder:"URL" help:"Postgres of the installation; by default that of the stack on the data folder."`
	DryRun   bool   `help:"Remove nothing: list what would be removed, and what has to wait."`

	Grace     time.Duration `default:"${janitor_Grace}" env:"SPOOL_GC_GRACE" help:"Time after which the content of a deleted session is removed, counted from when every reader of the log has processed the deletion."`
	Uploads   time.Duration `default:"${janitor_Uploads}" env:"SPOOL_GC_UPLOADS" help:"Age at which unreferenced content is removed. Named content stays for at least 15m."`
	Snapshots int           `default:"${janitor_Snapshots}" env:"SPOOL_GC_SNAPSHOTS" help:"Number of newest workspace snapshots that a session keeps. The snapshot that it resumes from always stays."`
}

// janitorTimeout is the time for which "spool gc" waits while the installation's own janitor performs a pass.
const janitorTimeout = time.Minute

// Run performs one pass of the janitor, which erases the content of deleted sessions.
func (c *gcCommand) Run(a *app) (err error) {
	if c.Database != "" {
		if _, err := pgx.ParseConfig(c.Database); err != nil {
			return usageError("database-url: not the URL of a Postgres database, such as postgres://user@host/name")
		}
	}
	if c.NATSURL != "" && c.Database == "" {
		return usageError("database-url: name the Postgres that belongs to --nats-url, or set SPOOL_DATABASE_URL")
	}
	if c.Grace < time.Millisecond {
		return usageError("grace: %s is less than 1ms", c.Grace)
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	inst, err := c.openInstallation(ctx, a, c.Database)
	if err != nil {
		return contextCause(ctx, err)
	}
	defer func() { err = errors.Join(err, inst.Close()) }()
	j, err := janitor.New(janitor.Config{DatabaseURL: inst.DatabaseURL, Grace: c.Grace, Uploads: c.Uploads, Snapshots: c.Snapshots},
		janitor.Deps{NATS: inst.NATS, Log: inst.Log, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	report, err := c.runPass(ctx, j)
	if printed := c.printReport(a, report); err == nil {
		err = printed
	}
	if err != nil {
		return contextCause(ctx, err)
	}
	return nil
}

// runPass performs one pass of the janitor j. If the installation's own janitor performs a pass, runPass waits for its
// end first.
func (c *gcCommand) runPass(ctx context.Context, j *janitor.Janitor) (janitor.PassReport, error) {
	late := time.After(janitorTimeout)
	for {
		report, err := j.RunPass(ctx, c.DryRun)
		if !errors.Is(err, janitor.ErrPassRunning) {
			return report, err
		}
		select {
		case <-ctx.Done():
			return report, ctx.Err()
		case <-late:
			return report, err
		case <-time.After(250 * time.Millisecond):
		}
	}
}

// printReport prints what a pass of the janitor erased or would erase.
func (c *gcCommand) printReport(a *app, r janitor.PassReport) error {
	if c.JSON {
		for _, i := range r.Items {
			if err := a.printJSON(i); err != nil {
				return err
			}
		}
		return nil
	}
	verb := "removed"
	if c.DryRun {
		verb = "would remove"
	}
	for _, i := range r.Items {
		name := i.Name
		if i.Tenant != "" {
			name += " of " + i.Tenant
		}
		line := fmt.Sprintf("%s: %s %s, %d commits, %d objects, %d bytes", verb, i.Kind, name, i.Messages, i.Objects, i.Bytes)
		if i.Waits != "" {
			line = fmt.Sprintf("waits: %s %s: %s", i.Kind, name, i.Waits)
		}
		if _, err := terminal.Fprintln(a.Out, line); err != nil {
			return err
		}
	}
	if len(r.Items) == 0 {
		_, err := terminal.Fprintln(a.Out, "nothing to remove")
		return err
	}
	return nil
}
