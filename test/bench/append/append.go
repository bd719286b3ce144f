// Package append measures the cost of jslog compared with the guarded publishes that it is built on: the same
// bytes, the same server, every message synced, in alternating rounds. The log is written as executors write it:
// signed, through an account of their own. The raw publishes come from the account that owns the streams. The
// benchmark reports one row for each number of sessions, and one that compares the versions of commits.
package append

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// minAppendsPerWriter is the minimum number of appends of each writer in a measured round, even if they take longer
// than the flag --each.
const minAppendsPerWriter = 4

// ackTimeout is the time limit for the acknowledgements of the last appends, counted from the end of a measured round.
const ackTimeout = 2 * time.Minute

// minShareOfRawRate is the performance target: appends to the log must reach at least this share of the rate of plain
// JetStream publishes with a guard.
const minShareOfRawRate = 0.85

// Benchmark is the subcommand append of the benchmark program. It measures the rate of appends to the log, and compares
// it with the rate of plain JetStream publishes.
type Benchmark struct {
	Sessions []harness.PositiveCount `default:"1,64,1000" help:"Numbers of sessions, each of which appends one commit after the other."`
	Writers  harness.PositiveCount   `default:"1000" help:"Number of sessions of the comparison of batches with single publishes."`
	Rounds   harness.PositiveCount   `default:"15" help:"Measurements of each kind, in turn."`
	Each     time.Duration           `default:"700ms" help:"Duration of one measurement."`
}

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	if slices.Min(append(m.Sessions, 1)) < 1 || m.Writers < 1 || m.Each <= 0 {
		return errors.New("--sessions, --writers and --each must be positive")
	}
	return nil
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	for _, n := range m.Sessions {
		err := b.RunPart(fmt.Sprintf("%d sessions", n), func(b *harness.Bench) error {
			r, err := measureAppends(ctx, b, int(n), int(m.Rounds), m.Each)
			if err != nil {
				return err
			}
			return b.ReportRow(r)
		})
		if err != nil {
			return err
		}
	}
	if err := b.RunPart("batches", func(b *harness.Bench) error {
		return compareBatches(ctx, b, int(m.Writers), int(m.Rounds), m.Each)
	}); err != nil {
		return err
	}
	return b.RunPart("versions of commits", func(b *harness.Bench) error {
		r, err := compareVersions(ctx, b, int(m.Rounds), m.Each)
		if err != nil {
			return err
		}
		return b.ReportRow(r)
	})
}

// writerResult holds the measurements of one kind of writer: the appends per second in each round, and the duration of
// each append.
type writerResult struct {
	rates   []float64
	samples []time.Duration
}

// addRound adds the measurements of a round that took the time took. samples are the durations of its appends.
func (r *writerResult) addRound(took time.Duration, samples []time.Duration) {
	r.rates = append(r.rates, float64(len(samples))/took.Seconds())
	r.samples = append(r.samples, samples...)
}

// signingKeys returns the keys with which every role of Spool signs its commits. A writer that uses them signs as an
// executor.
func signingKeys() (eventlog.Keys, error) {
	var text strings.Builder
	for _, role := range eventlog.WriterRoles() {
		fmt.Fprintf(&text, "%s:%032d ", role, 0)
	}
	return eventlog.ParseKeys(text.String(), topology.UserExecutor)
}

// connect connects to the server srv as a NATS user, and returns the connection and its JetStream context.
func connect(srv *natsserver.Server, user string) (*nats.Conn, jetstream.JetStream, error) {
	nc, err := nats.Connect(srv.ClientURL(), nats.UserInfo(user, srv.Password(user)), nats.CustomInboxPrefix(topology.InboxPrefix(user)))
	if err != nil {
		return nil, nil, err
	}
	js, err := jetstream.New(nc)
	if err != nil {
		nc.Close()
		return nil, nil, err
	}
	return nc, js, nil
}

// testbed is a NATS server with a log whose commits must be signed, and the connections that the writers of the
// benchmark use.
type testbed struct {
	owner, executor jetstream.JetStream
	keys            eventlog.Keys
	signing         topology.SigningSettings
}

