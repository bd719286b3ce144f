// Package gateway is the service that clients connect to: REST and gRPC, generated from one .proto file, and
// WebSocket and SSE streams that resume exactly. The gateway never writes to the log: it sends commands to the
// session service, reads from Postgres, and receives new events from LIVE. Any number of gateways may run, and a
// client may reconnect to any of them.
package gateway

import (
	"context"
	"crypto/rand"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"math"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"google.golang.org/grpc"

	"github.com/spoolhq/spool/pkg/budget"
	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/daemon"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/livefiles"
	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/api"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/changes"
	"github.com/spoolhq/spool/services/gateway/internal/commands"
	"github.com/spoolhq/spool/services/gateway/internal/cors"
	"github.com/spoolhq/spool/services/gateway/internal/dead"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/metrics"
	"github.com/spoolhq/spool/services/gateway/internal/objects"
	"github.com/spoolhq/spool/services/gateway/internal/quota"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/replay"
	"github.com/spoolhq/spool/services/gateway/internal/rest"
	"github.com/spoolhq/spool/services/gateway/internal/rpc"
	"github.com/spoolhq/spool/services/gateway/internal/signin"
	"github.com/spoolhq/spool/services/gateway/internal/socket"
	"github.com/spoolhq/spool/services/gateway/internal/sse"
	"github.com/spoolhq/spool/services/gateway/internal/waits"
	"github.com/spoolhq/spool/web"
)

// Deps are the dependencies of a gateway. The caller closes them after Run has returned.
type Deps struct {
	NATS *nats.Conn
	Pool *pgxpool.Pool // from readmodel.Open
	// Partitions describes the distribution of ids over the partitions of the log (topology.ReadPartitions).
	Partitions events.Partitioning
	Logger     *slog.Logger // nil discards
	// Metrics is a second registry for the gateway's metrics, in addition to its own /metrics; nil for none.
	Metrics prometheus.Registerer
	// LocalKey, from NewKey, has the rights of a client of a gateway without keys. "" means none.
	LocalKey string
	// Sealer stores the values of secrets; nil for one that encrypts to Config.SecretsRecipient.
	Sealer Sealer
	// Now is the clock for new ids; nil for time.Now. Expiry of keys does not depend on it.
	Now func() time.Time
}

// NewKey returns a new random key in the form of an API key, for Deps.LocalKey.
func NewKey() (string, error) { return auth.NewKey(rand.Reader) }

// Gateway is one replica of the service.
type Gateway struct {
	cfg          Config
	deps         Deps
	hub          *live.Hub
	changes      *changes.Hub
	keyWatch     *auth.KeyWatch
	limitsWatch  *budget.Watch // limits of tenants
	socket       *socket.Handler
	http         *http.Server
	grpc         *rpc.Server
	store        *reads.Store
	certificate  *certificate.Pair // nil without TLS
	storageWatch *storage.Watch

	ready    chan struct{}
	mu       sync.Mutex
	addr     net.Addr
	grpcAddr net.Addr
}

// New validates the config and creates a Gateway. Run starts it.
func New(cfg Config, deps Deps) (*Gateway, error) {
	if err := cfg.validate(); err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	if deps.NATS == nil || deps.Pool == nil {
		return nil, errors.New("gateway: Deps.NATS and Deps.Pool are required")
	}
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	if deps.Now == nil {
		deps.Now = time.Now
	}
	deps.Logger = deps.Logger.With("component", "gateway")
	js, err := jetstream.New(deps.NATS)
	if err != nil {
		return nil, fmt.Errorf("gateway: %w", err)
	}
	g := &Gateway{cfg: cfg, deps: deps, ready: make(chan struct{})}
	return g, g.buildParts(js)
}

