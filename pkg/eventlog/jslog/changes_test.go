package jslog_test

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/nats-io/nats.go"
	"github.com/nats-io/nats.go/jetstream"
	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/pkg/topology"
)

// directGet is the API subject for requests to any replica of the first shard.
const directGet = "$JS.API.DIRECT.GET.EVENTS-0"

// writer appends to the life subjects of sessions.
type writer struct {
	log   eventlog.Log
	heads map[string]eventlog.Head // by name
	n     int
}

func newWriter(l eventlog.Log) *writer { return &writer{log: l, heads: map[string]eventlog.Head{}} }

// write appends a commit to the session of each name.
func (w *writer) write(t *testing.T, names ...string) {
	t.Helper()
	for _, name := range names {
		head, ok := w.heads[name]
		if !ok {
			head = eventlog.Head{Subject: subjectOf(name)}
		}
		w.n++
		head, err := w.log.Append(t.Context(), head, eventlogtest.Draft(fmt.Sprint("changes ", w.n), "text"))
		if err != nil {
			t.Fatal(err)
		}
		w.heads[name] = head
	}
}

func subjectOf(name string) events.Subject { return eventlogtest.SessionSubject(0, 1, "changes "+name) }

// hashes returns the hash of the last commit of each name, by subject.
func (w *writer) hashes(names ...string) map[string]string {
	want := map[string]string{}
	for _, name := range names {
		want[w.heads[name].Subject.String()] = w.heads[name].Hash
	}
	return want
}

// failer is the part of *testing.T and *rapid.T that ends a test.
type failer interface {
	Helper()
	Context() context.Context
	Fatal(args ...any)
}

func changed(t failer, l *jslog.Log, after uint64) eventlog.Changes {
	t.Helper()
	c, err := l.Changed(t.Context(), eventlog.Position{Seq: after}, 1000)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// proxiedReads is a log whose requests to replicas pass through a handler of the test.
type proxiedReads struct {
	log *jslog.Log
	nc  *nats.Conn

	mu     sync.Mutex
	handle func(request []byte) (responses []*nats.Msg)
}

// newProxiedReads opens the log of nc with a proxy that forwards every request. ackTimeout is that of jslog.Config.
func newProxiedReads(t *testing.T, nc *nats.Conn, ackTimeout time.Duration) *proxiedReads {
	t.Helper()
	p := &proxiedReads{nc: nc}
	p.handle = func(request []byte) []*nats.Msg { return p.forward(t, request) }
	replica := connectWithoutJetStream(t)
	for api, handle := range map[string]func(m *nats.Msg) []*nats.Msg{
		directGet: func(m *nats.Msg) []*nats.Msg {
			p.mu.Lock()
			defer p.mu.Unlock()
			return p.handle(m.Data)
		},
		"$JS.API.STREAM.MSG.GET.>": func(m *nats.Msg) []*nats.Msg {
			reply, err := nc.Request(m.Subject, m.Data, wait)
			if err != nil {
				t.Errorf("forward %s: %v", m.Subject, err)
				return nil
			}
			return []*nats.Msg{reply}
		},
	} {
		if _, err := replica.Subscribe(api, func(m *nats.Msg) {
			for _, reply := range handle(m) {
				if err := m.RespondMsg(reply); err != nil {
					t.Errorf("respond: %v", err)
				}
			}
		}); err != nil {
			t.Fatal(err)
		}
	}
	if err := replica.Flush(); err != nil {
		t.Fatal(err)
	}
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	p.log = openConfig(t, jslog.Config{JetStream: js, Conn: replica, AckTimeout: ackTimeout})
	return p
}

// intercept sets the handler of requests for last messages. Other requests are forwarded.
func (p *proxiedReads) intercept(t *testing.T, handle func(request []byte) []*nats.Msg) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.handle = func(request []byte) []*nats.Msg {
		if bytes.Contains(request, []byte("multi_last")) {
			return handle(request)
		}
		return p.forward(t, request)
	}
}

