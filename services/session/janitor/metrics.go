package janitor

import "github.com/prometheus/client_golang/prometheus"

// metrics are the counters of one copy of the janitor.
type metrics struct {
	items  *prometheus.CounterVec
	bytes  *prometheus.CounterVec
	passes *prometheus.CounterVec
}

// newMetrics returns the metrics of the janitor. It registers them unless r is nil.
func newMetrics(r prometheus.Registerer) *metrics {
	m := &metrics{
		items:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_janitor_removed_total", Help: "What was removed for good."}, []string{"kind"}),
		bytes:  prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_janitor_removed_bytes_total", Help: "Size of the objects of what was removed."}, []string{"kind"}),
		passes: prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_janitor_passes_total", Help: "Passes by their outcome: ok or failed."}, []string{"outcome"}),
	}
	if r != nil {
		r.MustRegister(m.items, m.bytes, m.passes)
	}
	return m
}

// DescribeMetrics registers the janitor's metrics without a running janitor, for the documentation.
func DescribeMetrics(r prometheus.Registerer) { newMetrics(r) }

// countRemoved counts removed content of a kind: the number of objects, and their bytes.
func (m *metrics) countRemoved(k ContentKind, n int, bytes uint64) {
	m.items.WithLabelValues(string(k)).Add(float64(n))
	m.bytes.WithLabelValues(string(k)).Add(float64(bytes))
}

// countPass counts a pass of the janitor by its success.
func (m *metrics) countPass(ok bool) {
	outcome := "ok"
	if !ok {
		outcome = "failed"
	}
	m.passes.WithLabelValues(outcome).Inc()
}