// buildParts creates the parts of the gateway and connects them.
func (g *Gateway) buildParts(js jetstream.JetStream) error {
	if err := auth.CheckAccessTable(); err != nil {
		return err
	}
	counts := metrics.New(g.deps.Metrics)
	if g.cfg.TLSCert != "" {
		var err error
		if g.certificate, err = certificate.OpenPair(g.cfg.TLSCert, g.cfg.TLSKey, g.deps.Logger); err != nil {
			return fmt.Errorf("gateway: %w", err)
		}
		counts.Certificate.SetSource(g.certificate.Expiry)
	}
	g.storageWatch = storage.NewWatch(storage.Config{JetStream: js, Reserve: g.cfg.StoreReserve, Logger: g.deps.Logger})
	counts.Register(g.storageWatch.Collectors()...)
	log, err := jslog.New(jslog.Config{JetStream: js, Partitions: g.deps.Partitions, Logger: g.deps.Logger})
	if err != nil {
		return err
	}
	g.store = reads.New(g.deps.Pool, reads.Config{Log: log, Partitions: g.deps.Partitions})
	proxies, err := g.cfg.trustedProxies()
	if err != nil {
		return fmt.Errorf("gateway: %w", err)
	}
	signIns := signin.New(signin.Config{JetStream: js, Now: g.deps.Now, Entropy: rand.Reader, Logger: g.deps.Logger, CookieLifetime: g.cfg.SignInLifetime})
	failures := signin.NewFailures(time.Now)
	authenticator, err := auth.New(auth.Config{Required: g.cfg.Auth == AuthKeys, RootKey: g.cfg.RootKey, LocalKey: g.deps.LocalKey, Keys: g.store, Sessions: signIns, Now: g.deps.Now})
	if err != nil {
		return err
	}
	g.limitsWatch = budget.NewWatch(js, g.deps.Logger)
	g.keyWatch = auth.NewKeyWatch(g.store, signIns, g.deps.Logger)
	admissions := admission.New(admission.Limits{Bytes: g.cfg.MaxBytes, TenantBytes: g.cfg.MaxTenantBytes, TenantStreams: g.cfg.MaxTenantStreams, TenantRate: g.cfg.MaxTenantRequests, TenantBurst: g.cfg.MaxTenantBurst, TenantLimits: g.limitsWatch.Limits})
	counts.SetHeldBytes(admissions.BytesInFlight)
	g.hub = live.NewHub(live.Config{
		ReadModels: g.store, Partitions: g.deps.Partitions, NATS: g.deps.NATS, Logger: g.deps.Logger, Admission: admissions, BytesTimeout: bytesTimeoutFactor * g.cfg.WriteTimeout, LagAfter: g.cfg.LagAfter, Metrics: counts.LiveMetrics(),
	})
	g.changes = changes.NewHub(changes.Config{ReadModels: g.store, NATS: g.deps.NATS, Logger: g.deps.Logger, Admission: admissions, BytesTimeout: bytesTimeoutFactor * g.cfg.WriteTimeout})
	sealer, err := g.sealer(js)
	if err != nil {
		return err
	}
	stored := quota.New(quota.Config{Limit: g.storageLimit, Stored: g.store.StoredBytes, Now: g.deps.Now, Partitions: g.deps.Partitions})
	player := replay.New(replay.Config{Partitions: g.deps.Partitions, Live: g.hub, Reads: g.store, NATS: g.deps.NATS, Admission: admissions})
	server := &api.Server{
		Objects: objects.New(objects.Config{JetStream: js, Room: g.storageWatch}), Skills: objects.New(objects.Config{JetStream: js, Bucket: topology.BucketSkills, Room: g.storageWatch}), Sealer: sealer,
		Auth: authenticator, SignIn: signIns, Failures: failures, Dead: dead.New(js), Quota: stored, Admission: admissions,
		Reads: g.store, Waits: waits.New(waits.Config{ReadModels: g.store, JetStream: js, Logger: g.deps.Logger}), Live: g.hub, Changes: g.changes, Player: player, Watch: g.keyWatch, Files: livefiles.NewClient(g.deps.NATS), Now: g.deps.Now, Entropy: rand.Reader, WriteTimeout: g.cfg.WriteTimeout, Metrics: counts,
		Send: commands.New(commands.Config{
			JetStream: js, Room: g.storageWatch, Quota: stored.CheckLimit, Timeout: g.cfg.CommandTimeout, Now: g.deps.Now, Entropy: rand.Reader, Logger: g.deps.Logger,
			OnOutcome: counts.CountCommand, OnStored: g.hub.RecordCommit,
		}),
		AwaitBudget: func(ctx context.Context, tenant string, p events.Period, limit events.Budget) error {
			return budget.AwaitBudget(ctx, js, tenant, p, limit)
		},
		SessionLimit: func(tenant string) int {
			if own := g.limitsWatch.Limits(tenant).Sessions; own > 0 {
				return int(own)
			}
			return g.cfg.MaxTenantSessions
		},
		AwaitLimits: func(ctx context.Context, tenant string, l events.TenantLimits) error {
			return budget.AwaitLimits(ctx, js, tenant, l)
		},
	}
	g.socket = socket.New(socket.Config{
		Admission: admissions, ReadTimeout: g.cfg.ReadTimeout, Live: g.hub, Changes: g.changes, Player: player, Reads: g.store, Watch: g.keyWatch, Logger: g.deps.Logger, WriteTimeout: g.cfg.WriteTimeout,
		Decide: server.DecideInSession,
		Opened: func() func() { return counts.BeginStream("ws") },
		Sent:   func(n int) { counts.CountSent("ws", n) },
		Cut:    func(code string) { counts.CountCut("ws", code) },
	})
	var page *web.Page
	if !g.cfg.NoWeb {
		if page, err = web.New(g.cfg.PathPrefix); err != nil {
			return fmt.Errorf("gateway: %w", err)
		}
	}
	handler, err := rest.New(rest.Config{
		Page: page, API: server, Auth: authenticator, Proxies: proxies, Metrics: counts, Logger: g.deps.Logger, Ready: g.checkDependencies, Socket: g.socket, Failures: failures, PathPrefix: g.cfg.PathPrefix,
		Admission: admissions, MaxRequest: g.cfg.MaxRequest, MaxFile: g.cfg.MaxFile, MaxTranscript: g.cfg.MaxTranscript, ReadTimeout: g.cfg.ReadTimeout,
		CORS: cors.Policy{Origins: g.cfg.AllowedOrigins, Loopback: g.cfg.Auth == AuthOff},
		SSE: sse.New(sse.Config{
			Admission: admissions, Live: g.hub, Changes: g.changes, Player: player, Watch: g.keyWatch, WriteTimeout: g.cfg.WriteTimeout,
			Opened: func() func() { return counts.BeginStream("sse") },
			Sent:   func(n int) { counts.CountSent("sse", n) },
			Cut:    func(code string) { counts.CountCut("sse", code) },
		}),
	})
	if err != nil {
		return err
	}
	g.http = &http.Server{
		Handler: handler, ReadHeaderTimeout: 10 * time.Second, IdleTimeout: 2 * time.Minute,
		// A header that is too long for its field, such as an Idempotency-Key of 1 MiB, is refused with a problem
		// that names the field. Above this limit net/http answers with a bare 431.
		MaxHeaderBytes: 2 << 20,
		ConnContext:    admission.ConnContext,
		ConnState:      admission.ConnState,
		ErrorLog:       slog.NewLogLogger(g.deps.Logger.Handler(), slog.LevelDebug),
	}
	var secure *tls.Config // TLS of the gRPC listener
	if g.certificate != nil {
		g.http.TLSConfig, secure = g.certificate.TLSConfig(), g.certificate.TLSConfig()
		// On HTTP/2 a connection has many concurrent requests, whose headers are in memory before the clients are
		// authenticated.
		g.http.MaxHeaderBytes, g.http.HTTP2 = rest.MaxHeaderBytes, &http.HTTP2Config{MaxConcurrentStreams: maxHTTP2Streams}
	}
	g.grpc = rpc.New(rpc.Config{
		API: server, Auth: authenticator, Proxies: proxies, Admission: admissions, Metrics: counts, Logger: g.deps.Logger, MaxRequest: g.cfg.MaxRequest, ReadTimeout: g.cfg.ReadTimeout,
		TLS: secure,
	})
	return nil
}

