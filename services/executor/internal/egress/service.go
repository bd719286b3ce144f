package egress

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"errors"
	"fmt"
	"io/fs"
	"log/slog"
	"net"
	"net/http"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/gofrs/flock"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/executor/internal/egress/admin"
	"github.com/spoolhq/spool/services/executor/internal/egress/authority"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
	"github.com/spoolhq/spool/services/executor/internal/egress/policy"
	"github.com/spoolhq/spool/services/executor/internal/egress/proxy"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
	"github.com/spoolhq/spool/services/executor/internal/egress/telemetry"
)

// Deps are the dependencies of a Service. Each may be nil.
type Deps struct {
	Logger   *slog.Logger
	Resolver policy.Resolver                                                      // nil means the system's
	Dial     func(ctx context.Context, network, address string) (net.Conn, error) // connects to addresses of allowed hosts; nil means the system's
	Roots    *x509.CertPool                                                       // that certificates of allowed hosts are verified against; nil means the system's
	Own      func() ([]netip.Addr, error)                                         // returns the addresses of this machine; nil means those of its interfaces
	Getenv   func(string) string                                                  // reads the credentials of custom hosts; nil means os.Getenv
	Kill     <-chan struct{}                                                      // when it is closed, Run ends without waiting for open requests
}

// Service is the egress proxy with its registry, journals and listeners.
type Service struct {
	cfg       Config
	log       *slog.Logger
	kill      <-chan struct{}
	lock      *flock.Flock
	journals  *journal.Store
	registry  *registry.Registry
	metrics   *telemetry.Metrics
	proxy     *proxy.Server
	authority *authority.Authority
	pair      *certificate.Pair     // of the TLS listener; nil without one
	writeErr  atomic.Pointer[error] // of the last write of journals; nil if it succeeded
	draining  atomic.Bool
}

// New returns a Service. It validates the settings and locks the data folder: it fails if another proxy uses the folder. The
// caller must call Run, which releases the lock.
func New(cfg Config, deps Deps) (*Service, error) {
	cfg, err := cfg.withDefaults()
	if err != nil {
		return nil, err
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	if deps.Getenv == nil {
		deps.Getenv = os.Getenv
	}
	routes, err := cfg.loadRoutes(deps.Getenv)
	if err != nil {
		return nil, err
	}
	prices, err := cfg.loadPrices()
	if err != nil {
		return nil, err
	}
	open, err := cfg.parseOpenServers()
	if err != nil {
		return nil, err
	}
	closed, err := cfg.parseClosedNetworks()
	if err != nil {
		return nil, err
	}
	s := &Service{cfg: cfg, log: deps.Logger, kill: deps.Kill}
	if cfg.ListenTLS != "" {
		if s.pair, err = certificate.OpenPair(cfg.TLSCert, cfg.TLSKey, s.log); err != nil {
			return nil, err
		}
	}
	if s.lock, err = lockDataFolder(cfg.Data); err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	s.journals = journal.NewStore(journal.Config{MaxBytes: cfg.JournalMax, Logger: s.log, Failed: s.setJournalWriteError, Denied: s.logDenial})
	s.registry, err = registry.Open(registry.Config{
		Dir: filepath.Join(cfg.Data, "sandboxes"), Journals: s.journals, Connections: cfg.Connections, KeepFor: cfg.KeepFor, Logger: s.log,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("data: %w", err), s.lock.Unlock())
	}
	ca, created, err := authority.Open(cfg.Data, nil)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("data: %w", err), s.lock.Unlock())
	}
	if created {
		s.log.Info("created a certificate authority: sandboxes with methods in their allowlist trust it from their next turn on")
	}
	s.authority = ca
	s.metrics = telemetry.New(s.registry.Count, nil)
	if s.pair != nil {
		s.metrics.Certificate.SetSource(s.pair.Expiry)
	}
	s.proxy = proxy.New(proxy.Config{
		Routes: routes, Registry: s.registry, Prices: prices, Metrics: s.metrics, Logger: s.log, Open: open, Idle: cfg.Idle, ModelIdle: cfg.ModelIdle,
		Authority: ca, Roots: deps.Roots,
		Dialer: policy.NewDialer(policy.DialerConfig{Resolver: deps.Resolver, Dial: deps.Dial, Own: deps.Own, Closed: closed}),
	})
	return s, nil
}

