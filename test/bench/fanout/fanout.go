// Package fanout measures the age of text and events when WebSockets receive them, with a number of active sessions,
// each with its own WebSocket: runners write 10 lines per second, 9 of them text, through executor, log, DELTAS,
// projector, Postgres and gateway.
//
// The load is open: the clock fixes when a line is due, and a line that is late does not delay the next ones. The rows
// name the share of this rate that the clients received in time, the processor time that an event costs, and the memory
// of a session. The benchmark fails if a client did not receive every event exactly once and in order.
//
// The services, NATS and the played runners are in this process; Postgres and the clients have processes of their own.
package fanout

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The modes of the load.
const (
	staggered = "staggered" // the sessions begin their blocks at different times
	lockStep  = "lock-step" // all sessions begin and end their blocks in the same interval
)

// Targets of a load.
const (
	minDelivered = 0.99   // share of the offered rate
	maxCPU       = 180    // microseconds per event
	maxMemory    = 150e3  // bytes per session
	maxSessions  = 10_000 // more than this machine can have sockets for

	// targetSessions is the number of sessions for which the processor time of an event and the memory of a session
	// have targets. With fewer events in the same time, each costs more.
	targetSessions = 1000
)

// apartFlag is the command line flag that sets Benchmark.Apart, with a space before it.
const apartFlag = " --apart"

// maxAge returns the maximum age of an event at the 99th percentile, in milliseconds.
func maxAge(mode string) float64 {
	if mode == lockStep {
		return 600
	}
	return 250
}

// Benchmark is the subcommand fanout. It measures the age of text and events when WebSockets of many active sessions
// receive them.
type Benchmark struct {
	Sessions []int         `default:"1000" help:"Active sessions; several numbers are measured one after the other."`
	Modes    []string      `default:"staggered,lock-step" enum:"staggered,lock-step" help:"How the sessions begin their blocks: at different times (staggered), or all at once (lock-step)."`
	Each     time.Duration `default:"30s" help:"Duration of each load, at least 4s."`

	Stalled        int  `help:"Further clients that join up to 100 sessions and read nothing."`
	Trickling      int  `help:"Further clients that join up to 100 sessions and read one byte a second."`
	RestartGateway bool `help:"Restart the gateway in the middle of each load. The clients connect again with their cursors."`

	MoreGateways int  `help:"Further gateways, each with a client of one session in every partition, so that each receives all text in flight."`
	Apart        bool `help:"Run NATS, without users, and the played runners in processes of their own, so that the memory of the services can be told from theirs."`

	Profile string `placeholder:"FOLDER" help:"Write profiles of all parts except Postgres and the clients to this folder."`
}

// Validate is called by kong.
func (m *Benchmark) Validate() error {
	for _, n := range m.Sessions {
		if n < 1 || n > maxSessions {
			return fmt.Errorf("--sessions must be 1 to %d", maxSessions)
		}
	}
	if m.Each < 2*blockTime {
		return fmt.Errorf("--each must be at least %s", 2*blockTime)
	}
	if m.Stalled < 0 || m.Trickling < 0 || m.MoreGateways < 0 {
		return errors.New("--stalled, --trickling and --more-gateways must not be negative")
	}
	return nil
}

// Measure implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	stop, err := system.Profile(m.Profile)
	if err != nil {
		return err
	}
	var failures []error
	for _, mode := range m.Modes {
		best := 0
		for _, sessions := range m.Sessions {
			r, err := m.runLoad(ctx, b, mode, sessions)
			if err != nil {
				return errors.Join(append(failures, err)...)
			}
			if err := m.report(b, r); err != nil {
				return err
			}
			if r.met() {
				best = max(best, sessions)
			}
			if r.Failed > 0 {
				failures = append(failures, fmt.Errorf("%s: %d of %d clients did not receive every event exactly once and in order: %s", mode, r.Failed, sessions, r.Failure))
			}
		}
		if len(m.Sessions) > 1 {
			fmt.Fprintf(b.Messages(), "fanout: %s: target met at up to %d of the measured numbers of sessions %v\n", mode, best, m.Sessions)
		}
	}
	return errors.Join(append(failures, stop())...)
}

