package egress

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"runtime/debug"
	"syscall"
	"time"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/pkg/settings"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
	"github.com/spoolhq/spool/services/executor/internal/egress/proxy"
)

// Settings are the settings of the egress program, as its flags and variables set them.
type Settings struct {
	Config
	settings.Logging
}

// cli is the command line of the egress program.
type cli struct {
	Settings

	Serve  struct{} `cmd:"" default:"1" help:"Serve sandboxes and executors (the default)."`
	Health struct{} `cmd:"" help:"Exit with 0 if the proxy at the admin socket is healthy, else with 1."`
	Dial   struct{} `cmd:"" help:"Connect stdin and stdout to the admin socket."`
}

// healthTimeout is the time limit of a health check of the egress proxy.
const healthTimeout = 5 * time.Second

// RunCommandLine runs the egress program with the command line args, and returns the exit code: 0, 1 for a
// failure, 2 for wrong usage.
func RunCommandLine(args []string, stdin io.Reader, stdout, stderr io.Writer) int {
	const name = "egress"
	var c cli
	code := -1
	parser, err := kong.New(&c, kong.Name(name), kong.Description("The egress proxy of sandboxes: credentials, allowlist, metering."),
		kong.Writers(stdout, stderr), kong.Exit(func(n int) { code = n }))
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return 2
	}
	parsed, err := parser.Parse(args)
	if code >= 0 { // --help was given
		return code
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return 2
	}
	if c.Config, err = c.withDefaults(); err == nil {
		switch parsed.Command() {
		case "health":
			err = checkHealth(c.Config)
		case "dial":
			err = connectToAdminSocket(c.Config, stdin, stdout)
		default:
			err = serveProxy(c, stderr)
		}
	}
	if err != nil {
		fmt.Fprintf(stderr, "%s: %v\n", name, err)
		return 1
	}
	return 0
}

// serveProxy runs the egress proxy until the process gets a signal. A second signal ends the proxy without
// waiting for open requests.
func serveProxy(c cli, stderr io.Writer) error {
	log := slog.New(slog.NewJSONHandler(stderr, &slog.HandlerOptions{Level: c.LogLevel})).With("service", "egress")
	ctx, stop := context.WithCancel(context.Background())
	defer stop()
	kill, signals := make(chan struct{}), make(chan os.Signal, 2)
	signal.Notify(signals, syscall.SIGINT, syscall.SIGTERM)
	defer signal.Stop(signals)
	returned := make(chan struct{})
	defer close(returned)
	go func() {
		for _, act := range []func(){stop, func() { close(kill) }} {
			select {
			case <-signals:
				act()
			case <-returned:
				return
			}
		}
	}()
	if os.Getenv("GOMEMLIMIT") == "" {
		debug.SetMemoryLimit(proxy.MemoryLimitBytes)
	}
	s, err := New(c.Config, Deps{Logger: log, Kill: kill})
	if err != nil {
		return err
	}
	return s.Run(ctx)
}

// checkHealth returns an error unless the proxy at the configured admin socket is healthy.
func checkHealth(c Config) error {
	ctx, cancel := context.WithTimeout(context.Background(), healthTimeout)
	defer cancel()
	client := api.NewClient(api.DialSocket(c.ListenAdmin))
	defer client.Close()
	return client.Health(ctx)
}

// connectToAdminSocket copies in to the admin socket and the socket's answers to out, until the socket's
// connection ends.
func connectToAdminSocket(c Config, in io.Reader, out io.Writer) error {
	conn, err := net.Dial("unix", c.ListenAdmin)
	if err != nil {
		return fmt.Errorf("listen-admin: %w", err)
	}
	defer conn.Close() //nolint:errcheck // both directions have ended
	go func() {
		_, err := io.Copy(conn, in)
		if half, ok := conn.(*net.UnixConn); ok && err == nil {
			err = half.CloseWrite()
		}
		if err != nil {
			conn.Close() //nolint:errcheck // it ends the other direction
		}
	}()
	if _, err := io.Copy(out, conn); err != nil && !errors.Is(err, net.ErrClosed) {
		return fmt.Errorf("listen-admin: %w", err)
	}
	return nil
}
