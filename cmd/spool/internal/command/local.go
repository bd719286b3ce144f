package command

import (
	"context"
	"errors"
	"log/slog"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/eventlog"
)

// Local is Spool on this machine.
type Local interface {
	// DefaultDir is the user's data folder.
	DefaultDir() (string, error)
	// Find tells how to reach the stack that runs on a data folder; ok is false if none does.
	Find(dir string) (c Connection, ok bool, err error)
	// Start runs a stack on a data folder and returns when it is ready. It fails
	// with ErrBusy if one runs there already.
	Start(ctx context.Context, o StackOptions) (Stack, error)
	// Open opens the log and the database of a data folder on which no stack runs, or with ErrBusy.
	Open(ctx context.Context, o StackOptions) (Installation, error)
}

// ErrBusy is a data folder that another process has locked.
var ErrBusy = errors.New("another Spool runs on this data folder")

// Connection is how a running stack is reached.
type Connection struct {
	PID         int
	URL         string
	NATSURL     string
	DatabaseURL string
	LogKeys     string
}

// StackOptions say how to run a stack. DataDir is required.
type StackOptions struct {
	DataDir     string
	DatabaseURL string // empty means a private Postgres
	Listen      string // host:port of REST
	GRPCListen  string // host:port of gRPC
	TLSCert     string // PEM file of the gateway's certificate; empty serves without TLS
	TLSKey      string // PEM file of its private key
	TLSProxy    bool   // a proxy in front of the gateway speaks TLS
	Auth        string // off or keys; empty means what the environment says
	RootKey     string // makes the first keys; empty means what the environment says
	Sandbox     string // provider that sessions get unless they name one; empty means the only one
	MaxStore    int64  // bytes that the streams of NATS may take; 0 means what they take and three quarters of the free disk
	MockLLM     bool
	MockScript  string
	Logger      *slog.Logger
}

// Stack is all services in this process.
type Stack interface {
	URL() string
	// Done is closed when it has ended, by Close or by itself; Err then says why.
	Done() <-chan struct{}
	Err() error
	Close() error
}

// Installation is the log and the database under a stack, wherever that runs.
type Installation struct {
	Log         eventlog.Log
	NATS        *nats.Conn
	DatabaseURL string
	Close       func() error
}
