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
	"syscall"
	"time"

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

// Deps is what a Service is handed; all of it may be absent.
type Deps struct {
	Logger   *slog.Logger
	Resolver policy.Resolver                                                      // the system's when nil
	Dial     func(ctx context.Context, network, address string) (net.Conn, error) // to hosts of allowlists, by address; the system's when nil
	Roots    *x509.CertPool                                                       // that hosts of allowlists are verified against; the system's when nil
	Own      func() ([]netip.Addr, error)                                         // addresses of this machine; asked of it when nil
	Getenv   func(string) string                                                  // for credentials of custom hosts; the process's when nil
	Now      <-chan struct{}                                                      // closed to end at once, without waiting for open requests
}

// Service is the proxy.
type Service struct {
	cfg      Config
	log      *slog.Logger
	now      <-chan struct{}
	lock     *os.File
	journals *journal.Store
	registry *registry.Registry
	metrics  *telemetry.Metrics
	proxy    *proxy.Server
	vouches  *authority.Authority
	pair     *certificate.Pair     // of the TLS listener; nil without one
	unwell   atomic.Pointer[error] // why journals are not written
	draining atomic.Bool
}

// New checks the settings and opens the data folder, which no other proxy may
// have open. Run has to follow.
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
	routes, err := cfg.routes(deps.Getenv)
	if err != nil {
		return nil, err
	}
	prices, err := cfg.prices()
	if err != nil {
		return nil, err
	}
	open, err := cfg.open()
	if err != nil {
		return nil, err
	}
	closed, err := cfg.closed()
	if err != nil {
		return nil, err
	}
	s := &Service{cfg: cfg, log: deps.Logger, now: deps.Now}
	if cfg.ListenTLS != "" {
		if s.pair, err = certificate.OpenPair(cfg.TLSCert, cfg.TLSKey, s.log); err != nil {
			return nil, err
		}
	}
	if s.lock, err = lockData(cfg.Data); err != nil {
		return nil, fmt.Errorf("data: %w", err)
	}
	s.journals = journal.NewStore(journal.Config{MaxBytes: cfg.JournalMax, Logger: s.log, Failed: s.wrote, Denied: s.tell})
	s.registry, err = registry.Open(registry.Config{
		Dir: filepath.Join(cfg.Data, "sandboxes"), Journals: s.journals, Connections: cfg.Connections, KeepFor: cfg.KeepFor, Logger: s.log,
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("data: %w", err), s.lock.Close())
	}
	vouches, fresh, err := authority.Open(cfg.Data, nil)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("data: %w", err), s.lock.Close())
	}
	if fresh {
		s.log.Info("made a certificate authority: sandboxes with methods in their allowlist trust it from their next turn on")
	}
	s.vouches = vouches
	s.metrics = telemetry.New(s.registry.Count, nil)
	if s.pair != nil {
		s.metrics.Certificate.Watch(s.pair.Expiry)
	}
	s.proxy = proxy.New(proxy.Config{
		Routes: routes, Registry: s.registry, Prices: prices, Metrics: s.metrics, Logger: s.log, Open: open, Idle: cfg.Idle, ModelIdle: cfg.ModelIdle,
		Authority: vouches, Roots: deps.Roots,
		Dialer: policy.NewDialer(policy.DialerConfig{Resolver: deps.Resolver, Dial: deps.Dial, Own: deps.Own, Closed: closed}),
	})
	return s, nil
}

// lockData makes the folder and locks it for as long as the file is open.
func lockData(dir string) (*os.File, error) {
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, err
	}
	f, err := os.OpenFile(filepath.Join(dir, "lock"), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, err
	}
	if err := syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB); err != nil {
		return nil, errors.Join(fmt.Errorf("%s is in use by another egress proxy: %w", dir, err), f.Close())
	}
	return f, nil
}

// wrote is told how writes of journals went.
func (s *Service) wrote(err error) {
	if err == nil {
		s.unwell.Store(nil)
		return
	}
	s.metrics.Unwritten()
	s.unwell.Store(&err)
}

// tell logs a denial's line; the journal has bounded how many there are.
func (s *Service) tell(d journal.Denial) {
	s.log.Warn("egress denied", "sandbox", d.Sandbox, "tenant", d.Tenant, "session", d.Session, "execution", d.Execution, "line", d.Data.Line, "host", d.Data.Host, "port", d.Data.Port,
		"method", d.Data.Method, "address", d.Data.Address, "code", d.Data.Code, "reason", d.Data.Message, "count", d.Data.Count)
}

func (s *Service) health() error {
	if err := s.unwell.Load(); err != nil {
		return fmt.Errorf("journals are not written: %w", *err)
	}
	if s.draining.Load() {
		return errors.New("it is about to end")
	}
	return s.certificateHealth()
}

// certificateHealth returns why sandboxes will refuse the certificate of the TLS listener, or why its changed files are not served.
func (s *Service) certificateHealth() error {
	if s.pair == nil {
		return nil
	}
	expiry, err := s.pair.Expiry()
	if err == nil && !time.Now().Before(expiry) {
		err = &certificate.ExpiredError{File: s.cfg.TLSCert, NotAfter: expiry}
	}
	return err
}

