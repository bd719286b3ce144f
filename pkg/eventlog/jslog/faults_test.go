package jslog_test

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/Shopify/toxiproxy/v2"
	"github.com/nats-io/nats-server/v2/server"
	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"github.com/prometheus/client_golang/prometheus"
	"github.com/rs/zerolog"

	"github.com/spoolhq/spool/pkg/bus"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/natsserver"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// wait is the time limit of every step.
const wait = 30 * time.Second

// proxiedLog is a log behind a proxy that a test can cut, and the same log on a direct connection, like that of another
// copy of the service.
type proxiedLog struct {
	proxy   *toxiproxy.Proxy
	cut     *jslog.Log
	direct  *jslog.Log
	js      jetstream.JetStream // of the direct connection
	settles chan struct{}       // receives a value when the cut log begins to settle an append
}

func withProxy(t *testing.T) proxiedLog {
	t.Helper()
	srv := natstest.RunConfig(t, natsserver.Config{Port: natsserver.RandomPort})
	conn := natstest.Conn(t, srv)
	directJS, err := jetstream.New(conn)
	if err != nil {
		t.Fatal(err)
	}
	c := proxiedLog{direct: open(t, conn, 1), js: directJS, settles: make(chan struct{}, 1)}
	api := toxiproxy.NewServer(toxiproxy.NewMetricsContainer(prometheus.NewRegistry()), zerolog.Nop())
	c.proxy = toxiproxy.NewProxy(api, "nats", "127.0.0.1:0", net.JoinHostPort(natsserver.DefaultHost, strconv.Itoa(srv.Port())))
	if err := c.proxy.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(c.proxy.Stop)
	nc, err := nats.Connect("nats://"+c.proxy.Listen, append(bus.ConnOptions(slog.New(slog.DiscardHandler)), nats.ReconnectWait(10*time.Millisecond))...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	c.cut = openConfig(t, jslog.Config{JetStream: js, AckTimeout: 100 * time.Millisecond, Logger: slog.New(settleWatcher{c.settles})})
	return c
}

// settleWatcher is a slog handler that reports when the log settles an append.
type settleWatcher struct{ settles chan struct{} }

func (settleWatcher) Enabled(context.Context, slog.Level) bool { return true }
func (w settleWatcher) WithAttrs([]slog.Attr) slog.Handler     { return w }
func (w settleWatcher) WithGroup(string) slog.Handler          { return w }
func (w settleWatcher) Handle(_ context.Context, r slog.Record) error {
	if strings.HasPrefix(r.Message, "settle") {
		select {
		case w.settles <- struct{}{}:
		default:
		}
	}
	return nil
}

// drop discards the bytes in one direction: downstream to the log, upstream to the server.
func (c proxiedLog) drop(t *testing.T, direction string) {
	t.Helper()
	if _, err := c.proxy.Toxics.AddToxicJson(strings.NewReader(`{"name":"drop","type":"timeout","stream":"` + direction + `","attributes":{"timeout":0}}`)); err != nil {
		t.Fatal(err)
	}
}

// heal restores the connection. The client reconnects, because the old connection lost bytes.
func (c proxiedLog) heal(t *testing.T) {
	t.Helper()
	if err := c.proxy.Toxics.RemoveToxic(t.Context(), "drop"); err != nil {
		t.Fatal(err)
	}
	c.proxy.Stop()
	if err := c.proxy.Start(); err != nil {
		t.Fatal(err)
	}
}

type appended struct {
	head eventlog.Head
	err  error
}

// append appends a commit in the background and sends the result when the append has settled.
func (c proxiedLog) append(ctx context.Context, head eventlog.Head, name string) <-chan appended {
	done := make(chan appended, 1)
	go func() {
		h, err := c.cut.Append(ctx, head, eventlogtest.Draft(name, name))
		done <- appended{h, err}
	}()
	return done
}

func TestAppend_SettlesAfterALostAcknowledgement(t *testing.T) {
	t.Parallel()
	for name, another := range map[string]bool{"and nobody else wrote": false, "and another writer went on": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			c := withProxy(t)
			s := eventlogtest.SessionSubject(0, 1, "lost")
			head := eventlogtest.AppendCommits(t, c.cut, s, "before", 2)[1]
			tail := eventlogtest.StartTail(ctx, t, c.direct, eventlog.Position{Seq: head.Seq}, eventlog.Filter{})

			c.drop(t, "downstream")
			done := c.append(ctx, head, "ours")
			rec := <-tail // the commit is stored, and its acknowledgement is lost
			want, last := rec.Position.Seq, rec.Position.Seq
			<-c.settles
			if another {
				stored, err := c.direct.Last(ctx, s, eventlog.LeaderOnly)
				if err != nil {
					t.Fatal(err)
				}
				next, err := c.direct.Append(ctx, stored, eventlogtest.Draft("another", "another"))
				if err != nil {
					t.Fatal(err)
				}
				last = next.Seq
			}
			c.heal(t)
			got := <-done
			if got.err != nil {
				t.Fatalf("append: %v", got.err)
			}
			if got.head.Seq != want || got.head.Hash != rec.Commit.Hash {
				t.Errorf("append returned the head %d, want %d", got.head.Seq, want)
			}
			end, err := c.direct.Last(ctx, s, eventlog.LeaderOnly)
			if err != nil || end.Seq != last {
				t.Errorf("the last commit is %d, %v, want %d", end.Seq, err, last)
			}
			ours := 0
			for rec, err := range c.direct.Read(ctx, eventlog.Position{}, eventlog.Filter{Subject: s}) {
				if err != nil {
					t.Fatal(err)
				}
				if rec.Commit.ID == got.head.Commit.ID {
					ours++
				}
			}
			if ours != 1 {
				t.Errorf("our commit is stored %d times", ours)
			}
		})
	}
}

