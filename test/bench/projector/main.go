// Command projector measures how fast the log becomes rows in Postgres: on the live path, which also announces
// every batch on LIVE, and in a rebuild. Both are compared with COPY of the resulting rows into empty tables with
// the same indexes. It also measures how long a gateway takes to compute the state of a long session after one of
// its events, and how long a fork of that session takes.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
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
	"github.com/spoolhq/spool/test/bench/row"
)

// The performance targets, in events per second and as a share of the rate of COPY.
const (
	liveTarget    = 20_000
	rebuildTarget = 50_000
	copyShare     = 0.25
)

func main() {
	turns := flag.Int("turns", 10_000, "turns in the log; each has 23 events in 11 commits")
	sessions := flag.Int("sessions", 500, "sessions that they are spread over")
	rounds := flag.Int("rounds", 3, "measurements of each kind, in turn, each in a database of its own; the median counts; 0 leaves that out")
	stateTurns := flag.Int("state-turns", 4166, "turns of the session whose states are asked for, and that is forked; each has 24 events; 0 leaves that out")
	dir := flag.String("dir", "", "folder for log and database, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *sessions, *turns, *rounds, *stateTurns); err != nil {
		fmt.Fprintln(os.Stderr, "projector:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, dir string, sessions, turns, rounds, stateTurns int) error {
	if sessions < 1 || turns < 1 || rounds < 0 || stateTurns < 0 {
		return errors.New("sessions and turns must be positive, rounds and state-turns not negative")
	}
	tmp, err := os.MkdirTemp(dir, "spool-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	// Postgres may run as another user than this process.
	if err := os.Chmod(tmp, 0o755); err != nil {
		return err
	}
	// The speed of the log is measured by another benchmark: here it is only read.
	srv, err := natsserver.Start(natsserver.Config{StoreDir: filepath.Join(tmp, "nats"), Relaxed: true})
	if err != nil {
		return err
	}
	defer srv.Shutdown()
	nc, err := srv.Connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	pg, err := pgserver.Start(ctx, pgserver.Config{DataDir: filepath.Join(tmp, "postgres"), FetchURL: pgserver.FetchNever})
	if err != nil {
		return err
	}
	defer pg.Stop() //nolint:errcheck // the folder goes
	b, err := newBench(ctx, nc)
	if err != nil {
		return err
	}
	if rounds > 0 {
		if err := b.fill(ctx, sessions, turns); err != nil {
			return fmt.Errorf("fill the log: %w", err)
		}
		for i := range rounds {
			if err := b.round(ctx, pg, i); err != nil {
				return err
			}
		}
		if err := b.report(out); err != nil {
			return err
		}
	}
	if stateTurns == 0 {
		return nil
	}
	return states(ctx, out, pg, tmp, stateTurns)
}

type bench struct {
	nc  *nats.Conn
	js  jetstream.JetStream
	log eventlog.Log
	url string
	// ends are the stream sequences that each group's checkpoint must reach.
	ends   [topology.ProjectorGroups]uint64
	events int
	// snapshot is the snapshot of the workspace after each turn; "" for none.
	snapshot string

	// The durations of each round.
	lives, rebuilds, copies []time.Duration
	rows                    int64
}

func newBench(ctx context.Context, nc *nats.Conn) (*bench, error) {
	js, err := jetstream.New(nc)
	if err != nil {
		return nil, err
	}
	if err := topology.Provision(ctx, js, topology.Config{Shards: 1}); err != nil {
		return nil, err
	}
	log, err := jslog.New(jslog.Config{JetStream: js})
	if err != nil {
		return nil, err
	}
	return &bench{nc: nc, js: js, log: log}, nil
}

// round measures each kind once, in an empty database.
func (b *bench) round(ctx context.Context, pg *pgserver.Server, n int) error {
	admin, err := pgx.Connect(ctx, pg.DatabaseURL("postgres"))
	if err != nil {
		return err
	}
	defer admin.Close(ctx) //nolint:errcheck // the server goes
	name := fmt.Sprintf("round_%d", n)
	if _, err := admin.Exec(ctx, "CREATE DATABASE "+name); err != nil {
		return err
	}
	b.url = pg.DatabaseURL(name)
	if err := readmodel.Migrate(ctx, b.url); err != nil {
		return err
	}
	live, err := b.live(ctx)
	if err != nil {
		return fmt.Errorf("live: %w", err)
	}
	report, err := projector.Rebuild(ctx, projector.Config{DatabaseURL: b.url}, projector.Deps{Log: b.log}, false)
	if err != nil {
		return err
	}
	raw, rows, err := b.copy(ctx)
	if err != nil {
		return fmt.Errorf("copy: %w", err)
	}
	b.lives, b.rebuilds, b.copies, b.rows = append(b.lives, live), append(b.rebuilds, report.Duration), append(b.copies, raw), rows
	_, err = admin.Exec(ctx, "DROP DATABASE "+name+" WITH (FORCE)")
	return err
}

// report prints the rows. A ratio is computed within each round, because its parts share the state of the machine.
func (b *bench) report(out io.Writer) error {
	for _, m := range []struct {
		what   string
		target int
		took   []time.Duration
	}{{"projector, live", liveTarget, b.lives}, {"projector, rebuild", rebuildTarget, b.rebuilds}} {
		var rates, ratios, copied []float64
		for i, took := range m.took {
			rates = append(rates, float64(b.events)/took.Seconds())
			copied = append(copied, float64(b.events)/b.copies[i].Seconds())
			ratios = append(ratios, b.copies[i].Seconds()/took.Seconds())
		}
		rate, ratio := median(rates), median(ratios)
		r := row.Row{
			What: m.what, Target: fmt.Sprintf("%d events/s, or %.0f %% of COPY", m.target, 100*copyShare),
			Measured: fmt.Sprintf("%.0f events/s", rate), Against: fmt.Sprintf("%.0f events/s by COPY of the same %d rows", median(copied), b.rows),
			Ratio: ratio, OK: rate >= float64(m.target) || ratio >= copyShare, Command: "cd test && go run ./bench/projector",
		}
		if err := row.Write(out, r); err != nil {
			return err
		}
	}
	return nil
}

func median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return (list[len(list)/2] + list[(len(list)-1)/2]) / 2
}

// live returns how long a projector takes from its start to the end of the log.
func (b *bench) live(ctx context.Context) (time.Duration, error) {
	p, err := projector.New(projector.Config{DatabaseURL: b.url}, projector.Deps{NATS: b.nc, Log: b.log})
	if err != nil {
		return 0, err
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	from := time.Now()
	go func() { done <- p.Run(running) }()
	err = b.reached(ctx)
	took := time.Since(from)
	stop()
	if stopped := <-done; err == nil {
		err = stopped
	}
	return took, err
}

// reached blocks until every group is at the end of the log.
func (b *bench) reached(ctx context.Context) error {
	conn, err := readmodel.Connect(ctx, b.url, readmodel.Schema)
	if err != nil {
		return err
	}
	defer conn.Close(ctx) //nolint:errcheck // the server goes
	tick := time.NewTicker(20 * time.Millisecond)
	defer tick.Stop()
	for {
		var positions []int64
		if err := conn.QueryRow(ctx, "SELECT array_agg(position ORDER BY grp) FROM checkpoints").Scan(&positions); err != nil {
			return err
		}
		missing := 0
		for g, end := range b.ends {
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

// copy reads the rows into memory and copies them into tables like those they came from.
func (b *bench) copy(ctx context.Context) (took time.Duration, rows int64, err error) {
	conn, err := readmodel.Connect(ctx, b.url, readmodel.Schema)
	if err != nil {
		return 0, 0, err
	}
	defer conn.Close(ctx) //nolint:errcheck // the server goes
	for _, table := range []string{
		readmodel.Sessions, readmodel.Executions, readmodel.Blocks, readmodel.Events, readmodel.ToolCalls, readmodel.Sandboxes,
	} {
		d, n, err := copyTable(ctx, conn, table)
		if err != nil {
			return 0, 0, fmt.Errorf("%s: %w", table, err)
		}
		took, rows = took+d, rows+n
	}
	return took, rows, nil
}

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
