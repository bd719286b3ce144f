package append

import (
	"context"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// versionComparisonSessions is the number of sessions that write when commits of version 1 are compared with commits of
// version 2.
const versionComparisonSessions = 64

// The rounds of this comparison are shorter than those of the other rows, and there are more of them. The load of a
// shared machine changes within a second, so two rounds meet the same load only if they are short and adjacent.
const (
	// versionRoundsFactor is the number of rounds that compare commit versions for each round that the flag --rounds
	// requests.
	versionRoundsFactor = 20
	// versionRoundDivisor is how many times shorter a round in the comparison of commit versions is than the flag --each.
	versionRoundDivisor = 7
)

// maxVersion2CPURatio is the performance target: the maximum processor time of a commit of version 2, divided by that
// of a commit of version 1.
const maxVersion2CPURatio = 1.05

// clientActor returns an actor that has every field of commits of version 2, as in a commit that a client causes.
func clientActor() events.Actor {
	key := events.DeriveID(events.KindKey, "bench")
	return events.Actor{Kind: "key", ID: key, Key: key, User: "somebody@example.com", Service: "session/host-1:4711", Address: "192.0.2.17"}
}

// compareVersions compares the processor time of commits of version 1 and version 2 in pairs of rounds, and returns a
// row of docs/performance.md with the median of the ratios of all pairs. The versions take turns to begin a pair, so
// that garbage of one version is collected as often in a round of the other version.
func compareVersions(ctx context.Context, b *harness.Bench, rounds int, each time.Duration) (row.Row, error) {
	pairs, each := rounds*versionRoundsFactor, each/versionRoundDivisor
	t, err := newTestbed(ctx, b)
	if err != nil {
		return row.Row{}, err
	}
	var writers [2][]func(context.Context) error
	for v := range writers {
		signing := t.signing
		signing.CommitVersion = v + 1
		log, err := jslog.New(jslog.Config{JetStream: t.executor, Keys: t.keys, Signing: signing})
		if err != nil {
			return row.Row{}, err
		}
		for i := range versionComparisonSessions {
			writers[v] = append(writers[v], newVersionAppender(log, v+1, i))
		}
		if _, _, err := runWriters(ctx, writers[v], each); err != nil {
			return row.Row{}, err
		}
	}
	var costs [2][]float64 // microseconds a commit, by round
	for i := range pairs {
		for j := range 2 {
			v := (i + j) % 2
			commits := 0
			used, err := harness.CPUTime(func() error {
				_, samples, err := runWriters(ctx, writers[v], each)
				commits = len(samples)
				return err
			})
			if err != nil {
				return row.Row{}, err
			}
			costs[v] = append(costs[v], float64(used.Microseconds())/float64(commits))
		}
	}
	var ratios []float64
	for i := range pairs {
		ratios = append(ratios, costs[1][i]/costs[0][i])
	}
	ratio := harness.Median(ratios)
	low, high := harness.MedianBounds(ratios)
	return row.Row{
		What:     fmt.Sprintf("append of commits of version 2, CPU of client and server, sessions: %d", versionComparisonSessions),
		Target:   "5 % over version 1",
		Measured: fmt.Sprintf("%.1f µs a commit", harness.Median(costs[1])),
		Against:  fmt.Sprintf("version 1 %.1f µs a commit", harness.Median(costs[0])),
		Ratio:    ratio,
		OK:       ratio <= maxVersion2CPURatio,
		Note:     fmt.Sprintf("median of %d pairs of rounds of %s, 95 %% interval %.3f to %.3f; signed; each with key, user, service and address", pairs, each, low, high),
	}, nil
}

// newVersionAppender returns a function that appends the next commit of the i-th session to the log, as a commit of the
// given version.
func newVersionAppender(log *jslog.Log, version, i int) func(context.Context) error {
	head := eventlog.Head{Subject: runSubject(fmt.Sprint("version", version), i)}
	w := newDraftGenerator(head.Subject.ID)
	w.draft.Actor = clientActor()
	return func(ctx context.Context) error {
		next, err := log.Append(ctx, head, w.next(version*versionComparisonSessions+i))
		head = next
		return err
	}
}
