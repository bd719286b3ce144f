package append

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// The rate and the 99th percentile that commits of many sessions must reach.
const (
	// minBatchRate is the performance target of appends in atomic batches: the minimum rate, in commits per second.
	minBatchRate = 30_000
	// maxBatchP99Ms is the performance target of appends in atomic batches: the 99th percentile of their duration must be
	// lower, in milliseconds.
	maxBatchP99Ms = 80
)

// compareBatches reports a row of docs/performance.md that compares commits in atomic batches of JetStream with the
// same commits published singly, in alternating rounds. each is the duration of a round. A second server, whose streams
// do not allow batches, receives the single commits, as in an installation that was not upgraded.
func compareBatches(ctx context.Context, b *harness.Bench, sessions, rounds int, each time.Duration) error {
	return b.RunPart("published singly", func(other *harness.Bench) error {
		var kinds [2]struct {
			writers []func(context.Context) error
			result  writerResult
			cpu     []float64 // microseconds a commit, by round
		}
		for i, on := range []*harness.Bench{b, other} {
			t, err := newTestbed(ctx, on)
			if err == nil && on == other {
				err = t.denyBatches(ctx)
			}
			if err != nil {
				return err
			}
			log, err := jslog.New(jslog.Config{JetStream: t.executor, Keys: t.keys, Signing: t.signing})
			if err != nil {
				return err
			}
			for s := range sessions {
				kinds[i].writers = append(kinds[i].writers, newLogAppender(log, s))
			}
			if _, _, err := runWriters(ctx, kinds[i].writers, each/4); err != nil {
				return err
			}
		}
		for i := range rounds {
			for j := range kinds {
				k := &kinds[(i+j)%2]
				commits := 0
				used, err := harness.CPUTime(func() error {
					took, samples, err := runWriters(ctx, k.writers, each)
					k.result.addRound(took, samples)
					commits = len(samples)
					return err
				})
				if err != nil {
					return err
				}
				k.cpu = append(k.cpu, float64(used.Microseconds())/float64(commits))
			}
		}
		grouped, single := &kinds[0], &kinds[1]
		var ratios []float64
		for i, r := range single.result.rates {
			ratios = append(ratios, grouped.result.rates[i]/r)
		}
		rate, p99 := harness.Median(grouped.result.rates), row.Percentile(grouped.result.samples, 0.99)
		return b.ReportRow(row.Row{
			What:     fmt.Sprintf("append of run commits in atomic batches, signed, in an account of its own, sessions: %d", sessions),
			Target:   fmt.Sprintf("%d/s, p99 under %d ms", minBatchRate, maxBatchP99Ms),
			Measured: fmt.Sprintf("%.0f/s, %.0f µs of CPU a commit", rate, harness.Median(grouped.cpu)),
			Against: fmt.Sprintf("published singly %.0f/s, %.0f µs of CPU a commit, p50 %.2f ms, p99 %.2f ms", harness.Median(single.result.rates),
				harness.Median(single.cpu), row.Percentile(single.result.samples, 0.5), row.Percentile(single.result.samples, 0.99)),
			Ratio: harness.Median(ratios),
			P50Ms: row.Percentile(grouped.result.samples, 0.5),
			P99Ms: p99,
			OK:    rate >= minBatchRate && p99 < maxBatchP99Ms,
			Note:  fmt.Sprintf("medians of %d rounds; every message synced, one stream, one connection each; CPU of writers and server", rounds),
		})
	})
}

// denyBatches forbids atomic batches on the log's stream, as in an installation that was created before Spool used
// them.
func (t *testbed) denyBatches(ctx context.Context) error {
	s, err := t.owner.Stream(ctx, topology.EventsStreamName(0))
	if err != nil {
		return err
	}
	cfg := s.CachedInfo().Config
	if !cfg.AllowAtomicPublish {
		return errors.New("the stream does not allow batches")
	}
	cfg.AllowAtomicPublish = false
	_, err = t.owner.UpdateStream(ctx, cfg)
	return err
}
