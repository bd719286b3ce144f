package fanout

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/jackc/pgx/v5"

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/gateway"
	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/harness"
	"github.com/spoolhq/spool/test/bench/system"
)

const (
	// lineInterval is the time between two lines that one fake runner writes to its journal.
	lineInterval = 100 * time.Millisecond
	// piecesPerBlock is the number of pieces of text in a block. A block also has one event at its start and one at its
	// end, so that 9 of 10 lines of a journal are text.
	piecesPerBlock = 18
	// blockDuration is the time in which a fake runner writes one block.
	blockDuration = (piecesPerBlock + 2) * lineInterval
	// startTimeout is the time limit for all sessions to become active.
	startTimeout = 2 * time.Minute
	// drainTimeout is the time limit, counted from the last line of the runners, for the clients to receive all events.
	drainTimeout = 30 * time.Second
	// executorSlots is the number of slots of each executor. It is the maximum that an executor supports.
	executorSlots = 1024
)

// runnerScript is the work of the fake runners of all sessions: each writes text and events to its journal at a
// constant rate.
type runnerScript struct {
	mode    string
	blocks  int
	waiting sync.WaitGroup // counts the runners that have no query yet
	start   chan struct{}  // closed when all runners have a query
	started time.Time

	mu      sync.Mutex
	runners int // that have a query
	total   int

	late [1001]atomic.Int64 // lines by their lateness in milliseconds, the last also for more
}

// newRunnerScript returns the script of a number of fake runners, each of which writes a number of blocks. mode is
// "staggered" or modeLockStep.
func newRunnerScript(mode string, blocks, runners int) *runnerScript {
	s := &runnerScript{mode: mode, blocks: blocks, start: make(chan struct{}), total: runners}
	s.waiting.Add(runners)
	return s
}

// nextRunnerDelay returns the time from the common start to the first line of the next runner. It differs from runner
// to runner, so that not all write at the same moment.
func (s *runnerScript) nextRunnerDelay() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	spread := blockDuration
	if s.mode == modeLockStep {
		spread = lineInterval
	}
	s.runners++
	return spread * time.Duration(s.runners-1) / time.Duration(s.total)
}

// playTurn is the fake.Script of one runner. It waits for the common start and then writes blocks of text, one line
// every lineInterval. A late line does not delay the lines after it.
func (s *runnerScript) playTurn(ctx context.Context, t *fake.Turn) {
	phase := s.nextRunnerDelay()
	s.waiting.Done()
	select {
	case <-s.start:
	case <-ctx.Done():
		return
	}
	due := s.started.Add(phase)
	timer := time.NewTimer(time.Until(due))
	defer timer.Stop()
	next := func() bool {
		select {
		case <-timer.C:
		case <-ctx.Done():
			return false
		}
		late := max(0, time.Since(due)).Milliseconds()
		s.late[min(late, int64(len(s.late)-1))].Add(1)
		due = due.Add(lineInterval)
		timer.Reset(time.Until(due))
		return true
	}
	for n := range s.blocks {
		id := fmt.Sprint("b", n)
		var text strings.Builder
		if !next() {
			return
		}
		t.OpenBlock(id)
		for range piecesPerBlock {
			if !next() {
				return
			}
			piece := system.TimestampText(time.Now())
			t.AppendText(id, text.Len(), piece)
			text.WriteString(piece)
		}
		if !next() {
			return
		}
		t.CompleteBlock(id, text.String())
	}
}

// startWriting implements runnerControl.
func (s *runnerScript) startWriting(started time.Time) error {
	s.started = started
	close(s.start)
	return nil
}

// latenessP99Ms implements runnerControl.
func (s *runnerScript) latenessP99Ms() (int, error) {
	histogram := make([]int64, len(s.late))
	for i := range s.late {
		histogram[i] = s.late[i].Load()
	}
	return percentileIndex(histogram, 0.99), nil
}

// awaitQueries implements runnerControl.
func (s *runnerScript) awaitQueries(ctx context.Context) error {
	all := make(chan struct{})
	go func() { s.waiting.Wait(); close(all) }()
	select {
	case <-all:
		return nil
	case <-ctx.Done():
		s.mu.Lock()
		defer s.mu.Unlock()
		return fmt.Errorf("%d of %d runners have a query: %w", s.runners, s.total, ctx.Err())
	}
}

