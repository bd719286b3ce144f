// Package local gives the command line access to Spool on this machine: to stacks and their data folders.
package local

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"

	"github.com/alecthomas/kong"

	"github.com/spoolhq/spool/cmd/spool/internal/command"
	"github.com/spoolhq/spool/cmd/spool/stack"
	"github.com/spoolhq/spool/services/gateway"
)

// Machine implements command.LocalMachine: it finds and starts stacks on this machine.
type Machine struct{}

// DefaultDir returns the user's data folder.
func (Machine) DefaultDir() (string, error) { return stack.DefaultDataDir() }

// Find returns how to reach the stack that runs on a data folder. ok is false if none runs, or if it is still
// starting.
func (Machine) Find(dir string) (c command.StackConnection, ok bool, err error) {
	found, err := stack.FindRunning(dir)
	if errors.Is(err, stack.ErrNotRunning) && !errors.Is(err, os.ErrPermission) {
		return c, false, nil
	}
	if err != nil {
		return c, false, err
	}
	return command.StackConnection{PID: found.PID, URL: found.URL, NATSURL: found.NATSURL, DatabaseURL: found.DatabaseURL, LogKeys: found.LogKeys, LocalKey: found.LocalKey}, true, nil
}

// Start starts a stack. The settings of its services come from the SPOOL_* variables; options take precedence.
func (Machine) Start(ctx context.Context, o command.StackOptions) (command.Stack, error) {
	cfg, err := stackConfig(o)
	if err != nil {
		return nil, err
	}
	logs := func() error { return nil }
	if cfg.Logger == nil {
		if cfg.Logger, logs, err = openLogFile(o.DataDir); err != nil {
			return nil, err
		}
	}
	s, err := stack.Start(ctx, cfg)
	if err != nil {
		return nil, errors.Join(wrapLockError(err), logs())
	}
	return &loggedStack{s, logs}, nil
}

// Open opens the log and the database of a data folder on which no stack runs.
func (Machine) Open(ctx context.Context, o command.StackOptions) (command.Installation, error) {
	if _, err := os.Stat(o.DataDir); errors.Is(err, os.ErrNotExist) {
		return command.Installation{}, fmt.Errorf("data: folder %s does not exist: name the installation's folder with --data, or its --nats-url", o.DataDir)
	}
	base, err := stack.OpenStorage(ctx, stack.Config{DataDir: o.DataDir, DatabaseURL: o.DatabaseURL})
	if err != nil {
		return command.Installation{}, wrapLockError(err)
	}
	return command.Installation{Log: base.Log, NATS: base.NATS, DatabaseURL: base.DatabaseURL, Close: base.Close}, nil
}

// loggedStack is a running stack that writes its log to a file.
type loggedStack struct {
	*stack.Stack
	logs func() error
}

// Close stops the stack and then closes its log file.
func (r *loggedStack) Close() error { return errors.Join(r.Stack.Close(), r.logs()) }

// wrapLockError adds command.ErrDataFolderLocked to an error that means that another process has locked the data
// folder.
func wrapLockError(err error) error {
	if errors.Is(err, stack.ErrRunning) {
		return command.ErrDataFolderLocked
	}
	return err
}

// stackConfig returns the configuration of a stack: the services' settings from environment variables, overridden by
// the options.
func stackConfig(o command.StackOptions) (stack.Config, error) {
	c := stack.Config{DataDir: o.DataDir, DatabaseURL: o.DatabaseURL, MaxStore: o.MaxStore, TextAge: o.TextAge, MockLLM: o.MockLLM, MockScript: o.MockScript, Logger: o.Logger}
	if c.DatabaseURL == "" {
		c.DatabaseURL = os.Getenv("SPOOL_DATABASE_URL")
	}
	for _, s := range []struct {
		name string
		into any
		args []string
	}{
		{"gateway", &c.Gateway, nil}, {"session", &c.Session, nil}, {"executor", &c.Executor, nil},
		// The setting is required only by the service's own program; the stack sets it.
		{"projector", &c.Projector, []string{"--database-url", c.DatabaseURL}},
		{"janitor", &c.Janitor, []string{"--database-url", c.DatabaseURL}},
	} {
		if err := parseEnvironment(s.into, s.args); err != nil {
			return c, fmt.Errorf("settings of the %s in the environment: %w", s.name, err)
		}
	}
	c.Gateway.Listen, c.Gateway.GRPCListen = o.Listen, o.GRPCListen
	c.Gateway.PathPrefix, c.Gateway.NoWeb = o.PathPrefix, o.NoWeb
	c.Gateway.TLSCert, c.Gateway.TLSKey, c.Gateway.BehindTLSProxy = o.TLSCert, o.TLSKey, o.TLSProxy
	if o.Auth != "" {
		c.Gateway.Auth, c.Gateway.RootKey = o.Auth, o.RootKey
	} else if os.Getenv("SPOOL_AUTH") == "" { // a stack on one machine makes a key of its own, so it can require one
		c.Gateway.Auth = gateway.AuthKeys
	}
	if o.Sandbox != "" {
		c.Executor.Sandbox = o.Sandbox
	}
	// The stack has one executor, so its provider is the only one.
	c.Session.Providers = []string{c.Executor.Sandbox}
	c.Executor.DataDir = filepath.Join(o.DataDir, "executor")
	// A client on this machine's loopback can run programs here anyway; other clients need an explicit permission.
	if host, _, err := net.SplitHostPort(o.Listen); err == nil && isLoopback(host) && len(c.Session.HostPaths) == 0 {
		c.Session.HostPaths, c.Executor.HostPaths = []string{"/"}, []string{"/"}
	}
	c.Session.Private, c.Executor.Private = []string{o.DataDir}, []string{o.DataDir}
	return c, nil
}

// isLoopback reports whether a host can be reached only from this machine.
func isLoopback(host string) bool {
	ip := net.ParseIP(host)
	return host == "localhost" || ip != nil && ip.IsLoopback()
}

// parseEnvironment sets the settings of a service from environment variables and arguments, as the service's own
// program does.
func parseEnvironment(into any, args []string) error {
	parser, err := kong.New(into, kong.Exit(func(int) {}))
	if err != nil {
		return err
	}
	_, err = parser.Parse(args)
	return err
}

// openLogFile opens the file spool.log in the data folder. It returns a logger that writes to the file, and a function
// that closes the file.
func openLogFile(dir string) (*slog.Logger, func() error, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, nil, fmt.Errorf("data: cannot create %s (%w): choose another folder with --data, or make this one writable", dir, err)
	}
	f, err := os.OpenFile(filepath.Join(dir, "spool.log"), os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		return nil, nil, fmt.Errorf("data: cannot write to %s (%w): choose another folder with --data, or make this one writable", dir, err)
	}
	return slog.New(slog.NewTextHandler(f, &slog.HandlerOptions{Level: slog.LevelWarn})), f.Close, nil
}
