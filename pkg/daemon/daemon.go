// Package daemon provides the main function of a service: settings from flags and SPOOL_* variables, the logger,
// the connection to NATS, health and metrics over HTTP, and a graceful stop on SIGINT or SIGTERM.
package daemon

import (
	"context"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/url"
	"os"
	"os/signal"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/alecthomas/kong"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/pkg/topology"
)

// Settings are the settings that every service has.
type Settings struct {
	NATSURL       string `name:"nats-url" default:"nats://127.0.0.1:4222" env:"SPOOL_NATS_URL" help:"URL of NATS."`
	NATSUser      string `name:"nats-user" env:"SPOOL_NATS_USER" help:"NATS user; empty for a server without users."`
	NATSPassword  string `name:"nats-password" env:"SPOOL_NATS_PASSWORD" help:"Password of the NATS user."`
	NATSCA        string `name:"nats-ca" env:"SPOOL_NATS_CA" help:"PEM file of the authorities that verify the certificate of NATS. If it is set, the connection always uses TLS; otherwise TLS is used if NATS requires it, with the system's authorities."`
	MetricsListen string `default:"" env:"SPOOL_METRICS_LISTEN" help:"Address of /healthz, /readyz and /metrics, such as 127.0.0.1:9090; empty means none."`
	settings.Logging
}

// LogSettings are the additional settings of a service that opens the log. A service's command line embeds them.
type LogSettings struct {
	LogKeys string `name:"log-keys" default:"" env:"SPOOL_LOG_KEYS" help:"Keys that sign and verify the commits of the log, role:key, separated by commas; older keys of a role follow its first key after plus signs. Empty for a log that is not signed."`
}

func (s *LogSettings) logKeys() string { return s.LogKeys }

// Env holds everything that RunService passes to a service: connection, log, logger and registries.
type Env struct {
	NATS *nats.Conn
	Log  eventlog.Log
	// Partitions describes the distribution of ids over the partitions of the log; not set by RunServiceWithoutLog.
	Partitions events.Partitioning
	Logger     *slog.Logger
	Health     *Health               // checks of /readyz; the service adds its own
	Metrics    prometheus.Registerer // metrics of /metrics; the service adds its own
}

// LogCommandLine is implemented by pointers to structs that embed LogSettings.
type LogCommandLine interface{ logKeys() string }

// RunService runs the program of a service. It parses settings into cli, a pointer to a struct that embeds Settings and
// LogSettings, then connects to NATS and calls run until run returns or the process receives a signal. It returns the
// exit code: 0, 1 for a failure, 2 for invalid arguments.
//
// With `health` as the first argument RunService requests the readiness of the process that runs with the same
// settings, prints the components that are not ready, and returns 0 or 1.
func RunService(name, doc string, use jslog.Role, cli LogCommandLine, settings *Settings, run func(context.Context, Env) error) int {
	p := serviceProgram{name: name, doc: doc, cli: cli, settings: settings, run: run, open: logOpener{name, use, cli}.open}
	return p.runMain(os.Args[1:], os.Stdout, os.Stderr)
}

// RunServiceWithoutLog is like RunService for a service whose NATS user may not read the log: Env.Log is nil, and
// RunServiceWithoutLog does not wait for the streams. The service calls AwaitPartitions instead.
func RunServiceWithoutLog(name, doc string, cli any, settings *Settings, run func(context.Context, Env) error) int {
	p := serviceProgram{name: name, doc: doc, cli: cli, settings: settings, run: run, open: openNoLog}
	return p.runMain(os.Args[1:], os.Stdout, os.Stderr)
}

// serviceProgram describes the program of a service: its command line, and the function that runs the service.
type serviceProgram struct {
	name, doc string
	cli       any
	settings  *Settings
	run       func(context.Context, Env) error
	open      logOpenFunc
}

// logOpenFunc is a function that waits for the streams of the log, opens the log, and returns it with the partitioning
// of its ids.
type logOpenFunc func(context.Context, *nats.Conn, *slog.Logger) (eventlog.Log, events.Partitioning, error)

