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
	// lineInterval is the time from line to line of one runner.
	lineInterval = 100 * time.Millisecond
	// blockPieces is the number of pieces of text in a block. A block also has one event at its start and one at its end, so
	// 9 of 10 lines are text.
	blockPieces = 18
	// blockTime is the time in which a runner writes a block.
	blockTime = (blockPieces + 2) * lineInterval
	// startTimeout is the time in which all sessions have to be active.
	startTimeout = 2 * time.Minute
	// drainTimeout is the time after the last line in which all events have to arrive.
	drainTimeout = 30 * time.Second
	// executorSlots is the number of slots of each executor, the maximum that an executor supports.
	executorSlots = 1024
)

// script plays the runners of all sessions under load: each writes text and events at a constant rate.
type script struct {
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

func newScript(mode string, blocks, runners int) *script {
	s := &script{mode: mode, blocks: blocks, start: make(chan struct{}), total: runners}
	s.waiting.Add(runners)
	return s
}

// phase returns the time from the start of the load to the first line of the next runner, so that the runners do not
// all write at once.
func (s *script) phase() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	spread := blockTime
	if s.mode == lockStep {
		spread = lineInterval
	}
	s.runners++
	return spread * time.Duration(s.runners-1) / time.Duration(s.total)
}

// play is the script of one runner: blocks of text, one line every interval. The time at which a line is due does not
// depend on the lines before it.
func (s *script) play(ctx context.Context, t *fake.Turn) {
	phase := s.phase()
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
		t.Open(id)
		for range blockPieces {
			if !next() {
				return
			}
			piece := system.Stamp(time.Now())
			t.Text(id, text.Len(), piece)
			text.WriteString(piece)
		}
		if !next() {
			return
		}
		t.Complete(id, text.String())
	}
}

// begin implements runners.
func (s *script) begin(started time.Time) error {
	s.started = started
	close(s.start)
	return nil
}

// lateness implements runners.
func (s *script) lateness() (int, error) {
	histogram := make([]int64, len(s.late))
	for i := range s.late {
		histogram[i] = s.late[i].Load()
	}
	return percentile(histogram, 0.99), nil
}

