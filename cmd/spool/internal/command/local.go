package command

import (
	"context"
	"errors"
	"log/slog"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/eventlog"
)

// LocalMachine finds, starts and opens installations of Spool on this machine.
type LocalMachine interface {
	// DefaultDir returns the user's data folder.
	DefaultDir() (string, error)
	// Find returns how to reach the stack that runs on a data folder; ok is false if none runs.
	Find(dir string) (c StackConnection, ok bool, err error)
	// Start starts a stack on a data folder and returns when it is ready. It returns ErrDataFolderLocked if a stack
	// runs on the folder already.
	Start(ctx context.Context, o StackOptions) (Stack, error)
	// Open opens the log and the database of a data folder. It returns ErrDataFolderLocked if a stack runs on the
	// folder.
	Open(ctx context.Context, o StackOptions) (Installation, error)
}

// ErrDataFolderLocked is returned if another process uses the data folder.
var ErrDataFolderLocked = errors.New("another Spool runs on this data folder")

// StackConnection describes how to reach a stack that runs on this machine.
type StackConnection struct {
	PID         int
	URL         string
	NATSURL     string
	DatabaseURL string
	LogKeys     string
	LocalKey    string // the key of this machine's user; "" for a stack of an earlier version
}

// StackOptions are the options with which a stack is started. DataDir is required.
type StackOptions struct {
	DataDir     string
	DatabaseURL string        // empty means a private Postgres
	Listen      string        // host:port of REST
	GRPCListen  string        // host:port of gRPC
	TLSCert     string        // PEM file of the gateway's certificate; empty serves without TLS
	TLSKey      string        // PEM file of its private key
	TLSProxy    bool          // a proxy in front of the gateway terminates TLS
	PathPrefix  string        // path below which a proxy serves the gateway; "" for none
	NoWeb       bool          // serves no inspector
	Auth        string        // off or keys; "" means the value from the environment, or else keys
	RootKey     string        // creates the first keys; "" means the value from the environment
	Sandbox     string        // provider of sessions that name none; "" means the only provider
	MaxStore    int64         // disk limit of the NATS streams in bytes; 0 means their present size plus three quarters of the free disk
	TextAge     time.Duration // how long text in flight is stored; 0 means the default
	MockLLM     bool
	MockScript  string
	Logger      *slog.Logger
}

// Stack is a running set of all services of Spool in this process.
type Stack interface {
	URL() string
	// LocalKey returns the key with which the user of this machine calls the stack.
	LocalKey() string
	// Done returns a channel that is closed when the stack has ended, by Close or by itself. Err then returns the
	// reason.
	Done() <-chan struct{}
	Err() error
	Close() error
}

// Installation is an open connection to the log and the database of an installation, on this machine or on others.
type Installation struct {
	Log         eventlog.Log
	NATS        *nats.Conn
	DatabaseURL string
	Close       func() error
}
