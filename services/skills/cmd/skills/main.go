// Command skills is the skills service.
package main

import (
	"context"
	"os"

	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/services/skills"
)

// cli holds the parsed command line of the skills service.
type cli struct {
	daemon.Settings
	daemon.LogSettings
	skills.Config
}

func main() {
	var c cli
	os.Exit(daemon.RunService("skills", "Checks and keeps skills.", jslog.RoleContributor, &c, &c.Settings,
		func(ctx context.Context, env daemon.Env) error {
			s, err := skills.New(c.Config, skills.Deps{NATS: env.NATS, Log: env.Log, Logger: env.Logger, Metrics: env.Metrics})
			if err != nil {
				return err
			}
			env.Health.AddChannelCheck("commands", s.Ready())
			return s.Run(ctx)
		}))
}
