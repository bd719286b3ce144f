package daemon

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"
)

// healthChecksTimeout is the maximum time in which all health checks of one request to /readyz must end.
const healthChecksTimeout = 2 * time.Second

// Health decides by a list of checks whether a service is ready. The zero value has no checks, and so is ready. It is
// safe for concurrent use.
type Health struct {
	mu     sync.Mutex
	names  []string // in the order in which they were added
	checks map[string]func(context.Context) error
}

// AddCheck adds a health check, or replaces the check of that name. A check that returns nil succeeds.
func (h *Health) AddCheck(name string, check func(context.Context) error) {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.checks == nil {
		h.checks = map[string]func(context.Context) error{}
	}
	if h.checks[name] == nil {
		h.names = append(h.names, name)
	}
	h.checks[name] = check
}

// AddChannelCheck adds a health check that succeeds once the channel ready is closed.
func (h *Health) AddChannelCheck(name string, ready <-chan struct{}) {
	h.AddCheck(name, func(context.Context) error {
		select {
		case <-ready:
			return nil
		default:
			return errors.New("not started yet")
		}
	})
}

// FailUntilDone adds a health check that fails with reason until done is called. done must be called at most once.
func (h *Health) FailUntilDone(name, reason string) (done func()) {
	ready := make(chan struct{})
	h.AddCheck(name, func(context.Context) error {
		select {
		case <-ready:
			return nil
		default:
			return errors.New(reason)
		}
	})
	return func() { close(ready) }
}

// RunChecks runs all health checks concurrently. It returns "ok" or the error of each check by its name, and whether
// all checks succeeded.
func (h *Health) RunChecks(ctx context.Context) (map[string]string, bool) {
	ctx, cancel := context.WithTimeout(ctx, healthChecksTimeout)
	defer cancel()
	h.mu.Lock()
	checks := make(map[string]func(context.Context) error, len(h.names))
	for _, name := range h.names {
		checks[name] = h.checks[name]
	}
	h.mu.Unlock()
	var mu sync.Mutex
	var all sync.WaitGroup
	report, well := map[string]string{}, true
	for name, check := range checks {
		all.Go(func() {
			err := check(ctx)
			mu.Lock()
			defer mu.Unlock()
			report[name] = "ok"
			if err != nil {
				report[name], well = err.Error(), false
			}
		})
	}
	all.Wait()
	return report, well
}

// newMetricsRegistry returns a registry with the metrics that every process exports.
func newMetricsRegistry() *prometheus.Registry {
	registry := prometheus.NewRegistry()
	registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return registry
}

// CheckConnection returns an error that states the reason if a connection to NATS is not up.
func CheckConnection(nc *nats.Conn) error {
	s := nc.Status()
	if s == nats.CONNECTED {
		return nil
	}
	if reason := errorWithoutTime(nc.LastError()); reason != "" {
		return fmt.Errorf("NATS is %s: %s", s, reason)
	}
	return fmt.Errorf("NATS is %s", s)
}

// RegisterConnectionMetrics registers the metrics of a connection to NATS.
func RegisterConnectionMetrics(metrics prometheus.Registerer, nc *nats.Conn) {
	gauge := func(name, help string, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "spool_nats_" + name, Help: help}, value)
	}
	counter := func(name, help string, value func(nats.Statistics) uint64) prometheus.Collector {
		return prometheus.NewCounterFunc(prometheus.CounterOpts{Name: "spool_nats_" + name, Help: help},
			func() float64 { return float64(value(nc.Stats())) })
	}
	metrics.MustRegister(
		gauge("connected", "1 while the connection to NATS is up.", func() float64 {
			if nc.IsConnected() {
				return 1
			}
			return 0
		}),
		gauge("certificate_expiry_seconds", "Seconds until NATS's certificate expires; 0 while the connection is down or has no TLS.", func() float64 {
			state, err := nc.TLSConnectionState()
			if err != nil || len(state.PeerCertificates) == 0 {
				return 0
			}
			return time.Until(state.PeerCertificates[0].NotAfter).Seconds()
		}),
		counter("reconnects_total", "Reconnects to NATS.", func(s nats.Statistics) uint64 { return s.Reconnects }),
		counter("received_messages_total", "Messages received from NATS.", func(s nats.Statistics) uint64 { return s.InMsgs }),
		counter("sent_messages_total", "Messages sent to NATS.", func(s nats.Statistics) uint64 { return s.OutMsgs }),
		counter("received_bytes_total", "Bytes of messages received from NATS.", func(s nats.Statistics) uint64 { return s.InBytes }),
		counter("sent_bytes_total", "Bytes of messages sent to NATS.", func(s nats.Statistics) uint64 { return s.OutBytes }),
	)
}

// statusServer is the HTTP server of a service's health and metrics.
type statusServer struct {
	http *http.Server
	done chan struct{}
}

// startStatusServer listens on addr and serves health and metrics until shutdown is called.
func startStatusServer(ctx context.Context, addr string, health *Health, metrics prometheus.Gatherer, logger *slog.Logger) (*statusServer, error) {
	if _, _, err := net.SplitHostPort(addr); err != nil {
		return nil, fmt.Errorf("metrics-listen: %.100q is not an address such as 127.0.0.1:9090", addr)
	}
	var config net.ListenConfig
	l, err := config.Listen(ctx, "tcp", addr)
	if err != nil {
		return nil, fmt.Errorf("metrics-listen: %w; choose another address with --metrics-listen", err)
	}
	s := &statusServer{done: make(chan struct{}), http: &http.Server{
		Handler: statusHandler(health, metrics), ReadHeaderTimeout: 5 * time.Second, MaxHeaderBytes: 16 << 10,
		ErrorLog: slog.NewLogLogger(logger.Handler(), slog.LevelDebug),
	}}
	go func() {
		defer close(s.done)
		if err := s.http.Serve(l); !errors.Is(err, http.ErrServerClosed) {
			logger.Error("health and metrics are no longer served", "error", err)
		}
	}()
	logger.Info("health and metrics are served", "address", l.Addr().String())
	return s, nil
}

func (s *statusServer) shutdown() {
	_ = s.http.Close() // open requests are aborted: the process ends
	<-s.done
}

// statusHandler serves /healthz, which succeeds while the process runs, /readyz and /metrics.
func statusHandler(health *Health, metrics prometheus.Gatherer) http.Handler {
	mux := http.NewServeMux()
	mux.HandleFunc("GET /healthz", func(w http.ResponseWriter, _ *http.Request) {
		writeJSON(w, http.StatusOK, map[string]any{"status": "ok"})
	})
	mux.HandleFunc("GET /readyz", func(w http.ResponseWriter, r *http.Request) {
		checks, well := health.RunChecks(r.Context())
		status := http.StatusOK
		if !well {
			status = http.StatusServiceUnavailable
			w.Header().Set("Retry-After", "2")
		}
		writeJSON(w, status, map[string]any{"ready": well, "checks": checks})
	})
	mux.Handle("GET /metrics", promhttp.HandlerFor(metrics, promhttp.HandlerOpts{}))
	return mux
}

func writeJSON(w http.ResponseWriter, status int, v any) {
	w.Header().Set("Content-Type", "application/json")
	w.Header().Set("Cache-Control", "no-store")
	w.WriteHeader(status)
	_ = json.NewEncoder(w).Encode(v) // the client may have disconnected
}
