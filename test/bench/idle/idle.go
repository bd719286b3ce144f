// Package idle measures the cost of idle sessions: goroutines of sessions whose agents have ended, memory of very
// many sessions, and memory of idle WebSockets. All services run in this process; NATS, Postgres and the clients
// run in others.
package idle

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The performance targets of this benchmark.
const (
	// maxMemoryBytes is the performance target: the maximum memory, in bytes, of all services with targetSessions idle
	// sessions.
	maxMemoryBytes = 300e6
	// targetSessions is the number of idle sessions to which maxMemoryBytes refers.
	targetSessions = 100_000
	// maxSocketBytes is the performance target: the maximum memory, in bytes, of an idle WebSocket.
	maxSocketBytes = 40 << 10
)

const (
	// stepTimeout is the time limit of each step of the benchmark, except for the creation of sessions.
	stepTimeout = time.Minute
	// createTimeout is the time limit of the creation of sessions. The benchmark measures the sessions that exist at this
	// time.
	createTimeout = 45 * time.Second
	// agentIdleTimeout is the time without a turn after which Spool stops the agent of a session.
	agentIdleTimeout = time.Second
)

// Benchmark is the subcommand idle of the benchmark program. It measures the memory and the goroutines of idle sessions
// and of idle WebSockets.
type Benchmark struct {
	Sessions harness.PositiveCount `default:"100000" help:"Idle sessions."`
	Sockets  harness.PositiveCount `default:"2000" help:"Idle WebSockets, each of a session of its own."`
	Worked   int                   `default:"100" help:"Sessions that take a turn before they are idle, 1 to 1,024."`
}

// Validate checks the flags of the benchmark. kong, the parser of the command line, calls it.
func (m *Benchmark) Validate() error {
	if m.Sockets > m.Sessions || m.Worked < 1 || m.Worked > 1024 {
		return errors.New("--sockets must not be more than --sessions, --worked must be 1 to 1,024")
	}
	return nil
}

// Measure runs the benchmark and reports its rows of docs/performance.md to b. It implements harness.Benchmark.
func (m *Benchmark) Measure(ctx context.Context, b *harness.Bench) error {
	nats, _, err := b.StartNATSProcess(true) // the creation of sessions is not measured
	if err != nil {
		return err
	}
	provider := fake.New(func(context.Context, *fake.Turn) {})
	sys, err := b.StartSystem(ctx, system.Config{
		NATSURL: nats, Provider: provider,
		Session: session.Config{IdleTimeout: agentIdleTimeout}, Executor: executor.Config{Engine: "bench", Slots: m.Worked},
	})
	if err != nil {
		return err
	}
	goroutines, err := measureGoroutinesLeft(ctx, sys, provider, m.Worked)
	if err != nil {
		return err
	}
	before := measureUsage()
	ids, err := createSessions(ctx, sys, int(m.Sessions))
	if err != nil {
		return err
	}
	after := measureUsage()
	if err := b.ReportRow(sessionsRow(before, after, len(ids), goroutines, m.Worked)); err != nil {
		return err
	}
	sockets := int(m.Sockets)
	if len(ids) < sockets {
		return fmt.Errorf("created only %d sessions within %s, want at least %d for the WebSockets", len(ids), createTimeout, sockets)
	}
	if _, _, err := b.StartChild(ids[:sockets], socketsSubcommand, sys.URL); err != nil {
		return err
	}
	return b.ReportRow(socketsRow(after, measureUsage(), sockets))
}

// sessionsRow returns the row of docs/performance.md about idle sessions. It scales the measured memory to
// targetSessions sessions. goroutines are those that worked sessions left behind, which took a turn.
func sessionsRow(before, after resourceUsage, sessions, goroutines, worked int) row.Row {
	scaled := float64(before.resident) + (float64(after.resident)-float64(before.resident))*targetSessions/float64(sessions)
	more := after.goroutines - before.goroutines
	return row.Row{
		What:     fmt.Sprintf("idle sessions: %d", sessions),
		Target:   fmt.Sprintf("%d of them under %.0f MB in all services, no goroutine each", targetSessions, maxMemoryBytes/1e6),
		Measured: fmt.Sprintf("%.0f MB resident, %.0f MB of heap", float64(after.resident)/1e6, float64(after.live)/1e6),
		Against:  fmt.Sprintf("without them %.0f MB resident, %.0f MB of heap", float64(before.resident)/1e6, float64(before.live)/1e6),
		OK:       scaled < maxMemoryBytes && more < max(500, sessions/100) && goroutines < max(1, worked/10),
		Note:     fmt.Sprintf("%+d goroutines; %d sessions that took a turn before: %+d goroutines", more, worked, goroutines),
	}
}

// socketsRow returns the row of docs/performance.md about idle WebSockets.
func socketsRow(before, after resourceUsage, sockets int) row.Row {
	each := (float64(after.resident) - float64(before.resident)) / float64(sockets)
	return row.Row{
		What: fmt.Sprintf("idle WebSockets: %d, each joined to a session", sockets), Target: fmt.Sprintf("under %d KB each", maxSocketBytes>>10),
		Measured: fmt.Sprintf("%.1f KB each resident, %.1f KB of it live heap and stacks", each/1024, (float64(after.live)-float64(before.live))/float64(sockets)/1024),
		OK:       each < maxSocketBytes,
		Note:     fmt.Sprintf("%.1f goroutines each; without the kernel's buffers", float64(after.goroutines-before.goroutines)/float64(sockets)),
	}
}
