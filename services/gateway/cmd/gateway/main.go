// Command gateway runs the gateway, the service that clients connect to.
package main

import (
	"context"
	"os"

	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/gateway"
)

// cli is the command line of the gateway: its flags and environment variables.
type cli struct {
	daemon.Settings
	gateway.Config
	gateway.Database
}

// HealthListen returns the address on which the gateway serves its own readiness.
func (c *cli) HealthListen() (addr string, tls bool) { return c.Listen, c.TLSCert != "" }

func main() {
	var c cli
	os.Exit(daemon.RunServiceWithoutLog("gateway", "Serves clients: REST, SSE, WebSocket and gRPC.", &c, &c.Settings,
		func(ctx context.Context, env daemon.Env) error {
			pool, err := readmodel.Open(ctx, c.DatabaseURL)
			if err != nil {
				return err
			}
			defer pool.Close()
			deps := gateway.Deps{NATS: env.NATS, Pool: pool, Logger: env.Logger, Metrics: env.Metrics}
			stopWaiting, err := gateway.ServeWaiting(ctx, c.Config, deps)
			if err != nil {
				return err
			}
			deps.Partitions, err = daemon.AwaitPartitions(ctx, env.NATS, env.Logger)
			stopWaiting()
			if err != nil {
				return err
			}
			g, err := gateway.New(c.Config, deps)
			if err != nil {
				return err
			}
			env.Health.AddChannelCheck("clients", g.Ready())
			return g.Run(ctx)
		}))
}