// runLoad starts a new system, makes a number of sessions write text and events in it, and returns the measurements.
// mode is "staggered" or modeLockStep.
func (m *Benchmark) runLoad(ctx context.Context, b *harness.Bench, mode string, sessions int) (r *loadResult, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout+m.Each+2*drainTimeout)
	defer cancel()
	err = b.RunPart(fmt.Sprintf("%s, %d sessions", mode, sessions), func(b *harness.Bench) error {
		l := &loadConfig{mode: mode, blocks: int(m.Each / blockDuration), sessions: sessions}
		s := newRunnerScript(mode, l.blocks, sessions)
		l.runners = s
		provider := fake.New(s.playTurn)
		var url string
		if m.Apart {
			var nats int
			if url, nats, err = b.StartNATSProcess(false); err != nil {
				return err
			}
			p, remote, err := startRunners(ctx, b, runnersConfig{Mode: mode, Blocks: l.blocks, Runners: sessions})
			if err != nil {
				return err
			}
			l.runners, provider, l.pids = p, remote, measuredPIDs{nats: nats, runners: p.pid}
		}
		sys, err := b.StartSystem(ctx, system.Config{
			NATSURL: url, MoreGateways: m.MoreGateways, Provider: provider, Executors: (sessions + executorSlots - 1) / executorSlots, Executor: executor.Config{Engine: "bench", Slots: min(sessions, executorSlots)},
			Gateway: gateway.Config{MaxTenantStreams: 2*sessions + maxSlowJoins*(m.Stalled+m.Trickling)},
		})
		if err != nil {
			return err
		}
		r, err = m.measureLoad(ctx, b, sys, l)
		return err
	})
	return r, err
}

// loadConfig describes one measurement: the mode, the number of sessions and of blocks in each, the fake runners, and
// the ids of the processes that take part.
type loadConfig struct {
	mode             string
	blocks, sessions int
	runners          runnerControl
	pids             measuredPIDs
}

// measuredPIDs are the ids of the child processes whose memory and processor time are measured apart from those of the
// services; 0 for a process that does not exist.
type measuredPIDs struct{ clients, nats, runners int }

// measureLoad starts the clients, makes the fake runners write, blocks until the clients have received everything, and
// returns the measurements. sys is the running system.
func (m *Benchmark) measureLoad(ctx context.Context, b *harness.Bench, sys *system.System, l *loadConfig) (*loadResult, error) {
	idle, err := measureUsage(l.pids)
	if err != nil {
		return nil, err
	}
	c, err := startClients(ctx, b, clientsConfig{URL: sys.URL, Sessions: l.sessions, Blocks: l.blocks, Stalled: m.Stalled, Trickling: m.Trickling})
	if err != nil {
		return nil, err
	}
	if err := c.awaitJoined(); err != nil {
		return nil, err
	}
	l.pids.clients = c.pid
	if err := l.runners.awaitQueries(ctx); err != nil {
		return nil, err
	}
	leave, err := joinAtMoreGateways(ctx, sys)
	if err != nil {
		return nil, err
	}
	defer leave()
	before, err := measureUsage(l.pids)
	if err != nil {
		return nil, err
	}
	started := time.Now()
	length := blockDuration * time.Duration(l.blocks)
	// In staggered mode all sessions are active from the end of the first block to the time at which the first ends.
	w := measureWindow{From: started.Add(blockDuration), To: started.Add(length), Deadline: started.Add(length + blockDuration + drainTimeout)}
	if err := c.startMeasuring(w); err != nil {
		return nil, err
	}
	if err := l.runners.startWriting(started); err != nil {
		return nil, err
	}
	r := &loadResult{mode: l.mode, sessions: l.sessions, window: w.To.Sub(w.From)}
	peak, err := m.watchMemory(ctx, sys, c, l.pids, r, started.Add(length/2))
	if err != nil {
		return nil, err
	}
	after, err := measureUsage(l.pids)
	if err != nil {
		return nil, err
	}
	if r.clientsReport, err = c.finalReport(); err != nil {
		return nil, err
	}
	r.cpuServices, r.cpuPostgres, r.cpuClients = after.cpuServices-before.cpuServices, after.cpuPostgres-before.cpuPostgres, after.cpuClients-before.cpuClients
	r.cpu = r.cpuServices + r.cpuPostgres + r.cpuClients
	r.neighbours = max(0, (after.machine-before.machine-r.cpu).Seconds()/after.at.Sub(before.at).Seconds())
	r.services, r.nats, r.postgres, r.clients = peak.services-idle.services, peak.nats-idle.nats, peak.postgres-idle.postgres, peak.clients
	if r.lateMs, err = l.runners.latenessP99Ms(); err != nil {
		return nil, err
	}
	r.warnings = sys.WarningCount()
	if m.Stalled+m.Trickling > 0 {
		r.cut, err = countCutStreams(ctx, sys.URL)
	}
	return r, errors.Join(err, ctx.Err())
}

