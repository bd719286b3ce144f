// Command janitor runs the service that erases the content of deleted sessions, and stored objects that nothing needs.
package main

import (
	"context"
	"os"

	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/session/janitor"
)

// cli holds the parsed command line of the janitor.
type cli struct {
	daemon.Settings
	daemon.LogSettings
	janitor.Config
}

func main() {
	var c cli
	os.Exit(daemon.RunService("janitor", "Removes the content of deleted sessions, and what no session needs, for good.", jslog.RoleContributor, &c, &c.Settings,
		func(ctx context.Context, env daemon.Env) error {
			j, err := janitor.New(c.Config, janitor.Deps{NATS: env.NATS, Log: env.Log, Logger: env.Logger, Metrics: env.Metrics})
			if err != nil {
				return err
			}
			pool, err := readmodel.Open(ctx, c.DatabaseURL)
			if err != nil {
				return err
			}
			defer pool.Close()
			env.Health.AddCheck("read models", func(ctx context.Context) error { return readmodel.CheckMigrated(ctx, pool) })
			return j.Run(ctx)
		}))
}