func (p *serviceProgram) runMain(args []string, stdout, stderr io.Writer) int {
	fail := func(err error, code int) int {
		fmt.Fprintf(stderr, "%s: %v\n", p.name, err)
		return code
	}
	asked := len(args) > 0 && args[0] == "health"
	if asked {
		args = args[1:]
	}
	doc := p.doc + fmt.Sprintf(" `%s health` asks the process that runs with the same settings whether it is ready, and exits with 0 or 1.", p.name)
	parser, err := kong.New(p.cli, kong.Name(p.name), kong.Description(doc), kong.UsageOnError(), kong.Writers(stdout, stderr))
	if err != nil {
		return fail(err, 2)
	}
	if asked {
		// Settings that a service requires to run are not required to ask one.
		for _, flag := range parser.Model.AllFlags(false) {
			for _, f := range flag {
				f.Required = false
			}
		}
	}
	if _, err := parser.Parse(args); err != nil {
		return fail(err, 2)
	}
	SetGCPercent()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGINT, syscall.SIGTERM)
	defer stop()
	if asked {
		addr, secure := p.healthAddress()
		if err := requestHealth(ctx, addr, secure); err != nil {
			return fail(err, 1)
		}
		return 0
	}
	if err := p.serve(ctx, stderr); err != nil && !(errors.Is(err, context.Canceled) && ctx.Err() != nil) {
		return fail(err, 1)
	}
	return 0
}

// HealthListener is implemented by a service's settings if the service serves /readyz on a listener of its own.
type HealthListener interface {
	HealthListen() (addr string, tls bool) // returns its address, and whether it uses TLS
}

func (p *serviceProgram) healthAddress() (addr string, tls bool) {
	if own, ok := p.cli.(HealthListener); ok {
		return own.HealthListen()
	}
	return p.settings.MetricsListen, false
}

// serve listens, connects to NATS, opens the log and runs the service. It waits for NATS and for its streams, since
// services start in any order.
func (p *serviceProgram) serve(ctx context.Context, stderr io.Writer) (err error) {
	s := *p.settings
	logger := slog.New(slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: s.LogLevel})).With("service", p.name)
	metrics := newMetricsRegistry()
	env := Env{Logger: logger, Health: &Health{}, Metrics: metrics}
	if s.MetricsListen != "" {
		status, err := startStatusServer(ctx, s.MetricsListen, env.Health, metrics, logger)
		if err != nil {
			return err
		}
		defer status.shutdown()
	}
	if env.NATS, err = p.connect(logger); err != nil {
		return err
	}
	defer env.NATS.Close()
	RegisterConnectionMetrics(metrics, env.NATS)
	defer p.logConnectFailures(ctx, env.NATS, logger)()
	env.Health.AddCheck("nats", func(ctx context.Context) error { return CheckNATS(ctx, env.NATS) })
	opened := env.Health.FailUntilDone("streams", "NATS did not respond, or its streams are not installed")
	if env.Log, env.Partitions, err = p.open(ctx, env.NATS, logger); err != nil {
		return err
	}
	opened()
	return p.run(ctx, env)
}

func (p *serviceProgram) connect(logger *slog.Logger) (*nats.Conn, error) {
	s := p.settings
	options := append(bus.ConnOptions(logger), nats.Name("spool-"+p.name))
	if s.NATSUser != "" {
		options = append(options, nats.UserInfo(s.NATSUser, s.NATSPassword), nats.CustomInboxPrefix(topology.InboxPrefix(s.NATSUser)))
	}
	secure, err := bus.TLSOptions(s.NATSCA)
	if err != nil {
		return nil, err
	}
	options = append(append(options, secure...), nats.RetryOnFailedConnect(true))
	nc, err := nats.Connect(s.NATSURL, options...)
	if err != nil {
		return nil, fmt.Errorf("nats-url: connect to %s: %w", s.NATSURL, err)
	}
	return nc, nil
}

// connectCheckInterval is the interval between two checks of a NATS connection that is being established.
const connectCheckInterval = time.Second

// logConnectFailures logs why attempts to connect to NATS fail, for example because of an expired certificate. It logs
// each reason once until the connection is up. nats.go has no callback for a failed handshake. Logging ends with ctx or
// when stop is called; stop blocks until it has ended.
func (p *serviceProgram) logConnectFailures(ctx context.Context, nc *nats.Conn, logger *slog.Logger) (stop func()) {
	ctx, cancel := context.WithCancel(ctx)
	var done sync.WaitGroup
	done.Go(func() {
		tick := time.NewTicker(connectCheckInterval)
		defer tick.Stop()
		last := ""
		for {
			select {
			case <-ctx.Done():
				return
			case <-tick.C:
			}
			if nc.IsConnected() {
				last = ""
				continue
			}
			if reason := errorWithoutTime(nc.LastError()); reason != "" && reason != last {
				last = reason
				logger.Warn("NATS cannot be reached; retrying", "url", redactPassword(p.settings.NATSURL), "nats-ca", p.settings.NATSCA, "error", reason)
			}
		}
	})
	return func() {
		cancel()
		done.Wait()
	}
}

