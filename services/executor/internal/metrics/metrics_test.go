package metrics_test

import (
	"context"
	"errors"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/contents"
	"github.com/spoolhq/spool/services/executor/internal/metrics"
)

// TestMetrics: ends, sandboxes and snapshots are counted by outcome; what was cancelled is not counted.
func TestMetrics(t *testing.T) {
	t.Parallel()
	m, r := metrics.New(), prometheus.NewRegistry()
	m.Register(r, metrics.Sources{
		Slots: 4, Executions: func() int { return 3 }, Agents: func(resting bool) (int, uint64) {
			if resting {
				return 2, 20
			}
			return 1, 10
		},
		Pool: map[string]int{"spool": 5}, Ready: func(string) int { return 1 },
	})
	cancelled, cancel := context.WithCancel(t.Context())
	cancel()
	failed := errors.New("failed")
	m.CountEnds([]events.Event{{Data: events.ExecutionCompleted{}}, {Data: events.ExecutionFailed{}}, {Data: events.Error{}}})
	m.CountCreation(t.Context(), time.Second, nil)
	m.CountCreation(t.Context(), time.Second, failed)
	m.CountCreation(cancelled, time.Second, failed)
	m.CountPooled()
	m.CountSnapshot(t.Context(), time.Second, contents.Snapshot{NewBytes: 100, Missed: 2, Diverged: true}, nil)
	m.CountSnapshot(t.Context(), time.Second, contents.Snapshot{NewBytes: 7}, failed)
	m.CountSnapshot(cancelled, time.Second, contents.Snapshot{NewBytes: 7}, failed)
	got := values(t, r)
	for name, want := range map[string]float64{
		"executions_ended_total completed": 1, "executions_ended_total failed": 1, "executions_ended_total cancelled": 0,
		"sandboxes_total created": 1, "sandboxes_total failed": 1, "sandboxes_total pooled": 1, "sandbox_create_seconds": 1,
		"snapshots_total stored": 1, "snapshots_total failed": 1, "snapshot_seconds": 1, "snapshot_bytes_total": 100,
		"snapshot_missed_folders_total": 2, "snapshots_diverged_total": 1,
		"agents resting": 2, "agents working": 1, "agent_memory_bytes resting": 20, "agent_memory_bytes working": 10,
		"pool_sandboxes spool": 1, "executions": 3, "slots": 4,
	} {
		if got[name] != want {
			t.Errorf("%s is %v, want %v", name, got[name], want)
		}
	}
}

// values returns the values of all metrics, and the counts of histograms, by name and label.
func values(t *testing.T, r *prometheus.Registry) map[string]float64 {
	t.Helper()
	families, err := r.Gather()
	if err != nil {
		t.Fatal(err)
	}
	out := map[string]float64{}
	for _, f := range families {
		for _, m := range f.GetMetric() {
			name := strings.TrimPrefix(f.GetName(), "spool_executor_")
			for _, l := range m.GetLabel() {
				name += " " + l.GetValue()
			}
			out[name] = m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
		}
	}
	return out
}
