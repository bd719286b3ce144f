package worker

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/events"
)

// metrics are the metrics of a Worker.
type metrics struct {
	ended           *prometheus.CounterVec
	sandboxes       *prometheus.CounterVec
	sandboxSeconds  prometheus.Histogram
	snapshots       *prometheus.CounterVec
	snapshotSeconds prometheus.Histogram
	snapshotBytes   prometheus.Counter
}

func newMetrics() *metrics {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_executor_" + name, Help: help}, []string{"outcome"})
	}
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "spool_executor_" + name, Help: help, Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600},
		})
	}
	return &metrics{
		ended:           counter("executions_ended_total", "Executions whose end this executor recorded: completed, failed or cancelled."),
		sandboxes:       counter("sandboxes_total", "Sandboxes that were made (created), taken from the pool (pooled), or could not be made (failed)."),
		sandboxSeconds:  seconds("sandbox_create_seconds", "Time to make a sandbox, for a session or for the pool."),
		snapshots:       counter("snapshots_total", "Snapshots of workspaces that were stored, or failed."),
		snapshotSeconds: seconds("snapshot_seconds", "Time to take a snapshot of a workspace and store it."),
		snapshotBytes:   prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_executor_snapshot_bytes_total", Help: "Bytes of snapshots that had to be stored, since the store did not have them."}),
	}
}

// register registers all metrics.
func (w *Worker) register(r prometheus.Registerer) {
	gauge := func(name, help string, labels prometheus.Labels, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "spool_executor_" + name, Help: help, ConstLabels: labels}, value)
	}
	r.MustRegister(w.metrics.ended, w.metrics.sandboxes, w.metrics.sandboxSeconds, w.metrics.snapshots, w.metrics.snapshotSeconds, w.metrics.snapshotBytes,
		gauge("executions", "Executions that run.", nil, func() float64 { return float64(w.handling.Executions()) }),
		gauge("slots", "Executions that may run at once.", nil, func() float64 { return float64(w.cfg.Slots) }),
	)
	for _, state := range []string{"resting", "working"} {
		labels := prometheus.Labels{"state": state}
		r.MustRegister(
			gauge("agents", "Agents that rest, warm, between two turns, or work on one.", labels, func() float64 { n, _ := w.agents.Count(state == "resting"); return float64(n) }),
			gauge("agent_memory_bytes", "Memory of these agents and their processes, as last measured.", labels, func() float64 { _, b := w.agents.Count(state == "resting"); return float64(b) }),
		)
	}
	for architecture := range w.cfg.Pool {
		r.MustRegister(gauge("pool_sandboxes", "Sandboxes that wait in the pool with their agent started.", prometheus.Labels{"architecture": architecture}, func() float64 {
			return float64(w.pool.Ready(architecture))
		}))
	}
}

// stored counts the executions that end with stored events.
func (m *metrics) stored(list []events.Event) {
	for _, e := range list {
		if t := e.Data.EventType(); events.Terminal(t) {
			m.ended.WithLabelValues(strings.TrimPrefix(string(t), "execution_")).Inc()
		}
	}
}

// made counts a call that created a sandbox, unless it was cancelled.
func (m *metrics) made(ctx context.Context, took time.Duration, err error) {
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	if err != nil {
		m.sandboxes.WithLabelValues("failed").Inc()
		return
	}
	m.sandboxes.WithLabelValues("created").Inc()
	m.sandboxSeconds.Observe(took.Seconds())
}

// pooled counts a sandbox that was taken from the pool.
func (m *metrics) pooled() { m.sandboxes.WithLabelValues("pooled").Inc() }

// snapshot counts a snapshot, unless it was cancelled.
func (m *metrics) snapshot(ctx context.Context, took time.Duration, stored uint64, err error) {
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	if err != nil {
		m.snapshots.WithLabelValues("failed").Inc()
		return
	}
	m.snapshots.WithLabelValues("stored").Inc()
	m.snapshotSeconds.Observe(took.Seconds())
	m.snapshotBytes.Add(float64(stored))
}