// forward sends a request to the server and returns its responses.
func (p *proxiedReads) forward(t *testing.T, request []byte) (list []*nats.Msg) {
	inbox := p.nc.NewInbox()
	sub, err := p.nc.SubscribeSync(inbox)
	if err != nil {
		t.Errorf("forward: %v", err)
		return nil
	}
	defer func() { _ = sub.Unsubscribe() }()
	if err := p.nc.PublishRequest(directGet, inbox, request); err != nil {
		t.Errorf("forward: %v", err)
		return nil
	}
	for {
		m, err := sub.NextMsg(wait)
		if err != nil {
			t.Errorf("forward: %v", err)
			return list
		}
		list = append(list, m)
		if m.Header.Get("Nats-Sequence") == "" || !bytes.Contains(request, []byte("multi_last")) {
			return list
		}
	}
}

// edited returns a request with another value of a field.
func edited(t *testing.T, request []byte, field string, value any) []byte {
	fields := map[string]any{}
	err := json.Unmarshal(request, &fields)
	fields[field] = value
	out, merr := json.Marshal(fields)
	if err != nil || merr != nil {
		t.Errorf("edit a request: %v, %v", err, merr)
	}
	return out
}

// TestChanged_ReadsOnlyLastCommits tests which changes are found by counting, and that they have their hashes.
func TestChanged_ReadsOnlyLastCommits(t *testing.T) {
	t.Parallel()
	l, _, st := stream(t)
	w := newWriter(l)
	w.write(t, "a", "b", "c", "a", "b", "c")
	first := changed(t, l, 0)
	if len(first.Last) != 3 || len(first.Hash) != 0 {
		t.Fatalf("without an earlier count Changed returned %+v, want three subjects without hashes", first)
	}
	w.write(t, "a", "b", "a", "d")
	c := changed(t, l, first.Through.Seq)
	if want := w.hashes("a", "b", "d"); !maps.Equal(c.Hash, want) || len(c.Last) != 3 || c.Through.Seq != 10 || c.More {
		t.Errorf("Changed returned %+v, want the hashes %v", c, want)
	}
	// One message of a subject is removed and another one is stored, so its number of messages stays.
	if err := st.DeleteMsg(t.Context(), 1); err != nil {
		t.Fatal(err)
	}
	w.write(t, "a", "b", "b", "b", "b")
	masked := changed(t, l, c.Through.Seq)
	if want := map[string]uint64{w.heads["a"].Subject.String(): 11, w.heads["b"].Subject.String(): 15}; !maps.Equal(masked.Last, want) {
		t.Errorf("after a removal Changed returned %+v, want %v", masked, want)
	}
	// Few changes of many subjects are found without counting.
	w.write(t, "c")
	if few := changed(t, l, masked.Through.Seq); len(few.Last) != 1 || len(few.Hash) != 0 {
		t.Errorf("after one commit Changed returned %+v, want one subject without its hash", few)
	}
}

