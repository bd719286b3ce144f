package projector

import (
	"strconv"
	"sync/atomic"
	"time"

	"github.com/prometheus/client_golang/prometheus"
)

// metrics are the Prometheus metrics of a projector. Each has a label for the projector group.
type metrics struct {
	commits  *prometheus.CounterVec
	events   *prometheus.CounterVec
	poison   *prometheus.CounterVec
	applied  *prometheus.HistogramVec
	leading  *prometheus.GaugeVec
	position *prometheus.GaugeVec

	since []atomic.Int64 // by group: time of the oldest commit that was read but not applied, in ns; 0 for none
}

// newMetrics creates the metrics of a number of groups and registers them if r is not nil.
func newMetrics(r prometheus.Registerer, now func() time.Time, groups int) *metrics {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_projector_" + name, Help: help}, []string{"group"})
	}
	gauge := func(name, help string) *prometheus.GaugeVec {
		return prometheus.NewGaugeVec(prometheus.GaugeOpts{Name: "spool_projector_" + name, Help: help}, []string{"group"})
	}
	m := &metrics{
		since:   make([]atomic.Int64, groups),
		commits: counter("commits_total", "Commits that were folded into the read models."),
		events:  counter("events_total", "Events in these commits."),
		poison:  counter("poison_total", "Commits that could not be projected and were reported to DEAD."),
		applied: prometheus.NewHistogramVec(prometheus.HistogramOpts{
			Name: "spool_projector_apply_seconds", Help: "Seconds to fold a batch and commit it in Postgres.",
			Buckets: []float64{.001, .0025, .005, .01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10},
		}, []string{"group"}),
		leading:  gauge("leads", "1 for a group that this replica projects; each group is projected by one replica."),
		position: gauge("position", "Stream sequence up to which the group is projected."),
	}
	if r == nil {
		return m
	}
	r.MustRegister(m.commits, m.events, m.poison, m.applied, m.leading, m.position)
	for n := range m.since {
		m.setLeading(n, false)
		r.MustRegister(prometheus.NewGaugeFunc(prometheus.GaugeOpts{
			Name: "spool_projector_lag_seconds", ConstLabels: prometheus.Labels{"group": strconv.Itoa(n)},
			Help: "Age of the oldest commit that was read but not projected yet; 0 if there is none, or if another replica projects the group.",
		}, func() float64 {
			since := m.since[n].Load()
			if since == 0 {
				return 0
			}
			return max(0, now().Sub(time.Unix(0, since)).Seconds())
		}))
	}
	return m
}

// DescribeMetrics registers the projector's metrics without a projector, to generate documentation from them.
func DescribeMetrics(r prometheus.Registerer) { newMetrics(r, time.Now, 1) }

// setLeading records in the metrics whether this replica projects a group.
func (m *metrics) setLeading(group int, leading bool) {
	v := 0.0
	if leading {
		v = 1
	}
	m.leading.WithLabelValues(strconv.Itoa(group)).Set(v)
}

// clearLag resets the metric of the lag of a group, because another replica projects the group.
func (m *metrics) clearLag(group int) { m.since[group].Store(0) }

// recordStepBegin records in the metrics which commits a group is about to fold in one transaction.
func (m *metrics) recordStepBegin(group int, items []queuedCommit) {
	for _, it := range items {
		if it.rec.Position.Seq > 0 {
			m.since[group].Store(it.rec.Time.UnixNano())
			return
		}
	}
}

// recordStepEnd records in the metrics that a group has folded and written commits in one transaction, and how long
// this took.
func (m *metrics) recordStepEnd(group int, items []queuedCommit, at uint64, took time.Duration) {
	name := strconv.Itoa(group)
	for _, it := range items {
		if it.rec.Position.Seq == 0 {
			continue
		}
		m.commits.WithLabelValues(name).Inc()
		m.events.WithLabelValues(name).Add(float64(len(it.rec.Events)))
		if it.poison != nil {
			m.poison.WithLabelValues(name).Inc()
		}
	}
	m.applied.WithLabelValues(name).Observe(took.Seconds())
	m.position.WithLabelValues(name).Set(float64(at))
	m.since[group].Store(0)
}