func TestAppend_SettlesAfterALostRequest(t *testing.T) {
	t.Parallel()
	for name, another := range map[string]bool{"and nobody else wrote": false, "and another writer was faster": true} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			ctx, cancel := context.WithTimeout(t.Context(), wait)
			defer cancel()
			c := withProxy(t)
			s := eventlogtest.SessionSubject(0, 1, "lost")
			head := eventlogtest.AppendCommits(t, c.cut, s, "before", 1)[0]
			c.drop(t, "upstream")
			done := c.append(ctx, head, "ours")
			<-c.settles
			if another {
				if _, err := c.direct.Append(ctx, head, eventlogtest.Draft("another", "another")); err != nil {
					t.Fatal(err)
				}
			}
			c.heal(t)
			got := <-done
			var conflict *eventlog.ConflictError
			switch {
			case another && !errors.As(got.err, &conflict):
				t.Errorf("append: %v, want a conflict", got.err)
			case !another && got.err != nil:
				t.Errorf("append: %v", got.err)
			}
			n := 0
			for _, err := range c.direct.Read(ctx, eventlog.Position{}, eventlog.Filter{Subject: s}) {
				if err != nil {
					t.Fatal(err)
				}
				n++
			}
			if n != 2 {
				t.Errorf("%d commits are stored, want 2", n)
			}
		})
	}
}

// TestAppend_RetryFindsACommitWhoseOutcomeWasUnknown tests a writer whose time ended before it knew the outcome of an
// append: its retry finds the stored commit.
func TestAppend_RetryFindsACommitWhoseOutcomeWasUnknown(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	c := withProxy(t)
	s := eventlogtest.SessionSubject(0, 1, "given up")
	tail := eventlogtest.StartTail(ctx, t, c.direct, eventlog.Position{}, eventlog.Filter{})
	c.drop(t, "downstream")
	short, stop := context.WithCancel(ctx)
	done := c.append(short, eventlog.Head{Subject: s}, "ours")
	rec := <-tail
	stop()
	if got := <-done; !errors.Is(got.err, eventlog.ErrUnavailable) || !errors.Is(got.err, context.Canceled) {
		t.Fatalf("append: %v, want ErrUnavailable", got.err)
	}
	c.heal(t)
	head, err := c.cut.Append(ctx, eventlog.Head{Subject: s}, eventlogtest.Draft("ours", "ours"))
	if err != nil || head.Seq != rec.Position.Seq {
		t.Errorf("the retry returned %d, %v, want %d", head.Seq, err, rec.Position.Seq)
	}
}

// TestLostDelivery_IsReadAgain breaks the connection while the server sends the last commit. No later commit follows
// whose sequence would reveal the gap. On a busy machine the reader may miss a heartbeat and give up its consumer
// before the server sends the commit. The test then tries again with another commit.
func TestLostDelivery_IsReadAgain(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), 4*wait)
	defer cancel()
	c := withProxy(t)
	s := eventlogtest.SessionSubject(0, 1, "lost")
	tail := eventlogtest.StartTail(ctx, t, c.cut, eventlog.Position{}, eventlog.Filter{})
	eventlogtest.ExpectCommit(ctx, t, tail, eventlogtest.AppendCommits(t, c.direct, s, "before", 1)[0])
	for attempt := 0; ; attempt++ {
		c.drop(t, "downstream")
		last := eventlogtest.AppendCommits(t, c.direct, s, fmt.Sprint("lost ", attempt), 1)[0]
		sent := c.isSent(ctx, t, last.Seq)
		c.heal(t)
		eventlogtest.ExpectCommit(ctx, t, tail, last)
		if sent {
			return
		}
	}
}

