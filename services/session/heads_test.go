package session_test

import (
	"bytes"
	"context"
	"encoding/json"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/prometheus/client_golang/prometheus"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/jslog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
	"github.com/spoolhq/spool/services/session"
)

// headsSeed is a signing key for tests.
var headsSeed = strings.Repeat("5a", 32)

func headsKey(t *testing.T) heads.PublicKey {
	t.Helper()
	k, err := heads.ParsePrivateKey(headsSeed)
	must(t, err)
	return k.Public()
}

// chain returns the signed heads of the only shard.
func (s *stack) chain() *heads.Chain {
	s.t.Helper()
	chains, err := jslog.ReadHeads(s.t.Context(), s.js, 1, headsKey(s.t))
	must(s.t, err)
	return chains[0]
}

// endOfLog returns the last sequence of the log.
func (s *stack) endOfLog() uint64 {
	s.t.Helper()
	stream, err := s.js.Stream(s.t.Context(), topology.EventsStreamName(0))
	must(s.t, err)
	return stream.CachedInfo().State.LastSeq
}

// awaitSigned waits until the signed heads cover the whole log.
func (s *stack) awaitSigned() *heads.Chain {
	s.t.Helper()
	for deadline, end := time.Now().Add(within), s.endOfLog(); ; time.Sleep(20 * pause) {
		c := s.chain()
		if through, _ := c.ProvedThrough(); through >= end {
			return c
		}
		if time.Now().After(deadline) {
			s.t.Fatalf("the log up to %d was never signed; the chain is %+v", end, c)
		}
	}
}

// verify compares the log with its signed heads.
func (s *stack) verify(scope eventlog.VerifyScope) eventlog.VerifyReport {
	s.t.Helper()
	var err error
	scope.Heads, err = jslog.ReadHeads(s.t.Context(), s.js, 1, headsKey(s.t))
	must(s.t, err)
	r, err := eventlog.Verify(s.t.Context(), s.log, scope)
	must(s.t, err)
	return r
}

// stored is a message of the log.
type stored struct {
	subject string
	data    []byte
}

// forge rewrites the log like an attacker with access to the machine. edit may change messages, and removes messages
// by setting them to nil. All others keep their sequences. Removed messages at the end leave no gap.
func (s *stack) forge(edit func(list []stored)) {
	s.t.Helper()
	ctx := s.t.Context()
	name := topology.EventsStreamName(0)
	stream, err := s.js.Stream(ctx, name)
	must(s.t, err)
	info := stream.CachedInfo()
	list := make([]stored, info.State.LastSeq)
	for i := range list {
		m, err := stream.GetMsg(ctx, uint64(i)+1)
		must(s.t, err)
		list[i] = stored{m.Subject, m.Data}
	}
	edit(list)
	for len(list) > 0 && list[len(list)-1].data == nil {
		list = list[:len(list)-1]
	}
	must(s.t, s.js.DeleteStream(ctx, name))
	stream, err = s.js.CreateStream(ctx, info.Config)
	must(s.t, err)
	for i, m := range list {
		ack, err := s.js.Publish(ctx, m.subject, m.data)
		must(s.t, err)
		if ack.Sequence != uint64(i)+1 {
			s.t.Fatalf("message %d was stored as %d", i+1, ack.Sequence)
		}
		if m.data == nil {
			must(s.t, stream.DeleteMsg(ctx, ack.Sequence))
		}
	}
}

// rechain computes the hashes of a subject's messages again, from a message on.
func rechain(t *testing.T, list []stored, from int) {
	t.Helper()
	subject, err := events.Partitioning(topology.DefaultPartitions).ParseSubject(list[from].subject)
	must(t, err)
	prev := ""
	for i := range list {
		if list[i].subject != list[from].subject || list[i].data == nil {
			continue
		}
		c, err := events.DecodeCommit(list[i].data)
		must(t, err)
		if i >= from {
			c.Prev = prev
			c = c.WithStoredEvents(subject, c.Events)
			list[i].data, err = json.Marshal(c)
			must(t, err)
		}
		prev = c.Hash
	}
}

