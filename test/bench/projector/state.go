package projector

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http"
	"path/filepath"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
)

const (
	// maxStateShare is the performance target: the maximum time of a request for a past state of a session, as a share of
	// the time to fold this state from the first event.
	maxStateShare = 0.1
	// stateRequests is the number of measured requests for the past state at each of several events.
	stateRequests = 20
	// statesOnlyArguments are the arguments with which the benchmark program measures past states and forks only.
	statesOnlyArguments = "projector --rounds 0"
)

// measureStates measures requests for past states of one session with the given number of turns, with and without the
// states that the projector has saved. It also measures forks of the session.
func measureStates(ctx context.Context, b *harness.Bench, pg *pgserver.Server, turns int) error {
	t, err := newTestbed(ctx, b)
	if err != nil {
		return err
	}
	id := FirstSession()
	if err := t.storeSnapshot(ctx, "default", id); err != nil {
		return fmt.Errorf("store a snapshot: %w", err)
	}
	if err := t.fillLog(ctx, 1, turns); err != nil {
		return fmt.Errorf("fill the log: %w", err)
	}
	if err := t.appendStates(ctx, id); err != nil {
		return fmt.Errorf("fill the log: %w", err)
	}
	pool, url, err := t.serveFilledLog(ctx, b, pg)
	if err != nil {
		return err
	}
	if _, err := projector.Rebuild(ctx, projector.Config{DatabaseURL: t.url}, projector.Deps{Log: t.log}, true); err != nil {
		return fmt.Errorf("compare the rows with a rebuild: %w", err)
	}
	if err := t.reportForks(ctx, b, url); err != nil {
		return fmt.Errorf("forks: %w", err)
	}
	return t.reportStates(ctx, b, pool, url)
}

// FirstSession returns the id of the first session of a filled log.
func FirstSession() string { return events.DeriveID(events.KindSession, "bench", "0") }

// ServeFilledLog writes a number of sessions with the given number of turns in all to a new log, folds it, and serves it
// by a gateway that needs no key. It returns the URL of the gateway, which stops when the benchmark, or its part, ends.
func ServeFilledLog(ctx context.Context, b *harness.Bench, sessions, turns int) (url string, err error) {
	pg, err := pgserver.Start(ctx, pgserver.Config{DataDir: filepath.Join(b.Dir, "postgres"), FetchURL: pgserver.FetchNever})
	if err != nil {
		return "", err
	}
	b.Cleanup(pg.Stop)
	t, err := newTestbed(ctx, b)
	if err != nil {
		return "", err
	}
	if err := t.fillLog(ctx, sessions, turns); err != nil {
		return "", fmt.Errorf("fill the log: %w", err)
	}
	_, url, err = t.serveFilledLog(ctx, b, pg)
	return url, err
}

// serveFilledLog folds the log into the database postgres, and serves it by a gateway until the benchmark, or its part,
// ends. It returns a pool of connections to the database, and the URL of the gateway.
func (t *testbed) serveFilledLog(ctx context.Context, b *harness.Bench, pg *pgserver.Server) (pool *pgxpool.Pool, url string, err error) {
	t.url = pg.DatabaseURL("postgres")
	// Run live, because a rebuild takes its targets from existing rows.
	if err := readmodel.Migrate(ctx, t.url); err != nil {
		return nil, "", err
	}
	if _, err := t.timeLiveProjector(ctx); err != nil {
		return nil, "", err
	}
	pool, err = readmodel.Open(ctx, t.url)
	if err != nil {
		return nil, "", err
	}
	b.Cleanup(func() error { pool.Close(); return nil })
	g, err := gateway.New(gateway.Config{Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0"}, gateway.Deps{NATS: t.nc, Pool: pool, Partitions: t.log.Partitioning(), Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return nil, "", err
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- g.Run(running) }()
	b.Cleanup(func() error { stop(); return <-done })
	select {
	case <-g.Ready():
		return pool, g.URL(), nil
	case err := <-done:
		done <- err // for the cleanup
		return nil, "", err
	}
}

// callTimings holds the durations and the allocated memory of repeated equal calls.
type callTimings struct {
	seq       int // the event that the requests are for
	took      []time.Duration
	allocated uint64 // bytes for each request, in the whole process
}

// reportStates measures requests for past states of a session, with and without the states that the projector has saved
// in the database, and reports the rows of docs/performance.md. url is the URL of a gateway.
func (t *testbed) reportStates(ctx context.Context, b *harness.Bench, pool *pgxpool.Pool, url string) error {
	if _, err := pool.Exec(ctx, "ANALYZE"); err != nil {
		return err
	}
	path := url + "/api/sessions/" + FirstSession() + "/state?at="
	var list []callTimings
	for _, seq := range []int{499, t.events/1000*500 + 499, t.events} { // all but the last one are as far from a saved state as possible
		a, err := timeStateRequests(ctx, path, seq, stateRequests)
		if err != nil {
			return err
		}
		list = append(list, a)
	}
	if _, err := pool.Exec(ctx, "DELETE FROM session_states"); err != nil {
		return err
	}
	zero, err := timeStateRequests(ctx, path, t.events, 3)
	if err != nil {
		return err
	}
	for _, a := range list {
		ratio := quantileMs(a.took, 0.5) / quantileMs(zero.took, 0.5)
		r := row.Row{
			What: fmt.Sprintf("state at event %d of a session with %d events, over REST", a.seq, t.events), Target: fmt.Sprintf("under %.0f %% of a fold from zero", 100*maxStateShare),
			Measured: fmt.Sprintf("%.1f ms and %.1f MB allocated, of %d", quantileMs(a.took, 0.5), float64(a.allocated)/1e6, len(a.took)),
			Against:  fmt.Sprintf("the state at event %d folded from zero: %.1f ms and %.1f MB allocated", zero.seq, quantileMs(zero.took, 0.5), float64(zero.allocated)/1e6),
			Ratio:    ratio, P50Ms: quantileMs(a.took, 0.5), P99Ms: quantileMs(a.took, 0.99), OK: ratio < maxStateShare,
			Note: "the response has 50 of the blocks; gateway, client and Postgres share the machine",
		}
		if err := b.ReportRow(r); err != nil {
			return err
		}
	}
	return nil
}

// timeStateRequests measures n requests for a session's state as of the event with the given seq. path is the URL of
// the request, up to the seq.
func timeStateRequests(ctx context.Context, path string, seq, n int) (callTimings, error) {
	return timeCalls(seq, n, func() error {
		var state struct {
			Seq    int
			Blocks []json.RawMessage
		}
		if err := sendRequest(ctx, http.MethodGet, fmt.Sprint(path, seq), "", &state); err != nil {
			return err
		}
		if state.Seq != seq || len(state.Blocks) == 0 {
			return fmt.Errorf("%s%d: state at %d with %d blocks", path, seq, state.Seq, len(state.Blocks))
		}
		return nil
	})
}

// quantileMs returns the quantile q, from 0 to 1, of a list of durations, in milliseconds.
func quantileMs(list []time.Duration, q float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[min(len(list)-1, int(q*float64(len(list))))].Seconds() * 1000
}
