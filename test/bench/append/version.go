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

// versionSessions is the number of sessions of the comparison of commit versions.
const versionSessions = 64

// mostCPU is the maximum CPU cost of a commit of version 2 relative to one of version 1.
const mostCPU = 1.05

// author is an actor with every field of version 2, as in a commit that a client causes.
func author() events.Actor {
	key := events.Derive(events.KindKey, "bench")
	return events.Actor{Kind: "key", ID: key, Key: key, User: "somebody@example.com", Service: "session/host-1:4711", Address: "192.0.2.17"}
}

// versions compares the cost of commits of version 1 and version 2, in alternating rounds.
func versions(ctx context.Context, b *harness.Bench, rounds int, each time.Duration) (row.Row, error) {
	t, err := open(ctx, b)
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
		for i := range versionSessions {
			writers[v] = append(writers[v], versionWriter(log, v+1, i))
		}
		if _, _, err := drive(ctx, writers[v], each/4); err != nil {
			return row.Row{}, err
		}
	}
	var costs [2][]float64 // microseconds a commit, by round
	for i := range rounds {
		for j := range 2 {
			v := (i + j) % 2
			before, err := harness.CPUTime()
			if err != nil {
				return row.Row{}, err
			}
			_, samples, err := drive(ctx, writers[v], each)
			if err != nil {
				return row.Row{}, err
			}
			after, err := harness.CPUTime()
			if err != nil {
				return row.Row{}, err
			}
			costs[v] = append(costs[v], float64((after-before).Microseconds())/float64(len(samples)))
		}
	}
	var ratios []float64
	for i := range rounds {
		ratios = append(ratios, costs[1][i]/costs[0][i])
	}
	ratio := harness.Median(ratios)
	return row.Row{
		What:     fmt.Sprintf("append of commits of version 2, CPU of client and server, sessions: %d", versionSessions),
		Target:   "5 % over version 1",
		Measured: fmt.Sprintf("%.1f µs a commit", harness.Median(costs[1])),
		Against:  fmt.Sprintf("version 1 %.1f µs a commit", harness.Median(costs[0])),
		Ratio:    ratio,
		OK:       ratio <= mostCPU,
		Note:     fmt.Sprintf("medians of %d rounds in turn; signed; each with key, user, service and address", rounds),
	}, nil
}

func versionWriter(log *jslog.Log, version, i int) func(context.Context) error {
	head := eventlog.Head{Subject: subject(fmt.Sprint("version", version), i)}
	w := newWriter(head.Subject.ID)
	w.draft.Actor = author()
	return func(ctx context.Context) error {
		next, err := log.Append(ctx, head, w.next(version*versionSessions+i))
		head = next
		return err
	}
}
