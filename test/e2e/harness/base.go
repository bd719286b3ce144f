package harness

import (
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/cmd/spool/stack"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/pkg/readmodel/readmodeltest"
	"github.com/spoolhq/spool/pkg/topology"
)

// Servers holds the connections to the NATS and Postgres servers that the services of a Cluster use, and the addresses
// of these servers.
type Servers struct {
	DatabaseURL        string       // with the role of the projector
	GatewayDatabaseURL string       // with the role of the gateway
	NATSURL            string       // address of NATS; no sandbox may reach it
	Log                eventlog.Log // with the rights of admin
	// Connect opens a connection with a user's rights, and the log over it.
	Connect func(user string) (*nats.Conn, eventlog.Log, error)
}

// Outage stops and starts the NATS and Postgres servers of a Cluster, to test how Spool behaves while they are not
// available.
type Outage struct {
	nats     *natstest.RestartableServer
	postgres *pgtest.RestartableServer
}

// startServers starts NATS and Postgres. With Options.Outages the test can stop them, and NATS has no users. Otherwise
// NATS has the users that it has in `spool up`.
func (c *Cluster) startServers() {
	c.T.Helper()
	if c.opts.Outages {
		c.startRestartableServers()
		return
	}
	db := readmodeltest.NewDatabase(c.T)
	base, err := stack.OpenStorage(c.T.Context(), stack.Config{
		DataDir: c.opts.DataDir, DatabaseURL: db.Projector, MaxStore: c.opts.MaxStore, Logger: natstest.Logger(c.T),
	})
	requireNoError(c.T, err)
	c.T.Cleanup(func() { assertNoError(c.T, base.Close()) })
	c.Servers = &Servers{DatabaseURL: db.Projector, GatewayDatabaseURL: db.Gateway, Log: base.Log, Connect: base.Connect, NATSURL: base.NATSURL()}
}

// startRestartableServers starts NATS and Postgres in such a way that Cluster.Outage can stop them.
func (c *Cluster) startRestartableServers() {
	o := &Outage{nats: natstest.RunRestartable(c.T), postgres: pgtest.RunRestartable(c.T)}
	c.Outage = o
	connect := func(string) (*nats.Conn, eventlog.Log, error) {
		nc := o.nats.Conn()
		js, err := jetstream.New(nc)
		if err != nil {
			return nil, nil, err
		}
		log, err := jslog.New(jslog.Config{JetStream: js})
		return nc, log, err
	}
	db := readmodeltest.CreateRoles(c.T, o.postgres.URL())
	c.Servers = &Servers{DatabaseURL: db.Projector, GatewayDatabaseURL: db.Gateway, Connect: connect, NATSURL: o.nats.URL()}
	nc, log, err := connect("")
	requireNoError(c.T, err)
	js, err := jetstream.New(nc)
	requireNoError(c.T, err)
	requireNoError(c.T, topology.Provision(c.T.Context(), js, topology.ProvisionConfig{}))
	c.Servers.Log = log
}

// StopNATS stops the cluster's NATS server. StartNATS starts it again.
func (o *Outage) StopNATS() { o.nats.Stop() }

// StartNATS starts the cluster's NATS server again, with the same port and folder.
func (o *Outage) StartNATS() { o.nats.Start() }

// StopPostgres stops the cluster's Postgres server. StartPostgres starts it again.
func (o *Outage) StopPostgres() { o.postgres.Stop() }

// StartPostgres starts the cluster's Postgres server again, at the same address.
func (o *Outage) StartPostgres() { o.postgres.Start() }
