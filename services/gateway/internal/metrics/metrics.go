// Package metrics defines the Prometheus metrics of a gateway.
package metrics

import (
	"net/http"
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/services/gateway/internal/live"
)

// Metrics are the metrics of one gateway. They have their own registry, so that several gateways can run in one
// process.
type Metrics struct {
	registry *prometheus.Registry
	also     prometheus.Registerer // second registry; nil for none

	requests *prometheus.CounterVec
	inFlight prometheus.Gauge
	seconds  *prometheus.HistogramVec
	calls    *prometheus.CounterVec
	commands *prometheus.CounterVec
	refused  prometheus.Counter
	streams  *prometheus.GaugeVec
	frames   *prometheus.CounterVec
	bytes    *prometheus.CounterVec
	cut      *prometheus.CounterVec
	feeds    prometheus.Gauge
	readers  prometheus.Gauge
	rereads  *prometheus.CounterVec
	held     atomic.Pointer[func() int64]

	// Certificate exports the certificate of the listeners, after Watch was called on it.
	Certificate *certificate.Collector
}

// New creates the metrics of a gateway and registers them with a registry of their own. If second is not nil, New
// registers them with second too.
func New(second prometheus.Registerer) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_gateway_" + name, Help: help}, labels)
	}
	gauge := func(name, help string) prometheus.Gauge {
		return prometheus.NewGauge(prometheus.GaugeOpts{Name: "spool_gateway_" + name, Help: help})
	}
	m := &Metrics{
		registry: prometheus.NewRegistry(), also: second,
		requests: counter("http_requests_total", "Answered HTTP requests.", "method", "route", "status"),
		inFlight: gauge("http_requests_in_flight", "HTTP requests in progress, including SSE streams."),
		seconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "spool_gateway_http_request_seconds", Help: "Seconds to answer an HTTP request, except streams and requests with wait.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"method", "route"}),
		calls:    counter("grpc_calls_total", "Answered gRPC calls.", "method", "code"),
		commands: counter("commands_total", "Commands by outcome: ok, or the error code.", "type", "outcome"),
		refused:  prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_gateway_unauthenticated_total", Help: "Requests without a valid API key."}),
		streams: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "spool_gateway_streams", Help: "Open streaming connections, including calls of WatchExecution (kind watch), and requests that wait for the end of an execution (kind wait).",
		}, []string{"kind"}),
		frames:  counter("frames_total", "Events, text deltas and execution statuses (kind watch) sent to clients.", "kind"),
		bytes:   counter("frame_bytes_total", "Bytes of events, text deltas and execution statuses sent to clients, without framing.", "kind"),
		cut:     counter("clients_cut_total", "Streams that this gateway ended, by error code.", "kind", "code"),
		feeds:   gauge("feeds", "Sessions with at least one streaming client."),
		readers: gauge("readers", "Streaming clients, counted once for each session."),
		rereads: counter("rereads_total", "Reads of Postgres and DELTAS to bring streamed sessions up to date, by cause.", "why"),
	}
	held := prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "spool_gateway_held_bytes", Help: "Bytes of max-bytes that are held by requests in progress and by unsent stream data."}, func() float64 {
		if bytes := m.held.Load(); bytes != nil {
			return float64((*bytes)())
		}
		return 0
	})
	m.Certificate = certificate.NewCollector("spool_gateway_")
	own := []prometheus.Collector{
		m.Certificate, held, m.requests, m.inFlight, m.seconds, m.calls, m.commands, m.refused, m.streams, m.frames, m.bytes, m.cut, m.feeds, m.readers, m.rereads,
	}
	m.Register(own...)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	return m
}

// Register adds metrics of other parts of the gateway to both registries.
func (m *Metrics) Register(list ...prometheus.Collector) {
	m.registry.MustRegister(list...)
	if m.also != nil {
		m.also.MustRegister(list...)
	}
}

// Handler returns an HTTP handler that serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// SetHeldBytes sets the function that returns the number of bytes that requests in progress hold.
func (m *Metrics) SetHeldBytes(bytes func() int64) { m.held.Store(&bytes) }

// BeginRequest counts an HTTP request that has begun; done must be called at its end.
func (m *Metrics) BeginRequest() (done func()) {
	m.inFlight.Inc()
	return m.inFlight.Dec
}

// CountRequest counts an answered HTTP request. The duration of streams and of requests with wait is not recorded.
func (m *Metrics) CountRequest(method, route string, status int, took time.Duration, stream bool) {
	m.requests.WithLabelValues(method, route, strconv.Itoa(status)).Inc()
	if stream {
		return
	}
	m.seconds.WithLabelValues(method, route).Observe(took.Seconds())
}

// CountCall counts an answered gRPC call.
func (m *Metrics) CountCall(method, code string) { m.calls.WithLabelValues(method, code).Inc() }

// CountCommand counts a command that the gateway sent, by type and outcome.
func (m *Metrics) CountCommand(t command.Type, outcome string) {
	m.commands.WithLabelValues(string(t), outcome).Inc()
}

// CountUnauthenticated counts a request that was refused because it had no valid API key.
func (m *Metrics) CountUnauthenticated() { m.refused.Inc() }

// BeginStream counts an open connection of a kind (ws, sse, grpc, watch), or a waiting request (wait); done must be called at its end.
func (m *Metrics) BeginStream(kind string) (done func()) {
	g := m.streams.WithLabelValues(kind)
	g.Inc()
	return g.Dec
}

// CountSent counts a frame that was sent on a stream of a kind, and its bytes.
func (m *Metrics) CountSent(kind string, bytes int) {
	m.frames.WithLabelValues(kind).Inc()
	m.bytes.WithLabelValues(kind).Add(float64(bytes))
}

// CountCut counts a stream that was ended with an error.
func (m *Metrics) CountCut(kind, code string) { m.cut.WithLabelValues(kind, code).Inc() }

// LiveMetrics returns the functions with which a live.Hub counts its feeds, Readers and reads.
func (m *Metrics) LiveMetrics() live.Metrics {
	return live.Metrics{
		Feeds:   func(n int) { m.feeds.Add(float64(n)) },
		Readers: func(n int) { m.readers.Add(float64(n)) },
		Reread:  func(why string) { m.rereads.WithLabelValues(why).Inc() },
	}
}
