package main

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"path/filepath"
	"slices"
	"time"

	"github.com/jackc/pgx/v5/pgxpool"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/pgserver"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/services/projector"
	"github.com/spoolhq/spool/test/bench/row"
)

const (
	// stateShare is the most that a state may take of the time of a fold from zero.
	stateShare = 0.1
	// statesAsked is how often each state is asked for.
	statesAsked = 20
)

// states measures the state at events of one long session: with the states that the projector saved, and without them.
func states(ctx context.Context, out io.Writer, pg *pgserver.Server, dir string, turns int) (err error) {
	srv, err := natsserver.Start(natsserver.Config{StoreDir: filepath.Join(dir, "nats-states"), Relaxed: true})
	if err != nil {
		return err
	}
	defer srv.Shutdown()
	nc, err := srv.Connect()
	if err != nil {
		return err
	}
	defer nc.Close()
	b, err := newBench(ctx, nc)
	if err != nil {
		return err
	}
	id := events.Derive(events.KindSession, "bench", "0")
	if err := b.storeSnapshot(ctx, "default", id); err != nil {
		return fmt.Errorf("store a snapshot: %w", err)
	}
	if err := b.fill(ctx, 1, turns); err != nil {
		return fmt.Errorf("fill the log: %w", err)
	}
	if err := b.seal(ctx, id); err != nil {
		return fmt.Errorf("fill the log: %w", err)
	}
	b.url = pg.DatabaseURL("postgres")
	// Live, since a rebuild takes its targets from rows that are there.
	if err := readmodel.Migrate(ctx, b.url); err != nil {
		return err
	}
	if _, err := b.live(ctx); err != nil {
		return err
	}
	if _, err := projector.Rebuild(ctx, projector.Config{DatabaseURL: b.url}, projector.Deps{Log: b.log}, true); err != nil {
		return fmt.Errorf("compare: %w", err)
	}
	pool, err := readmodel.Open(ctx, b.url)
	if err != nil {
		return err
	}
	defer pool.Close()
	g, err := gateway.New(gateway.Config{Listen: "127.0.0.1:0", GRPCListen: "127.0.0.1:0"}, gateway.Deps{NATS: nc, Pool: pool, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	running, stop := context.WithCancel(ctx)
	done := make(chan error, 1)
	go func() { done <- g.Run(running) }()
	defer func() {
		stop()
		err = errors.Join(err, <-done)
	}()
	select {
	case <-g.Ready():
	case err := <-done:
		return err
	}
	if err := b.reportForks(ctx, out, g.URL()); err != nil {
		return fmt.Errorf("forks: %w", err)
	}
	return b.reportStates(ctx, out, pool, g.URL())
}

// asked is what states at one event took.
type asked struct {
	at        int
	took      []time.Duration
	allocated uint64 // bytes of one, in the whole process
}

func (b *bench) reportStates(ctx context.Context, out io.Writer, pool *pgxpool.Pool, url string) error {
	if _, err := pool.Exec(ctx, "ANALYZE"); err != nil {
		return err
	}
	path := url + "/api/sessions/" + events.Derive(events.KindSession, "bench", "0") + "/state?at="
	var list []asked
	for _, at := range []int{499, b.events/1000*500 + 499, b.events} { // as far from a saved state as can be, but for the last one
		a, err := ask(ctx, path, at, statesAsked)
		if err != nil {
			return err
		}
		list = append(list, a)
	}
	if _, err := pool.Exec(ctx, "DELETE FROM session_states"); err != nil {
		return err
	}
	zero, err := ask(ctx, path, b.events, 3)
	if err != nil {
		return err
	}
	for _, a := range list {
		ratio := ms(a.took, 0.5) / ms(zero.took, 0.5)
		r := row.Row{
			What: fmt.Sprintf("state at event %d of a session with %d events, over REST", a.at, b.events), Target: fmt.Sprintf("under %.0f %% of a fold from zero", 100*stateShare),
			Measured: fmt.Sprintf("%.1f ms and %.1f MB allocated, of %d", ms(a.took, 0.5), float64(a.allocated)/1e6, len(a.took)),
			Against:  fmt.Sprintf("the state at event %d folded from zero: %.1f ms and %.1f MB allocated", zero.at, ms(zero.took, 0.5), float64(zero.allocated)/1e6),
			Ratio:    ratio, P50Ms: ms(a.took, 0.5), P99Ms: ms(a.took, 0.99), OK: ratio < stateShare, Command: "cd test && go run ./bench/projector",
			Note: "50 of the blocks are in the answer; gateway, client and Postgres share the machine",
		}
		if err := row.Write(out, r); err != nil {
			return err
		}
	}
	return nil
}

// ask asks for a state several times, after once that does not count.
func ask(ctx context.Context, path string, at, n int) (asked, error) {
	return measure(at, n, func() error { return get(ctx, fmt.Sprint(path, at), at) })
}

func get(ctx context.Context, url string, at int) error {
	req, err := http.NewRequestWithContext(ctx, http.MethodGet, url, nil)
	if err != nil {
		return err
	}
	resp, err := http.DefaultClient.Do(req)
	if err != nil {
		return err
	}
	defer resp.Body.Close() //nolint:errcheck // read to its end
	var state struct {
		Seq    int
		Blocks []json.RawMessage
	}
	if err := json.NewDecoder(resp.Body).Decode(&state); err != nil {
		return err
	}
	if resp.StatusCode != http.StatusOK || state.Seq != at || len(state.Blocks) == 0 {
		return fmt.Errorf("%s answered %s, the state at %d with %d blocks", url, resp.Status, state.Seq, len(state.Blocks))
	}
	return nil
}

// ms is a quantile in milliseconds.
func ms(list []time.Duration, q float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return list[min(len(list)-1, int(q*float64(len(list))))].Seconds() * 1000
}
