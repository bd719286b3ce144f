// Package natsserver runs a NATS server with JetStream inside the process, for `spool up` and for tests.
package natsserver

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/consumergate"
	"github.com/spoolhq/spool/pkg/topology"
)

const (
	// DefaultHost is the address on which the server listens if Config.Host is empty.
	DefaultHost = "127.0.0.1"
	// DefaultMaxPayload is the maximum size of a NATS message in bytes, headers included. A command with a message of 1
	// MiB fits even if JSON escapes each byte with six characters.
	DefaultMaxPayload = 8 << 20
	// MinStoreSize is the minimum of Config.MaxStore in bytes. The stream of commands reserves 512 MiB of the store.
	MinStoreSize = 640 << 20
	// RandomPort as a port in Config requests any free TCP port.
	RandomPort = server.RANDOM_PORT

	defaultReadyTimeout = 30 * time.Second
	// connectTimeout is the time limit for a connection to the server within the process. Only a busy server can delay it.
	connectTimeout = 30 * time.Second
)

// Config configures a Server. Only StoreDir is required.
type Config struct {
	// StoreDir is the folder of the streams; it is created if it does not exist. Two servers must not share one.
	StoreDir string
	// Host is the address of the TCP listener; empty means DefaultHost.
	Host string
	// Port is the TCP port. 0 means no listener, so that only this process can connect; RandomPort means any free
	// port.
	Port int
	// Relaxed leaves fsync to the server's two-minute timer: acknowledged messages can be lost if the machine loses
	// power. By default every message is written to disk before it is acknowledged.
	Relaxed bool
	// MaxStore is the disk limit of the streams in bytes; 0 means their size at Start plus three quarters of the
	// free disk.
	MaxStore int64
	// MaxPayload is the maximum size of a message in bytes, headers included; 0 means DefaultMaxPayload.
	MaxPayload int
	// ReadyTimeout is the time for which Start waits for the listener after the streams are recovered; 0 means 30 s.
	ReadyTimeout time.Duration
	// Accounts sets up the accounts and users of package topology, with random passwords, and the gate for
	// consumers. Without Accounts every client has all permissions.
	Accounts bool
	// Logger receives the messages of the server and its connections; nil discards them.
	Logger *slog.Logger
}

func (c *Config) validate() error {
	if c.StoreDir == "" {
		return errors.New("nats: StoreDir is empty: name the folder that holds the streams")
	}
	if c.Port < RandomPort || c.Port > 65535 {
		return fmt.Errorf("nats: port %d is out of range: use 1 to 65535, 0 for no listener, or -1 for any free port", c.Port)
	}
	if c.MaxPayload < 0 || c.MaxPayload > server.MAX_PAYLOAD_MAX_SIZE*8 {
		return fmt.Errorf("nats: MaxPayload %d is out of range: use 1 to %d bytes, or 0 for %d", c.MaxPayload, server.MAX_PAYLOAD_MAX_SIZE*8, DefaultMaxPayload)
	}
	if c.MaxStore < 0 || c.MaxStore > 0 && c.MaxStore < MinStoreSize {
		return fmt.Errorf("nats: MaxStore %d is out of range: use at least %d bytes, or 0 for a limit derived from the free disk", c.MaxStore, MinStoreSize)
	}
	if c.ReadyTimeout < 0 {
		return fmt.Errorf("nats: ReadyTimeout %s is negative", c.ReadyTimeout)
	}
	if c.Host == "" {
		c.Host = DefaultHost
	}
	if c.MaxPayload == 0 {
		c.MaxPayload = DefaultMaxPayload
	}
	if c.ReadyTimeout == 0 {
		c.ReadyTimeout = defaultReadyTimeout
	}
	if c.Logger == nil {
		c.Logger = slog.New(slog.DiscardHandler)
	}
	abs, err := filepath.Abs(c.StoreDir)
	if err != nil {
		return fmt.Errorf("nats: StoreDir %s: %w", c.StoreDir, err)
	}
	c.StoreDir = abs
	return nil
}

// Server is a running NATS server. It is safe for concurrent use.
type Server struct {
	cfg       Config
	passwords map[string]string // by user; nil without accounts
	gate      *nats.Conn        // nil without accounts
	logger    *slog.Logger
	stop      func() // stops the server; a second call waits for the first

	mu            sync.Mutex
	nats          *server.Server // replaced by restart
	failedAtStart []string       // result of failedStreams at the server's start
}

// current returns the NATS server that was started last.
func (s *Server) current() *server.Server {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.nats
}