// newTestbed starts a NATS server and installs a log on it. It connects once in the account that owns the log's stream,
// and once as an executor.
func newTestbed(ctx context.Context, b *harness.Bench) (*testbed, error) {
	srv, err := b.StartNATSServer(natsserver.Config{Port: natsserver.RandomPort, Accounts: true})
	if err != nil {
		return nil, err
	}
	if !srv.SyncsWrites() {
		return nil, errors.New("the server does not sync every message")
	}
	t := &testbed{}
	for user, js := range map[string]*jetstream.JetStream{topology.UserAdmin: &t.owner, topology.UserExecutor: &t.executor} {
		var nc *nats.Conn
		if nc, *js, err = connect(srv, user); err != nil {
			return nil, err
		}
		b.Cleanup(func() error { nc.Close(); return nil })
	}
	if t.keys, err = signingKeys(); err != nil {
		return nil, err
	}
	if err := topology.Provision(ctx, t.owner, topology.ProvisionConfig{Shards: 1, KeyIDs: t.keys.KeyIDs()}); err != nil {
		return nil, err
	}
	t.signing, err = topology.ReadSigning(ctx, t.owner, 1)
	return t, err
}

// measureAppends measures appends to the log and plain JetStream publishes in alternating rounds, with one writer for
// each of a number of sessions. each is the duration of a round. It returns the row of docs/performance.md.
func measureAppends(ctx context.Context, b *harness.Bench, sessions, rounds int, each time.Duration) (row.Row, error) {
	t, err := newTestbed(ctx, b)
	if err != nil {
		return row.Row{}, err
	}
	log, err := jslog.New(jslog.Config{JetStream: t.executor, Keys: t.keys, Signing: t.signing})
	if err != nil {
		return row.Row{}, err
	}
	var raws, owners, logs []func(context.Context) error
	for i := range sessions {
		logs = append(logs, newLogAppender(log, i))
		raw, err := newRawPublisher(t.executor, "raw", i)
		if err != nil {
			return row.Row{}, err
		}
		owner, err := newRawPublisher(t.owner, "owner", i)
		if err != nil {
			return row.Row{}, err
		}
		raws, owners = append(raws, raw), append(owners, owner)
	}
	// Warm up all, so that none pays for the first files and subjects.
	for _, writers := range [][]func(context.Context) error{raws, owners, logs} {
		if _, _, err := runWriters(ctx, writers, each/4); err != nil {
			return row.Row{}, err
		}
	}
	var raw, owner, through writerResult
	for i := range rounds {
		kinds := []struct {
			writers []func(context.Context) error
			into    *writerResult
		}{{raws, &raw}, {owners, &owner}, {logs, &through}}
		if i%2 == 1 {
			slices.Reverse(kinds)
		}
		for _, k := range kinds {
			took, samples, err := runWriters(ctx, k.writers, each)
			if err != nil {
				return row.Row{}, err
			}
			k.into.addRound(took, samples)
		}
	}
	return appendRow(sessions, &raw, &owner, &through), nil
}

// appendRow returns the row of docs/performance.md that compares appends to the log (through) with plain publishes
// (raw). It compares round by round, because measurements of the same round share the load of the disk and the cores.
// owner are plain publishes in the account that owns the stream.
func appendRow(sessions int, raw, owner, through *writerResult) row.Row {
	var ratios []float64
	for i, r := range raw.rates {
		ratios = append(ratios, through.rates[i]/r)
	}
	ratio := harness.Median(ratios)
	return row.Row{
		What:     fmt.Sprintf("append through jslog, signed, sessions: %d", sessions),
		Target:   fmt.Sprintf("%.0f %% of raw guarded publishes of the same user", 100*minShareOfRawRate),
		Measured: fmt.Sprintf("%.0f/s", harness.Median(through.rates)),
		Against:  fmt.Sprintf("raw %.0f/s, p50 %.2f ms, p99 %.2f ms; raw in the account of the stream %.0f/s", harness.Median(raw.rates), row.Percentile(raw.samples, 0.5), row.Percentile(raw.samples, 0.99), harness.Median(owner.rates)),
		Ratio:    ratio,
		P50Ms:    row.Percentile(through.samples, 0.5),
		P99Ms:    row.Percentile(through.samples, 0.99),
		OK:       ratio >= minShareOfRawRate,
		Note:     fmt.Sprintf("medians of %d rounds; every message synced, one stream, one connection each", len(ratios)),
	}
}

