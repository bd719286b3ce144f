package idle

import (
	"context"
	"crypto/rand"
	"os"
	"runtime"
	"runtime/debug"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/system"
)

// resourceUsage holds the memory and the number of goroutines of this process, after a garbage collection.
type resourceUsage struct {
	resident   uint64 // bytes of memory
	live       uint64 // bytes of heap and stacks
	goroutines int
}

// measureUsage runs a garbage collection and returns the memory and the number of goroutines of this process.
func measureUsage() resourceUsage {
	runtime.GC()
	debug.FreeOSMemory()
	var m runtime.MemStats
	runtime.ReadMemStats(&m)
	u := resourceUsage{resident: m.Sys - m.HeapReleased, live: m.HeapAlloc + m.StackInuse, goroutines: runtime.NumGoroutine()}
	// The kernel's figure is used where there is one.
	raw, err := os.ReadFile("/proc/self/status")
	if err != nil {
		return u
	}
	for line := range strings.Lines(string(raw)) {
		if f := strings.Fields(line); len(f) > 1 && f[0] == "VmRSS:" {
			if kib, err := strconv.ParseUint(f[1], 10, 64); err == nil {
				u.resident = kib << 10
			}
		}
	}
	return u
}

// measureGoroutinesLeft takes a turn in each of a number of sessions, waits until their sandboxes are removed, and
// returns how many more goroutines the process has than before.
func measureGoroutinesLeft(ctx context.Context, sys *system.System, provider *fake.Provider, sessions int) (goroutines int, err error) {
	ctx, cancel := context.WithTimeout(ctx, stepTimeout)
	defer cancel()
	c := system.NewClient(sys.URL)
	// The first turns create what stays: connections and pools.
	if err := takeTurns(ctx, c, sys, provider, 16); err != nil {
		return 0, err
	}
	before := runtime.NumGoroutine()
	if err := takeTurns(ctx, c, sys, provider, sessions); err != nil {
		return 0, err
	}
	return awaitGoroutines(before+sessions/10) - before, nil
}

// goroutineTimeout is the time limit for the end of the goroutines that served the sessions.
const goroutineTimeout = 10 * time.Second

// awaitGoroutines blocks until the process has at most the number enough of goroutines, or until goroutineTimeout has
// passed, and returns their number.
func awaitGoroutines(enough int) int {
	tick := time.NewTicker(100 * time.Millisecond)
	defer tick.Stop()
	for deadline := time.Now().Add(goroutineTimeout); ; <-tick.C {
		if n := runtime.NumGoroutine(); n <= enough || time.Now().After(deadline) {
			return n
		}
	}
}

// takeTurns creates a number of sessions, takes a turn in each, and blocks until all of them are idle and have no
// sandbox.
func takeTurns(ctx context.Context, c *system.Client, sys *system.System, provider *fake.Provider, sessions int) error {
	var group errgroup.Group
	group.SetLimit(16)
	for range sessions {
		group.Go(func() error {
			id, err := c.CreateSession(ctx, system.SessionSpec{Architecture: "spool"})
			if err == nil {
				_, err = c.PostMessage(ctx, id, "begin")
			}
			return err
		})
	}
	if err := group.Wait(); err != nil {
		return err
	}
	return system.PollUntil(ctx, stepTimeout, "the sandboxes of idle sessions are removed", func() (bool, error) {
		c.HTTP.CloseIdleConnections()
		var idle, all int
		err := sys.Pool.QueryRow(ctx, "SELECT count(*) FILTER (WHERE idle), count(*) FROM "+readmodel.TableSessions).Scan(&idle, &all)
		return provider.SandboxCount() == 0 && idle == all, err
	})
}

// concurrentCreates is the number of sessions that are created concurrently.
const concurrentCreates = 64

// createSessions writes a number of sessions to the log, as the session service does. It blocks until the session
// service has set their timers and the projector has added them to the read models, and returns their ids.
func createSessions(ctx context.Context, sys *system.System, sessions int) ([]string, error) {
	var before int
	if err := sys.Pool.QueryRow(ctx, "SELECT count(*) FROM "+readmodel.TableSessions).Scan(&before); err != nil {
		return nil, err
	}
	deadline := time.Now().Add(createTimeout)
	var next atomic.Int64
	var mu sync.Mutex
	var ids []string
	var group errgroup.Group
	for range concurrentCreates {
		group.Go(func() error {
			for next.Add(1) <= int64(sessions) && time.Now().Before(deadline) {
				id, err := createSession(ctx, sys)
				if err != nil {
					return err
				}
				mu.Lock()
				ids = append(ids, id)
				mu.Unlock()
			}
			return nil
		})
	}
	if err := group.Wait(); err != nil {
		return nil, err
	}
	js, err := jetstream.New(sys.NATS)
	if err != nil {
		return nil, err
	}
	return ids, system.PollUntil(ctx, stepTimeout+createTimeout, "every session has its row and its timer", func() (bool, error) {
		var rows int
		if err := sys.Pool.QueryRow(ctx, "SELECT count(*) FROM "+readmodel.TableSessions).Scan(&rows); err != nil {
			return false, err
		}
		stream, err := js.Stream(ctx, topology.StreamTimers)
		if err != nil {
			return false, err
		}
		return rows == before+len(ids) && stream.CachedInfo().State.Msgs >= uint64(len(ids)), sys.Err()
	})
}

// createSession writes a session with default options to the log, and returns its id.
func createSession(ctx context.Context, sys *system.System) (string, error) {
	id, err := events.NewID(events.KindSession, time.Now(), rand.Reader)
	if err != nil {
		return "", err
	}
	command, err := events.NewID(events.KindCommand, time.Now(), rand.Reader)
	if err != nil {
		return "", err
	}
	sessions := eventlog.Sessions{Log: sys.Log}
	l := &eventlog.SessionState{Tenant: "default", ID: id, LifeHead: eventlog.Head{Subject: events.LifeSubject("default", id)}}
	list, err := session.Decide(l.Life, session.CreateSession{
		CommandBase: session.CommandBase{CommandMeta: events.CommandMeta{CommandID: command, Now: time.Now().UTC()}},
		SessionCreated: events.SessionCreated{
			Agent: "default", AgentVersion: "1", Architecture: "spool", Provider: "local",
			Options: events.Options{IdleTimeoutMs: 900_000, TurnLimitMs: 3_600_000, SessionLimitMs: 86_400_000},
		},
	})
	if err != nil {
		return "", err
	}
	return id, sessions.AppendLife(ctx, l, events.Actor{Kind: "service", ID: "bench"}, command, list)
}
