package command

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// provisionShards is the number of streams of a new log: services that run apart are there for more than one machine's load.
	provisionShards = 4
	// provisionTime bounds the work itself, once NATS answers.
	provisionTime = time.Minute
	// provisionPause lies between two tries to reach NATS.
	provisionPause = 250 * time.Millisecond
)

type provisionCommand struct {
	NATSURL      string        `name:"nats-url" default:"nats://127.0.0.1:4222" env:"SPOOL_NATS_URL" help:"Where NATS listens."`
	NATSUser     string        `name:"nats-user" env:"SPOOL_NATS_USER" help:"User at NATS that may make streams: admin. Empty for a server without users."`
	NATSPassword string        `name:"nats-password" env:"SPOOL_NATS_PASSWORD" help:"Password at NATS."`
	NATSCA       string        `name:"nats-ca" env:"SPOOL_NATS_CA" placeholder:"FILE" help:"PEM file of the authorities that NATS's certificate is checked against; with it the connection always has TLS."`
	LogKeys      string        `name:"log-keys" env:"SPOOL_LOG_KEYS" help:"Keys that commits of the log are signed with, role:key, separated by commas. From the first time that they are given, what services write has to be signed: stop services of earlier releases before. Empty changes nothing."`
	LogKeysLost  bool          `help:"With --log-keys, when a key that signed commits is lost for good: takes all commits that the log holds now as they are. Stop all services before, and look at what verify says after."`
	Commits      int           `name:"commit-version" default:"0" env:"SPOOL_COMMIT_VERSION" help:"Version of the commits that services write from their next start on: 1 as long as services of releases that know no other still run. 0 means the newest. It never goes down."`
	Shards       int           `default:"0" env:"SPOOL_SHARDS" help:"Streams that the log is spread over: 1, 2, 4 or 8, for good. 0 means what is installed, else 4."`
	Replicas     int           `default:"0" env:"SPOOL_REPLICAS" help:"Copies of each stream, 1 to 5. 0 means what is installed, else 1."`
	Wait         time.Duration `default:"1m" env:"SPOOL_PROVISION_WAIT" help:"How long to wait for NATS to answer."`
	JSON         bool          `help:"Print one JSON object."`
}

// Run installs the streams and buckets, or brings them up to date.
func (c *provisionCommand) Run(a *app) error {
	if err := c.check(); err != nil {
		return err
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	nc, err := c.connect(ctx)
	if err != nil {
		return causeOf(ctx, err)
	}
	defer nc.Close()
	work, done := context.WithTimeout(ctx, provisionTime)
	defer done()
	shards, err := c.provision(work, nc)
	if err != nil {
		return causeOf(ctx, err)
	}
	if c.JSON {
		return a.json(map[string]any{"natsUrl": nc.ConnectedUrlRedacted(), "shards": shards})
	}
	_, err = fmt.Fprintf(a.Out, "provisioned %s: the log lies in %d streams\n", nc.ConnectedUrlRedacted(), shards)
	return err
}

func (c *provisionCommand) check() error {
	switch {
	case c.LogKeysLost && c.LogKeys == "":
		return usage("log-keys-lost: give the keys that commits are signed with from now on, with --log-keys")
	case c.Shards < 0 || c.Shards > topology.MaxShards || c.Shards > 0 && topology.MaxShards%c.Shards != 0:
		return usage("shards: %d must be 1, 2, 4 or 8, or 0 for what is installed", c.Shards)
	case c.Replicas < 0 || c.Replicas > 5:
		return usage("replicas: %d must be 1 to 5, or 0 for what is installed", c.Replicas)
	case c.Commits < 0 || c.Commits > events.CommitVersion:
		return usage("commit-version: %d must be 1 to %d, or 0 for the newest", c.Commits, events.CommitVersion)
	case c.Wait < 0:
		return usage("wait: %s is negative", c.Wait)
	}
	return nil
}

// connect waits for NATS. A user that it refuses is not waited for.
func (c *provisionCommand) connect(ctx context.Context) (*nats.Conn, error) {
	options := append(bus.ConnOptions(slog.New(slog.DiscardHandler)), nats.Name("spool-provision"), nats.Timeout(dialTimeout))
	if c.NATSUser != "" {
		options = append(options, nats.UserInfo(c.NATSUser, c.NATSPassword), nats.CustomInboxPrefix(topology.InboxPrefix(c.NATSUser)))
	}
	secure, err := bus.TLSOptions(c.NATSCA)
	if err != nil {
		return nil, err
	}
	options = append(options, secure...)
	late := time.NewTimer(c.Wait)
	defer late.Stop()
	for {
		nc, err := nats.Connect(c.NATSURL, options...)
		if err == nil {
			return nc, nil
		}
		if errors.Is(err, nats.ErrAuthorization) {
			return nil, fmt.Errorf("nats-user: NATS refuses user %q: check --nats-user and --nats-password", c.NATSUser)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-late.C:
			return nil, fmt.Errorf("nats-url: NATS has not answered within %s: %w; check that it runs, --nats-url and --nats-ca", c.Wait, err)
		case <-time.After(provisionPause):
		}
	}
}

// provision installs everything and gives the number of shards.
func (c *provisionCommand) provision(ctx context.Context, nc *nats.Conn) (int, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return 0, fmt.Errorf("jetstream: %w", err)
	}
	keys, err := eventlog.ParseKeys(c.LogKeys, "")
	if err != nil {
		return 0, err
	}
	if !keys.IsZero() && keys.Missing() != "" {
		return 0, fmt.Errorf("log-keys: no key of %s is among them", keys.Missing())
	}
	shards, err := topology.Shards(ctx, js)
	switch {
	case errors.Is(err, topology.ErrNotInstalled) && c.Shards == 0:
		shards = provisionShards
	case errors.Is(err, topology.ErrNotInstalled) || err == nil && c.Shards != 0:
		shards = c.Shards // another number than what is installed is Provision's to refuse
	case err != nil:
		return 0, err
	}
	return shards, topology.Provision(ctx, js, topology.Config{Shards: shards, Replicas: c.Replicas, KeyIDs: keys.KeyIDs(), KeysLost: c.LogKeysLost, CommitVersion: c.Commits})
}
