// Package daemon is the frame around a service's process: settings from flags
// and SPOOL_* variables, the logger, the connection to NATS, and a stop on
// SIGINT or SIGTERM.
package daemon

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"os/signal"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/topology"
)

// Settings are what every service takes.
type Settings struct {
	NATSURL      string     `name:"nats-url" default:"nats://127.0.0.1:4222" env:"SPOOL_NATS_URL" help:"Where NATS listens."`
	NATSUser     string     `name:"nats-user" env:"SPOOL_NATS_USER" help:"User at NATS; empty for a server without users."`
	NATSPassword string     `name:"nats-password" env:"SPOOL_NATS_PASSWORD" help:"Password at NATS."`
	LogLevel     slog.Level `default:"info" env:"SPOOL_LOG_LEVEL" help:"The least severe level that is logged: debug, info, warn or error."`
}

// Env is what a service is handed.
type Env struct {
	NATS   *nats.Conn
	Log    eventlog.Log
	Logger *slog.Logger
}

// Main parses settings into cli, a pointer to a struct that embeds Settings,
// then connects and runs the service until it ends or the process is told to.
// It returns the exit code: 0, 1 for a failure, 2 for wrong usage.
func Main(name, doc string, cli any, settings *Settings, run func(context.Context, Env) error) int {
	return start(name, doc, cli, settings, run, openLog)
}

// MainWithoutLog is Main for a service whose NATS user may not read the log: Env.Log is nil.
func MainWithoutLog(name, doc string, cli any, settings *Settings, run func(context.Context, Env) error) int {
	return start(name, doc, cli, settings, run, func(context.Context, *nats.Conn, *slog.Logger) (eventlog.Log, error) { return nil, nil })
}

// opener opens the log.
type opener func(context.Context, *nats.Conn, *slog.Logger) (eventlog.Log, error)

func start(name, doc string, cli any, settings *Settings, run func(context.Context, Env) error, open opener) int {
	parser, err := kong.New(cli, kong.Name(name), kong.Description(doc), kong.UsageOnError())
	if err != nil {
		return fail(os.Stderr, name, err, 2)
	}
	if _, err := parser.Parse(os.Args[1:]); err != nil {
		return fail(os.Stderr, name, err, 2)
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	env, err := dial(ctx, name, *settings, open)
	if err == nil {
		defer env.NATS.Close()
		err = run(ctx, env)
	}
	if err != nil && !(errors.Is(err, context.Canceled) && ctx.Err() != nil) {
		return fail(os.Stderr, name, err, 1)
	}
	return 0
}

func fail(w io.Writer, name string, err error, code int) int {
	fmt.Fprintf(w, "%s: %v\n", name, err)
	return code
}

// dial connects to NATS and opens the log. It waits for NATS, and for its
// streams to be installed, since services start in any order.
func dial(ctx context.Context, name string, s Settings, open opener) (Env, error) {
	logger := slog.New(slog.NewJSONHandler(os.Stderr, &slog.HandlerOptions{Level: s.LogLevel})).With("service", name)
	options := append(bus.ConnOptions(logger), nats.Name("spool-"+name))
	if s.NATSUser != "" {
		options = append(options, nats.UserInfo(s.NATSUser, s.NATSPassword), nats.CustomInboxPrefix(topology.InboxPrefix(s.NATSUser)))
	}
	nc, err := nats.Connect(s.NATSURL, append(options, nats.RetryOnFailedConnect(true))...)
	if err != nil {
		return Env{}, fmt.Errorf("nats-url: connect to %s: %w", s.NATSURL, err)
	}
	log, err := open(ctx, nc, logger)
	if err != nil {
		nc.Close()
		return Env{}, err
	}
	return Env{NATS: nc, Log: log, Logger: logger}, nil
}

// openLog waits until the log's streams are there.
func openLog(ctx context.Context, nc *nats.Conn, logger *slog.Logger) (eventlog.Log, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, fmt.Errorf("jetstream: %w", err)
	}
	for said := false; ; said = true {
		try, cancel := context.WithTimeout(ctx, 2*time.Second)
		shards, err := topology.Shards(try, js)
		cancel()
		if err == nil {
			return jslog.New(jslog.Config{JetStream: js, Shards: shards, Logger: logger})
		}
		if !said {
			logger.Info("waiting for NATS and its streams", "reason", err.Error())
		}
		select {
		case <-ctx.Done():
			return nil, ctx.Err()
		case <-time.After(500 * time.Millisecond):
		}
	}
}