// errorWithoutTime returns the text of a certificate error without the current time, so that equal errors of two
// attempts have equal texts.
func errorWithoutTime(err error) string {
	var invalid x509.CertificateInvalidError
	if errors.As(err, &invalid) && invalid.Reason == x509.Expired && invalid.Cert != nil {
		return fmt.Sprintf("the server's certificate for %s is only valid from %s to %s: renew it", strings.Join(invalid.Cert.DNSNames, ", "),
			invalid.Cert.NotBefore.UTC().Format(time.RFC3339), invalid.Cert.NotAfter.UTC().Format(time.RFC3339))
	}
	if err == nil {
		return ""
	}
	return err.Error()
}

// redactPassword returns a URL with its password replaced.
func redactPassword(raw string) string {
	u, err := url.Parse(raw)
	if err != nil {
		return ""
	}
	return u.Redacted()
}

// openNoLog is the logOpenFunc of a service that does not use the log: it returns a nil log.
func openNoLog(context.Context, *nats.Conn, *slog.Logger) (eventlog.Log, events.Partitioning, error) {
	return nil, 0, nil
}

// AwaitPartitions waits until the streams exist, and returns how the log distributes ids over partitions.
func AwaitPartitions(ctx context.Context, nc *nats.Conn, logger *slog.Logger) (events.Partitioning, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return 0, fmt.Errorf("jetstream: %w", err)
	}
	return awaitStreams(ctx, logger, func(ctx context.Context) (events.Partitioning, error) { return topology.ReadPartitions(ctx, js) })
}

const (
	// streamsTimeout is the time limit of one attempt to read the settings of the log's streams.
	streamsTimeout = 2 * time.Second
	// firstStreamsPause and longestStreamsPause are the first and the longest pause between two such attempts.
	firstStreamsPause, longestStreamsPause = 250 * time.Millisecond, 2 * time.Second
)

// logOpener opens the log for a service, which appends to the log in the role of the service's name.
type logOpener struct {
	name string
	use  jslog.Role
	cli  LogCommandLine
}

// open waits until the log's streams exist and opens the log.
func (o logOpener) open(ctx context.Context, nc *nats.Conn, logger *slog.Logger) (eventlog.Log, events.Partitioning, error) {
	keys, err := eventlog.ParseKeys(o.cli.logKeys(), o.name)
	if err != nil {
		return nil, 0, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, 0, fmt.Errorf("jetstream: %w", err)
	}
	var layout topology.Layout
	signing, err := awaitStreams(ctx, logger, func(ctx context.Context) (s topology.SigningSettings, err error) {
		if layout, err = topology.ReadLayout(ctx, js); err != nil {
			return s, err
		}
		return topology.ReadSigning(ctx, js, layout.Shards)
	})
	if err != nil {
		return nil, 0, err
	}
	if err := jslog.CheckKeys(signing, keys, o.use); err != nil {
		return nil, 0, err
	}
	if len(signing.Keys) == 0 && !keys.IsZero() {
		logger.Warn("commits are not verified: `spool provision` was not run with log-keys")
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Shards: layout.Shards, Partitions: layout.Partitions, Keys: keys, Signing: signing, Logger: logger})
	if err != nil {
		return nil, 0, err
	}
	return log, layout.Partitions, nil
}

// awaitStreams calls read until NATS responds and the streams of the log are installed, and returns the result of read.
// It returns an error at once if the metadata of the streams is invalid, because waiting does not help then.
func awaitStreams[T any](ctx context.Context, logger *slog.Logger, read func(context.Context) (T, error)) (T, error) {
	pauses := retry.NewDoubling(firstStreamsPause, longestStreamsPause)
	for logged := ""; ; {
		try, cancel := context.WithTimeout(ctx, streamsTimeout)
		found, err := read(try)
		cancel()
		var invalid *topology.LayoutError
		if err == nil || errors.As(err, &invalid) {
			return found, err
		}
		if reason := err.Error(); reason != logged {
			logged = reason
			logger.Info("waiting for NATS and its streams", "reason", reason)
		}
		if retry.Pause(ctx, pauses.NextBackOff()) != nil {
			return found, ctx.Err()
		}
	}
}
