// Command heads measures what signed heads cost: the processor time of a pass over what changed, for each commit, against that of
// appending the commits. Server, writers and signer run in this process, so their processor time is counted together.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/signal"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/test/bench/row"
)

// limit is the share of an append's processor time that signing may take.
const limit = 0.05

func main() {
	rounds := flag.Int("rounds", 9, "passes")
	sessions := flag.Int("sessions", 200, "sessions that write")
	commits := flag.Int("commits", 60, "commits of each session between two passes: one a second, and a pass a minute")
	dir := flag.String("dir", "", "folder for the stream, on the disk to measure; a temporary one by default")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), os.Interrupt)
	defer stop()
	if err := run(ctx, os.Stdout, *dir, *rounds, *sessions, *commits); err != nil {
		fmt.Fprintln(os.Stderr, "heads:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, out io.Writer, dir string, rounds, sessions, commits int) error {
	if rounds < 1 || sessions < 1 || commits < 1 {
		return errors.New("rounds, sessions and commits must be positive")
	}
	tmp, err := os.MkdirTemp(dir, "spool-bench-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(tmp)
	b, err := newBench(ctx, tmp, sessions)
	if err != nil {
		return err
	}
	defer b.close()
	var appends, passes, ratios []float64
	for range rounds {
		before := processorTime()
		if err := b.append(ctx, commits); err != nil {
			return err
		}
		between := processorTime()
		if err := b.sign(ctx); err != nil {
			return err
		}
		after := processorTime()
		n := float64(sessions * commits)
		appends, passes = append(appends, (between-before).Seconds()/n), append(passes, (after-between).Seconds()/n)
		ratios = append(ratios, (after-between).Seconds()/(between-before).Seconds())
	}
	ratio := median(ratios)
	return row.Write(out, row.Row{
		What:     fmt.Sprintf("signed heads: processor time for each commit, %d sessions with %d commits between two passes", sessions, commits),
		Target:   "5 % of that of an append",
		Measured: fmt.Sprintf("%.1f µs", median(passes)*1e6),
		Against:  fmt.Sprintf("append %.1f µs", median(appends)*1e6),
		Ratio:    ratio,
		OK:       ratio <= limit,
		Command:  "cd test && go run ./bench/heads",
		Note:     fmt.Sprintf("medians of %d rounds; server, writers and signer in one process; the work of the session service's pass without its timer", rounds),
	})
}

func median(list []float64) float64 {
	list = slices.Sorted(slices.Values(list))
	return (list[len(list)/2] + list[(len(list)-1)/2]) / 2
}

// processorTime is what this process took so far.
func processorTime() time.Duration {
	var u syscall.Rusage
	if err := syscall.Getrusage(syscall.RUSAGE_SELF, &u); err != nil {
		panic(err) // the arguments are right
	}
	return time.Duration(u.Utime.Nano() + u.Stime.Nano())
}

type bench struct {
	srv     *natsserver.Server
	nc      *nats.Conn
	js      jetstream.JetStream
	log     *jslog.Log
	key     heads.PrivateKey
	writers []*writer
	last    heads.Entry
	hash    string
	seq     uint64
}

type writer struct {
	head eventlog.Head
	n    int
}

func newBench(ctx context.Context, dir string, sessions int) (*bench, error) {
	b := &bench{}
	var err error
	if b.key, err = heads.ParsePrivateKey(strings.Repeat("5a", 32)); err != nil {
		return nil, err
	}
	if b.srv, err = natsserver.Start(natsserver.Config{StoreDir: dir, Port: natsserver.RandomPort}); err != nil {
		return nil, err
	}
	if err := b.open(ctx); err != nil {
		b.srv.Shutdown()
		return nil, err
	}
	for i := range sessions {
		b.writers = append(b.writers, &writer{head: eventlog.Head{Subject: events.RunOf("default", events.Derive(events.KindSession, "bench", fmt.Sprint(i)))}})
	}
	return b, nil
}

func (b *bench) open(ctx context.Context) error {
	var err error
	if b.nc, err = nats.Connect(b.srv.ClientURL()); err != nil {
		return err
	}
	if b.js, err = jetstream.New(b.nc); err != nil {
		return err
	}
	if err := topology.Provision(ctx, b.js, topology.Config{Shards: 1}); err != nil {
		return err
	}
	b.log, err = jslog.New(jslog.Config{JetStream: b.js})
	return err
}

func (b *bench) close() {
	b.nc.Close()
	b.srv.Shutdown()
}

// append has every session write its commits, one after the other.
func (b *bench) append(ctx context.Context, commits int) error {
	var wg sync.WaitGroup
	errs := make(chan error, len(b.writers))
	for i, w := range b.writers {
		wg.Go(func() {
			for range commits {
				if err := w.write(ctx, b.log, i); err != nil {
					errs <- err
					return
				}
			}
		})
	}
	wg.Wait()
	close(errs)
	return <-errs
}

func (w *writer) write(ctx context.Context, log *jslog.Log, i int) error {
	w.n++
	id := fmt.Sprintf("%010d%016d", i, w.n)
	head, err := log.Append(ctx, w.head, events.Draft{
		ID: string(events.KindCommit) + "_" + id, Actor: events.Actor{Kind: "executor", ID: "bench"}, Epoch: 1,
		Events: []events.Event{{
			ID: string(events.KindEvent) + "_" + id, Time: time.Unix(1_750_000_000, 0), ConversationID: events.MainConversation, Source: events.FromRunner, N: 1,
			Data: events.BlockComplete{Block: events.Block{
				ID: events.Derive(events.KindBlock, id), Kind: events.KindToolResult, Status: events.StatusComplete, Time: time.Unix(1_750_000_000, 0),
				ToolUseID: "call_1", Output: "total 8\n-rw-r--r-- 1 agent agent 213 main.py\n", DurationMs: 12,
			}},
		}},
	})
	w.head = head
	return err
}

// sign does what a pass of the session service does: find what changed, read the last commits, store an entry.
func (b *bench) sign(ctx context.Context) error {
	changes, err := b.log.Changed(ctx, eventlog.Position{Seq: b.last.Through}, heads.MaxHeads)
	if err != nil {
		return err
	}
	e := heads.Entry{N: b.last.N + 1, Prev: b.hash, Time: time.Now(), Through: changes.Through.Seq}
	for subject, seq := range changes.Last {
		rec, err := b.log.At(ctx, eventlog.Position{Seq: seq})
		if err != nil {
			return err
		}
		e.Heads = append(e.Heads, heads.Head{Subject: subject, Seq: seq, Hash: rec.Commit.Hash})
	}
	data, hash, err := e.Seal(b.key)
	if err != nil {
		return err
	}
	ack, err := b.js.Publish(ctx, topology.HeadSubject(0), data, jetstream.WithExpectLastSequencePerSubject(b.seq))
	if err != nil {
		return err
	}
	b.last, b.hash, b.seq = e, hash, ack.Sequence
	return nil
}
