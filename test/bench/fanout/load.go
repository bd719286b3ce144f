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
	// interval is the time from line to line of one runner.
	interval = 100 * time.Millisecond
	// pieces is the number of pieces of text in a block. A block also has one event at its start and one at its end, so
	// 9 of 10 lines are text.
	pieces = 18
	// blockTime is the time in which a runner writes a block.
	blockTime = (pieces + 2) * interval
	// startTimeout is the time in which all sessions have to be active.
	startTimeout = 2 * time.Minute
	// drainTimeout is the time after the last line in which all events have to arrive.
	drainTimeout = 30 * time.Second
	// slots is the number of sessions of an executor, which is its limit.
	slots = 1024
)

// script is the script of all runners.
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

// phase returns the time from the start of the load to the first line of the next runner.
func (s *script) phase() time.Duration {
	s.mu.Lock()
	defer s.mu.Unlock()
	spread := blockTime
	if s.mode == lockStep {
		spread = interval
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
		due = due.Add(interval)
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
		for range pieces {
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

// lateness returns the 99th percentile of the lateness in milliseconds.
func (s *script) lateness() int {
	histogram := make([]int64, len(s.late))
	for i := range s.late {
		histogram[i] = s.late[i].Load()
	}
	return percentile(histogram, 0.99)
}

// awaitQueries blocks until every runner has its query.
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
		s := &script{mode: mode, blocks: int(m.Each / blockTime), start: make(chan struct{}), total: sessions}
		s.waiting.Add(sessions)
		var url string
		var nats int
		if m.NATSProcess {
			if url, nats, err = b.StartNATS(false); err != nil {
				return err
			}
		}
		sys, err := b.System(ctx, system.Config{
			NATSURL: url, MoreGateways: m.MoreGateways, Provider: fake.New(s.play), Executors: (sessions + slots - 1) / slots, Executor: executor.Config{Engine: "bench", Slots: min(sessions, slots)},
			Gateway: gateway.Config{MaxTenantStreams: 2*sessions + slowJoins*(m.Stalled+m.Trickling)},
		})
		if err != nil {
			return err
		}
		r, err = m.drive(ctx, b, sys, s, nats)
		return err
	})
	return r, err
}

// drive starts the clients and then the runners, and returns when the clients have ended. nats is the process of NATS, or 0.
func (m *Benchmark) drive(ctx context.Context, b *harness.Bench, sys *system.System, s *script, nats int) (*result, error) {
	idle, err := measureUsage(0, nats)
	if err != nil {
		return nil, err
	}
	c, err := startClients(ctx, b, clientsConfig{URL: sys.URL, Sessions: s.total, Blocks: s.blocks, Stalled: m.Stalled, Trickling: m.Trickling})
	if err != nil {
		return nil, err
	}
	if err := c.awaitJoined(); err != nil {
		return nil, err
	}
	if err := s.awaitQueries(ctx); err != nil {
		return nil, err
	}
	leave, err := joinEverywhere(ctx, sys)
	if err != nil {
		return nil, err
	}
	defer leave()
	before, err := measureUsage(c.pid, nats)
	if err != nil {
		return nil, err
	}
	s.started = time.Now()
	length := blockTime * time.Duration(s.blocks)
	// In staggered mode all sessions are active from the end of the first block to the time at which the first ends.
	w := window{From: s.started.Add(blockTime), To: s.started.Add(length), Deadline: s.started.Add(length + blockTime + drainTimeout)}
	if err := c.begin(w); err != nil {
		return nil, err
	}
	close(s.start)
	r := &result{mode: s.mode, sessions: s.total, window: w.To.Sub(w.From)}
	peak, err := m.watch(ctx, sys, c, nats, r, s.started.Add(length/2))
	if err != nil {
		return nil, err
	}
	after, err := measureUsage(c.pid, nats)
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
	r.lateMs, r.warnings = s.lateness(), sys.Warnings()
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
func (m *Benchmark) watch(ctx context.Context, sys *system.System, c *clients, nats int, r *result, middle time.Time) (peak usage, err error) {
	tick := time.NewTicker(time.Second)
	defer tick.Stop()
	half := time.After(time.Until(middle))
	for {
		select {
		case <-tick.C:
			now, err := measureUsage(c.pid, nats)
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

// usage is the processor time and the memory of the processes of a load.
type usage struct {
	cpuServices, cpuPostgres, cpuClients time.Duration
	services, nats, postgres, clients    int64         // bytes
	machine                              time.Duration // processor time of all processes
	at                                   time.Time
}

// measureUsage measures this process, which runs the services, the processes of the clients and of NATS, unless they are 0,
// and all others below this process, which are those of Postgres. The processor time of the services includes that of
// NATS.
func measureUsage(clients, nats int) (u usage, err error) {
	all, err := harness.Processes(os.Getpid())
	if err != nil {
		return u, err
	}
	in, others := harness.Subtree(all, clients)
	broker, others := harness.Subtree(others, nats)
	self, postgres := others[:1], others[1:]
	machine, err := harness.MachineCPU()
	return usage{
		machine: machine, at: time.Now(),
		cpuServices: harness.TotalCPU(self) + harness.TotalCPU(broker), nats: int64(harness.Memory(broker)), cpuPostgres: harness.TotalCPU(postgres), cpuClients: harness.TotalCPU(in),
		services: int64(harness.Memory(self)), postgres: int64(harness.Memory(postgres)), clients: int64(harness.Memory(in)), //nolint:gosec // far below the limit
	}, err
}