// runWriters runs all writers concurrently. Until the duration each has passed, it calls a writer again when its last
// append was acknowledged. It returns the total time and the duration of every append.
func runWriters(ctx context.Context, writers []func(context.Context) error, each time.Duration) (time.Duration, []time.Duration, error) {
	// Without a deadline the client limits a publish to 5 s, which a busy disk may need.
	ctx, cancel := context.WithTimeout(ctx, each+ackTimeout)
	defer cancel()
	var mu sync.Mutex
	var all []time.Duration
	var first error
	var wg sync.WaitGroup
	start := time.Now()
	for _, write := range writers {
		wg.Go(func() {
			var samples []time.Duration
			var err error
			for err == nil && (time.Since(start) < each || len(samples) < minAppendsPerWriter) && ctx.Err() == nil {
				t := time.Now()
				if err = write(ctx); err == nil {
					samples = append(samples, time.Since(t))
				}
			}
			mu.Lock()
			defer mu.Unlock()
			all = append(all, samples...)
			if err != nil && first == nil {
				first = err
			}
		})
	}
	wg.Wait()
	return time.Since(start), all, errors.Join(first, ctx.Err())
}

// draftGenerator generates the drafts of the commits of one session. It prepares everything but the ids beforehand, so
// that this work is not measured.
type draftGenerator struct {
	n     int
	draft events.Draft
}

// executorActor returns an executor as the actor of the benchmark's commits.
func executorActor() events.Actor {
	id := events.DeriveID(events.KindExecutor, "bench")
	return events.Actor{Kind: "executor", ID: id}.WrittenBy("executor/" + id)
}

// newDraftGenerator returns a generator of commits that are typical of a run: the result of a tool call.
func newDraftGenerator(session string) *draftGenerator {
	return &draftGenerator{draft: events.Draft{
		Actor: executorActor(), Epoch: 1,
		Events: []events.Event{{
			Time: time.Unix(1_750_000_000, 0), ExecutionID: events.DeriveID(events.KindExecution, session),
			ConversationID: events.MainConversation, Source: events.FromRunner, N: 1,
			Data: events.BlockComplete{Block: events.Block{
				ID: events.DeriveID(events.KindBlock, session), Kind: events.KindToolResult, Status: events.StatusComplete, Time: time.Unix(1_750_000_000, 0),
				ToolUseID: "call_1", Output: "total 8\n-rw-r--r-- 1 agent agent 213 main.py\n", DurationMs: 12,
			}},
		}},
		State: json.RawMessage(`{"v":1,"phase":"running","epoch":1,"attempt":1,"journal":"jnl_1","open":[]}`),
	}}
}

// next returns the draft of the next commit, with new ids. session is the number of the session, from 0.
func (w *draftGenerator) next(session int) events.Draft {
	w.n++
	id := fmt.Sprintf("%010d%016d", session, w.n)
	d := w.draft
	d.ID = string(events.KindCommit) + "_" + id
	d.Events = []events.Event{w.draft.Events[0]}
	d.Events[0].ID = string(events.KindEvent) + "_" + id
	return d
}

// runSubject returns the run subject of the i-th session of a kind of writer.
func runSubject(kind string, i int) events.Subject {
	return events.RunSubject("default", events.DeriveID(events.KindSession, "bench", kind, fmt.Sprint(i)))
}

// newLogAppender returns a function that appends the next commit of the i-th session to the log.
func newLogAppender(log *jslog.Log, i int) func(context.Context) error {
	head := eventlog.Head{Subject: runSubject("log", i)}
	w := newDraftGenerator(head.Subject.ID)
	return func(ctx context.Context) error {
		next, err := log.Append(ctx, head, w.next(i))
		head = next
		return err
	}
}

// newRawPublisher returns a function that publishes the bytes of a commit of the i-th session directly to JetStream,
// with a guard. The bytes are encoded beforehand. kind keeps the sessions of several kinds of writers apart.
func newRawPublisher(js jetstream.JetStream, kind string, i int) (func(context.Context) error, error) {
	s := runSubject(kind, i)
	c, err := newDraftGenerator(s.ID).next(i).Seal(s, "")
	if err != nil {
		return nil, err
	}
	c.Prev = c.Hash // a commit in the middle of a chain
	data, err := c.Encode()
	if err != nil {
		return nil, err
	}
	name, seq := s.String(), uint64(0)
	return func(ctx context.Context) error {
		ack, err := js.Publish(ctx, name, data, jetstream.WithExpectLastSequencePerSubject(seq))
		if err == nil {
			seq = ack.Sequence
		}
		return err
	}, nil
}