// report writes the rows of one load.
func (m *Benchmark) report(b *harness.Bench, r *result) error {
	load := fmt.Sprintf("at %d sessions, 10 events/s each (9 of 10 text), %s, %.0f s", r.sessions, r.mode, m.Each.Seconds())
	if flags := m.disturbances(); flags != "" {
		load += "," + flags
	}
	command := harness.Command(fmt.Sprintf("fanout --sessions %d --modes %s --each %s%s", r.sessions, r.mode, m.Each, m.disturbances()))
	age := row.Row{
		What:   "runner's line to WebSocket " + load,
		Target: fmt.Sprintf("p99 under %.0f ms, %.0f %% of the offered rate, every event once and in order", maxAge(r.mode), 100*minDelivered),
		Measured: fmt.Sprintf("p90 %.1f ms; %.0f events/s of %.0f offered (%.1f %%); %d events once and in order",
			r.P90Ms, r.rate(), r.offered(), 100*r.delivered(), r.Events),
		P50Ms: r.P50Ms, P99Ms: r.P99Ms, OK: r.met(), Command: command,
		Note: fmt.Sprintf("the runners' own lateness has p99 %d ms; other programs took %.1f cores of the machine; %d clients connected again; %d warnings logged", r.lateMs, r.neighbours, r.Reconnects, r.warnings),
	}
	if r.Failed > 0 {
		age.Measured += fmt.Sprintf("; FAILED in %d sessions: %s", r.Failed, r.Failure)
	}
	if m.Stalled+m.Trickling > 0 {
		age.Note += fmt.Sprintf("; with %d clients that read nothing and %d that read a byte a second, of whose streams %d were cut", m.Stalled, m.Trickling, r.cut)
		if m.RestartGateway {
			age.Note += " after the restart"
		}
	}
	if m.MoreGateways > 0 {
		age.Note += fmt.Sprintf("; with %d more gateways that receive all text in flight", m.MoreGateways)
	}
	if m.RestartGateway {
		age.Target = "every event once and in order"
		age.Note += fmt.Sprintf("; gateway restarted in the middle, in %.0f ms", r.restart.Seconds()*1000)
	}
	cpu := row.Row{
		What: "the same: processor time of an event", Target: fmt.Sprintf("under %d µs", maxCPU), Measured: fmt.Sprintf("%.0f µs", r.cpuMicros(r.cpu)),
		Against: fmt.Sprintf("services, NATS and runners %.0f, Postgres %.0f, clients %.0f", r.cpuMicros(r.cpuServices), r.cpuMicros(r.cpuPostgres), r.cpuMicros(r.cpuClients)),
		OK:      r.cpuMicros(r.cpu) < maxCPU, Command: command, Note: "from the first line to the end of the last client, with the ends of all turns",
	}
	if r.sessions < targetSessions || m.disturbances() != "" && m.disturbances() != apartFlag {
		cpu.Target, cpu.OK = "none for this load", true
	}
	perSession := func(bytes int64) float64 { return float64(bytes) / float64(r.sessions) }
	memory := row.Row{
		What: "the same: memory of an active session", Target: fmt.Sprintf("under %.0f KB in all services, NATS and Postgres apart", maxMemory/1e3),
		Measured: fmt.Sprintf("%.0f KB", perSession(r.services)/1e3),
		Against:  fmt.Sprintf("NATS %.0f, Postgres %.0f; clients %.0f", perSession(r.nats)/1e3, perSession(r.postgres)/1e3, perSession(r.clients)/1e3),
		OK:       perSession(r.services) < maxMemory, Command: command,
		Note: "the largest resident memory under load, less that before the sessions were created",
	}
	if r.sessions != targetSessions || m.disturbances() != apartFlag {
		memory.Target, memory.OK = "none for this load", true
	}
	if !m.Apart {
		memory.Against = fmt.Sprintf("Postgres %.0f; clients %.0f", perSession(r.postgres)/1e3, perSession(r.clients)/1e3)
		memory.Note += ", which includes NATS and the played runners; --apart measures them apart"
	}
	return errors.Join(b.Report(age), b.Report(cpu), b.Report(memory))
}

// disturbances returns the command line flags that disturb the system under load, with a space before each.
func (m *Benchmark) disturbances() (flags string) {
	if m.Stalled > 0 {
		flags += fmt.Sprint(" --stalled ", m.Stalled)
	}
	if m.Trickling > 0 {
		flags += fmt.Sprint(" --trickling ", m.Trickling)
	}
	if m.RestartGateway {
		flags += " --restart-gateway"
	}
	if m.MoreGateways > 0 {
		flags += fmt.Sprint(" --more-gateways ", m.MoreGateways)
	}
	if m.Apart {
		flags += apartFlag
	}
	return flags
}

// result holds the measurements of one run of the system under load.
type result struct {
	report
	mode     string
	sessions int
	window   time.Duration // in which the rate is measured
	lateMs   int           // p99 of how late the runners wrote
	restart  time.Duration // of the gateway
	cut      int           // streams that the gateway ended because the client was too slow
	warnings int64         // logged by the services

	neighbours float64 // cores that other processes of this machine used

	cpu, cpuServices, cpuPostgres, cpuClients time.Duration
	services, nats, postgres, clients         int64 // bytes of memory; services include NATS unless it has a process of its own
}

// met reports whether the target is met. While the gateway restarts, text and events wait.
func (r *result) met() bool {
	return r.Failed == 0 && (r.restart > 0 || r.P99Ms < maxAge(r.mode) && r.delivered() >= minDelivered)
}

// offered returns the events per second that the runners write, rate those that the clients received, and delivered the ratio of both.
func (r *result) offered() float64   { return float64(r.sessions) / lineInterval.Seconds() }
func (r *result) rate() float64      { return float64(r.InWindow) / r.window.Seconds() }
func (r *result) delivered() float64 { return r.rate() / r.offered() }

// cpuMicros returns the microseconds of processor time for each event.
func (r *result) cpuMicros(cpu time.Duration) float64 {
	return float64(cpu.Microseconds()) / float64(max(1, r.Events))
}

// percentile returns the smallest index up to which a histogram holds the given share of its counts.
func percentile(histogram []int64, share float64) int {
	var all, below int64
	for _, n := range histogram {
		all += n
	}
	return max(0, slices.IndexFunc(histogram, func(n int64) bool { below += n; return float64(below) >= share*float64(all) }))
}
