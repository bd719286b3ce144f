package jslog_test

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"golang.org/x/sync/errgroup"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// serverProcess is the variable with which the test binary runs as a NATS server: folder and port.
const serverProcess = "JSLOG_TEST_SERVER"

// serve runs a NATS server until its standard input ends.
func serve(config string) error {
	dir, port, _ := strings.Cut(config, ":")
	n, err := strconv.Atoi(port)
	if err != nil {
		return err
	}
	srv, err := natsserver.Start(natsserver.Config{StoreDir: dir, Port: n, Logger: slog.New(slog.DiscardHandler)})
	if err != nil {
		return err
	}
	fmt.Println(srv.Port())
	_, err = io.Copy(io.Discard, os.Stdin)
	srv.Shutdown()
	return err
}

// killable is a NATS server in a process of its own.
type killable struct {
	t    *testing.T
	dir  string
	port int
	cmd  *exec.Cmd
}

func runKillable(t *testing.T) *killable {
	t.Helper()
	k := &killable{t: t, dir: t.TempDir(), port: natsserver.RandomPort}
	k.start()
	t.Cleanup(k.kill)
	return k
}

func (k *killable) start() {
	k.t.Helper()
	k.cmd = exec.Command(os.Args[0]) //nolint:gosec // this test binary
	k.cmd.Env = append(os.Environ(), serverProcess+"="+k.dir+":"+strconv.Itoa(k.port))
	k.cmd.Stderr = k.t.Output()
	if _, err := k.cmd.StdinPipe(); err != nil {
		k.t.Fatal(err)
	}
	out, err := k.cmd.StdoutPipe()
	if err == nil {
		err = k.cmd.Start()
	}
	if err != nil {
		k.t.Fatal(err)
	}
	line, err := bufio.NewReader(out).ReadString('\n')
	if err == nil {
		k.port, err = strconv.Atoi(strings.TrimSpace(line))
	}
	if err != nil {
		k.t.Fatalf("start a server process: %v", err)
	}
}

// kill ends the server with SIGKILL and waits for its end.
func (k *killable) kill() {
	if err := k.cmd.Process.Kill(); err != nil && !errors.Is(err, os.ErrProcessDone) {
		k.t.Errorf("kill the server: %v", err)
	}
	_ = k.cmd.Wait() // reports the signal
}

// TestBatches_SurviveAKilledServer kills the server several times while 1,000 writers append. No acknowledged commit is
// lost, none is stored twice, and all chains hold.
func TestBatches_SurviveAKilledServer(t *testing.T) {
	t.Parallel()
	const writers, commits, kills = 1000, 4, 4
	ctx, cancel := context.WithTimeout(t.Context(), 10*wait)
	defer cancel()
	srv := runKillable(t)
	nc, err := nats.Connect("nats://"+net.JoinHostPort(natsserver.DefaultHost, strconv.Itoa(srv.port)),
		append(bus.ConnOptions(slog.New(slog.DiscardHandler)), nats.ReconnectWait(10*time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	if err := topology.Provision(ctx, js, topology.ProvisionConfig{Shards: 1}); err != nil {
		t.Fatal(err)
	}
	log := openConfig(t, jslog.Config{JetStream: js, Logger: slog.New(slog.DiscardHandler)})

	var done atomic.Int64
	due := make(chan struct{}, kills)
	heads := make([][]eventlog.Head, writers)
	var g errgroup.Group
	for i := range writers {
		g.Go(func() error {
			head := eventlog.Head{Subject: events.RunSubject(eventlogtest.Tenant, eventlogtest.ID(events.KindSession, fmt.Sprint("killed", i)))}
			for j := range commits {
				next, err := log.Append(ctx, head, eventlogtest.Draft(fmt.Sprint("killed ", i, " ", j), "x"))
				if err != nil {
					return fmt.Errorf("writer %d, commit %d: %w", i, j, err)
				}
				head, heads[i] = next, append(heads[i], next)
				if done.Add(1)%(writers*commits/(kills+1)) == 0 && len(due) < cap(due) {
					due <- struct{}{}
				}
			}
			return nil
		})
	}
	ended := make(chan error, 1)
	go func() { ended <- g.Wait() }()
	for range kills {
		select {
		case <-due:
		case err := <-ended:
			t.Fatalf("the writers ended before the last kill: %v", err)
		case <-ctx.Done():
			t.Fatalf("the writers make no progress: %d of %d commits are stored", done.Load(), writers*commits)
		}
		srv.kill()
		srv.start()
	}
	if err := <-ended; err != nil {
		t.Fatal(err)
	}

	stored := map[uint64]string{}
	ids := map[string]uint64{}
	for rec, err := range log.Read(ctx, eventlog.Position{}, eventlog.Filter{}) {
		if err != nil {
			t.Fatal(err)
		}
		if at := ids[rec.Commit.ID]; at > 0 {
			t.Errorf("commit %s is stored at %d and at %d", rec.Commit.ID, at, rec.Position.Seq)
		}
		stored[rec.Position.Seq], ids[rec.Commit.ID] = rec.Commit.ID, rec.Position.Seq
	}
	if len(stored) != writers*commits {
		t.Errorf("%d commits are stored, want %d", len(stored), writers*commits)
	}
	for _, list := range heads {
		for _, h := range list {
			if stored[h.Seq] != h.Commit.ID {
				t.Errorf("commit %s was acknowledged at %d, which holds %q", h.Commit.ID, h.Seq, stored[h.Seq])
			}
		}
	}
	if r, err := eventlog.Verify(ctx, log, eventlog.VerifyScope{}); err != nil || len(r.Problems) > 0 || r.Commits != writers*commits {
		t.Errorf("verify found %d commits, %v: %v", r.Commits, r.Problems, err)
	}
	if n := inBatches(ctx, t, js, writers*commits); n == 0 {
		t.Error("no commit was stored in a batch")
	} else {
		t.Logf("%d of %d commits were stored in batches", n, writers*commits)
	}
}

// inBatches returns how many of the first n messages of the log were stored in a batch.
func inBatches(ctx context.Context, t *testing.T, js jetstream.JetStream, n int) (found int) {
	t.Helper()
	c, err := js.OrderedConsumer(ctx, topology.EventsStreamName(0), jetstream.OrderedConsumerConfig{HeadersOnly: true})
	if err != nil {
		t.Fatal(err)
	}
	for range n {
		m, err := c.Next(jetstream.FetchContext(ctx))
		if err != nil {
			t.Fatal(err)
		}
		if m.Headers().Get("Nats-Batch-Id") != "" {
			found++
		}
	}
	return found
}

// TestBatches_FallBackOnStreamsThatDoNotAllowThem tests an installation whose streams do not allow batches yet.
func TestBatches_FallBackOnStreamsThatDoNotAllowThem(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	nc := natstest.Conn(t, natstest.Run(t))
	log := open(t, nc, 1)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	s, err := js.Stream(ctx, topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	cfg := s.CachedInfo().Config
	cfg.AllowAtomicPublish = false
	if _, err := js.UpdateStream(ctx, cfg); err != nil {
		t.Fatal(err)
	}
	jslog.ForceBatches(log)
	heads := eventlogtest.AppendCommits(t, log, eventlogtest.SessionSubject(0, 1, "older"), "older", 3)
	if n := inBatches(ctx, t, js, len(heads)); n != 0 {
		t.Errorf("%d commits were stored in batches", n)
	}
}