// storageLimit returns how many bytes a tenant may store; 0 means no limit. The platform tenant has none, because its
// entries belong to the operator.
func (g *Gateway) storageLimit(tenant string) int64 {
	if tenant == events.PlatformTenant {
		return 0
	}
	if own := g.limitsWatch.Limits(tenant).StorageBytes; own > 0 {
		return int64(min(own, math.MaxInt64)) //nolint:gosec // bounded just here
	}
	return g.cfg.MaxTenantStorage
}

// bytesTimeoutFactor is the multiple of the write timeout for which a stream waits for bytes of the in-flight limit. A client that does
// not read is disconnected after twice the write timeout, and its bytes are returned then.
const bytesTimeoutFactor = 3

// maxHTTP2Streams is the largest number of concurrent requests on an HTTP/2 connection.
const maxHTTP2Streams = 128

// serveHTTP serves HTTP, with TLS if a certificate is configured.
func (g *Gateway) serveHTTP(l net.Listener) error {
	if g.certificate == nil {
		return g.http.Serve(g.limitConnections(l, rest.OverloadedResponse()))
	}
	// A refused connection has not done its TLS handshake, so no answer can be sent.
	return g.http.ServeTLS(g.limitConnections(l, nil), "", "")
}

// Ready returns a channel that is closed when both listeners accept connections.
func (g *Gateway) Ready() <-chan struct{} { return g.ready }

