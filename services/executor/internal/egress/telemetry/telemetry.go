// Package telemetry has the Prometheus metrics of the egress proxy.
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

// Metrics are the metrics of one proxy. They have a registry of their own, so that tests can run several proxies in one process.
type Metrics struct {
	registry *prometheus.Registry

	requests      *prometheus.CounterVec
	open          *prometheus.GaugeVec
	tokens        *prometheus.CounterVec
	cost          *prometheus.CounterVec
	unmetered     *prometheus.CounterVec
	firstByte     *prometheus.HistogramVec
	duration      *prometheus.HistogramVec
	denials       *prometheus.CounterVec
	conns         prometheus.Gauge
	tunnelled     *prometheus.CounterVec
	writeFailures prometheus.Counter
	refused       *prometheus.CounterVec

	// Certificate has the metrics of the TLS listener's certificate, after its Watch was called.
	Certificate *certificate.Collector
}

// New returns the metrics of an egress proxy. sandboxes returns the number of registered sandboxes. If also is not nil, the
// metrics are also registered there, from which the reference documentation lists them.
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
		requests: counter("requests_total", "Requests that ended, by route and status; status is 0 if there was no answer. Requests to hosts of the allowlist have the routes forward, connect and, inside a connect tunnel, judged.", "route", "status"),
		open: prometheus.NewGaugeVec(prometheus.GaugeOpts{
			Name: "spool_egress_open_requests", Help: "Requests and tunnels that are open.",
		}, []string{"route"}),
		tokens:        counter("tokens_total", "Tokens of models; model is a name of the price table, or other.", "provider", "model", "kind"),
		cost:          counter("cost_usd_total", "US dollars by the price table.", "provider", "model"),
		unmetered:     counter("unmetered_total", "Model calls whose answer reported no usage.", "provider"),
		firstByte:     seconds("first_byte_seconds", "Time from a model call to the first byte of its answer."),
		duration:      seconds("model_call_seconds", "Duration of a model call."),
		denials:       counter("denials_total", "Refused connections and requests.", "code"),
		conns:         prometheus.NewGauge(prometheus.GaugeOpts{Name: "spool_egress_open_connections", Help: "Open connections of sandboxes."}),
		tunnelled:     counter("tunnel_bytes_total", "Bytes copied through tunnels.", "direction"),
		writeFailures: prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_egress_journal_failures_total", Help: "Failed writes of journals, which are tried again."}),
		refused:       counter("tls_refused_total", "Connections over TLS that were closed before they were served: handshake (not TLS 1.3, or too slow), preamble (the first line is invalid, or too slow), token (it belongs to no registered sandbox), crowd (too many connections that have not named a sandbox yet), limit (too many connections).", "reason"),

		Certificate: certificate.NewCollector("spool_egress_"),
	}
	own := []prometheus.Collector{
		m.requests, m.open, m.tokens, m.cost, m.unmetered, m.firstByte, m.duration, m.denials, m.conns, m.tunnelled, m.writeFailures, m.refused, m.Certificate,
		prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "spool_egress_sandboxes", Help: "Registered sandboxes."}, func() float64 { return float64(sandboxes()) }),
	}
	m.registry.MustRegister(own...)
	m.registry.MustRegister(collectors.NewGoCollector(), collectors.NewProcessCollector(collectors.ProcessCollectorOpts{}))
	if also != nil {
		also.MustRegister(own...)
	}
	return m
}

// Handler returns an HTTP handler that serves the metrics.
func (m *Metrics) Handler() http.Handler {
	return promhttp.HandlerFor(m.registry, promhttp.HandlerOpts{})
}

// BeginRequest counts an open request through a route, until the caller calls done with the HTTP status.
func (m *Metrics) BeginRequest(route string) (done func(status int)) {
	m.open.WithLabelValues(route).Inc()
	return func(status int) {
		m.open.WithLabelValues(route).Dec()
		m.requests.WithLabelValues(route, strconv.Itoa(status)).Inc()
	}
}

// CountModelCall counts a model call. model is a name of the price table, or "" for a model without a price.
func (m *Metrics) CountModelCall(c events.ModelCalled, model string, metered bool) {
	if model == "" {
		model = "other" // a sandbox can choose any name, and each would be a time series
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

// CountDenial counts a request that the proxy denied, by the code of the denial.
func (m *Metrics) CountDenial(code string) { m.denials.WithLabelValues(code).Inc() }

// CountTLSRefusal counts a connection over TLS that was closed before it was served, by reason.
func (m *Metrics) CountTLSRefusal(reason string) { m.refused.WithLabelValues(reason).Inc() }

// AddConnections adds n to the gauge of open connections: 1 for a new one, -1 for a closed one.
func (m *Metrics) AddConnections(n float64) { m.conns.Add(n) }

// CountTunnelBytes counts the bytes that were sent through a tunnel. direction is "out" (to the host) or "in".
func (m *Metrics) CountTunnelBytes(direction string, n int) {
	m.tunnelled.WithLabelValues(direction).Add(float64(n))
}

// CountJournalWriteFailure counts a failed write of journals to disk.
func (m *Metrics) CountJournalWriteFailure() { m.writeFailures.Inc() }