// awaitQueries implements runners.
func (s *script) awaitQueries(ctx context.Context) error {
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

// runLoad runs a system under a load.
func (m *Benchmark) runLoad(ctx context.Context, b *harness.Bench, mode string, sessions int) (r *result, err error) {
	ctx, cancel := context.WithTimeout(ctx, startTimeout+m.Each+2*drainTimeout)
	defer cancel()
	err = b.Part(fmt.Sprintf("%s, %d sessions", mode, sessions), func(b *harness.Bench) error {
		l := &load{mode: mode, blocks: int(m.Each / blockTime), sessions: sessions}
		s := newScript(mode, l.blocks, sessions)
		l.runners = s
		provider := fake.New(s.play)
		var url string
		if m.Apart {
			var nats int
			if url, nats, err = b.StartNATS(false); err != nil {
				return err
			}
			p, remote, err := startRunners(ctx, b, runnersConfig{Mode: mode, Blocks: l.blocks, Runners: sessions})
			if err != nil {
				return err
			}
			l.runners, provider, l.pids = p, remote, pids{nats: nats, runners: p.pid}
		}
		sys, err := b.System(ctx, system.Config{
			NATSURL: url, MoreGateways: m.MoreGateways, Provider: provider, Executors: (sessions + executorSlots - 1) / executorSlots, Executor: executor.Config{Engine: "bench", Slots: min(sessions, executorSlots)},
			Gateway: gateway.Config{MaxTenantStreams: 2*sessions + slowJoins*(m.Stalled+m.Trickling)},
		})
		if err != nil {
			return err
		}
		r, err = m.drive(ctx, b, sys, l)
		return err
	})
	return r, err
}

// load describes the load of one run: the sessions, and the processes that make the load.
type load struct {
	mode             string
	blocks, sessions int
	runners          runners
	pids             pids
}

// pids are the processes whose usage is measured separately from that of the services; 0 for a process that does not
// exist.
type pids struct{ clients, nats, runners int }

// drive starts the clients and then the runners, and returns when the clients have ended.
func (m *Benchmark) drive(ctx context.Context, b *harness.Bench, sys *system.System, l *load) (*result, error) {
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
	leave, err := joinEverywhere(ctx, sys)
	if err != nil {
		return nil, err
	}
	defer leave()
	before, err := measureUsage(l.pids)
	if err != nil {
		return nil, err
	}
	started := time.Now()
	length := blockTime * time.Duration(l.blocks)
	// In staggered mode all sessions are active from the end of the first block to the time at which the first ends.
	w := window{From: started.Add(blockTime), To: started.Add(length), Deadline: started.Add(length + blockTime + drainTimeout)}
	if err := c.begin(w); err != nil {
		return nil, err
	}
	if err := l.runners.begin(started); err != nil {
		return nil, err
	}
	r := &result{mode: l.mode, sessions: l.sessions, window: w.To.Sub(w.From)}
	peak, err := m.watch(ctx, sys, c, l.pids, r, started.Add(length/2))
	if err != nil {
		return nil, err
	}
	after, err := measureUsage(l.pids)
	if err != nil {
		return nil, err
	}
	if r.report, err = c.end(); err != nil {
		return nil, err
	}
	r.cpuServices, r.cpuPostgres, r.cpuClients = after.cpuServices-before.cpuServices, after.cpuPostgres-before.cpuPostgres, after.cpuClients-before.cpuClients
	r.cpu = r.cpuServices + r.cpuPostgres + r.cpuClients
	r.neighbours = max(0, (after.machine-before.machine-r.cpu).Seconds()/after.at.Sub(before.at).Seconds())
	r.services, r.nats, r.postgres, r.clients = peak.services-idle.services, peak.nats-idle.nats, peak.postgres-idle.postgres, peak.clients
	if r.lateMs, err = l.runners.lateness(); err != nil {
		return nil, err
	}
	r.warnings = sys.Warnings()
	if m.Stalled+m.Trickling > 0 {
		r.cut, err = cutStreams(ctx, sys.URL)
	}
	return r, errors.Join(err, ctx.Err())
}

// joinEverywhere joins one session of each partition at every further gateway, and reads what comes until leave is called.
func joinEverywhere(ctx context.Context, sys *system.System) (leave func(), err error) {
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
		sessions[sys.Log.Partitioning().Of(id)] = id
	}
	for _, url := range sys.More {
		client := system.NewClient(url)
		for _, id := range sessions {
			socket, err := client.Join(ctx, id)
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

// watch blocks until the clients have read everything, and returns the largest memory. At the given time it profiles the
// memory and restarts the gateway, as the flags request.
func (m *Benchmark) watch(ctx context.Context, sys *system.System, c *clients, p pids, r *result, middle time.Time) (peak usage, err error) {
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
			if err := system.ProfileMemory(m.Profile); err != nil {
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

// usage is the processor time used so far, and the memory, of the processes that take part in a run.
type usage struct {
	cpuServices, cpuPostgres, cpuClients time.Duration
	services, nats, postgres, clients    int64         // bytes
	machine                              time.Duration // processor time of all processes
	at                                   time.Time
}

// measureUsage measures this process, which runs the services, the given ones, and all others below this process, which
// are those of Postgres. The processor time of the services includes that of NATS and of the runners.
func measureUsage(p pids) (u usage, err error) {
	all, err := harness.Processes(os.Getpid())
	if err != nil {
		return u, err
	}
	in, others := harness.Subtree(all, p.clients)
	broker, others := harness.Subtree(others, p.nats)
	played, others := harness.Subtree(others, p.runners)
	self, postgres := others[:1], others[1:]
	machine, err := harness.MachineCPU()
	return usage{
		machine: machine, at: time.Now(),
		cpuServices: harness.TotalCPU(self) + harness.TotalCPU(broker) + harness.TotalCPU(played), nats: int64(harness.Memory(broker)), cpuPostgres: harness.TotalCPU(postgres), cpuClients: harness.TotalCPU(in),
		services: int64(harness.Memory(self)), postgres: int64(harness.Memory(postgres)), clients: int64(harness.Memory(in)), //nolint:gosec // far below the limit
	}, err
}