// isSent reports whether the server sends a message to one of the stream's consumers within two seconds.
func (c proxiedLog) isSent(ctx context.Context, t *testing.T, seq uint64) bool {
	t.Helper()
	stream, err := c.js.Stream(ctx, topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	for until := time.Now().Add(2 * time.Second); time.Now().Before(until); {
		list, sent := stream.ListConsumers(ctx), false
		for info := range list.Info() { // the goroutine of the lister waits until every item was taken
			sent = sent || info.Delivered.Consumer > 0 && info.Delivered.Stream >= seq
		}
		if list.Err() != nil {
			t.Fatal(list.Err())
		}
		if sent {
			return true
		}
	}
	return false
}

// connectWithoutJetStream returns a connection to a server without JetStream, where a test can answer the requests itself.
func connectWithoutJetStream(t *testing.T) *nats.Conn {
	t.Helper()
	ns, err := server.NewServer(&server.Options{DontListen: true, NoSigs: true, NoLog: true})
	if err != nil {
		t.Fatal(err)
	}
	ns.Start()
	t.Cleanup(func() { ns.Shutdown(); ns.WaitForShutdown() })
	nc, err := nats.Connect("", nats.InProcessServer(ns))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(nc.Close)
	return nc
}

// TestLast_LeaderIsNotStale puts a replica that lags in front of the reads: it answers every request with the first
// message of the stream.
func TestLast_LeaderIsNotStale(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	nc := natstest.Conn(t, natstest.Run(t))
	direct := open(t, nc, 1)
	s := eventlogtest.SessionSubject(0, 1, "stale")
	heads := eventlogtest.AppendCommits(t, direct, s, "stale", 3)

	replica := connectWithoutJetStream(t)
	answer := func(api string, request func(m *nats.Msg) (*nats.Msg, error)) {
		t.Helper()
		if _, err := replica.Subscribe(api, func(m *nats.Msg) {
			reply, err := request(m)
			if err == nil {
				err = m.RespondMsg(reply)
			}
			if err != nil {
				t.Errorf("replica: %v", err)
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	answer("$JS.API.DIRECT.GET.EVENTS-0.>", func(*nats.Msg) (*nats.Msg, error) {
		return nc.Request("$JS.API.DIRECT.GET.EVENTS-0", []byte(`{"seq":1}`), wait)
	})
	answer("$JS.API.DIRECT.GET.EVENTS-0", func(*nats.Msg) (*nats.Msg, error) {
		return nc.Request("$JS.API.DIRECT.GET.EVENTS-0", []byte(`{"seq":999}`), wait) // sequence 999 does not exist, so the answer is 404
	})
	answer("$JS.API.STREAM.MSG.GET.>", func(m *nats.Msg) (*nats.Msg, error) { return nc.Request(m.Subject, m.Data, wait) })
	if err := replica.Flush(); err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	l := openConfig(t, jslog.Config{JetStream: js, Conn: replica})

	stale, err := l.Last(ctx, s, eventlog.AnyReplica)
	if err != nil || stale.Seq != heads[0].Seq {
		t.Fatalf("the replica answers %d, %v, want %d", stale.Seq, err, heads[0].Seq)
	}
	var conflict *eventlog.ConflictError
	if _, err := l.Append(ctx, stale, eventlogtest.Draft("next", "next")); !errors.As(err, &conflict) {
		t.Fatalf("append to a stale head: %v, want a conflict", err)
	}
	fresh, err := l.Last(ctx, s, eventlog.LeaderOnly)
	if err != nil || fresh.Seq != heads[2].Seq {
		t.Fatalf("the leader answers %d, %v, want %d", fresh.Seq, err, heads[2].Seq)
	}
	if _, err := l.Append(ctx, fresh, eventlogtest.Draft("next", "next")); err != nil {
		t.Error(err)
	}
	if rec, err := l.CommitAt(ctx, eventlog.Position{Seq: heads[2].Seq}); err != nil || rec.Commit.Hash != heads[2].Hash {
		t.Errorf("a commit that the replica does not know yet: %v", err)
	}
}

// TestTail_SurvivesServerRestarts stops and starts the server several times during a tail.
func TestTail_SurvivesServerRestarts(t *testing.T) {
	t.Parallel()
	ctx, cancel := context.WithTimeout(t.Context(), wait)
	defer cancel()
	srv := natstest.RunRestartable(t)
	l := open(t, srv.Conn(), 2)
	s := eventlogtest.SessionSubject(1, 2, "restart")
	tail := eventlogtest.StartTail(ctx, t, l, eventlog.Position{Shard: 1}, eventlog.Filter{Partitions: []int{s.Partition()}})
	for i := range 3 {
		name := "round " + strconv.Itoa(i)
		heads := eventlogtest.AppendCommits(t, l, s, name, 3)
		eventlogtest.ExpectCommit(ctx, t, tail, heads[0])
		srv.Stop()
		srv.Start()
		heads = append(heads, eventlogtest.AppendCommits(t, l, s, name+" after", 3)...)
		for _, h := range heads[1:] {
			eventlogtest.ExpectCommit(ctx, t, tail, h)
		}
	}

	// Without a server, a tail still ends with its context, and an append reports that its outcome is unknown.
	srv.Stop()
	short, stop := context.WithTimeout(ctx, 200*time.Millisecond)
	defer stop()
	if _, err := l.Append(short, eventlog.Head{Subject: eventlogtest.SessionSubject(0, 2, "down")}, eventlogtest.Draft("down", "")); !errors.Is(err, eventlog.ErrUnavailable) {
		t.Errorf("append without a server: %v, want ErrUnavailable", err)
	}
	cancel()
	if rec, ok := <-tail; ok {
		t.Errorf("after its end the tail yields %s", rec.Position)
	}
}