// TestChanged_EqualsTheHistory compares both ways of Changed with random histories of appends and removals.
func TestChanged_EqualsTheHistory(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	l := open(t, nc, 1)
	js, err := jetstream.New(nc)
	if err != nil {
		t.Fatal(err)
	}
	st, err := js.Stream(t.Context(), topology.EventsStreamName(0))
	if err != nil {
		t.Fatal(err)
	}
	counted, scanned, run := 0, 0, 0
	rapid.Check(t, func(rt *rapid.T) {
		// All histories share the stream, so each one begins after the one before.
		run++
		if err := st.Purge(t.Context()); err != nil {
			rt.Fatal(err)
		}
		w, subjects := newWriter(l), map[uint64]string{} // existing messages, by sequence
		info, err := st.Info(t.Context())
		if err != nil {
			rt.Fatal(err)
		}
		after, end := info.State.LastSeq, info.State.LastSeq
		for range rapid.IntRange(1, 6).Draw(rt, "passes") {
			for range rapid.IntRange(0, 12).Draw(rt, "steps") {
				name := fmt.Sprint(run, " ", rapid.IntRange(0, 3).Draw(rt, "session"))
				subject := subjectOf(name).String()
				switch what := rapid.IntRange(0, 11).Draw(rt, "step"); what {
				case 0: // the session is erased
					if err := st.Purge(t.Context(), jetstream.WithPurgeSubject(subject)); err != nil {
						rt.Fatal(err)
					}
					maps.DeleteFunc(subjects, func(_ uint64, s string) bool { return s == subject })
					delete(w.heads, name)
				case 1: // one of its commits is erased
					seqs := slices.Sorted(maps.Keys(subjects))
					if len(seqs) == 0 {
						continue
					}
					seq := rapid.SampledFrom(seqs).Draw(rt, "erased")
					if err := st.DeleteMsg(t.Context(), seq); err != nil {
						rt.Fatal(err)
					}
					delete(subjects, seq)
				default:
					ack, err := js.Publish(t.Context(), subject, []byte("{}"))
					if err != nil {
						rt.Fatal(err)
					}
					end = ack.Sequence
					subjects[end] = subject
				}
			}
			want, last := map[string]uint64{}, after
			for _, seq := range slices.Sorted(maps.Keys(subjects)) {
				if seq > after {
					want[subjects[seq]], last = seq, seq
				}
			}
			c, fresh := changed(rt, l, after), changed(rt, openConfig(t, jslog.Config{JetStream: js}), after)
			for what, c := range map[string]eventlog.Changes{"with": c, "without": fresh} {
				if !maps.Equal(c.Last, want) || c.More || c.Through.Seq < last || c.Through.Seq > end {
					rt.Fatalf("%s an earlier count Changed after %d returned %+v, want %v up to %d at least and %d at most", what, after, c, want, last, end)
				}
			}
			if c.Hash != nil {
				counted++
			} else {
				scanned++
			}
			after = c.Through.Seq
		}
	})
	if counted == 0 || scanned == 0 {
		t.Errorf("%d results by counting and %d by reading headers, want some of each", counted, scanned)
	}
}