// URL returns the base URL of the HTTP listener. It must be called after Ready.
func (g *Gateway) URL() string {
	if g.certificate != nil {
		return "https://" + g.Addr().String()
	}
	return "http://" + g.Addr().String()
}

// Addr returns the address of the HTTP listener, or nil before Ready.
func (g *Gateway) Addr() net.Addr {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.addr
}

// GRPCAddr returns the address of the gRPC listener, or nil before Ready.
func (g *Gateway) GRPCAddr() net.Addr {
	g.mu.Lock()
	defer g.mu.Unlock()
	return g.grpcAddr
}

// Run serves until ctx ends, then waits for running requests and ends streams with a reason. If NATS or Postgres is
// not available, Run keeps serving and answers 503 until they are back.
func (g *Gateway) Run(ctx context.Context) error {
	var listen net.ListenConfig
	web, err := listen.Listen(ctx, "tcp", g.cfg.Listen)
	if err != nil {
		return fmt.Errorf("gateway: listen for HTTP on %s: %w; choose another address with --listen", g.cfg.Listen, err)
	}
	rpcs, err := listen.Listen(ctx, "tcp", g.cfg.GRPCListen)
	if err != nil {
		return errors.Join(fmt.Errorf("gateway: listen for gRPC on %s: %w; choose another address with --grpc-listen", g.cfg.GRPCListen, err), web.Close())
	}
	g.mu.Lock()
	g.addr, g.grpcAddr = web.Addr(), rpcs.Addr()
	g.mu.Unlock()

	run, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	var wg sync.WaitGroup
	start := func(name string, f func() error) {
		wg.Go(func() {
			if err := f(); err != nil && !errors.Is(err, http.ErrServerClosed) && !errors.Is(err, grpc.ErrServerStopped) {
				cancel(fmt.Errorf("gateway: %s: %w", name, err))
			}
		})
	}
	start("follow changes", func() error {
		return g.changes.Run(run, func() {
			start("deliver LIVE", func() error { return g.hub.Run(run, func() { close(g.ready) }) })
		})
	})
	start("watch the space in NATS", func() error { return g.storageWatch.Run(run) })
	start("watch API keys", func() error { g.keyWatch.Run(run); return nil })
	start("watch tenant limits", func() error { return g.limitsWatch.Run(run) })
	start("check health", func() error { g.grpc.UpdateHealth(run, g.checkDependencies); return nil })
	start("serve HTTP", func() error { return g.serveHTTP(web) })
	start("serve gRPC", func() error { return g.grpc.Serve(g.limitConnections(rpcs, nil)) })
	<-run.Done()
	g.shutDown()
	wg.Wait()
	if err := context.Cause(run); err != nil && ctx.Err() == nil {
		return err
	}
	return nil
}

// limitConnections returns a listener that accepts the connections of l up to the configured limits, and sends answer
// to each connection above a limit before it closes that connection.
func (g *Gateway) limitConnections(l net.Listener, answer []byte) net.Listener {
	return admission.NewListener(l, g.cfg.MaxConnections, g.cfg.MaxAddressConns, answer)
}

// shutDown stops the servers. It waits for running requests to finish, up to the configured shutdown grace.
func (g *Gateway) shutDown() {
	ctx, cancel := context.WithTimeout(context.Background(), g.cfg.ShutdownGrace)
	defer cancel()
	var wg sync.WaitGroup
	wg.Go(g.socket.Close)
	wg.Go(func() { g.grpc.Stop(ctx) })
	wg.Go(func() {
		if err := g.http.Shutdown(ctx); err != nil {
			g.deps.Logger.Warn("requests aborted at the end of the shutdown grace", "error", err)
			_ = g.http.Close() // closes the remaining connections; an error changes nothing
		}
	})
	wg.Wait()
}

// checkDependencies returns the gateway's dependencies, such as NATS and Postgres, by name, each with an error if it
// is not available or nil if it is.
func (g *Gateway) checkDependencies(ctx context.Context) map[string]error {
	ctx, cancel := context.WithTimeout(ctx, 2*time.Second)
	defer cancel()
	out := map[string]error{"nats": daemon.CheckNATS(ctx, g.deps.NATS), "postgres": nil}
	if err := g.store.CheckReady(ctx); err != nil {
		out["postgres"] = err
	}
	return out
}
