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

// modeLockStep is the mode of the benchmark in which all sessions begin and end their blocks in the same interval. In
// the other mode, "staggered", they begin them at different times.
const modeLockStep = "lock-step"

// Targets of a load.
const (
	// minDeliveredShare is the performance target: the minimum share of the written events that the clients receive in
	// time.
	minDeliveredShare = 0.99
	// maxCPUMicrosPerEvent is the performance target: the maximum processor time of an event, in microseconds.
	maxCPUMicrosPerEvent = 180
	// maxBytesPerSession is the performance target: the maximum memory, in bytes, of an active session in all services.
	maxBytesPerSession = 150e3
	// maxSessions is the maximum of the flag --sessions. It is more than this machine can have sockets for.
	maxSessions = 10_000

	// targetSessions is the number of sessions for which the processor time of an event and the memory of a session have
	// targets. With fewer sessions there are fewer events in the same time, and each costs more.
	targetSessions = 1000
)

// separateProcessesFlag is the command line flag --apart, with a space before it. With this flag, NATS and the fake
// runners run in processes of their own.
const separateProcessesFlag = " --apart"

// maxAgeMs returns the performance target of a mode: the maximum of the 99th percentile of the age of an event when a
// client receives it, in milliseconds.
func maxAgeMs(mode string) float64 {
	if mode == modeLockStep {
		return 600
	}
	return 250
}

// Benchmark is the subcommand fanout of the benchmark program. It measures the age of text and events when clients
// receive them, with many active sessions that each have a WebSocket.
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

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	for _, n := range m.Sessions {
		if n < 1 || n > maxSessions {
			return fmt.Errorf("--sessions must be 1 to %d", maxSessions)
		}
	}
	if m.Each < 2*blockDuration {
		return fmt.Errorf("--each must be at least %s", 2*blockDuration)
	}
	if m.Stalled < 0 || m.Trickling < 0 || m.MoreGateways < 0 {
		return errors.New("--stalled, --trickling and --more-gateways must not be negative")
	}
	return nil
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	stop, err := system.StartProfiles(m.Profile)
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
			if err := m.reportResult(b, r); err != nil {
				return err
			}
			if r.metTarget() {
				best = max(best, sessions)
			}
			if r.Failed > 0 {
				failures = append(failures, fmt.Errorf("%s: %d of %d clients did not receive every event exactly once and in order: %s", mode, r.Failed, sessions, r.Failure))
			}
		}
		if len(m.Sessions) > 1 {
			fmt.Fprintf(b.MessageWriter(), "fanout: %s: target met at up to %d of the measured numbers of sessions %v\n", mode, best, m.Sessions)
		}
	}
	return errors.Join(append(failures, stop())...)
}

