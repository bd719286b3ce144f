// Package fanout measures the age of text and events when WebSockets receive them, with the given number of active
// sessions, each with its own WebSocket: runners write 10 lines per second, 9 of them text, through executor, log,
// DELTAS, projector, Postgres, LIVE and gateway. It also checks that every client receives everything once and in
// order. If the target is missed, it searches for the load at which it is met.
package fanout

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// target is the maximum age of an event at the 99th percentile, in milliseconds.
const target = 250

// reducedDuration is the maximum duration of the measurement of a smaller load, after the full load has missed the target.
const reducedDuration = 10 * time.Second

// Benchmark is the subcommand fanout.
type Benchmark struct {
	Sessions int           `default:"1000" help:"Active sessions, 1 to 1,024, which is the limit of an executor."`
	Each     time.Duration `default:"1m" help:"Duration of the load, at least 1s."`
	Profile  string        `placeholder:"FOLDER" help:"Write profiles of all parts except Postgres to this folder."`
}

// Validate is called by kong.
func (m *Benchmark) Validate() error {
	if m.Sessions < 1 || m.Sessions > 1024 || m.Each < time.Second {
		return errors.New("--sessions must be 1 to 1,024, --each at least 1s")
	}
	return nil
}

// Measure implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	stop, err := system.Profile(m.Profile)
	if err != nil {
		return err
	}
	r, err := runLoad(ctx, b, m.Sessions, m.Each)
	if err != nil {
		return err
	}
	if err := stop(); err != nil {
		return err
	}
	full := toRow(r)
	for smaller := m.Sessions / 2; !r.met() && smaller > 30; smaller /= 2 {
		if r, err = runLoad(ctx, b, smaller, min(m.Each, reducedDuration)); err != nil {
			return err
		}
		if r.met() {
			full.Note += fmt.Sprintf("; met at %d sessions with %.0f events/s, p99 %.0f ms", smaller, r.rate(), row.Percentile(r.samples, 0.99))
		}
	}
	return b.Report(full)
}

func toRow(r *result) row.Row {
	out := row.Row{
		What:   fmt.Sprintf("runner's line to WebSocket at %d sessions, 10 events/s each (9 of 10 text), %.0f s", r.sessions, r.each.Seconds()),
		Target: fmt.Sprintf("p99 under %d ms, nothing lost, duplicated or out of order", target),
		P50Ms:  row.Percentile(r.samples, 0.5), P99Ms: row.Percentile(r.samples, 0.99), OK: r.met(),
	}
	out.Measured = fmt.Sprintf("p99 %.0f ms at %.0f events/s; of %d nothing lost, duplicated or out of order", out.P99Ms, r.rate(), len(r.samples))
	if r.err != nil {
		out.Measured = fmt.Sprintf("p99 %.0f ms at %.0f events/s; %d of %d sessions failed, the first with: %v", out.P99Ms, r.rate(), r.failed, r.sessions, r.err)
	}
	out.Note = fmt.Sprintf("runners simulated in the process; runners, clients, services, NATS and Postgres share the machine; %d warnings logged", r.warnings)
	return out
}
