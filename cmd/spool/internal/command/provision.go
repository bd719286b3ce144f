package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// provisionShards is the number of shards of the log that "spool provision" creates, for services that run in
	// separate processes. "spool up" runs all services in one process and uses fewer.
	provisionShards = 4
	// provisionTimeout is the time limit for creating the streams after NATS has responded.
	provisionTimeout = time.Minute
	// connectRetryPause is the pause between two attempts to connect to NATS.
	connectRetryPause = 250 * time.Millisecond
)

type provisionCommand struct {
	NATSURL      string `name:"nats-url" default:"${daemon_NATSURL}" env:"SPOOL_NATS_URL" help:"URL of NATS."`
	NATSUser     string `name:"nats-user" env:"SPOOL_NATS_USER" help:"NATS user that may create streams: admin. Empty for a server without users."`
	NATSPassword string `name:"nats-password" env:"SPOOL_NATS_PASSWORD" help:"Password of the NATS user."`
	NATSCA       string `name:"nats-ca" env:"SPOOL_NATS_CA" placeholder:"FILE" help:"PEM file of the authorities that NATS's certificate is checked against; with it the connection always has TLS."`
	LogKeys      string `name:"log-keys" env:"SPOOL_LOG_KEYS" help:"Keys that sign the commits of the log, role:key, separated by commas. Once keys are set, all new commits must be signed: stop services of earlier releases first. Empty changes nothing."`
	LogKeysLost  bool   `help:"With --log-keys, if a key that signed commits is permanently lost: accept all present commits of the log as they are. Stop all services first, and run spool verify afterwards."`
	Commits      int    `name:"commit-version" default:"0" env:"SPOOL_COMMIT_VERSION" help:"Version of the commits that services write from their next start on. Use 1 while services of releases that support only version 1 still run. 0 means the newest version. The version never decreases."`
	Shards       int    `default:"0" env:"SPOOL_SHARDS" help:"Number of streams of the log: 1, 2, 4 or 8. It cannot be changed later. 0 means the installed number, or 4 for a new installation."`
	Partitions   int    `default:"0" env:"SPOOL_PARTITIONS" help:"Number of partitions of the log, each of which a projector reads as one group: 1, 2, 4, 8, 16, 32 or 64, and not less than the number of shards. It cannot be changed later. 0 means the installed number, or 8 for a new installation."`
	Replicas     int    `default:"0" env:"SPOOL_REPLICAS" help:"Replicas of each stream, 1 to 5. 0 means the installed number, or 1 for a new installation."`
	textAgeFlag
	Wait time.Duration `default:"1m" env:"SPOOL_PROVISION_WAIT" help:"How long to wait for NATS."`
	JSON bool          `help:"Print one JSON object."`
}

// Run creates or updates the streams and buckets of an installation on NATS.
func (c *provisionCommand) Run(a *app) error {
	if err := c.checkFlags(); err != nil {
		return err
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	nc, err := c.connectNATS(ctx)
	if err != nil {
		return contextCause(ctx, err)
	}
	defer nc.Close()
	work, done := context.WithTimeout(ctx, provisionTimeout)
	defer done()
	layout, err := c.provisionLog(work, nc)
	if err != nil {
		return contextCause(ctx, err)
	}
	if c.JSON {
		return a.printJSON(map[string]any{"natsUrl": nc.ConnectedUrlRedacted(), "shards": layout.Shards, "partitions": layout.Partitions.PartitionCount()})
	}
	_, err = terminal.Fprintf(a.Out, "provisioned %s: the log has %d streams and %d partitions\n", nc.ConnectedUrlRedacted(), layout.Shards, layout.Partitions.PartitionCount())
	return err
}

// checkFlags returns a usage error if flags of the command are invalid.
func (c *provisionCommand) checkFlags() error {
	switch {
	case c.LogKeysLost && c.LogKeys == "":
		return usageError("log-keys-lost: set the new signing keys with --log-keys")
	case c.Shards < 0 || c.Shards > topology.MaxShards || c.Shards > 0 && topology.MaxShards%c.Shards != 0:
		return usageError("shards: %d must be 1, 2, 4 or 8, or 0 for the installed number", c.Shards)
	case c.Partitions != 0 && events.CheckPartitions(c.Partitions) != nil:
		return usageError("partitions: %d must be 1, 2, 4, 8, 16, 32 or 64, or 0 for the installed number", c.Partitions)
	case c.Replicas < 0 || c.Replicas > 5:
		return usageError("replicas: %d must be 1 to 5, or 0 for the installed number", c.Replicas)
	case c.Commits < 0 || c.Commits > events.CommitVersion:
		return usageError("commit-version: %d must be 1 to %d, or 0 for the newest", c.Commits, events.CommitVersion)
	case c.Wait < 0:
		return usageError("wait: %s is negative", c.Wait)
	}
	return c.checkTextAge()
}

// textAgeFlag is the flag that sets how long NATS keeps the deltas of text.
type textAgeFlag struct {
	TextAge time.Duration `default:"24h" env:"SPOOL_TEXT_AGE" help:"How long text in flight is stored, at least a minute. Replays show it until then; a client that joins a block that is open for longer gets the block's text when it is complete. The text in flight of deleted sessions is removed after this time too."`
}

// checkTextAge returns a usage error if the flag is invalid.
func (f textAgeFlag) checkTextAge() error {
	if f.TextAge < topology.MinDeltasMaxAge {
		return usageError("text-age: %s is less than %s", f.TextAge, topology.MinDeltasMaxAge)
	}
	return nil
}

// connectNATS connects to NATS, and retries until NATS responds. It returns an error at once if NATS rejects the
// credentials.
func (c *provisionCommand) connectNATS(ctx context.Context) (*nats.Conn, error) {
	options := append(bus.ConnOptions(slog.New(slog.DiscardHandler)), nats.Name("spool-provision"), nats.Timeout(natsDialTimeout))
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
			return nil, fmt.Errorf("nats-user: NATS rejects user %q: check --nats-user and --nats-password", c.NATSUser)
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-late.C:
			return nil, fmt.Errorf("nats-url: NATS did not respond within %s: %w; check that it runs, --nats-url and --nats-ca", c.Wait, err)
		case <-time.After(connectRetryPause):
		}
	}
}

// provisionLog creates or updates all streams and buckets, and returns the layout of the log.
func (c *provisionCommand) provisionLog(ctx context.Context, nc *nats.Conn) (layout topology.Layout, err error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return layout, fmt.Errorf("jetstream: %w", err)
	}
	keys, err := eventlog.ParseKeys(c.LogKeys, "")
	if err != nil {
		return layout, err
	}
	if !keys.IsZero() && keys.MissingRole() != "" {
		return layout, fmt.Errorf("log-keys: the keys contain no key of %s", keys.MissingRole())
	}
	// Provision rejects numbers that differ from the installed ones.
	cfg := topology.ProvisionConfig{Shards: c.Shards, Partitions: c.Partitions, Replicas: c.Replicas, DeltasAge: c.TextAge, KeyIDs: keys.KeyIDs(), KeysLost: c.LogKeysLost, CommitVersion: c.Commits}
	if installed, err := topology.IsInstalled(ctx, js); err != nil {
		return layout, err
	} else if !installed {
		cfg.Partitions = cmp.Or(c.Partitions, topology.DefaultPartitions)
		cfg.Shards = cmp.Or(c.Shards, min(provisionShards, cfg.Partitions))
	}
	if err := topology.Provision(ctx, js, cfg); err != nil {
		return layout, err
	}
	return topology.ReadLayout(ctx, js)
}