// TestChanged_OnlyBelievesAReplicaThatHasEverything tests responses of replicas that lag, and responses that arrive
// in part.
func TestChanged_OnlyBelievesAReplicaThatHasEverything(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name    string
		respond func(t *testing.T, p *proxiedReads, try int, request []byte) []*nats.Msg
		counted bool // whether a later try succeeds
		silent  bool // whether the replica does not respond
	}{
		{"one replica lags", func(t *testing.T, p *proxiedReads, try int, request []byte) []*nats.Msg {
			if try == 0 {
				request = edited(t, request, "up_to_seq", 7) // a replica with 7 messages responds like this
			}
			return p.forward(t, request)
		}, true, false},
		{"all replicas lag", func(t *testing.T, p *proxiedReads, _ int, request []byte) []*nats.Msg {
			return p.forward(t, edited(t, request, "up_to_seq", 7))
		}, false, false},
		{"a replica knows none of the subjects", func(t *testing.T, p *proxiedReads, try int, request []byte) []*nats.Msg {
			if try == 0 {
				request = edited(t, request, "multi_last", []string{"ev.other"})
			}
			return p.forward(t, request)
		}, true, false},
		{"a message of a response is lost", func(t *testing.T, p *proxiedReads, try int, request []byte) []*nats.Msg {
			list := p.forward(t, request)
			if try == 0 {
				list = slices.Delete(list, 1, 2)
			}
			return list
		}, true, false},
		{"the last message of a response is lost", func(t *testing.T, p *proxiedReads, try int, request []byte) []*nats.Msg {
			list := p.forward(t, request)
			if try == 0 {
				list = slices.Delete(list, len(list)-2, len(list)-1)
			}
			return list
		}, true, false},
		{"responses end early because of their size", func(t *testing.T, p *proxiedReads, _ int, request []byte) []*nats.Msg {
			return p.forward(t, edited(t, request, "max_bytes", 1))
		}, true, false},
		{"the server does not have the request", func(*testing.T, *proxiedReads, int, []byte) []*nats.Msg {
			return []*nats.Msg{{Header: nats.Header{"Status": {"408"}, "Description": {"Empty Request"}}}}
		}, false, false},
		{"responses do not arrive", func(*testing.T, *proxiedReads, int, []byte) []*nats.Msg { return nil }, false, true},
		{"a server does not state the end", func(t *testing.T, p *proxiedReads, _ int, request []byte) []*nats.Msg {
			list := p.forward(t, request)
			list[len(list)-1].Header.Del("Nats-UpTo-Sequence")
			return list
		}, false, false},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			nc := natstest.Conn(t, natstest.Run(t))
			w := newWriter(open(t, nc, 1))
			ackTimeout := time.Duration(0)
			if c.silent {
				ackTimeout = 3 * time.Second // the time until the headers are read instead
			}
			p := newProxiedReads(t, nc, ackTimeout)
			w.write(t, "a", "b", "c")
			changed(t, p.log, 0)
			w.write(t, "a", "b", "a", "b", "c", "c", "b")
			var tries atomic.Int64
			p.intercept(t, func(request []byte) []*nats.Msg {
				return c.respond(t, p, int(tries.Add(1))-1, request)
			})
			got := changed(t, p.log, 3)
			want := map[string]uint64{}
			for _, h := range w.heads {
				want[h.Subject.String()] = h.Seq
			}
			if !maps.Equal(got.Last, want) || got.Through.Seq != 10 || tries.Load() == 0 {
				t.Errorf("Changed returned %+v after %d requests, want %v up to 10", got, tries.Load(), want)
			}
			if c.counted && !maps.Equal(got.Hash, w.hashes("a", "b", "c")) || !c.counted && len(got.Hash) > 0 {
				t.Errorf("the hashes are %v", got.Hash)
			}
		})
	}
}

// TestChanged_ReturnsTheLastCommitOfItsRange appends commits between the count and the request for last commits.
func TestChanged_ReturnsTheLastCommitOfItsRange(t *testing.T) {
	t.Parallel()
	nc := natstest.Conn(t, natstest.Run(t))
	w := newWriter(open(t, nc, 1))
	p := newProxiedReads(t, nc, 0)
	w.write(t, "a", "b")
	changed(t, p.log, 0)
	w.write(t, "a", "b", "a", "b")
	want := map[string]uint64{w.heads["a"].Subject.String(): 5, w.heads["b"].Subject.String(): 6}
	hashes := w.hashes("b")
	p.intercept(t, func(request []byte) []*nats.Msg {
		w.write(t, "a", "new", "a")
		return p.forward(t, request)
	})
	c := changed(t, p.log, 2)
	if !maps.Equal(c.Last, want) || c.Through.Seq != 6 || !maps.Equal(c.Hash, hashes) {
		t.Errorf("Changed returned %+v, want %v up to 6 and the hashes %v", c, want, hashes)
	}
	p.intercept(t, func(request []byte) []*nats.Msg { return p.forward(t, request) })
	next := changed(t, p.log, 6)
	if want := w.hashes("a", "new"); !maps.Equal(next.Hash, want) || next.Through.Seq != 9 {
		t.Errorf("the next call returned %+v, want the hashes %v", next, want)
	}
}

func bulkSubject(i int) string {
	return fmt.Sprintf("ev.%s.default.%d.life", events.PartitionToken(i%events.MaxPartitions), i)
}

