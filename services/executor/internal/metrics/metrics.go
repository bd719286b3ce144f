// Package metrics has the Prometheus metrics of an executor.
package metrics

import (
	"context"
	"errors"
	"strings"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/contents"
)

// Metrics counts the executions, sandboxes and snapshots of an executor. It is safe for concurrent use.
type Metrics struct {
	ended           *prometheus.CounterVec
	sandboxes       *prometheus.CounterVec
	sandboxSeconds  prometheus.Histogram
	snapshots       *prometheus.CounterVec
	snapshotSeconds prometheus.Histogram
	snapshotBytes   prometheus.Counter
	missedFolders   prometheus.Counter
	diverged        prometheus.Counter
}

// New returns Metrics that are not registered.
func New() *Metrics {
	counter := func(name, help string) *prometheus.CounterVec {
		return prometheus.NewCounterVec(prometheus.CounterOpts{Name: "spool_executor_" + name, Help: help}, []string{"outcome"})
	}
	seconds := func(name, help string) prometheus.Histogram {
		return prometheus.NewHistogram(prometheus.HistogramOpts{
			Name: "spool_executor_" + name, Help: help, Buckets: []float64{.01, .025, .05, .1, .25, .5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600},
		})
	}
	return &Metrics{
		ended:           counter("executions_ended_total", "Executions whose end this executor recorded: completed, failed or cancelled."),
		sandboxes:       counter("sandboxes_total", "Sandboxes that were made (created), taken from the pool (pooled), or could not be made (failed)."),
		sandboxSeconds:  seconds("sandbox_create_seconds", "Time to make a sandbox, for a session or for the pool."),
		snapshots:       counter("snapshots_total", "Snapshots of workspaces that were stored, or failed."),
		snapshotSeconds: seconds("snapshot_seconds", "Time to take a snapshot of a workspace and store it."),
		snapshotBytes:   prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_executor_snapshot_bytes_total", Help: "Bytes of snapshots that had to be stored, since the store did not have them."}),
		missedFolders:   prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_executor_snapshot_missed_folders_total", Help: "Folders in which a walk over all files found changes that the watcher in the sandbox had not reported."}),
		diverged:        prometheus.NewCounter(prometheus.CounterOpts{Name: "spool_executor_snapshots_diverged_total", Help: "Snapshots that were taken again as a whole, because the runner's edits did not make the tree that it had found."}),
	}
}

// Sources are the functions and values from which the gauges of an executor are read.
type Sources struct {
	Slots      int                                      // executions that may run at once
	Executions func() int                               // that run
	Agents     func(resting bool) (n int, bytes uint64) // that rest, or work, and their memory
	Pool       map[string]int                           // sizes by architecture
	Ready      func(architecture string) int            // sandboxes in the pool
}

// Register registers all metrics of the executor with r.
func (m *Metrics) Register(r prometheus.Registerer, s Sources) {
	gauge := func(name, help string, labels prometheus.Labels, value func() float64) prometheus.Collector {
		return prometheus.NewGaugeFunc(prometheus.GaugeOpts{Name: "spool_executor_" + name, Help: help, ConstLabels: labels}, value)
	}
	r.MustRegister(m.ended, m.sandboxes, m.sandboxSeconds, m.snapshots, m.snapshotSeconds, m.snapshotBytes, m.missedFolders, m.diverged,
		gauge("executions", "Executions that run.", nil, func() float64 { return float64(s.Executions()) }),
		gauge("slots", "Executions that may run at once.", nil, func() float64 { return float64(s.Slots) }),
	)
	for _, state := range []string{"resting", "working"} {
		labels := prometheus.Labels{"state": state}
		r.MustRegister(
			gauge("agents", "Agents that rest, warm, between two turns, or work on one.", labels, func() float64 { n, _ := s.Agents(state == "resting"); return float64(n) }),
			gauge("agent_memory_bytes", "Memory of these agents and their processes, as last measured.", labels, func() float64 { _, b := s.Agents(state == "resting"); return float64(b) }),
		)
	}
	for architecture := range s.Pool {
		r.MustRegister(gauge("pool_sandboxes", "Sandboxes that wait in the pool with their agent started.", prometheus.Labels{"architecture": architecture}, func() float64 {
			return float64(s.Ready(architecture))
		}))
	}
}

// CountEnds counts the executions that have ended, according to the events that were just stored in the log.
func (m *Metrics) CountEnds(list []events.Event) {
	for _, e := range list {
		if t := e.Data.EventType(); events.IsTerminal(t) {
			m.ended.WithLabelValues(strings.TrimPrefix(string(t), "execution_")).Inc()
		}
	}
}

// CountCreation counts the creation of a sandbox, which took some time and may have failed. It does not count
// a cancelled one.
func (m *Metrics) CountCreation(ctx context.Context, took time.Duration, err error) {
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

// CountPooled counts a sandbox that a session took from the warm pool.
func (m *Metrics) CountPooled() { m.sandboxes.WithLabelValues("pooled").Inc() }

// CountSnapshot counts a snapshot, which took some time and may have failed. It does not count a cancelled
// one.
func (m *Metrics) CountSnapshot(ctx context.Context, took time.Duration, s contents.Snapshot, err error) {
	if err != nil && errors.Is(ctx.Err(), context.Canceled) {
		return
	}
	if err != nil {
		m.snapshots.WithLabelValues("failed").Inc()
		return
	}
	m.snapshots.WithLabelValues("stored").Inc()
	m.snapshotSeconds.Observe(took.Seconds())
	m.snapshotBytes.Add(float64(s.NewBytes))
	m.missedFolders.Add(float64(s.Missed))
	if s.Diverged {
		m.diverged.Inc()
	}
}
