// Package loopback forwards connections from a loopback port of a sandbox to the egress proxy, over the proxy's Unix socket
// or over TLS. A sandbox has no other network.
package loopback

import (
	"cmp"
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/retry"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/tlsconn"
)

// The defaults.
const (
	// DefaultMaxConnections is the default of the maximum number of connections that are forwarded at a time. Further
	// connections wait to be accepted.
	DefaultMaxConnections = 256
	// DefaultIdleTimeout is the default of the time without a byte in either direction after which a connection is
	// closed.
	DefaultIdleTimeout = 15 * time.Minute
	// socketDialTimeout is the time limit for connecting to the egress proxy at its Unix socket.
	socketDialTimeout = 5 * time.Second
	// serverDialTimeout is the time limit for connecting to the egress proxy over TLS, which takes several round trips
	// and may lose packets.
	serverDialTimeout = 15 * time.Second
	// DefaultWait is the default of the time for which a connection waits for an egress proxy that restarts.
	DefaultWait = time.Minute
	// shortestRedialPause and longestRedialPause are the limits of the pause between two dials of the egress proxy.
	shortestRedialPause = 20 * time.Millisecond
	longestRedialPause  = 500 * time.Millisecond
	// acceptRetryPause is the pause after a failure to accept a connection.
	acceptRetryPause = 100 * time.Millisecond
	// maxSocketPath is the maximum length in bytes of the path of a Unix socket.
	maxSocketPath = 107
)

// Config configures a Forwarder. Either Socket or Server is required.
type Config struct {
	Socket      string        // path of the proxy's Unix socket, which need not exist yet; "" with Server
	Server      string        // host:port at which the proxy speaks TLS; "" with Socket
	Authority   string        // certificates in PEM form, the only ones that Server is verified against
	Token       string        // names the sandbox at the proxy
	Address     string        // "" for runner.EgressAddress
	HostsOnly   bool          // the proxy serves hosts of the allowlist only, no models and MCP servers
	Connections int           // 0 for DefaultMaxConnections
	Idle        time.Duration // 0 for DefaultIdleTimeout
	Wait        time.Duration // for a proxy that cannot be reached, before the client is refused; 0 for DefaultWait, negative for none
	Log         *slog.Logger  // nil for none
}

// validate returns an error if a field of the configuration is missing or wrong, and sets defaults.
func (c *Config) validate() error {
	switch {
	case c.Socket == "" && c.Server == "":
		return errors.New("egress socket: is empty, and so is the egress server")
	case c.Socket != "" && c.Server != "":
		return errors.New("egress server: the egress socket is set as well: set one of them")
	case len(c.Socket) > maxSocketPath:
		return fmt.Errorf("egress socket: its path has %d bytes, a Unix socket allows %d: choose a shorter one", len(c.Socket), maxSocketPath)
	case c.Token == "":
		return errors.New("egress token: is empty: the proxy serves no connection without one")
	case strings.ContainsAny(c.Token, " \t\r\n"):
		return errors.New("egress token: has a space or a newline")
	case c.Connections < 0:
		return fmt.Errorf("egress connections: %d is negative", c.Connections)
	case c.Idle < 0:
		return fmt.Errorf("egress idle time: %s is negative", c.Idle)
	}
	c.Address = cmp.Or(c.Address, runner.EgressAddress)
	c.Connections = cmp.Or(c.Connections, DefaultMaxConnections)
	c.Idle = cmp.Or(c.Idle, DefaultIdleTimeout)
	c.Wait = cmp.Or(c.Wait, DefaultWait)
	if c.Log == nil {
		c.Log = slog.New(slog.DiscardHandler)
	}
	return nil
}

// Forwarder listens on a loopback port in the sandbox and forwards each connection to the egress proxy.
type Forwarder struct {
	cfg      Config
	tls      *tls.Config // nil for a Unix socket
	listener *net.TCPListener

	mu          sync.Mutex
	unreachable bool // the last dial of the proxy failed
	handlers    sync.WaitGroup
}

// Listen starts to listen on the loopback port. The caller must call Run.
func Listen(ctx context.Context, cfg Config) (*Forwarder, error) {
	if err := cfg.validate(); err != nil {
		return nil, err
	}
	secure, err := cfg.tlsConfig()
	if err != nil {
		return nil, err
	}
	var lc net.ListenConfig
	l, err := lc.Listen(ctx, "tcp", cfg.Address)
	if err != nil {
		return nil, fmt.Errorf("egress: listen on %s: %w", cfg.Address, err)
	}
	tcp, ok := l.(*net.TCPListener)
	if !ok {
		return nil, errors.Join(fmt.Errorf("egress: %s is not a TCP address", cfg.Address), l.Close())
	}
	return &Forwarder{cfg: cfg, tls: secure, listener: tcp}, nil
}

// maxCachedTLSSessions is the number of TLS sessions that are kept for resumption, so that later connections need no
// certificates.
const maxCachedTLSSessions = 8

// tlsConfig returns the TLS configuration for connections to Server, or nil if the egress proxy is reached at a Unix
// socket.
func (c *Config) tlsConfig() (*tls.Config, error) {
	if c.Server == "" {
		return nil, nil //nolint:nilnil // a Unix socket needs none
	}
	host, port, err := net.SplitHostPort(c.Server)
	if err != nil || host == "" || port == "" {
		return nil, fmt.Errorf("egress server: %q is not a host and a port like proxy.example.com:7443", c.Server)
	}
	roots := x509.NewCertPool()
	if !roots.AppendCertsFromPEM([]byte(c.Authority)) {
		return nil, errors.New("egress authority: has no certificate in PEM form")
	}
	return &tls.Config{MinVersion: tls.VersionTLS13, ServerName: host, RootCAs: roots, ClientSessionCache: tls.NewLRUClientSessionCache(maxCachedTLSSessions)}, nil
}

