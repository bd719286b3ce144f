// Command fanout measures the age of text and events when WebSockets receive them, with the given number of active
// sessions, each with its own WebSocket: runners write 10 lines per second, 9 of them text, through executor, log,
// DELTAS, projector, Postgres, LIVE and gateway. It also checks that every client receives everything once and in
// order. If the target is missed, it searches for the load at which it is met.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"time"

	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// target is the maximum age of an event at the 99th percentile, in milliseconds.
const target = 250

// shorter is the duration of the measurement of a smaller load, after the full load has missed the target.
const shorter = 10 * time.Second

func main() {
	sessions := flag.Int("sessions", 1000, "sessions at work; an executor takes 1,024 at most")
	each := flag.Duration("each", time.Minute, "how long they work")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	profile := flag.String("profile", "", "folder for profiles of all parts but Postgres")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *sessions, *each, *profile); err != nil {
		fmt.Fprintln(os.Stderr, "fanout:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, dir string, sessions int, each time.Duration, profile string) error {
	if sessions < 1 || sessions > 1024 || each < time.Second {
		return errors.New("sessions must be 1 to 1,024, and each a second or more")
	}
	stop, err := system.Profile(profile)
	if err != nil {
		return err
	}
	r, err := load(ctx, dir, sessions, each)
	if err != nil {
		return err
	}
	if err := stop(); err != nil {
		return err
	}
	whole := toRow(r)
	for smaller := sessions / 2; !r.reached() && smaller > 30; smaller /= 2 {
		if r, err = load(ctx, dir, smaller, min(each, shorter)); err != nil {
			return err
		}
		if r.reached() {
			whole.Note += fmt.Sprintf("; reached at %d sessions with %.0f events/s, p99 %.0f ms", smaller, r.rate(), row.Percentile(r.samples, 0.99))
		}
	}
	return row.Write(out, whole)
}

func toRow(r *result) row.Row {
	out := row.Row{
		What:   fmt.Sprintf("runner's line to WebSocket at %d sessions, 10 events/s each (9 of 10 text), %.0f s", r.sessions, r.each.Seconds()),
		Target: fmt.Sprintf("p99 under %d ms, nothing lost, doubled or out of order", target),
		P50Ms:  row.Percentile(r.samples, 0.5), P99Ms: row.Percentile(r.samples, 0.99), OK: r.reached(),
		Command: "cd test && go run ./bench/fanout",
	}
	out.Measured = fmt.Sprintf("p99 %.0f ms at %.0f events/s; of %d nothing lost, doubled or out of order", out.P99Ms, r.rate(), len(r.samples))
	if r.broken != nil {
		out.Measured = fmt.Sprintf("p99 %.0f ms at %.0f events/s; %d of %d sessions broken, one: %v", out.P99Ms, r.rate(), r.brokenIn, r.sessions, r.broken)
	}
	out.Note = fmt.Sprintf("runners played in the process; runners, clients, services, NATS and Postgres share the machine; %d warnings logged", r.warnings)
	return out
}
