// Package projector measures how fast the log becomes rows in Postgres: on the live path, which also announces
// every batch to gateways, and in a rebuild. Both are compared with COPY of the resulting rows into empty tables with
// the same indexes. It also measures how long a gateway takes to compute the state of a long session after one of
// its events, and how long a fork of that session takes.
package projector

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"
	"time"

	"github.com/jackc/pgx/v5"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

// The performance targets, in events per second and as a share of the rate of COPY.
const (
	// minLiveRate is the performance target of a running projector: the minimum rate, in events per second.
	minLiveRate = 20_000
	// minRebuildRate is the performance target of a rebuild of the read models: the minimum rate, in events per second.
	minRebuildRate = 50_000
	// minShareOfCopy is the performance target of a running projector and of a rebuild, which counts
	// where their rates are missed: the minimum rate, as a share of the rate at which COPY of Postgres writes the same rows.
	minShareOfCopy = 0.25
)

// Benchmark is the subcommand projector of the benchmark program. It measures how fast the projector folds the log into
// Postgres.
type Benchmark struct {
	Turns      harness.PositiveCount `default:"10000" help:"Turns in the log; each has 23 events in 11 commits."`
	Sessions   harness.PositiveCount `default:"500" help:"Sessions that have these turns."`
	Rounds     int                   `default:"3" help:"Measurements of each kind, in turn, each in a database of its own; the median counts; 0 skips them."`
	StateTurns int                   `default:"4166" help:"Turns of the session that is forked and whose states are measured; each has 24 events; 0 skips this part."`
}

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	if m.Rounds < 0 || m.StateTurns < 0 {
		return errors.New("--rounds and --state-turns must not be negative")
	}
	return nil
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	pg, err := pgserver.Start(ctx, pgserver.Config{DataDir: filepath.Join(b.Dir, "postgres"), FetchURL: pgserver.FetchNever})
	if err != nil {
		return err
	}
	b.Cleanup(pg.Stop)
	if m.Rounds > 0 {
		if err := b.RunPart("rounds", func(b *harness.Bench) error { return m.measureRounds(ctx, b, pg) }); err != nil {
			return err
		}
	}
	if m.StateTurns == 0 {
		return nil
	}
	return b.RunPart("states", func(b *harness.Bench) error { return measureStates(ctx, b, pg, m.StateTurns) })
}

// measureRounds measures the running projector, the rebuild of the read models and COPY of Postgres, --rounds times
// each, and reports the rows of docs/performance.md.
func (m *Benchmark) measureRounds(ctx context.Context, b *harness.Bench, pg *pgserver.Server) error {
	t, err := newTestbed(ctx, b)
	if err != nil {
		return err
	}
	if err := t.fillLog(ctx, int(m.Sessions), int(m.Turns)); err != nil {
		return fmt.Errorf("fill the log: %w", err)
	}
	for i := range m.Rounds {
		if err := t.measureRound(ctx, pg, i); err != nil {
			return err
		}
	}
	return t.reportRates(b)
}

// testbed is a log, the database into which a projector folds it, and the results of the measurements so far.
type testbed struct {
	nc  *nats.Conn
	js  jetstream.JetStream
	log eventlog.Log
	url string // of the database
	// ends are the stream sequences that each group's checkpoint must reach.
	ends   [topology.DefaultPartitions]uint64
	events int
	// snapshot is the snapshot of the workspace after each turn; "" for none.
	snapshot string

	// The durations of each round.
	lives, rebuilds, copies []time.Duration
	rows                    int64
}

// newTestbed starts a NATS server and creates the streams. The server does not sync every message to the disk, because
// the benchmark measures how fast the log is read.
func newTestbed(ctx context.Context, b *harness.Bench) (*testbed, error) {
	srv, err := b.StartNATSServer(natsserver.Config{Relaxed: true})
	if err != nil {
		return nil, err
	}
	nc, err := srv.Connect()
	if err != nil {
		return nil, err
	}
	b.Cleanup(func() error { nc.Close(); return nil })
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 1, Partitions: topology.DefaultPartitions}); err != nil {
		return nil, err
	}
	log, err := jslog.New(jslog.Config{JetStream: js, Partitions: topology.DefaultPartitions})
	if err != nil {
		return nil, err
	}
	return &testbed{nc: nc, js: js, log: log}, nil
}

// measureRound measures the running projector, the rebuild of the read models and COPY of Postgres once, in a new
// database. n is the number of the round.
func (t *testbed) measureRound(ctx context.Context, pg *pgserver.Server, n int) error {
	admin, err := pgx.Connect(ctx, pg.DatabaseURL("postgres"))
	if err != nil {
		return err
	}
	defer admin.Close(ctx) //nolint:errcheck // the server is stopped at the end
	name := fmt.Sprintf("round_%d", n)
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return err
	}
	t.url = pg.DatabaseURL(name)
	if err := readmodel.Migrate(ctx, t.url); err != nil {
		return err
	}
	live, err := t.timeLiveProjector(ctx)
	if err != nil {
		return fmt.Errorf("live: %w", err)
	}
	report, err := projector.Rebuild(ctx, projector.Config{DatabaseURL: t.url}, projector.Deps{Log: t.log}, false)
	if err != nil {
		return err
	}
	raw, rows, err := t.timeCopy(ctx)
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	t.lives, t.rebuilds, t.copies, t.rows = append(t.lives, live), append(t.rebuilds, report.Duration), append(t.copies, raw), rows
	_, err = admin.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
	return err
}