// TestSignedHeads_FindChangedAndRemovedCommits tests that every way to falsify a log is found and named, even if the
// attacker computes all hashes again.
func TestSignedHeads_FindChangedAndRemovedCommits(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name string
		edit func(t *testing.T, list []stored, sid string)
		want []string // expected faults in the report of the whole log
	}{
		{"an unchanged log", func(*testing.T, []stored, string) {}, nil},
		{"one byte was changed", func(_ *testing.T, list []stored, sid string) {
			i := indexOf(list, sid, ".life", 1)
			list[i].data = bytes.Replace(list[i].data, []byte("hello"), []byte("hullo"), 1)
		}, []string{"its contents hash to"}},
		{"a commit was changed and the chain computed anew", func(t *testing.T, list []stored, sid string) {
			i := indexOf(list, sid, ".life", 1)
			list[i].data = bytes.Replace(list[i].data, []byte("hello"), []byte("hullo"), 1)
			rechain(t, list, i)
		}, []string{"does not have the hash that was signed"}},
		{"a commit was removed and the chain computed anew", func(t *testing.T, list []stored, sid string) {
			i := indexOf(list, sid, ".life", 1)
			list[i].data = nil
			rechain(t, list, indexOf(list, sid, ".life", 1))
		}, []string{"does not have the hash that was signed"}},
		{"the end of a session was removed", func(_ *testing.T, list []stored, sid string) {
			last := -1
			for i := range list {
				if strings.Contains(list[i].subject, sid) && strings.HasSuffix(list[i].subject, ".run") {
					last = i
				}
			}
			list[last].data = nil
		}, []string{"is missing: its hash was signed"}},
		{"the end of the log was cut", func(_ *testing.T, list []stored, _ string) {
			for i := len(list) - 3; i < len(list); i++ {
				list[i].data = nil
			}
		}, []string{"is missing: its hash was signed"}},
		{"a session was removed", func(_ *testing.T, list []stored, sid string) {
			for i := range list {
				if strings.Contains(list[i].subject, sid) {
					list[i].data = nil
				}
			}
		}, []string{"is missing: its hash was signed"}},
		{"two commits changed places", func(_ *testing.T, list []stored, sid string) {
			i, j := indexOf(list, sid, ".life", 0), -1
			for k := range list {
				if !strings.Contains(list[k].subject, sid) && strings.HasSuffix(list[k].subject, ".run") {
					j = k
				}
			}
			list[i], list[j] = list[j], list[i]
		}, []string{"another subject"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			s := newStack(t)
			svc := s.startCopy("one", session.Config{HeadsKey: headsSeed, HeadsEvery: time.Second})
			s.executors(2)
			var sids []string
			for range 3 {
				sid := s.create(events.Options{})
				for range 2 {
					s.awaitEnd(sid, s.postText(sid, "hello"))
				}
				sids = append(sids, sid)
			}
			s.awaitSigned()
			svc.stop()
			s.forge(func(list []stored) { c.edit(t, list, sids[1]) })
			r := s.verify(eventlog.VerifyScope{})
			for _, want := range c.want {
				if !reports(r, want) {
					t.Errorf("no fault contains %q: %+v", want, r.Problems)
				}
			}
			if len(c.want) == 0 && r.Problem != nil {
				t.Errorf("a sound log has the fault %v", r.Problem)
			}
			if len(c.want) > 0 && !strings.Contains(r.Problem.Subject, sids[1]) && c.name != "the end of the log was cut" && c.name != "two commits changed places" {
				t.Errorf("the first fault is on %s, want one of session %s", r.Problem.Subject, sids[1])
			}
		})
	}
}

func reports(r eventlog.VerifyReport, why string) bool {
	for _, p := range r.Problems {
		if strings.Contains(p.Why, why) {
			return true
		}
	}
	return false
}

// indexOf returns the index of the n-th message of a session on a subject.
func indexOf(list []stored, sid, aspect string, n int) int {
	for i, m := range list {
		if m.data != nil && strings.Contains(m.subject, sid) && strings.HasSuffix(m.subject, aspect) {
			if n == 0 {
				return i
			}
			n--
		}
	}
	return -1
}

