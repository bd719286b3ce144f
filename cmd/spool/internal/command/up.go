package command

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
)

type upCommand struct {
	Data       string     `env:"SPOOL_DATA_DIR" placeholder:"DIR" help:"Folder of everything that lasts; by default spool in the user's data folder."`
	Listen     string     `default:"127.0.0.1:7700" env:"SPOOL_LISTEN" help:"Address of REST, WebSocket and SSE; port 0 takes any free one."`
	GRPCListen string     `name:"grpc-listen" default:"127.0.0.1:7701" env:"SPOOL_GRPC_LISTEN" help:"Address of gRPC; port 0 takes any free one."`
	TLSCert    string     `name:"tls-cert" env:"SPOOL_TLS_CERT" placeholder:"FILE" help:"PEM file of a certificate, with its chain, that REST and gRPC are served with; needed beyond loopback. It is read again when it changes."`
	TLSKey     string     `name:"tls-key" env:"SPOOL_TLS_KEY" placeholder:"FILE" help:"PEM file of the private key of --tls-cert."`
	TLSProxy   bool       `name:"behind-tls-proxy" default:"false" env:"SPOOL_BEHIND_TLS_PROXY" help:"A proxy in front speaks TLS with clients: listen beyond loopback without --tls-cert."`
	Database   string     `name:"database-url" env:"SPOOL_DATABASE_URL" placeholder:"URL" help:"A Postgres to use; without it a private one in the data folder."`
	Auth       string     `enum:"off,keys" default:"off" env:"SPOOL_AUTH" help:"Who is let in: keys, or off, which serves everybody and only on loopback."`
	RootKey    string     `env:"SPOOL_ROOT_KEY" help:"A key of 32 characters or more that makes API keys and sets limits and budgets, and does nothing else."`
	Sandbox    string     `enum:"local,docker,modal" default:"local" env:"SPOOL_SANDBOX" help:"Where agents run: local, on this machine without isolation, docker, each session in a container of its own, or modal, each in a sandbox of modal.com."`
	MaxStore   int64      `env:"SPOOL_MAX_STORE" placeholder:"BYTES" help:"Bytes that the streams and buckets of NATS may take on disk, 671088640 or more; by default what they take already and three quarters of what is free."`
	MockLLM    bool       `name:"mock-llm" env:"SPOOL_MOCK_LLM" help:"Give agents a scripted model server in place of real models."`
	MockScript string     `env:"SPOOL_MOCKLLM_SCRIPT" type:"existingfile" placeholder:"FILE" help:"The script of --mock-llm; without it the built-in one."`
	LogLevel   slog.Level `default:"warn" env:"SPOOL_LOG_LEVEL" help:"The least severe level that is logged: debug, info, warn or error."`
}

// Run serves until it is told to stop, which is its proper end.
func (c *upCommand) Run(a *app) (err error) {
	for _, l := range []struct{ flag, value string }{{"listen", c.Listen}, {"grpc-listen", c.GRPCListen}} {
		if _, _, err := net.SplitHostPort(l.value); err != nil {
			return usage("%s: %q is not an address such as 127.0.0.1:7700", l.flag, l.value)
		}
	}
	dir, err := dataDir(a, c.Data)
	if err != nil {
		return err
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	stack, err := a.Local.Start(ctx, StackOptions{
		DataDir: dir, DatabaseURL: c.Database, Listen: c.Listen, GRPCListen: c.GRPCListen, Sandbox: c.Sandbox,
		Auth: c.Auth, RootKey: c.RootKey, MaxStore: c.MaxStore, TLSCert: c.TLSCert, TLSKey: c.TLSKey, TLSProxy: c.TLSProxy,
		MockLLM: c.MockLLM, MockScript: c.MockScript,
		Logger: slog.New(slog.NewTextHandler(a.Err, &slog.HandlerOptions{Level: c.LogLevel})),
	})
	if ctx.Err() != nil && err != nil {
		return nil // stopped while it was starting
	}
	if errors.Is(err, ErrBusy) {
		return fmt.Errorf("data: %w; `spool run` joins it, or choose another folder with --data", err)
	}
	if err != nil {
		return err
	}
	if _, err := fmt.Fprintf(a.Out, "ready %s\n", stack.URL()); err != nil {
		return errors.Join(err, stack.Close())
	}
	select {
	case <-ctx.Done():
		return stack.Close()
	case <-stack.Done():
		return fmt.Errorf("the stack ended: %w", errors.Join(stack.Err(), stack.Close()))
	}
}
