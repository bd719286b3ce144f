// Package telemetry is what the egress proxy counts, for Prometheus.
package telemetry

import (
	"net/http"
	"strconv"
	"time"

	"github.com/prometheus/client_golang/prometheus"
	"github.com/prometheus/client_golang/prometheus/collectors"
	"github.com/prometheus/client_golang/prometheus/promhttp"

	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/events"
)

// Metrics of one proxy; it has a registry of its own, so that several live in one process.
type Metrics struct {
	registry *prometheus.Registry

	requests  *prometheus.CounterVec
	open      *prometheus.GaugeVec
	tokens    *prometheus.CounterVec
	cost      *prometheus.CounterVec
	unmetered *prometheus.CounterVec
	firstByte *prometheus.HistogramVec
	duration  *prometheus.HistogramVec
	denials   *prometheus.CounterVec
	conns     prometheus.Gauge
	tunnelled *prometheus.CounterVec
	unwritten prometheus.Counter
	refused   *prometheus.CounterVec

	// Certificate shows the certificate of the TLS listener, once it is told its source.
	Certificate *certificate.Collector
}

// New makes the metrics; sandboxes tells how many are registered. They are
// registered with another registry too, unless that is nil.
func New(sandboxes func() int, also prometheus.Registerer) *Metrics {
	counter := func(name, help string, labels ...string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_egress_" + name, Help: help}, labels)
	}
	seconds := func(name, help string) *prometheus.HistogramVec {
		return prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "spool_egress_" + name, Help: help, Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600},
		}, []string{"provider"})
	}
	m := &Metrics{
		registry: prometheus.NewRegistry(),
		requests: counter("requests_total", "Requests that ended, by route (forward, connect and, inside of connections by it, judged are those to hosts of the allowlist) and status; 0 when none came.", "route", "status"),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "spool_egress_open_requests", Help: "Requests and tunnels that are open.",
		}, []string{"route"}),
		tokens:    counter("tokens_total", "Tokens of models; model is a name of the price table, or other.", "provider", "model", "kind"),
		cost:      counter("cost_usd_total", "US dollars by the price table.", "provider", "model"),
		unmetered: counter("unmetered_total", "Calls of models that were answered without a word of usage.", "provider"),
		firstByte: seconds("first_byte_seconds", "Time from a model call to the first byte of its answer."),
		duration:  seconds("model_call_seconds", "Time of a whole model call."),
		denials:   counter("denials_total", "Connections and requests that were refused.", "code"),
		conns:     prometheus.NewGauge(prometheus.GaugeOpts{Name: "spool_egress_open_connections", Help: "Connections of sandboxes."}),
		tunnelled: counter("tunnel_bytes_total", "Bytes through tunnels.", "direction"),
		unwritten: prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_egress_journal_failures_total", Help: "Writes of journals that failed and are tried again."}),
		refused:   counter("tls_refused_total", "Connections over TLS that were closed before they were served: handshake (not TLS 1.3, or too slow), preamble (the first line is none, or too slow), token (of no registered sandbox), crowd (too many that name no sandbox yet), limit (too many connections).", "reason"),

		Certificate: certificate.NewCollector("spool_egress_"),
	}
	own := []prometheus.Collector{
		m.requests, m.open, m.tokens, m.cost, m.unmetered, m.firstByte, m.duration, m.denials, m.conns, m.tunnelled, m.unwritten, m.refused, m.Certificate,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "spool_egress_sandboxes", Help: "Sandboxes that may use the proxy."}, func() float64 { return float64(sandboxes()) }),
	}
	m.registry.MustRegister(own...)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if also != nil {
		also.MustRegister(own...)
	}
	return m
}

// Handler serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// Begin counts a request that came; the function that it gives counts its end.
func (m *Metrics) Begin(route string) (done func(status int)) {
	m.open.WithLabelValues(route).Inc()
	return func(status int) {
		m.open.WithLabelValues(route).Dec()
		m.requests.WithLabelValues(route, strconv.Itoa(status)).Inc()
	}
}

// Called counts a model call; model is a name of the price table, "" for others.
func (m *Metrics) Called(c events.ModelCalled, model string, metered bool) {
	if model == "" {
		model = "other" // a sandbox may ask for any name
	}
	for kind, n := range map[string]uint32{"input": c.Usage.InputTokens, "output": c.Usage.OutputTokens, "cache_read": c.Usage.CacheReadTokens, "cache_write": c.Usage.CacheWriteTokens} {
		m.tokens.WithLabelValues(c.Provider, model, kind).Add(float64(n))
	}
	m.cost.WithLabelValues(c.Provider, model).Add(c.CostUSD)
	if !metered {
		m.unmetered.WithLabelValues(c.Provider).Inc()
	}
	ms := func(n uint32) float64 { return (time.Duration(n) * time.Millisecond).Seconds() }
	m.firstByte.WithLabelValues(c.Provider).Observe(ms(c.FirstByteMs))
	m.duration.WithLabelValues(c.Provider).Observe(ms(c.DurationMs))
}

// Denied counts a refusal.
func (m *Metrics) Denied(code string) { m.denials.WithLabelValues(code).Inc() }

// RefusedTLS counts a connection over TLS that was closed before it was served.
func (m *Metrics) RefusedTLS(reason string) { m.refused.WithLabelValues(reason).Inc() }

// Connected counts a connection that came (1) or went (-1).
func (m *Metrics) Connected(n float64) { m.conns.Add(n) }

// Tunnelled counts bytes to or from a host.
func (m *Metrics) Tunnelled(direction string, n int) {
	m.tunnelled.WithLabelValues(direction).Add(float64(n))
}

// Unwritten counts a write of a journal that failed.
func (m *Metrics) Unwritten() { m.unwritten.Inc() }