// TestChanged_MoreSubjectsThanOneRequestMayHave changes more subjects than the server returns in one response.
func TestChanged_MoreSubjectsThanOneRequestMayHave(t *testing.T) {
	t.Parallel()
	const subjects = 1100
	l, js, _ := stream(t)
	publish := func() {
		t.Helper()
		for i := range subjects {
			if _, err := js.PublishAsync(bulkSubject(i), []byte("{}")); err != nil {
				t.Fatal(err)
			}
		}
		select {
		case <-js.PublishAsyncComplete():
		case <-t.Context().Done():
			t.Fatal("the messages were not stored")
		}
	}
	publish()
	at := eventlog.Position{}
	for range 2 {
		c, err := l.Changed(t.Context(), at, 3000)
		if err != nil {
			t.Fatal(err)
		}
		at = c.Through
		publish()
	}
	c, err := l.Changed(t.Context(), at, 3000)
	if err != nil || len(c.Last) != subjects || c.Hash == nil || c.Through.Seq != 3*subjects {
		t.Fatalf("Changed returned %d subjects up to %s, counted %v: %v", len(c.Last), c.Through, c.Hash != nil, err)
	}
	for i := range subjects {
		if got, want := c.Last[bulkSubject(i)], uint64(2*subjects+i+1); got != want {
			t.Fatalf("the last message of subject %d is %d, want %d", i, got, want)
		}
	}
	publish()
	if c, err := l.Changed(t.Context(), c.Through, subjects-1); err != nil || len(c.Last) != subjects-1 || !c.More {
		t.Errorf("with a limit Changed returned %d subjects, more %v, %v", len(c.Last), c.More, err)
	}
}

// TestChanged_WhileWritersAppend compares each result with the acknowledgements of writers that append meanwhile, on
// one server and on a cluster whose replicas lag behind their leader.
func TestChanged_WhileWritersAppend(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		connect func(t *testing.T) *nats.Conn
		config  topology.ProvisionConfig
	}{
		"one server": {func(t *testing.T) *nats.Conn { return natstest.Conn(t, natstest.Run(t)) }, topology.ProvisionConfig{}},
		"three replicas": {func(t *testing.T) *nats.Conn {
			nc, err := nats.Connect(natstest.RunCluster(t).URL)
			if err != nil {
				t.Fatal(err)
			}
			t.Cleanup(nc.Close)
			return nc
		}, topology.ProvisionConfig{Replicas: 3}},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			js, err := jetstream.New(c.connect(t))
			if err != nil {
				t.Fatal(err)
			}
			if err := topology.Provision(t.Context(), js, c.config); err != nil {
				t.Fatal(err)
			}
			l := openConfig(t, jslog.Config{JetStream: js})
			const writers, commits = 8, 150
			var mu sync.Mutex
			stored := map[uint64]string{} // subjects, by sequence
			var wg sync.WaitGroup
			for i := range writers {
				wg.Go(func() {
					head := eventlog.Head{Subject: subjectOf(fmt.Sprint(i))}
					for n := range commits {
						next, err := l.Append(t.Context(), head, eventlogtest.Draft(fmt.Sprint("writer ", i, " ", n), "text"))
						if err != nil {
							t.Errorf("append: %v", err)
							return
						}
						head = next
						mu.Lock()
						stored[head.Seq] = head.Subject.String()
						mu.Unlock()
					}
				})
			}
			var list []eventlog.Changes
			counted := 0
			for at := uint64(0); at < writers*commits && !t.Failed(); at = list[len(list)-1].Through.Seq {
				c := changed(t, l, at)
				if list = append(list, c); len(c.Hash) > 0 {
					counted++
				}
			}
			wg.Wait()
			at := uint64(0)
			for _, c := range list {
				want := map[string]uint64{}
				for seq := at + 1; seq <= c.Through.Seq; seq++ {
					want[stored[seq]] = seq
				}
				if !maps.Equal(c.Last, want) {
					t.Fatalf("Changed after %d returned %+v, want %v", at, c, want)
				}
				at = c.Through.Seq
			}
			t.Logf("%d results, %d of them by counting", len(list), counted)
		})
	}
}
