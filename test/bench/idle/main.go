// Command idle measures the cost of idle sessions: goroutines of sessions whose agents have ended, memory of very
// many sessions, and memory of idle WebSockets. All services run in this process; NATS, Postgres and the clients
// run in others.
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

	"github.com/spoolhq/spool/services/executor"
	"github.com/spoolhq/spool/services/session"
	"github.com/spoolhq/spool/test/bench/fake"
	"github.com/spoolhq/spool/test/bench/row"
	"github.com/spoolhq/spool/test/bench/system"
)

// The performance targets of this benchmark.
const (
	memoryTarget = 300e6   // bytes of all services with targetAt sessions
	targetAt     = 100_000 // sessions
	socketTarget = 40 << 10
)

const (
	// patience is the time limit of each step except the creation of sessions.
	patience = time.Minute
	// making is the time limit of the creation of sessions; only the sessions that exist by then are measured.
	making = 45 * time.Second
	// resting is the idle time after which a session's agent is ended.
	resting = time.Second
)

func main() {
	role := flag.String("role", "", "nats or sockets: what this program starts itself as")
	at := flag.String("at", "", "of a role: the folder, or the gateway's URL")
	sessions := flag.Int("sessions", targetAt, "idle sessions")
	sockets := flag.Int("sockets", 2000, "idle WebSockets, each of a session of its own")
	worked := flag.Int("worked", 100, "sessions that have worked before they rest")
	dir := flag.String("dir", "", "folder for everything, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	var err error
	switch *role {
	case "":
		err = run(ctx, os.Stdout, *dir, *sessions, *sockets, *worked)
	case "nats":
		err = serveNATS(*at)
	case "sockets":
		err = openSockets(ctx, *at)
	default:
		err = fmt.Errorf("role: %q is not nats or sockets", *role)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "idle:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, dir string, sessions, sockets, worked int) (err error) {
	if sessions < 1 || sockets < 1 || sockets > sessions || worked < 1 || worked > 1024 {
		return errors.New("sessions and sockets must be positive, sockets no more than sessions, worked 1 to 1,024")
	}
	tmp, remove, err := system.Scratch(dir)
	if err != nil {
		return err
	}
	defer remove()
	nats, err := child("nats", tmp, nil)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, nats.end()) }()
	provider := fake.New(func(context.Context, *fake.Turn) {})
	sys, err := system.Start(ctx, system.Config{
		Dir: tmp, NATSURL: nats.said, Provider: provider,
		Session: session.Config{IdleTimeout: resting}, Executor: executor.Config{Engine: "bench", Slots: worked},
	})
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, sys.Close()) }()
	goroutines, err := work(ctx, sys, provider, worked)
	if err != nil {
		return err
	}
	before := measure()
	ids, err := fill(ctx, sys, sessions)
	if err != nil {
		return err
	}
	after := measure()
	if err := row.Write(out, rested(before, after, len(ids), goroutines, worked)); err != nil {
		return err
	}
	if len(ids) < sockets {
		return fmt.Errorf("only %d sessions were made in %s: too few for %d sockets", len(ids), making, sockets)
	}
	clients, err := child("sockets", sys.URL, ids[:sockets])
	if err != nil {
		return err
	}
	joined := measure()
	if err := row.Write(out, waiting(after, joined, sockets)); err != nil {
		return errors.Join(err, clients.end())
	}
	return clients.end()
}

// rested returns the row of the sessions. It is scaled if there are fewer sessions than the target is defined for.
func rested(before, after usage, sessions, goroutines, worked int) row.Row {
	scaled := float64(before.resident) + (float64(after.resident)-float64(before.resident))*targetAt/float64(sessions)
	more := after.goroutines - before.goroutines
	return row.Row{
		What:     fmt.Sprintf("idle sessions: %d", sessions),
		Target:   fmt.Sprintf("%d of them under %.0f MB in all services, no goroutine each", targetAt, memoryTarget/1e6),
		Measured: fmt.Sprintf("%.0f MB resident, %.0f MB of heap", float64(after.resident)/1e6, float64(after.live)/1e6),
		Against:  fmt.Sprintf("without them %.0f MB resident, %.0f MB of heap", float64(before.resident)/1e6, float64(before.live)/1e6),
		OK:       scaled < memoryTarget && more < max(500, sessions/100) && goroutines < max(1, worked/10), Command: "cd test && go run ./bench/idle",
		Note: fmt.Sprintf("%+d goroutines; %d that had worked and rest: %+d goroutines", more, worked, goroutines),
	}
}

func waiting(before, after usage, sockets int) row.Row {
	each := (float64(after.resident) - float64(before.resident)) / float64(sockets)
	return row.Row{
		What: fmt.Sprintf("idle WebSockets: %d, each joined to a session", sockets), Target: fmt.Sprintf("under %d KB each", socketTarget>>10),
		Measured: fmt.Sprintf("%.1f KB each resident, %.1f KB of it live heap and stacks", each/1024, (float64(after.live)-float64(before.live))/float64(sockets)/1024),
		OK:       each < socketTarget, Command: "cd test && go run ./bench/idle",
		Note: fmt.Sprintf("%.1f goroutines each; the kernel's buffers apart", float64(after.goroutines-before.goroutines)/float64(sockets)),
	}
}
