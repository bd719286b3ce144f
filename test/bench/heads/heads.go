// Package heads measures the cost of signed heads: the processor time of a pass over the changed subjects, for each
// commit, compared with that of appending the commits. A second row compares commits of version 2 with signed heads
// with commits of version 1 without. Server, writers and signer run in this process, so their processor time is
// counted together.
package heads

import (
	"context"
	"fmt"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// maxSigningShare is the performance target: the maximum processor time of signing heads, as a share of the processor
// time of the appends.
const maxSigningShare = 0.05

// Benchmark is the subcommand heads of the benchmark program. It measures the processor time of signed heads.
type Benchmark struct {
	Rounds   harness.PositiveCount `default:"9" help:"Passes."`
	Sessions harness.PositiveCount `default:"200" help:"Sessions that write."`
	Commits  harness.PositiveCount `default:"60" help:"Commits of each session between two passes. The default is one a second, with one pass a minute."`
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	if err := b.RunPart("signed heads", func(b *harness.Bench) error { return m.reportSigningCost(ctx, b) }); err != nil {
		return err
	}
	return b.RunPart("version 2 and signed heads", func(b *harness.Bench) error {
		r, err := compareTogether(ctx, b, int(m.Rounds), int(m.Sessions), int(m.Commits))
		if err != nil {
			return err
		}
		return b.ReportRow(r)
	})
}

// reportSigningCost measures the processor time of signing heads, compared with that of the appends before it, and
// reports the row of docs/performance.md.
func (m *Benchmark) reportSigningCost(ctx context.Context, b *harness.Bench) error {
	t, err := newTestbed(ctx, b, int(m.Sessions))
	if err != nil {
		return err
	}
	var appends, passes, ratios []float64
	for range m.Rounds {
		appended, err := harness.CPUTime(func() error { return t.appendToAll(ctx, int(m.Commits)) })
		if err != nil {
			return err
		}
		signed, err := harness.CPUTime(func() error { return t.signHeads(ctx) })
		if err != nil {
			return err
		}
		n := float64(m.Sessions * m.Commits)
		appends, passes = append(appends, appended.Seconds()/n), append(passes, signed.Seconds()/n)
		ratios = append(ratios, signed.Seconds()/appended.Seconds())
	}
	ratio := harness.Median(ratios)
	return b.ReportRow(row.Row{
		What:     fmt.Sprintf("signed heads: processor time for each commit, %d sessions with %d commits between two passes", m.Sessions, m.Commits),
		Target:   "5 % of that of an append",
		Measured: fmt.Sprintf("%.1f µs", harness.Median(passes)*1e6),
		Against:  fmt.Sprintf("append %.1f µs", harness.Median(appends)*1e6),
		Ratio:    ratio,
		OK:       ratio <= maxSigningShare,
		Note:     fmt.Sprintf("medians of %d rounds; server, writers and signer in one process; the work of the session service's pass without its timer", m.Rounds),
	})
}

// testbed is a NATS server with a log, the sessions that write to one shard of the log, and the state of the signer of
// this shard's heads.
type testbed struct {
	js      jetstream.JetStream
	log     *jslog.Log // of the writers
	changes *jslog.Log // of the signer
	shard   int
	key     heads.PrivateKey
	writers []*sessionWriter
	last    heads.ChainEntry
	hash    string
	seq     uint64
}

// sessionWriter appends commits to one session.
type sessionWriter struct {
	actor events.Actor
	head  eventlog.Head
	n     int
}

// newTestbed starts a NATS server, installs a log of one shard, and creates a writer for each of a number of sessions.
func newTestbed(ctx context.Context, b *harness.Bench, sessions int) (*testbed, error) {
	t := &testbed{}
	var err error
	if t.key, err = heads.ParsePrivateKey(strings.Repeat("5a", 32)); err != nil {
		return nil, err
	}
	srv, err := b.StartNATSServer(natsserver.Config{Port: natsserver.RandomPort})
	if err != nil {
		return nil, err
	}
	nc, err := nats.Connect(srv.ClientURL())
	if err != nil {
		return nil, err
	}
	b.Cleanup(func() error { nc.Close(); return nil })
	if t.js, err = jetstream.New(nc); err != nil {
		return nil, err
	}
	if err := topology.Provision(ctx, t.js, topology.ProvisionConfig{Shards: 1}); err != nil {
		return nil, err
	}
	if t.log, err = jslog.New(jslog.Config{JetStream: t.js}); err != nil {
		return nil, err
	}
	t.changes = t.log
	for i := range sessions {
		t.writers = append(t.writers, &sessionWriter{actor: events.Actor{Kind: "executor", ID: "bench"}, head: eventlog.Head{Subject: events.RunSubject("default", events.DeriveID(events.KindSession, "bench", fmt.Sprint(i)))}})
	}
	return t, nil
}

// appendToAll appends a number of commits to each session. The sessions are written concurrently.
func (t *testbed) appendToAll(ctx context.Context, commits int) error {
	var wg sync.WaitGroup
	errs := make(chan error, len(t.writers))
	for i, w := range t.writers {
		wg.Go(func() {
			for range commits {
				if err := w.appendCommit(ctx, t.log, i); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}

// appendCommit appends one commit to the writer's session. i is the number of the session, from 0.
func (w *sessionWriter) appendCommit(ctx context.Context, log *jslog.Log, i int) error {
	w.n++
	id := fmt.Sprintf("%010d%016d", i, w.n)
	head, err := log.Append(ctx, w.head, events.Draft{
		ID: string(events.KindCommit) + "_" + id, Actor: w.actor, Epoch: 1,
		Events: []events.Event{{
			ID: string(events.KindEvent) + "_" + id, Time: time.Unix(1_750_000_000, 0), ConversationID: events.MainConversation, Source: events.FromRunner, N: 1,
			Data: events.BlockComplete{Block: events.Block{
				ID: events.DeriveID(events.KindBlock, id), Kind: events.KindToolResult, Status: events.StatusComplete, Time: time.Unix(1_750_000_000, 0),
				ToolUseID: "call_1", Output: "total 8\n-rw-r--r-- 1 agent agent 213 main.py\n", DurationMs: 12,
			}},
		}},
	})
	w.head = head
	return err
}

// signHeads signs the heads once, as the session service does in each of its passes: it finds the subjects that have
// changed, reads their last commits, and stores a signed entry with their hashes.
func (t *testbed) signHeads(ctx context.Context) error {
	changes, err := t.changes.Changed(ctx, eventlog.Position{Shard: t.shard, Seq: t.last.Through}, heads.MaxHeads)
	if err != nil {
		return err
	}
	e := heads.ChainEntry{Shard: t.shard, N: t.last.N + 1, Prev: t.hash, Time: time.Now(), Through: changes.Through.Seq}
	for subject, seq := range changes.Last {
		hash, ok := changes.Hash[subject]
		if !ok {
			rec, err := t.changes.CommitAt(ctx, eventlog.Position{Shard: t.shard, Seq: seq})
			if err != nil {
				return err
			}
			hash = rec.Commit.Hash
		}
		e.Heads = append(e.Heads, heads.Head{Subject: subject, Seq: seq, Hash: hash})
	}
	data, hash, err := e.Sign(t.key)
	if err != nil {
		return err
	}
	ack, err := t.js.Publish(ctx, topology.HeadSubject(t.shard), data, jetstream.WithExpectLastSequencePerSubject(t.seq))
	if err != nil {
		return err
	}
	t.last, t.hash, t.seq = e, hash, ack.Sequence
	return nil
}