// reportRates reports the rows of docs/performance.md about the projector and the rebuild. Ratios are computed within
// each round, because its measurements share the load of the machine.
func (t *testbed) reportRates(b *harness.Bench) error {
	for _, kind := range []struct {
		what   string
		target int
		took   []time.Duration
	}{{"projector, live", minLiveRate, t.lives}, {"projector, rebuild", minRebuildRate, t.rebuilds}} {
		var rates, ratios, copied []float64
		for i, took := range kind.took {
			rates = append(rates, float64(t.events)/took.Seconds())
			copied = append(copied, float64(t.events)/t.copies[i].Seconds())
			ratios = append(ratios, t.copies[i].Seconds()/took.Seconds())
		}
		rate, ratio := harness.Median(rates), harness.Median(ratios)
		r := row.Row{
			What: kind.what, Target: fmt.Sprintf("%d events/s, or %.0f %% of COPY", kind.target, 100*minShareOfCopy),
			Measured: fmt.Sprintf("%.0f events/s", rate), Against: fmt.Sprintf("%.0f events/s by COPY of the same %d rows", harness.Median(copied), t.rows),
			Ratio: ratio, OK: rate >= float64(kind.target) || ratio >= minShareOfCopy,
		}
		if err := b.ReportRow(r); err != nil {
			return err
		}
	}
	return nil
}

// timeLiveProjector starts a projector, and returns the time that it takes to fold the whole log.
func (t *testbed) timeLiveProjector(ctx context.Context) (time.Duration, error) {
	p, err := projector.New(projector.Config{DatabaseURL: t.url}, projector.Deps{NATS: t.nc, Log: t.log})
	if err != nil {
		return 0, err
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	from := time.Now()
	go func() { done <- p.Run(running) }()
	err = t.awaitCheckpoints(ctx)
	took := time.Since(from)
	stop()
	if stopped := <-done; err == nil {
		err = stopped
	}
	return took, err
}

// awaitCheckpoints blocks until the checkpoint of every group is at the end of the log.
func (t *testbed) awaitCheckpoints(ctx context.Context) error {
	conn, err := readmodel.Connect(ctx, t.url, readmodel.Schema)
	if err != nil {
		return err
	}
	defer conn.Close(ctx) //nolint:errcheck // the server is stopped at the end
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var positions []int64
		if err := conn.QueryRow(ctx, "SELECT array_agg(position ORDER BY grp) FROM checkpoints").Scan(&positions); err != nil {
			return err
		}
		missing := 0
		for g, end := range t.ends {
			if uint64(positions[g]) < end {
				missing++
			}
		}
		if missing == 0 {
			return nil
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-tick.C:
		}
	}
}

// timeCopy copies the rows of all read models with COPY of Postgres into tables with the same columns and indexes. It
// returns the time that COPY took, and the number of rows.
func (t *testbed) timeCopy(ctx context.Context) (took time.Duration, rows int64, err error) {
	conn, err := readmodel.Connect(ctx, t.url, readmodel.Schema)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close(ctx) //nolint:errcheck // the server is stopped at the end
	for _, table := range []string{
		readmodel.TableSessions, readmodel.TableExecutions, readmodel.TableBlocks, readmodel.TableEvents, readmodel.TableToolCalls, readmodel.TableSandboxes,
	} {
		d, n, err := copyTable(ctx, conn, table)
		if err != nil {
			return 0, 0, fmt.Errorf("%s: %w", table, err)
		}
		took, rows = took+d, rows+n
	}
	return took, rows, nil
}

// copyTable copies the rows of a Postgres table with COPY into a new table with the same columns and indexes. It
// returns the time that COPY took, and the number of rows.
func copyTable(ctx context.Context, conn *pgx.Conn, table string) (time.Duration, int64, error) {
	// COPY cannot write generated columns.
	var names []string
	err := conn.QueryRow(ctx, `SELECT array_agg(attname::text ORDER BY attnum) FROM pg_attribute
		WHERE attrelid = $1::regclass AND attnum > 0 AND NOT attisdropped AND attgenerated = ''`, table).Scan(&names)
	if err != nil {
		return 0, 0, err
	}
	quoted := make([]string, len(names))
	for i, name := range names {
		quoted[i] = pgx.Identifier{name}.Sanitize()
	}
	result, err := conn.Query(ctx, "SELECT "+strings.Join(quoted, ", ")+" FROM "+table)
	if err != nil {
		return 0, 0, err
	}
	values, err := pgx.CollectRows(result, func(r pgx.CollectableRow) ([]any, error) { return r.Values() })
	if err != nil {
		return 0, 0, err
	}
	if _, err := conn.Exec(ctx, "CREATE TABLE copy_"+table+" (LIKE "+table+" INCLUDING ALL)"); err != nil {
		return 0, 0, err
	}
	from := time.Now()
	n, err := conn.CopyFrom(ctx, pgx.Identifier{"copy_" + table}, names, pgx.CopyFromRows(values))
	return time.Since(from), n, err
}