// joinAtMoreGateways joins one session of each partition at every gateway of the flag --more-gateways, and reads the
// events until leave is called.
func joinAtMoreGateways(ctx context.Context, sys *system.System) (leave func(), err error) {
	reading, stop := context.WithCancel(ctx)
	var all sync.WaitGroup
	leave = func() { stop(); all.Wait() }
	if len(sys.More) == 0 {
		return leave, nil
	}
	rows, err := sys.Pool.Query(ctx, "SELECT id FROM sessions")
	if err != nil {
		return leave, err
	}
	ids, err := pgx.CollectRows(rows, pgx.RowTo[string])
	if err != nil {
		return leave, err
	}
	sessions := map[int]string{}
	for _, id := range ids {
		sessions[sys.Log.Partitioning().PartitionOf(id)] = id
	}
	for _, url := range sys.More {
		client := system.NewClient(url)
		for _, id := range sessions {
			socket, err := client.JoinSession(ctx, id)
			if err != nil {
				leave()
				return func() {}, err
			}
			all.Go(func() {
				defer socket.Close()
				for {
					if _, _, err := socket.Next(reading); err != nil {
						return
					}
				}
			})
		}
	}
	return leave, nil
}

// watchMemory measures the memory of all processes every second until the clients have received everything, and returns
// the largest values. At the time middle it writes profiles and restarts the gateway, if the flags request this.
func (m *Benchmark) watchMemory(ctx context.Context, sys *system.System, c *clientsProcess, p measuredPIDs, r *loadResult, middle time.Time) (peak resourceUsage, err error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	half := time.After(time.Until(middle))
	for {
		select {
		case <-tick.C:
			now, err := measureUsage(p)
			if err != nil {
				return peak, err
			}
			peak.services, peak.nats = max(peak.services, now.services), max(peak.nats, now.nats)
			peak.postgres, peak.clients = max(peak.postgres, now.postgres), max(peak.clients, now.clients)
		case <-half:
			if err := system.WriteMemoryProfiles(m.Profile); err != nil {
				return peak, err
			}
			if !m.RestartGateway {
				continue
			}
			begun := time.Now()
			if err := sys.RestartGateway(ctx); err != nil {
				return peak, err
			}
			r.restart = time.Since(begun)
		case <-c.done:
			return peak, nil
		case <-ctx.Done():
			return peak, ctx.Err()
		}
	}
}

// resourceUsage is the processor time that the processes of a measurement have used so far, and their memory.
type resourceUsage struct {
	cpuServices, cpuPostgres, cpuClients time.Duration
	services, nats, postgres, clients    int64         // bytes
	machine                              time.Duration // processor time of all processes
	at                                   time.Time
}

// measureUsage returns the processor time and the memory of this process, which runs the services, of the processes p,
// and of all other descendants of this process, which belong to Postgres. The processor time of the services includes
// that of NATS and of the fake runners.
func measureUsage(p measuredPIDs) (u resourceUsage, err error) {
	all, err := harness.Processes(os.Getpid())
	if err != nil {
		return u, err
	}
	in, others := harness.SplitSubtree(all, p.clients)
	broker, others := harness.SplitSubtree(others, p.nats)
	played, others := harness.SplitSubtree(others, p.runners)
	self, postgres := others[:1], others[1:]
	machine, err := harness.MachineCPU()
	return resourceUsage{
		machine: machine, at: time.Now(),
		cpuServices: harness.TotalCPU(self) + harness.TotalCPU(broker) + harness.TotalCPU(played), nats: int64(harness.TotalMemory(broker)), cpuPostgres: harness.TotalCPU(postgres), cpuClients: harness.TotalCPU(in),
		services: int64(harness.TotalMemory(self)), postgres: int64(harness.TotalMemory(postgres)), clients: int64(harness.TotalMemory(in)), //nolint:gosec // far below the limit
	}, err
}
