package skills

import (
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics holds the Prometheus metrics of one copy of the skills service.
type metrics struct {
	commands       *prometheus.CounterVec
	commandSeconds *prometheus.HistogramVec
	kept           prometheus.Counter
}

// newMetrics returns the metrics of the skills service. It registers them unless r is nil.
func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		commands: prometheus.NewCounterVec(prometheus.CounterOpts{
			Name: "spool_skills_commands_total", Help: "Commands by their outcome: ok, a refusal's code, or retried for one that is given back to be carried out again.",
		}, []string{"type", "outcome"}),
		commandSeconds: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "spool_skills_command_seconds", Help: "Time to carry a command out, from its delivery to its answer.",
			Buckets: []float64{.0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60},
		}, []string{"type"}),
		kept: prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_skills_kept_total", Help: "ZIPs that were stored; one that was there already is not counted."}),
	}
	if r != nil {
		r.MustRegister(m.commands, m.commandSeconds, m.kept)
	}
	return m
}

// DescribeMetrics registers the metrics of the skills service without a running copy. Their documentation is generated
// from them.
func DescribeMetrics(r prometheus.Registerer) { newMetrics(r) }

// observeCommand records a command of a type, its outcome, and how long it took.
func (m *metrics) observeCommand(typ, outcome string, took time.Duration) {
	m.commands.WithLabelValues(typ, outcome).Inc()
	m.commandSeconds.WithLabelValues(typ).Observe(took.Seconds())
}
