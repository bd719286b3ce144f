package gateway

import (
	"context"
	"crypto/tls"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/rest"
)

// ServeWaiting serves /healthz and /readyz on the gateway's HTTP address until stop is called. It is used while a
// Gateway cannot be created, because NATS does not respond and the partitions of the log are not known yet. It
// answers other requests with 503. Deps.NATS and Deps.Pool are required.
func ServeWaiting(ctx context.Context, cfg Config, deps Deps) (stop func(), err error) {
	if deps.Logger == nil {
		deps.Logger = slog.New(slog.DiscardHandler)
	}
	g := &Gateway{cfg: cfg, deps: deps, store: reads.New(deps.Pool, reads.Config{})}
	var secure *tls.Config
	if cfg.TLSCert != "" {
		pair, err := certificate.OpenPair(cfg.TLSCert, cfg.TLSKey, deps.Logger)
		if err != nil {
			return nil, fmt.Errorf("gateway: %w", err)
		}
		secure = pair.TLSConfig()
	}
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", cfg.Listen)
	if err != nil {
		return nil, fmt.Errorf("gateway: listen for HTTP on %s: %w; choose another address with --listen", cfg.Listen, err)
	}
	if secure != nil {
		l = tls.NewListener(l, secure)
	}
	server := &http.Server{
		Handler: rest.WaitingHandler(g.checkDependencies), ReadHeaderTimeout: 5 * time.Second, WriteTimeout: 10 * time.Second, MaxHeaderBytes: rest.MaxHeaderBytes,
		ErrorLog: slog.NewLogLogger(deps.Logger.Handler(), slog.LevelDebug),
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		if err := server.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			deps.Logger.Error("readiness is no longer served", "error", err)
		}
	}()
	return func() {
		_ = server.Close() // closes the listener and its connections; clients connect again
		<-done
	}, nil
}
