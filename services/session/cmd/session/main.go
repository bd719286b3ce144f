// Command session is the session service.
package main

import (
	"context"
	"os"

	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/services/session"
)

// cli holds the parsed command line of the session service.
type cli struct {
	daemon.Settings
	daemon.LogSettings
	session.Config
	session.ConsumerGate
}

func main() {
	var c cli
	os.Exit(daemon.RunService("session", "Owns the life of sessions: commands, queue, timers.", jslog.RoleWriter, &c, &c.Settings,
		func(ctx context.Context, env daemon.Env) error {
			stop, err := c.Serve(c.NATSURL, c.NATSCA, env.Logger)
			if err != nil {
				return err
			}
			defer stop()
			s, err := session.New(c.Config, session.Deps{NATS: env.NATS, Log: env.Log, Logger: env.Logger, Metrics: env.Metrics})
			if err != nil {
				return err
			}
			env.Health.AddChannelCheck("commands", s.Ready())
			return s.Run(ctx)
		}))
}
