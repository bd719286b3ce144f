// Command projector runs the projector, which folds the log into Postgres.
package main

import (
	"context"
	"os"

	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector"
)

// cli holds the parsed command line of the projector.
type cli struct {
	daemon.Settings
	daemon.LogSettings
	projector.Config
}

func main() {
	var c cli
	os.Exit(daemon.RunService("projector", "Folds the log into the read models in Postgres.", jslog.RoleVerifier, &c, &c.Settings,
		func(ctx context.Context, env daemon.Env) error {
			p, err := projector.New(c.Config, projector.Deps{NATS: env.NATS, Log: env.Log, Logger: env.Logger, Metrics: env.Metrics})
			if err != nil {
				return err
			}
			pool, err := readmodel.Open(ctx, c.DatabaseURL)
			if err != nil {
				return err
			}
			defer pool.Close()
			env.Health.AddCheck("read models", func(ctx context.Context) error { return readmodel.AwaitCaughtUp(ctx, pool, env.Partitions) })
			return p.Run(ctx)
		}))
}