// reportResult reports the rows of docs/performance.md about one measurement: the age of events, the processor time of
// an event, and the memory of a session.
func (m *Benchmark) reportResult(b *harness.Bench, r *loadResult) error {
	load := fmt.Sprintf("at %d sessions, 10 events/s each (9 of 10 text), %s, %.0f s", r.sessions, r.mode, m.Each.Seconds())
	if flags := m.disturbanceFlags(); flags != "" {
		load += "," + flags
	}
	command := harness.ShellCommand(fmt.Sprintf("fanout --sessions %d --modes %s --each %s%s", r.sessions, r.mode, m.Each, m.disturbanceFlags()))
	age := row.Row{
		What:   "runner's line to WebSocket " + load,
		Target: fmt.Sprintf("p99 under %.0f ms, %.0f %% of the offered rate, every event once and in order", maxAgeMs(r.mode), 100*minDeliveredShare),
		Measured: fmt.Sprintf("p90 %.1f ms; %.0f events/s of %.0f offered (%.1f %%); %d events once and in order",
			r.P90Ms, r.receivedRate(), r.offeredRate(), 100*r.deliveredShare(), r.Events),
		P50Ms: r.P50Ms, P99Ms: r.P99Ms, OK: r.metTarget(), Command: command,
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
		What: "the same: processor time of an event", Target: fmt.Sprintf("under %d µs", maxCPUMicrosPerEvent), Measured: fmt.Sprintf("%.0f µs", r.cpuMicrosPerEvent(r.cpu)),
		Against: fmt.Sprintf("services, NATS and runners %.0f, Postgres %.0f, clients %.0f", r.cpuMicrosPerEvent(r.cpuServices), r.cpuMicrosPerEvent(r.cpuPostgres), r.cpuMicrosPerEvent(r.cpuClients)),
		OK:      r.cpuMicrosPerEvent(r.cpu) < maxCPUMicrosPerEvent, Command: command, Note: "from the first line to the end of the last client, with the ends of all turns",
	}
	if r.sessions < targetSessions || m.disturbanceFlags() != "" && m.disturbanceFlags() != separateProcessesFlag {
		cpu.Target, cpu.OK = "none for this load", true
	}
	perSession := func(bytes int64) float64 { return float64(bytes) / float64(r.sessions) }
	memory := row.Row{
		What: "the same: memory of an active session", Target: fmt.Sprintf("under %.0f KB in all services, NATS and Postgres apart", maxBytesPerSession/1e3),
		Measured: fmt.Sprintf("%.0f KB", perSession(r.services)/1e3),
		Against:  fmt.Sprintf("NATS %.0f, Postgres %.0f; clients %.0f", perSession(r.nats)/1e3, perSession(r.postgres)/1e3, perSession(r.clients)/1e3),
		OK:       perSession(r.services) < maxBytesPerSession, Command: command,
		Note: "the largest resident memory under load, less that before the sessions were created",
	}
	if r.sessions != targetSessions || m.disturbanceFlags() != separateProcessesFlag {
		memory.Target, memory.OK = "none for this load", true
	}
	if !m.Apart {
		memory.Against = fmt.Sprintf("Postgres %.0f; clients %.0f", perSession(r.postgres)/1e3, perSession(r.clients)/1e3)
		memory.Note += ", which includes NATS and the played runners; --apart measures them apart"
	}
	return errors.Join(b.ReportRow(age), b.ReportRow(cpu), b.ReportRow(memory))
}

// disturbanceFlags returns those flags of the command line that disturb the measured system, such as --restart-gateway,
// with a space before each.
func (m *Benchmark) disturbanceFlags() (flags string) {
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
		flags += separateProcessesFlag
	}
	return flags
}

// loadResult holds what was measured while a number of sessions were active in one system.
type loadResult struct {
	clientsReport
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

// metTarget reports whether the measurement reached the performance targets. If the gateway was restarted, only the
// completeness of the events counts, because text and events wait meanwhile.
func (r *loadResult) metTarget() bool {
	return r.Failed == 0 && (r.restart > 0 || r.P99Ms < maxAgeMs(r.mode) && r.deliveredShare() >= minDeliveredShare)
}

// offeredRate returns the events per second that the fake runners write in all sessions.
func (r *loadResult) offeredRate() float64 { return float64(r.sessions) / lineInterval.Seconds() }

// receivedRate returns the events per second that the clients received in the measured time span.
func (r *loadResult) receivedRate() float64 { return float64(r.InWindow) / r.window.Seconds() }

// deliveredShare returns the rate of received events as a share of the rate of written events.
func (r *loadResult) deliveredShare() float64 { return r.receivedRate() / r.offeredRate() }

// cpuMicrosPerEvent divides a processor time by the number of received events. It returns microseconds.
func (r *loadResult) cpuMicrosPerEvent(cpu time.Duration) float64 {
	return float64(cpu.Microseconds()) / float64(max(1, r.Events))
}

// percentileIndex returns the smallest index of a histogram up to which the given share (0 to 1) of all its counts
// lies.
func percentileIndex(histogram []int64, share float64) int {
	var all, below int64
	for _, n := range histogram {
		all += n
	}
	return max(0, slices.IndexFunc(histogram, func(n int64) bool { below += n; return float64(below) >= share*float64(all) }))
}