// postText posts a query and returns its execution.
func (s *stack) postText(sid, text string) string {
	s.t.Helper()
	exe := id(events.KindExecution)
	if a := s.send(command.TypePostMessage, sid, exe, command.PostMessage{Content: text}); a.Error != nil {
		s.t.Fatal(a.Error)
	}
	return exe
}

// TestSignedHeads_AreOneChainOfSeveralCopies tests that copies that sign concurrently store one chain without a gap,
// and that the heads of a session are signed when its execution ends, long before the next pass over all sessions.
func TestSignedHeads_AreOneChainOfSeveralCopies(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	for _, name := range []string{"one", "two", "three"} {
		s.startCopy(name, session.Config{HeadsKey: headsSeed, HeadsEvery: time.Hour})
	}
	begin := s.endOfLog()
	s.executors(4)
	for range 10 {
		sid := s.create(events.Options{})
		s.awaitEnd(sid, s.postText(sid, "hello"))
	}
	l, err := s.log.Last(t.Context(), events.RunSubject("default", s.session()), eventlog.LeaderOnly)
	must(t, err)
	for deadline := time.Now().Add(within); ; time.Sleep(20 * pause) {
		c := s.chain()
		if faults := c.Faults(); len(faults) > 0 {
			t.Fatalf("the chain has faults: %+v", faults)
		}
		if through, _ := c.ProvedThrough(); through > begin {
			t.Fatalf("the pass over all sessions signed up to %d, an hour too early", through)
		}
		if s.isSigned(l) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("the end of %s at %d was never signed", l.Subject, l.Seq)
		}
	}
	if r := s.verify(eventlog.VerifyScope{}); r.Problem != nil {
		t.Errorf("the log has the fault %v", r.Problem)
	}
}

// isSigned reports whether an entry lists the commit of a head.
func (s *stack) isSigned(want eventlog.Head) bool {
	s.t.Helper()
	stream, err := s.js.Stream(s.t.Context(), topology.StreamHeads)
	must(s.t, err)
	for seq := uint64(1); seq <= stream.CachedInfo().State.LastSeq; seq++ {
		m, err := stream.GetMsg(s.t.Context(), seq)
		must(s.t, err)
		e, _, err := heads.OpenEntry(m.Data, headsKey(s.t))
		must(s.t, err)
		if slices.Contains(e.Heads, heads.Head{Subject: want.Subject.String(), Seq: want.Seq, Hash: want.Hash}) {
			return true
		}
	}
	return false
}

// session returns the id of a session with one execution that has ended.
func (s *stack) session() string {
	s.t.Helper()
	sid := s.create(events.Options{})
	s.awaitEnd(sid, s.postText(sid, "hello"))
	return sid
}

// TestSignedHeads_StopWhenTheChainWasCut tests that a copy that has seen an entry signs nothing after a chain that
// ends before that entry, because the next entry would hide the cut.
func TestSignedHeads_StopWhenTheChainWasCut(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	metrics := prometheus.NewRegistry()
	svc, err := session.New(session.Config{HeadsKey: headsSeed, HeadsEvery: time.Second},
		session.Deps{NATS: s.nc, Log: s.log, Logger: slog.New(slog.DiscardHandler), Copy: "one", Metrics: metrics})
	must(t, err)
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- svc.Run(ctx) }()
	t.Cleanup(func() { cancel(); must(t, <-done) })
	awaitReady(t, svc.Ready(), done)
	s.executors(1)
	s.session()
	s.awaitSigned()
	stream, err := s.js.Stream(t.Context(), topology.StreamHeads)
	must(t, err)
	must(t, stream.Purge(t.Context()))
	s.session()
	for deadline := time.Now().Add(within); value(t, metrics, "spool_session_signed_heads_failures_total") < 3; time.Sleep(pause) {
		if time.Now().After(deadline) {
			t.Fatal("the signer does not notice that its chain was cut")
		}
	}
	info, err := stream.Info(t.Context())
	must(t, err)
	if info.State.Msgs != 0 {
		t.Errorf("%d entries were stored after the cut", info.State.Msgs)
	}
}

