package session

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/storage"
	"github.com/spoolhq/spool/services/session/internal/usage"
)

// metrics holds the Prometheus metrics of one replica of the session service.
type metrics struct {
	commands       *prometheus.CounterVec
	commandSeconds *prometheus.HistogramVec
	lag            prometheus.Histogram
	jobs           prometheus.Counter
	heads          prometheus.Counter
	headsAt        prometheus.Gauge
	unsigned       prometheus.Counter
}

// newMetrics returns the metrics of the session service. It registers them unless r is nil.
func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		commands: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spool_session_commands_total", Help: "Commands by their outcome: ok, a refusal's code, or retried for one that is given back to be carried out again.",
		}, []string{"type", "outcome"}),
		commandSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "spool_session_command_seconds", Help: "Time to carry a command out, from its delivery to its answer.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"type"}),
		lag: prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "spool_session_reaction_lag_seconds", Help: "Time from when the log stored a commit that can make something due until that was done.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 300},
		}),
		jobs:     prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_session_jobs_total", Help: "Jobs that were given to executors; one that lay in the queue already is counted again."}),
		heads:    prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_session_signed_heads_total", Help: "Heads of the log that this copy signed."}),
		headsAt:  prometheus.NewGauge(prometheus.GaugeOpts{Name: "spool_session_signed_heads_timestamp_seconds", Help: "When this copy last signed heads of the log, in seconds since 1970; 0 for never."}),
		unsigned: prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_session_signed_heads_failures_total", Help: "Passes of the signer that failed; a later pass signs the heads that they omitted."}),
	}
	if r != nil {
		r.MustRegister(m.commands, m.commandSeconds, m.lag, m.jobs, m.heads, m.headsAt, m.unsigned)
	}
	return m
}

// DescribeMetrics registers the metrics of the session service without a running copy. Their documentation is generated
// from them.
func DescribeMetrics(r prometheus.Registerer) {
	newMetrics(r)
	r.MustRegister(new(storage.Watch).Collectors()...)
	r.MustRegister(new(usage.Aggregator).Collectors()...)
}

// observeCommand records a command of a type, its outcome, and how long it took.
func (m *metrics) observeCommand(typ, outcome string, took time.Duration) {
	m.commands.WithLabelValues(typ, outcome).Inc()
	m.commandSeconds.WithLabelValues(typ).Observe(took.Seconds())
}

// countSignedHeads adds n to the number of signed heads, and records the present time as that of the last signing.
func (m *metrics) countSignedHeads(n int) {
	m.heads.Add(float64(n))
	m.headsAt.SetToCurrentTime()
}

// observeReactorLag records the time from the append of a commit to the end of its handling by the reactor.
func (m *metrics) observeReactorLag(lag time.Duration) { m.lag.Observe(max(0, lag.Seconds())) }
