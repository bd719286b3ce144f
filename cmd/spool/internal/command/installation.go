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
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/topology"
)

// natsDialTimeout is the maximum time for connecting to NATS.
const natsDialTimeout = 5 * time.Second

// installationFlags are the flags of commands that read and write the log and the database directly, without a gateway.
type installationFlags struct {
	NATSURL      string `name:"nats-url" env:"SPOOL_NATS_URL" placeholder:"URL" help:"NATS of the installation; by default that of the stack on the data folder, or the data folder itself if no stack runs."`
	NATSUser     string `name:"nats-user" env:"SPOOL_NATS_USER" help:"NATS user that may read the log, such as admin."`
	NATSPassword string `name:"nats-password" env:"SPOOL_NATS_PASSWORD" help:"Password of the NATS user."`
	NATSCA       string `name:"nats-ca" env:"SPOOL_NATS_CA" placeholder:"FILE" help:"With --nats-url: PEM file of the authorities that NATS's certificate is checked against; the connection then always has TLS."`
	LogKeys      string `name:"log-keys" env:"SPOOL_LOG_KEYS" help:"With --nats-url: the keys that sign the commits of the log, role:key, separated by commas."`
	Data         string `env:"SPOOL_DATA_DIR" placeholder:"DIR" help:"Data folder of the installation; by default spool in the user's data folder."`
	JSON         bool   `help:"Print one JSON object per line."`
}

// openInstallation opens the log and the database of the installation that the flags name. If database is not empty, it
// is the URL of the database to open instead.
func (i installationFlags) openInstallation(ctx context.Context, a *app, database string) (Installation, error) {
	if i.NATSURL != "" {
		secure, err := bus.TLSOptions(i.NATSCA)
		if err != nil {
			return Installation{}, err
		}
		return i.dialInstallation(ctx, i.NATSURL, database, i.LogKeys, secure...)
	}
	dir, err := dataDirOrDefault(a, i.Data)
	if err != nil {
		return Installation{}, err
	}
	running, ok, err := a.Local.Find(dir)
	if err != nil {
		return Installation{}, err
	}
	if ok {
		if database == "" {
			database = running.DatabaseURL
		}
		return i.dialInstallation(ctx, running.NATSURL, database, running.LogKeys)
	}
	opened, err := a.Local.Open(ctx, StackOptions{DataDir: dir, DatabaseURL: database})
	if errors.Is(err, ErrDataFolderLocked) {
		return Installation{}, fmt.Errorf("data: %w and is not ready yet: try again later, or set its --nats-url", err)
	}
	return opened, err
}

// dialInstallation connects to the NATS server at url, and opens the log on it and the database.
func (i installationFlags) dialInstallation(ctx context.Context, url, database, logKeys string, secure ...nats.Option) (Installation, error) {
	// Commands that write to the log from here do the work of the janitor.
	keys, err := eventlog.ParseKeys(logKeys, topology.UserJanitor)
	if err != nil {
		return Installation{}, err
	}
	options := append([]nats.Option{nats.Name("spool-cli"), nats.Timeout(natsDialTimeout)}, secure...)
	if i.NATSUser != "" {
		options = append(options, nats.UserInfo(i.NATSUser, i.NATSPassword), nats.CustomInboxPrefix(topology.InboxPrefix(i.NATSUser)))
	}
	nc, err := nats.Connect(url, append(bus.ConnOptions(slog.New(slog.DiscardHandler)), options...)...)
	if err != nil {
		return Installation{}, fmt.Errorf("nats-url: cannot reach NATS: %w; check that it runs, and --nats-url, --nats-ca, --nats-user and --nats-password", err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return Installation{}, fmt.Errorf("jetstream: %w", err)
	}
	try, cancel := context.WithTimeout(ctx, natsDialTimeout)
	defer cancel()
	layout, err := topology.ReadLayout(try, js)
	if err != nil {
		nc.Close()
		return Installation{}, fmt.Errorf("nats-url: %w", err)
	}
	signing, err := jslog.CheckSigning(try, js, layout.Shards, keys, jslog.RoleWriter)
	if err != nil {
		nc.Close()
		return Installation{}, err
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: layout.Shards, Partitions: layout.Partitions, Keys: keys, Signing: signing, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		nc.Close()
		return Installation{}, err
	}
	return Installation{Log: log, NATS: nc, DatabaseURL: database, Close: func() error { nc.Close(); return nil }}, nil
}