// listen opens the sockets of sandboxes.
func (s *Service) listen() ([]proxy.Listener, error) {
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
	settings := s.pair.TLS()
	settings.MinVersion = tls.VersionTLS13
	return append(list, proxy.Listener{Listener: remote, TLS: &proxy.TLS{
		Config: settings, Within: s.cfg.TLSHandshake, Connections: s.cfg.TLSConnections, PerAddress: s.cfg.TLSAddressConnections,
	}}), nil
}

// Run serves until ctx ends, lets open requests finish for as long as the
// settings say, and then writes what is left to write. It gives nil for a deliberate stop.
func (s *Service) Run(ctx context.Context) error {
	defer s.lock.Close() //nolint:errcheck // nothing is in it
	sandboxes, err := s.listen()
	if err != nil {
		return err
	}
	for _, l := range sandboxes {
		defer l.Close() //nolint:errcheck // closed below already
	}
	holders, err := listenUnix(s.cfg.ListenAdmin, 0o700, 0o600)
	if err != nil {
		return fmt.Errorf("listen-admin: %w", err)
	}
	defer holders.Close() //nolint:errcheck // closed below already

	api := &http.Server{
		Handler:           admin.New(admin.Config{Registry: s.registry, Metrics: s.metrics.Handler(), Health: s.health, Trust: s.vouches.Trust, Logger: s.log}),
		ReadHeaderTimeout: 30 * time.Second, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug),
	}
	servers := []*http.Server{api}
	g, failed := errgroup.WithContext(ctx)
	if s.cfg.ListenMetrics != "" {
		l, err := net.Listen("tcp", s.cfg.ListenMetrics)
		if err != nil {
			return fmt.Errorf("listen-metrics: %w", err)
		}
		m := s.metricsServer()
		servers = append(servers, m)
		g.Go(func() error { return stopped(m.Serve(l)) })
	}
	// What writes and tidies outlives what serves.
	keep, stopKeeping := context.WithCancel(context.WithoutCancel(ctx))
	defer stopKeeping()
	kept, _ := errgroup.WithContext(keep)
	kept.Go(func() error { return s.journals.Run(keep) })
	kept.Go(func() error { return s.registry.Run(keep) })
	g.Go(func() error { return s.proxy.Serve(sandboxes...) })
	g.Go(func() error { return stopped(api.Serve(holders)) })
	s.log.Info("ready", "sandboxes", s.cfg.ListenSandboxes, "tls", s.cfg.ListenTLS, "admin", s.cfg.ListenAdmin, "registered", s.registry.Count())

	<-failed.Done()
	s.drain(sandboxes)
	for _, srv := range servers {
		err = errors.Join(err, shut(srv))
	}
	err = errors.Join(err, g.Wait())
	stopKeeping()
	return errors.Join(err, kept.Wait())
}

func (s *Service) metricsServer() *http.Server {
	mux := http.NewServeMux()
	mux.Handle("GET /metrics", s.metrics.Handler())
	mux.Handle("GET /healthz", admin.Health(s.health))
	return &http.Server{Handler: mux, ReadHeaderTimeout: 10 * time.Second, ErrorLog: slog.NewLogLogger(s.log.Handler(), slog.LevelDebug)}
}

// drain takes no more connections and waits for open requests.
func (s *Service) drain(listeners []proxy.Listener) {
	s.draining.Store(true)
	s.log.Info("stopping", "drain", s.cfg.Drain)
	for _, l := range listeners {
		if err := l.Close(); err != nil {
			s.log.Warn("close the sandboxes' socket", "address", l.Addr(), "error", err)
		}
	}
	ctx, cancel := context.WithTimeout(context.Background(), s.cfg.Drain)
	defer cancel()
	if s.now != nil {
		go func() {
			select {
			case <-s.now:
				cancel()
			case <-ctx.Done():
			}
		}()
	}
	if err := s.proxy.Shutdown(ctx); err != nil {
		s.log.Warn("requests were cut off", "reason", err)
	}
}

func stopped(err error) error {
	if errors.Is(err, http.ErrServerClosed) {
		return nil
	}
	return err
}

// shut ends a server whose requests are short.
func shut(srv *http.Server) error {
	ctx, cancel := context.WithTimeout(context.Background(), 5*time.Second)
	defer cancel()
	if err := srv.Shutdown(ctx); err != nil {
		return errors.Join(err, srv.Close())
	}
	return nil
}

// listenUnix listens on a socket, in place of one that nobody answers at any more.
func listenUnix(path string, folder, mode fs.FileMode) (net.Listener, error) {
	if err := os.MkdirAll(filepath.Dir(path), folder); err != nil {
		return nil, err
	}
	if c, err := net.DialTimeout("unix", path, time.Second); err == nil {
		return nil, errors.Join(fmt.Errorf("%s: another process listens there", path), c.Close())
	}
	if info, err := os.Lstat(path); err == nil {
		if info.Mode().Type() != fs.ModeSocket {
			return nil, fmt.Errorf("%s: there is something else than a socket", path)
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