// Addr returns the address on which the forwarder listens.
func (f *Forwarder) Addr() net.Addr { return f.listener.Addr() }

// Run forwards connections until ctx ends, then closes all of them and returns nil, or the error of closing the
// listener.
func (f *Forwarder) Run(ctx context.Context) error {
	defer f.handlers.Wait()
	var closeErr error
	closed := make(chan struct{})
	stop := context.AfterFunc(ctx, func() { defer close(closed); closeErr = f.listener.Close() })
	defer stop()
	slots := make(chan struct{}, f.cfg.Connections)
	for {
		select {
		case slots <- struct{}{}:
		case <-ctx.Done():
			<-closed
			return closeErr
		}
		c, err := f.listener.AcceptTCP()
		if err == nil {
			f.handlers.Go(func() {
				defer func() { <-slots }()
				f.forwardConnection(ctx, c)
			})
			continue
		}
		<-slots
		if ctx.Err() != nil {
			<-closed
			return closeErr
		}
		// Most likely the process is out of file descriptors, which passes.
		f.cfg.Log.Error("egress: accept a connection", "err", err)
		pause := time.NewTimer(acceptRetryPause)
		select {
		case <-pause.C:
		case <-ctx.Done():
			pause.Stop()
		}
	}
}

// forwardConnection connects a client to the egress proxy and copies bytes in both directions.
func (f *Forwarder) forwardConnection(ctx context.Context, client *net.TCPConn) {
	defer closeQuietly(client)
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(ctx, func() { closeQuietly(client) })()
	proxy, err := f.awaitProxy(ctx)
	if err != nil {
		refuseRequest(client, "the egress proxy cannot be reached, so nothing leaves this sandbox for now; try again in a moment")
		return
	}
	defer closeQuietly(proxy)
	defer context.AfterFunc(ctx, func() { closeQuietly(proxy) })()
	p := &proxyPipe{client: client, proxy: proxy, idle: f.cfg.Idle}
	if p.copyBothWays(); p.isUnanswered() && ctx.Err() == nil {
		sendHTTPError(client, "the egress proxy closed the connection without an answer; try again in a moment")
	}
}

// awaitProxy connects to the egress proxy. It dials again while the proxy cannot be reached, up to Config.Wait, so that a restart of the
// proxy costs no client its connection.
func (f *Forwarder) awaitProxy(ctx context.Context) (halfClosableConn, error) {
	waiting, cancel := context.WithTimeout(ctx, f.cfg.Wait)
	defer cancel()
	pauses := retry.NewDoubling(shortestRedialPause, longestRedialPause)
	for {
		proxy, err := f.dial(ctx)
		f.logReachability(ctx, err)
		var untrusted *tls.CertificateVerificationError
		if err == nil || errors.As(err, &untrusted) || retry.Pause(waiting, pauses.NextBackOff()) != nil {
			return proxy, err
		}
	}
}

// dial connects to the egress proxy and sends the first line, which holds the sandbox's token.
func (f *Forwarder) dial(ctx context.Context) (halfClosableConn, error) {
	proxy, err := f.connect(ctx)
	if err != nil {
		return nil, err
	}
	preamble := runner.EgressPreamble + f.cfg.Token
	if f.cfg.HostsOnly {
		preamble += runner.EgressHostsOnly
	}
	if _, err := io.WriteString(proxy, preamble+"\n"); err != nil {
		return nil, errors.Join(err, proxy.Close())
	}
	return proxy, nil
}

// connect opens a connection to the egress proxy, to its Unix socket or over TLS.
func (f *Forwarder) connect(ctx context.Context) (halfClosableConn, error) {
	network, address, within := "unix", f.cfg.Socket, socketDialTimeout
	if f.tls != nil {
		network, address, within = "tcp", f.cfg.Server, serverDialTimeout
	}
	ctx, cancel := context.WithTimeout(ctx, within)
	defer cancel()
	var d net.Dialer
	c, err := d.DialContext(ctx, network, address)
	if err != nil {
		return nil, err
	}
	if f.tls != nil {
		return tlsconn.Client(ctx, c, f.tls)
	}
	proxy, ok := c.(halfClosableConn)
	if !ok {
		return nil, errors.Join(errors.New("the address is not a Unix socket"), c.Close())
	}
	return proxy, nil
}

// logReachability logs when the egress proxy becomes unreachable and when it becomes reachable again. err is the result
// of the last attempt to connect.
func (f *Forwarder) logReachability(ctx context.Context, err error) {
	if ctx.Err() != nil {
		return
	}
	f.mu.Lock()
	defer f.mu.Unlock()
	switch {
	case err != nil && !f.unreachable:
		f.cfg.Log.Warn("the egress proxy cannot be reached", "proxy", cmp.Or(f.cfg.Server, f.cfg.Socket), "err", err)
	case err == nil && f.unreachable:
		f.cfg.Log.Info("the egress proxy is back", "proxy", cmp.Or(f.cfg.Server, f.cfg.Socket))
	}
	f.unreachable = err != nil
}

// closeQuietly closes c and ignores the error: a connection that breaks during its close is closed as well.
func closeQuietly(c io.Closer) { _ = c.Close() }
