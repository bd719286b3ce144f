package command

import (
	"errors"
	"fmt"
	"log/slog"
	"net"

	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/services/gateway"
)

type upCommand struct {
	Data       string `env:"SPOOL_DATA_DIR" placeholder:"DIR" help:"Folder of all persistent data; by default spool in the user's data folder."`
	Listen     string `default:"${gateway_Listen}" env:"SPOOL_LISTEN" help:"Address of REST, WebSocket and SSE; port 0 means any free port."`
	GRPCListen string `name:"grpc-listen" default:"${gateway_GRPCListen}" env:"SPOOL_GRPC_LISTEN" help:"Address of gRPC; port 0 means any free port."`
	TLSCert    string `name:"tls-cert" env:"SPOOL_TLS_CERT" placeholder:"FILE" help:"PEM file of the certificate, with its chain, for REST and gRPC; required for addresses other than loopback. It is reloaded when it changes."`
	TLSKey     string `name:"tls-key" env:"SPOOL_TLS_KEY" placeholder:"FILE" help:"PEM file of the private key of --tls-cert."`
	TLSProxy   bool   `name:"behind-tls-proxy" default:"false" env:"SPOOL_BEHIND_TLS_PROXY" help:"A proxy in front of the gateway terminates TLS: allow addresses other than loopback without --tls-cert."`
	PathPrefix string `name:"path-prefix" env:"SPOOL_PATH_PREFIX" help:"Path below which a proxy serves the gateway, such as /spool. Requests are served with and without it."`
	NoWeb      bool   `name:"no-web" default:"false" env:"SPOOL_NO_WEB" help:"Do not serve the inspector, the page at /."`
	Database   string `name:"database-url" env:"SPOOL_DATABASE_URL" placeholder:"URL" help:"A Postgres to use; by default a private one in the data folder."`
	Auth       string `enum:"off,keys" default:"keys" env:"SPOOL_AUTH" help:"Authentication of clients: keys requires the local key, which the stack creates in the data folder, or an API key; off serves every program on this machine, and only on loopback."`
	NoAuth     bool   `name:"no-auth" help:"The same as --auth off."`
	Open       bool   `help:"Print the URL of spool open when the stack is ready. Not with --no-web."`
	RootKey    string `env:"SPOOL_ROOT_KEY" help:"A key of 32 characters or more that may only create API keys and set limits and budgets."`
	Sandbox    string `enum:"local,docker,modal" default:"${executor_Sandbox}" env:"SPOOL_SANDBOX" help:"Where agents run: local (on this machine without isolation), docker (a container per session) or modal (a sandbox of modal.com per session)."`
	MaxStore   int64  `env:"SPOOL_MAX_STORE" placeholder:"BYTES" help:"Disk limit of the streams and buckets of NATS in bytes, 671088640 or more; by default their present size plus three quarters of the free disk."`
	textAgeFlag
	MockLLM    bool       `name:"mock-llm" env:"SPOOL_MOCK_LLM" help:"Use a scripted model server instead of real models."`
	MockScript string     `env:"SPOOL_MOCKLLM_SCRIPT" type:"existingfile" placeholder:"FILE" help:"The script of --mock-llm; by default the built-in one."`
	LogLevel   slog.Level `default:"warn" env:"SPOOL_LOG_LEVEL" help:"Lowest level that is logged: debug, info, warn or error."`
}

// Run runs all services until a signal to stop arrives, which is not an error.
func (c *upCommand) Run(a *app) (err error) {
	for _, l := range []struct{ flag, value string }{{"listen", c.Listen}, {"grpc-listen", c.GRPCListen}} {
		if _, _, err := net.SplitHostPort(l.value); err != nil {
			return usageError("%s: %q is not an address such as 127.0.0.1:7700", l.flag, l.value)
		}
	}
	if err := c.checkTextAge(); err != nil {
		return err
	}
	if c.Open && c.NoWeb {
		return usageError("open: there is no page with --no-web")
	}
	dir, err := dataDirOrDefault(a, c.Data)
	if err != nil {
		return err
	}
	if c.NoAuth {
		c.Auth = gateway.AuthOff
	}
	if c.Auth == gateway.AuthOff {
		terminal.Fprintln(a.Err, "warning: authentication is off: every program on this machine may use Spool, and a local agent can approve its own calls")
	}
	ctx, cancel := a.interruptibleContext()
	defer cancel()
	daemon.SetGCPercent()
	stack, err := a.Local.Start(ctx, StackOptions{
		DataDir: dir, DatabaseURL: c.Database, Listen: c.Listen, GRPCListen: c.GRPCListen, Sandbox: c.Sandbox,
		Auth: c.Auth, RootKey: c.RootKey, MaxStore: c.MaxStore, TextAge: c.TextAge, TLSCert: c.TLSCert, TLSKey: c.TLSKey, TLSProxy: c.TLSProxy, PathPrefix: c.PathPrefix, NoWeb: c.NoWeb,
		MockLLM: c.MockLLM, MockScript: c.MockScript,
		Logger: slog.New(slog.NewTextHandler(a.Err, &slog.HandlerOptions{Level: c.LogLevel})),
	})
	if ctx.Err() != nil && err != nil {
		return nil // stopped during the start
	}
	if errors.Is(err, ErrDataFolderLocked) {
		return fmt.Errorf("data: %w; `spool run` joins it, or choose another folder with --data", err)
	}
	if err != nil {
		return err
	}
	if _, err := terminal.Fprintf(a.Out, "ready %s\n", stack.URL()); err != nil {
		return errors.Join(err, stack.Close())
	}
	switch {
	case c.NoWeb:
	case !c.Open:
		if _, err := terminal.Fprintf(a.Out, "inspector %s%s/\n", stack.URL(), c.PathPrefix); err != nil {
			return errors.Join(err, stack.Close())
		}
	default:
		open := openCommand{serverFlags{URL: stack.URL(), Key: stack.LocalKey(), CA: c.TLSCert}}
		if err := open.Run(a); err != nil {
			return errors.Join(err, stack.Close())
		}
	}
	select {
	case <-ctx.Done():
		return stack.Close()
	case <-stack.Done():
		return fmt.Errorf("the stack ended: %w", errors.Join(stack.Err(), stack.Close()))
	}
}