// lockDataFolder creates the data folder if it does not exist, and locks it.
func lockDataFolder(dir string) (*flock.Flock, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	lock := flock.New(filepath.Join(dir, "lock"))
	locked, err := lock.TryLock()
	if err != nil {
		return nil, err
	}
	if !locked {
		return nil, fmt.Errorf("%s is in use by another egress proxy", dir)
	}
	return lock, nil
}

// setJournalWriteError records the error of the last write of journals, nil if it succeeded, for the health check.
func (s *Service) setJournalWriteError(err error) {
	if err == nil {
		s.writeErr.Store(nil)
		return
	}
	s.metrics.CountJournalWriteFailure()
	s.writeErr.Store(&err)
}

// logDenial writes a denial to the program's log. The journal limits the rate of calls.
func (s *Service) logDenial(d journal.Denial) {
	s.log.Warn("egress denied", "sandbox", d.Sandbox, "tenant", d.Tenant, "session", d.Session, "execution", d.Execution, "line", d.Data.Line, "host", d.Data.Host, "port", d.Data.Port,
		"method", d.Data.Method, "address", d.Data.Address, "code", d.Data.Code, "reason", d.Data.Message, "count", d.Data.Count)
}

// checkHealth returns an error if the proxy cannot write journals, is shutting down, or has no valid TLS certificate.
func (s *Service) checkHealth() error {
	if err := s.writeErr.Load(); err != nil {
		return fmt.Errorf("journals are not written: %w", *err)
	}
	if s.draining.Load() {
		return errors.New("the proxy is about to end")
	}
	return s.checkCertificate()
}

// checkCertificate returns an error if the certificate of the TLS listener has expired, or its changed files cannot be loaded.
func (s *Service) checkCertificate() error {
	if s.pair == nil {
		return nil
	}
	expiry, err := s.pair.Expiry()
	if err == nil && !time.Now().Before(expiry) {
		err = &certificate.ExpiredError{File: s.cfg.TLSCert, NotAfter: expiry}
	}
	return err
}

// listenForSandboxes opens the listening sockets to which sandboxes connect.
func (s *Service) listenForSandboxes() ([]proxy.Listener, error) {
	local, err := listenUnix(s.cfg.ListenSandboxes, 0o755, 0o666)
	if err != nil {
		return nil, fmt.Errorf("listen-sandboxes: %w", err)
	}
	list := []proxy.Listener{{Listener: local}}
	if s.pair == nil {
		return list, nil
	}
	remote, err := net.Listen("tcp", s.cfg.ListenTLS)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("listen-tls: %w", err), local.Close())
	}
	settings := s.pair.TLSConfig()
	settings.MinVersion = tls.VersionTLS13
	return append(list, proxy.Listener{Listener: remote, TLS: &proxy.TLSConfig{
		Config: settings, Within: s.cfg.TLSHandshake, Connections: s.cfg.TLSConnections, PerAddress: s.cfg.TLSAddressConnections,
	}}), nil
}