// value returns the value of a counter.
func value(t *testing.T, metrics prometheus.Gatherer, name string) float64 {
	t.Helper()
	list, err := metrics.Gather()
	must(t, err)
	for _, f := range list {
		if f.GetName() == name {
			return f.GetMetric()[0].GetCounter().GetValue()
		}
	}
	t.Fatalf("there is no metric %s", name)
	return 0
}

// TestSignedHeads_ContinueAfterADamagedEntry tests that a damaged entry stays a fault of the chain, and that later
// commits are signed.
func TestSignedHeads_ContinueAfterADamagedEntry(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	one := s.startCopy("one", session.Config{HeadsKey: headsSeed, HeadsEvery: time.Second})
	s.executors(1)
	s.session()
	s.awaitSigned()
	one.stop()
	_, err := s.js.Publish(t.Context(), topology.HeadSubject(0), []byte(`{"entry":`))
	must(t, err)
	s.startCopy("two", session.Config{HeadsKey: headsSeed, HeadsEvery: time.Second})
	s.session()
	s.awaitSigned()
	if r := s.verify(eventlog.VerifyScope{}); !reports(r, "signed heads: decode") {
		t.Errorf("the damaged entry is not reported: %+v", r.Problems)
	}
}

// TestSettingHeadsKey tests that the key comes from the setting or from a file, that without a key nothing is signed,
// and that the error of an invalid key does not contain the key.
func TestSettingHeadsKey(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "heads.key")
	must(t, os.WriteFile(file, []byte(headsSeed+"\n"), 0o600))
	for _, cfg := range []session.Config{{HeadsKey: headsSeed, HeadsEvery: time.Second}, {HeadsKeyFile: file, HeadsEvery: time.Second}} {
		s := newStack(t)
		s.startCopy("one", cfg)
		s.executors(1)
		s.session()
		s.awaitSigned()
	}
	s := newStack(t)
	for name, cfg := range map[string]session.Config{
		"heads-key: ":                                             {HeadsKey: headsSeed[:60]},
		"heads-key and heads-key-file: ":                          {HeadsKey: headsSeed, HeadsKeyFile: file},
		"heads-key-file: ":                                        {HeadsKeyFile: file + "x"},
		"heads-every: 10ms is not between 1s and 1h":              {HeadsEvery: 10 * time.Millisecond},
		"heads-key: is not a key: 64 hexadecimal digits are requ": {HeadsKey: "AGE"},
	} {
		_, err := session.New(cfg, session.Deps{NATS: s.nc, Log: s.log, Logger: slog.New(slog.DiscardHandler)})
		if err == nil || !strings.Contains(err.Error(), name) || strings.Contains(err.Error(), headsSeed[:60]) {
			t.Errorf("%q: New returned %v", name, err)
		}
	}
}

// TestReadHeads_WrongKey tests that, for heads that another key signed, ReadHeads returns an error that names the key
// instead of faults of the log.
func TestReadHeads_WrongKey(t *testing.T) {
	t.Parallel()
	s := newStack(t)
	s.startCopy("one", session.Config{HeadsKey: headsSeed, HeadsEvery: time.Second})
	s.executors(1)
	s.session()
	s.awaitSigned()
	other, err := heads.ParsePrivateKey(strings.Repeat("7b", 32))
	must(t, err)
	if _, err := jslog.ReadHeads(t.Context(), s.js, 1, other.Public()); err == nil || !strings.Contains(err.Error(), headsKey(t).ID()) {
		t.Errorf("ReadHeads with another key returned %v", err)
	}
	must(t, s.js.DeleteStream(t.Context(), topology.StreamHeads))
	if _, err := jslog.ReadHeads(t.Context(), s.js, 1, other.Public()); err == nil || !strings.Contains(err.Error(), "never signed") {
		t.Errorf("ReadHeads without the stream returned %v", err)
	}
}
