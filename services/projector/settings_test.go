package projector_test

import (
	"fmt"
	"strconv"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/pgserver/pgtest"
	"github.com/spoolhq/spool/services/projector"
)

// metricSum returns the sum of a metric over the series whose first label has a value ("" for all): values of counters and
// gauges, and sample counts of histograms.
func metricSum(t *testing.T, registry *prometheus.Registry, name, label string) (sum float64) {
	t.Helper()
	list, err := registry.Gather()
	if err != nil {
		t.Fatal(err)
	}
	for _, family := range list {
		if family.GetName() != name {
			continue
		}
		for _, m := range family.GetMetric() {
			if label == "" || m.GetLabel()[0].GetValue() == label {
				sum += m.GetCounter().GetValue() + m.GetGauge().GetValue() + float64(m.GetHistogram().GetSampleCount())
			}
		}
	}
	return sum
}

// TestSettingDatabaseURL_SelectsTheDatabase tests that the rows are written to the database of the setting.
func TestSettingDatabaseURL_SelectsTheDatabase(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	first, second := w.url, pgtest.NewDatabase(t)
	s := w.session(-1).create()
	for _, url := range []string{second, first} {
		w.start(func(c *projector.Config, _ *projector.Deps) { c.DatabaseURL = url })
		w.url = url
		w.awaitProjected(s)
		if n := queryOne[int](w, "SELECT count(*) FROM sessions"); n != 1 {
			t.Errorf("%d sessions in %s", n, url)
		}
	}
}

// TestSettingBatchCommits_LimitsTransactions tests that the setting limits the number of commits in one transaction.
func TestSettingBatchCommits_LimitsTransactions(t *testing.T) {
	t.Parallel()
	const commits = 60
	for _, batch := range []int{1, 1000} {
		t.Run(strconv.Itoa(batch), func(t *testing.T) {
			t.Parallel()
			w := newWorld(t, 1)
			s := w.session(3).create()
			for n := range commits {
				s.append(&s.life, "", events.SessionOptionsUpdated{Options: events.Options{TurnLimitMs: uint32(n)}})
			}
			registry := prometheus.NewRegistry()
			w.start(func(c *projector.Config, d *projector.Deps) { c.BatchCommits, d.Metrics = batch, registry })
			w.awaitProjected(s)
			eventually(t, "counted", func() error {
				if n := metricSum(t, registry, "spool_projector_commits_total", "3"); n < commits+1 {
					return fmt.Errorf("%v commits", n)
				}
				return nil
			})
			if n := metricSum(t, registry, "spool_projector_apply_seconds", "3"); (n > commits) != (batch == 1) {
				t.Errorf("%v transactions for %d commits", n, commits+1)
			}
		})
	}
}

// TestSettingLockRetry_ShorterIntervalTakesOver tests that, of two replicas that wait for groups, the one with the shorter interval takes them
// over.
func TestSettingLockRetry_ShorterIntervalTakesOver(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	start := func(retry time.Duration) (stop func(), leads func() float64) {
		registry := prometheus.NewRegistry()
		stop = w.start(func(c *projector.Config, d *projector.Deps) {
			c.LockRetry, d.Metrics = retry, registry
			// In this mode, an idle connection has executed its last statement. In other modes it may only have
			// prepared it.
			c.DatabaseURL += "&default_query_exec_mode=exec"
		})
		return stop, func() float64 { return metricSum(t, registry, "spool_projector_leads", "") }
	}
	all := func(what string, leads func() float64) {
		t.Helper()
		eventually(t, what, func() error {
			if n := leads(); int(n) != w.log.Partitioning().GroupCount() {
				return fmt.Errorf("the replica leads %v groups", n)
			}
			return nil
		})
	}
	asked := func(want int) {
		t.Helper()
		eventually(t, fmt.Sprintf("%d replicas have tried to take all locks without success", want), func() error {
			if n := queryOne[int](w, "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state = 'idle' AND query LIKE 'SELECT pg_try_advisory_lock%' AND state_change < now() - interval '200 ms'"); n != want {
				return fmt.Errorf("there are %d", n)
			}
			return nil
		})
	}
	stop, leads := start(20 * time.Millisecond)
	all("the first replica leads", leads)
	asked(0)
	_, never := start(time.Hour)
	asked(1) // without success: the replica retries in an hour
	_, soon := start(20 * time.Millisecond)
	stop()
	all("the third replica leads", soon)
	if n := leads() + never(); n != 0 {
		t.Errorf("the other replica leads %v groups", n)
	}
}

// TestMetrics_CountCommitsAndLag tests that projected commits are counted, and that a lag is reported while Postgres
// is blocked.
func TestMetrics_CountCommitsAndLag(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	s := w.session(5).create()
	registry := prometheus.NewRegistry()
	w.start(func(_ *projector.Config, d *projector.Deps) { d.Metrics = registry })
	w.awaitProjected(s)
	await := func(name string, ok func(float64) bool) {
		t.Helper()
		eventually(t, name, func() error {
			if v := metricSum(t, registry, name, "5"); !ok(v) {
				return fmt.Errorf("the value is %v", v)
			}
			return nil
		})
	}
	await("spool_projector_commits_total", func(v float64) bool { return v == 1 })
	await("spool_projector_events_total", func(v float64) bool { return v == 1 })
	await("spool_projector_position", func(v float64) bool { return v == float64(s.life.Seq) })
	await("spool_projector_leads", func(v float64) bool { return v == 1 })
	await("spool_projector_lag_seconds", func(v float64) bool { return v == 0 })

	blocker := w.conn()
	tx, err := blocker.Begin(t.Context())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := tx.Exec(t.Context(), "LOCK TABLE sessions IN ACCESS EXCLUSIVE MODE"); err != nil {
		t.Fatal(err)
	}
	s.append(&s.life, "", events.SessionOptionsUpdated{Options: events.Options{TurnLimitMs: 5}})
	await("spool_projector_lag_seconds", func(v float64) bool { return v > 0.1 })
	if err := tx.Rollback(t.Context()); err != nil {
		t.Fatal(err)
	}
	await("spool_projector_lag_seconds", func(v float64) bool { return v == 0 })
	await("spool_projector_commits_total", func(v float64) bool { return v == 2 })
}