// Run serves sandboxes and the admin API until ctx ends. Then it waits for open requests up to Config.Drain, writes all journals, and
// returns nil.
func (s *Service) Run(ctx context.Context) error {
	defer s.lock.Unlock() //nolint:errcheck // nothing was written to it
	sandboxes, err := s.listenForSandboxes()
	if err != nil {
		return err
	}
	for _, l := range sandboxes {
		defer l.Close() //nolint:errcheck // closed below already
	}
	adminListener, err := listenUnix(s.cfg.ListenAdmin, 0o700, 0o600)
	if err != nil {
		return fmt.Errorf("listen-admin: %w", err)
	}
	defer adminListener.Close() //nolint:errcheck // closed below already

	adminServer := &http.Server{
		Handler:           admin.New(admin.Config{Registry: s.registry, Metrics: s.metrics.Handler(), Health: s.checkHealth, Trust: s.authority.TrustCertificate, Logger: s.log}),
		ReadHeaderTimeout: 30 * time.Second, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	servers := []*http.Server{adminServer}
	g, failed := errgroup.WithContext(ctx)
	if s.cfg.ListenMetrics != "" {
		l, err := net.Listen("tcp", s.cfg.ListenMetrics)
		if err != nil {
			return fmt.Errorf("listen-metrics: %w", err)
		}
		m := s.metricsServer()
		servers = append(servers, m)
		g.Go(func() error { return ignoreClosed(m.Serve(l)) })
	}
	// Journals and registry run until the last request has ended.
	storage, stopStorage := context.WithCancel(context.WithoutCancel(ctx))
	defer stopStorage()
	stores, _ := errgroup.WithContext(storage)
	stores.Go(func() error { return s.journals.Run(storage) })
	stores.Go(func() error { return s.registry.Run(storage) })
	g.Go(func() error { return s.proxy.Serve(sandboxes...) })
	g.Go(func() error { return ignoreClosed(adminServer.Serve(adminListener)) })
	s.log.Info("ready", "sandboxes", s.cfg.ListenSandboxes, "tls", s.cfg.ListenTLS, "admin", s.cfg.ListenAdmin, "registered", s.registry.Count())

	<-failed.Done()
	s.drainRequests(sandboxes)
	for _, srv := range servers {
		err = errors.Join(err, shutdownHTTPServer(srv))
	}
	err = errors.Join(err, g.Wait())
	stopStorage()
	return errors.Join(err, stores.Wait())
}

// metricsServer returns the HTTP server of the proxy's metrics.
func (s *Service) metricsServer() *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", s.metrics.Handler())
	mux.Handle("GET /healthz", admin.Health(s.checkHealth))
	return &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)}
}

// drainRequests stops accepting connections, and waits for open requests up to Config.Drain.
func (s *Service) drainRequests(listeners []proxy.Listener) {
	s.draining.Store(true)
	s.log.Info("stopping", "drain", s.cfg.Drain)
	for _, l := range listeners {
		if err := l.Close(); err != nil {
			s.log.Warn("close a listener for sandboxes", "address", l.Addr(), "error", err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Drain)
	defer cancel()
	if s.kill != nil {
		go func() {
			select {
			case <-s.kill:
				cancel()
			case <-ctx.Done():
			}
		}()
	}
	if err := s.proxy.Shutdown(ctx); err != nil {
		s.log.Warn("open requests were canceled", "reason", err)
	}
}

// ignoreClosed returns nil for http.ErrServerClosed, and other errors as they are.
func ignoreClosed(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// shutdownHTTPServer stops an HTTP server: it waits a few seconds for running requests, and then cancels them.
func shutdownHTTPServer(srv *http.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := srv.Shutdown(ctx); err != nil {
		return errors.Join(err, srv.Close())
	}
	return nil
}

// listenUnix listens on a Unix socket. It replaces a socket file on which no process listens.
func listenUnix(path string, folder, mode fs.FileMode) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), folder); err != nil {
		return nil, err
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		return nil, errors.Join(fmt.Errorf("%s: another process listens there", path), c.Close())
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("%s: the file is not a socket", path)
		}
		if err := os.Remove(path); err != nil {
			return nil, err
		}
	}
	l, err := net.Listen("unix", path)
	if err != nil {
		return nil, err
	}
	if err := os.Chmod(path, mode); err != nil {
		return nil, errors.Join(err, l.Close())
	}
	return l, nil
}
