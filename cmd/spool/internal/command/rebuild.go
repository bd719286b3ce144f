package command

import (
	"errors"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/services/projector"
)

type rebuildCommand struct {
	installationFlags
	Database string `name:"database-url" env:"SPOOL_DATABASE_URL" placeholder:"URL" help:"Postgres of the installation; by default that of the stack on the data folder."`
	Compare  bool   `help:"Change nothing: fold the log again and check that the read models are equal, row by row."`
}

// Run rebuilds the read models in Postgres from the log, or compares them with it.
func (c *rebuildCommand) Run(a *app) (err error) {
	if c.Database != "" {
		if _, err := pgx.ParseConfig(c.Database); err != nil {
			return usageError("database-url: not the URL of a Postgres database, such as postgres://user@host/name")
		}
	}
	if c.NATSURL != "" && c.Database == "" {
		return usageError("database-url: name the Postgres that belongs to --nats-url, or set SPOOL_DATABASE_URL")
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	inst, err := c.openInstallation(ctx, a, c.Database)
	if err != nil {
		return contextCause(ctx, err)
	}
	defer func() { err = errors.Join(err, inst.Close()) }()
	report, err := projector.Rebuild(ctx, projector.Config{DatabaseURL: inst.DatabaseURL}, projector.Deps{Log: inst.Log, NATS: inst.NATS}, c.Compare)
	if err != nil {
		return contextCause(ctx, err)
	}
	if c.JSON {
		return a.printJSON(map[string]any{
			"compare": c.Compare, "commits": report.Commits, "rows": report.Rows,
			"durationMs": report.Duration.Milliseconds(), "heldMs": report.Held.Milliseconds(),
		})
	}
	if c.Compare {
		_, err = terminal.Fprintf(a.Out, "equal: %d commits folded, %d rows compared, in %s\n", report.Commits, report.Rows, report.Duration.Round(1e6))
	} else {
		_, err = terminal.Fprintf(a.Out, "rebuilt: %d commits folded in %s; live projection was paused for %s\n", report.Commits, report.Duration.Round(1e6), report.Held.Round(1e6))
	}
	return err
}