// Start starts an embedded NATS server that runs until Shutdown. It returns when JetStream has recovered its streams
// and the server accepts connections. The error names a port that is in use, or a folder that is not writable.
func Start(cfg Config) (*Server, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	if err := checkStoreDir(cfg.StoreDir); err != nil {
		return nil, err
	}
	if err := checkPort(cfg.Host, cfg.Port); err != nil {
		return nil, err
	}
	if cfg.MaxStore == 0 {
		var err error
		if cfg.MaxStore, err = diskLimit(cfg.StoreDir); err != nil {
			return nil, err
		}
	}
	if cfg.Accounts {
		if err := moveStreamsToAccount(cfg.StoreDir); err != nil {
			return nil, err
		}
	}
	srv := &Server{cfg: cfg, logger: cfg.Logger.With("component", "nats")}
	if cfg.Accounts {
		srv.passwords = map[string]string{}
		for _, u := range topology.Users() {
			srv.passwords[u.Name] = rand.Text()
		}
	}
	if err := srv.launch(); err != nil {
		return nil, err
	}
	srv.cfg.Port = srv.Port() // a restarted server listens on the same port
	ctx, cancel := context.WithCancel(context.Background())
	var watching sync.WaitGroup
	watching.Go(func() { srv.restartAfterWriteErrors(ctx) })
	srv.stop = sync.OnceFunc(func() {
		if srv.gate != nil {
			srv.gate.Close()
		}
		cancel()
		watching.Wait()
		shutdownNow(srv.current())
	})
	if err := srv.serveConsumerGate(); err != nil {
		srv.Shutdown()
		return nil, err
	}
	return srv, nil
}

