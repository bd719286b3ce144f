// Command executor is the executor service.
package main

import (
	"context"
	"os"

	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/services/executor"
)

type cli struct {
	daemon.Settings
	daemon.LogSettings
	executor.Config
}

func main() {
	var c cli
	os.Exit(daemon.RunService("executor", "Runs agents: claims executions, holds their sandboxes, follows them into the log.", jslog.RoleWriter, &c, &c.Settings,
		func(ctx context.Context, env daemon.Env) error {
			e, err := executor.New(c.Config, executor.Deps{NATS: env.NATS, Log: env.Log, Logger: env.Logger, Metrics: env.Metrics})
			if err != nil {
				return err
			}
			env.Logger.Info("starting", "executor", e.ID())
			env.Health.AddChannelCheck("jobs", e.Ready())
			return e.Run(ctx)
		}))
}