// launch starts a NATS server with the settings of s, and makes it the current one. It returns when the server is ready.
func (s *Server) launch() error {
	cfg := &s.cfg
	options, err := s.serverOptions()
	if err != nil {
		return err
	}
	ns, err := server.NewServer(options)
	if err != nil {
		return fmt.Errorf("nats: configure server: %w", err)
	}
	adapter := &logAdapter{logger: s.logger, fatal: make(chan string, 1)}
	ns.SetLoggerV2(adapter, false, false, false)

	// Start returns when the streams are recovered and the listener is up. It reports a failure only to the logger,
	// and then the server never becomes ready.
	ns.Start()
	if reason := adapter.firstFatal(); reason != "" {
		shutdownNow(ns)
		return fmt.Errorf("nats: start with folder %s: %s", cfg.StoreDir, reason)
	}
	if !ns.ReadyForConnections(cfg.ReadyTimeout) || !ns.JetStreamEnabled() {
		shutdownNow(ns)
		return fmt.Errorf("nats: server with folder %s was not ready within %s", cfg.StoreDir, cfg.ReadyTimeout)
	}
	if !cfg.Accounts {
		limits := server.JetStreamAccountLimits{MaxMemory: -1, MaxStore: cfg.MaxStore, MaxStreams: -1, MaxConsumers: -1, MaxAckPending: -1, MemoryMaxStreamBytes: -1, StoreMaxStreamBytes: -1}
		if err := ns.GlobalAccount().UpdateJetStreamLimits(map[string]server.JetStreamAccountLimits{"": limits}); err != nil {
			shutdownNow(ns)
			return fmt.Errorf("nats: set the disk limit of the streams to %d bytes: %w", cfg.MaxStore, err)
		}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.nats, s.failedAtStart = ns, failedStreams(ns)
	return nil
}

// serverOptions returns new options for the NATS server. A server changes its options, so two servers cannot share them.
func (s *Server) serverOptions() (*server.Options, error) {
	options, cfg := &server.Options{}, &s.cfg
	if cfg.Accounts {
		var text strings.Builder
		err := topology.WriteAccounts(&text, strconv.FormatInt(cfg.MaxStore, 10), func(user string) string { return strconv.Quote(s.passwords[user]) })
		if err == nil {
			err = options.ProcessConfigString(text.String())
		}
		if err != nil {
			return nil, fmt.Errorf("nats: configure accounts: %w", err)
		}
	}
	options.ServerName = "spool"
	options.Host, options.Port, options.DontListen = cfg.Host, cfg.Port, cfg.Port == 0
	options.JetStream, options.StoreDir, options.SyncAlways = true, cfg.StoreDir, !cfg.Relaxed
	options.JetStreamMaxStore = cfg.MaxStore
	if !cfg.Accounts {
		options.JetStreamMaxStore += MinStoreSize // the server also counts reservations of streams; the limit of the account applies
	}
	options.MaxPayload = int32(cfg.MaxPayload)
	options.NoSigs = true
	return options, nil
}

// serveConsumerGate runs the consumer gate on the server, if the server has accounts.
func (s *Server) serveConsumerGate() (err error) {
	if !s.cfg.Accounts {
		return nil
	}
	if s.gate, err = s.ConnectAs(topology.UserGate, nats.Name("spool-gate")); err != nil {
		return err
	}
	return consumergate.Serve(s.gate, s.logger)
}

// Connect opens a connection to the server within the process. The connection reconnects without limit, buffers at most
// 8 MiB of publishes while it is disconnected, and reports errors to the server's logger. The caller must close it
// before Shutdown.
func (s *Server) Connect(opts ...nats.Option) (*nats.Conn, error) {
	nc, err := nats.Connect("", append(s.connOptions(), opts...)...)
	if err != nil {
		return nil, fmt.Errorf("nats: connect in process: %w", err)
	}
	return nc, nil
}

// ConnectAs is like Connect, but authenticates as a NATS user of package topology. It requires Config.Accounts.
func (s *Server) ConnectAs(user string, opts ...nats.Option) (*nats.Conn, error) {
	password, ok := s.passwords[user]
	if !ok {
		return nil, fmt.Errorf("nats: user %q does not exist", user)
	}
	return s.Connect(append([]nats.Option{nats.UserInfo(user, password), nats.CustomInboxPrefix(topology.InboxPrefix(user))}, opts...)...)
}

// Password returns the password of a NATS user, or "" if the user does not exist.
func (s *Server) Password(user string) string { return s.passwords[user] }

func (s *Server) connOptions() []nats.Option {
	return append([]nats.Option{nats.InProcessServer(s), nats.Timeout(connectTimeout)}, bus.ConnOptions(s.logger)...)
}

// InProcessConn opens a raw connection to the server; it makes Server a nats.InProcessConnProvider.
func (s *Server) InProcessConn() (net.Conn, error) {
	ns := s.current()
	if !ns.Running() {
		return nil, errors.New("nats: the embedded server is shut down")
	}
	return ns.InProcessConn()
}

// ClientURL returns the URL of the server's TCP listener, or "" if there is none.
func (s *Server) ClientURL() string {
	if s.cfg.Port == 0 {
		return ""
	}
	return s.current().ClientURL()
}

// Port returns the port of the server's TCP listener, or 0 if there is none.
func (s *Server) Port() int {
	if addr, ok := s.current().Addr().(*net.TCPAddr); ok && addr != nil {
		return addr.Port
	}
	return 0
}

// StoreDir returns the folder in which the server stores its streams.
func (s *Server) StoreDir() string { return s.cfg.StoreDir }

// SyncsWrites reports whether the server writes each message to disk before it acknowledges the message.
func (s *Server) SyncsWrites() bool {
	js := s.current().JetStreamConfig()
	return js != nil && js.SyncAlways
}

// Shutdown stops the server and returns when its files are closed. A second call waits for the first.
func (s *Server) Shutdown() { s.stop() }

func shutdownNow(ns *server.Server) {
	ns.Shutdown()
	ns.WaitForShutdown()
}

// checkStoreDir returns an error unless the data folder exists, or can be created, and is writable. The NATS server
// would find such a problem too, but its error does not always name the folder, and never a solution.
func checkStoreDir(dir string) error {
	remedy := "choose another data folder, or make this one writable"
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return fmt.Errorf("nats: cannot create the data folder %s (%w): %s", dir, errorWithoutPath(err), remedy)
	}
	probe, err := os.CreateTemp(dir, ".probe-")
	if err != nil {
		return fmt.Errorf("nats: cannot write to the data folder %s (%w): %s", dir, errorWithoutPath(err), remedy)
	}
	return errors.Join(probe.Close(), os.Remove(probe.Name()))
}

func checkPort(host string, port int) error {
	if port <= 0 {
		return nil
	}
	addr := net.JoinHostPort(host, strconv.Itoa(port))
	l, err := net.Listen("tcp", addr)
	if errors.Is(err, syscall.EADDRINUSE) {
		return fmt.Errorf("nats: port %d on %s is in use (%w): stop the program that listens there, or choose another port", port, host, errorWithoutPath(err))
	}
	if err != nil {
		return fmt.Errorf("nats: cannot listen on %s (%w): choose another host or port", addr, errorWithoutPath(err))
	}
	return l.Close()
}

// errorWithoutPath returns an error without its operation and path, for a message that already contains them.
func errorWithoutPath(err error) error {
	var errno syscall.Errno
	if errors.As(err, &errno) {
		return errno
	}
	return err
}
