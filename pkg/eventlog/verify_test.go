package eventlog_test

import (
	"context"
	"fmt"
	"iter"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/eventlog/eventlogtest"
	"github.com/spoolhq/spool/pkg/eventlog/heads"
	"github.com/spoolhq/spool/pkg/eventlog/memlog"
	"github.com/spoolhq/spool/pkg/events"
)

const tenant = eventlogtest.Tenant

// sessionWriter appends events of sessions like the services do.
type sessionWriter struct {
	t     *testing.T
	log   *memlog.Log
	heads map[events.Subject]eventlog.Head
	n     int
}

func newSessionWriter(t *testing.T, shards int) *sessionWriter {
	t.Helper()
	l, err := memlog.New(memlog.Config{Shards: shards})
	if err != nil {
		t.Fatal(err)
	}
	return &sessionWriter{t: t, log: l, heads: map[events.Subject]eventlog.Head{}}
}

// write appends one commit with events of an execution and returns its position.
func (s *sessionWriter) write(sub events.Subject, epoch uint64, execution string, data ...events.Payload) eventlog.Position {
	s.t.Helper()
	s.n++
	d := events.Draft{ID: eventlogtest.ID(events.KindCommit, fmt.Sprint(s.n)), Actor: author(), Epoch: epoch}
	for i, p := range data {
		d.Events = append(d.Events, events.Event{
			ID: eventlogtest.ID(events.KindEvent, fmt.Sprint(s.n, "-", i)), Time: time.Unix(1_750_000_000, 0), ExecutionID: execution, Source: events.FromServer, Data: p,
		})
	}
	return s.append(sub, d)
}

// author returns an actor with every field set.
func author() events.Actor {
	return events.Actor{Kind: "key", ID: "key_1", Key: "key_1", User: "ann", Service: "session/test", Address: "192.0.2.1"}
}

// TestVerify_ChainChangesToVersion2 tests that a chain may begin in version 1 and continue in version 2.
func TestVerify_ChainChangesToVersion2(t *testing.T) {
	t.Parallel()
	s := newSessionWriter(t, 1)
	life, _, exe := session("mixed")
	for i, v := range []int{1, 1, 2, 2} {
		s.append(life, events.Draft{V: v, ID: eventlogtest.ID(events.KindCommit, fmt.Sprint("mixed", i)), Actor: author(), Events: []events.Event{{
			ID: eventlogtest.ID(events.KindEvent, fmt.Sprint("mixed", i)), Time: time.Unix(1_750_000_000, 0), ExecutionID: exe(i), Source: events.FromServer, Data: events.MessageAccepted{},
		}}})
	}
	if r := s.verify(eventlog.VerifyScope{}); r.Problem != nil || r.Commits != 4 {
		t.Errorf("%d commits, %v", r.Commits, r.Problem)
	}
}

func (s *sessionWriter) append(sub events.Subject, d events.Draft) eventlog.Position {
	s.t.Helper()
	head := s.heads[sub]
	head.Subject = sub
	next, err := s.log.Append(s.t.Context(), head, d)
	if err != nil {
		s.t.Fatal(err)
	}
	s.heads[sub] = next
	return eventlog.Position{Shard: sub.Partition() % s.log.Shards(), Seq: next.Seq}
}

func (s *sessionWriter) verify(scope eventlog.VerifyScope) eventlog.VerifyReport {
	s.t.Helper()
	r, err := eventlog.Verify(s.t.Context(), s.log, scope)
	if err != nil {
		s.t.Fatal(err)
	}
	return r
}

// session returns the two subjects of a session, and a function that returns the id of its n-th execution.
func session(name string) (life, run events.Subject, exe func(int) string) {
	life = events.LifeSubject(tenant, eventlogtest.ID(events.KindSession, name))
	return life, events.RunSubject(tenant, life.ID), func(i int) string { return eventlogtest.ID(events.KindExecution, fmt.Sprint(name, i)) }
}

// writeWholeSession writes a session with a completed, a withdrawn and an open query.
func (s *sessionWriter) writeWholeSession(name string) (life, run events.Subject, exe func(int) string) {
	s.t.Helper()
	life, run, exe = session(name)
	s.write(life, 0, "", events.SessionCreated{Agent: "default"})
	s.write(life, 0, exe(1), events.MessageAccepted{Content: "one"}, events.ExecutionDispatched{})
	s.write(run, 1, exe(1), events.ExecutionClaimed{Epoch: 1}, events.ExecutionStarted{Attempt: 1})
	s.write(life, 0, exe(2), events.MessageAccepted{Content: "two"}, events.ExecutionQueued{Ahead: 1})
	s.write(run, 1, exe(1), events.ExecutionCompleted{Result: strings.Repeat("r", 300_000)})
	s.write(life, 0, exe(2), events.ExecutionWithdrawn{Reason: "cancelled"})
	s.write(life, 0, exe(3), events.MessageAccepted{Content: "three"}, events.ExecutionDispatched{})
	return life, run, exe
}

func TestVerify_AcceptsSoundLogs(t *testing.T) {
	t.Parallel()
	for _, shards := range []int{1, 8} {
		s := newSessionWriter(t, shards)
		var open []string
		for i := range 20 {
			_, _, exe := s.writeWholeSession(fmt.Sprint("session", i))
			open = append(open, exe(3))
		}
		life, _, _ := s.writeWholeSession("deleted")
		s.write(life, 0, "", events.SessionDeleted{})
		key := events.Subject{Tenant: tenant, ID: events.CatalogueID(events.Key, tenant, "", "", "k"), Aspect: events.Key}
		s.write(key, 0, "", events.KeyCreated{KeyID: "k"})

		all := s.verify(eventlog.VerifyScope{})
		if all.Problem != nil {
			t.Fatalf("%d shards: %v", shards, all.Problem)
		}
		if all.Sessions != 21 || all.Commits != 21*7+2 || all.Events != 21*11+2 || len(all.Open) != 21 {
			t.Errorf("%d shards: %d sessions, %d commits, %d events, %d open", shards, all.Sessions, all.Commits, all.Events, len(all.Open))
		}
		for _, o := range all.Open {
			if o.Deleted != (o.Session == life.ID) || !o.Deleted && !slices.Contains(open, o.ExecutionID) {
				t.Errorf("%+v is reported as open", o)
			}
			if rec, err := s.log.CommitAt(t.Context(), o.Position); err != nil || rec.Events[0].ExecutionID != o.ExecutionID {
				t.Errorf("%+v was not accepted there: %v", o, err)
			}
		}
		one := s.verify(eventlog.VerifyScope{Tenant: tenant, Session: life.ID})
		if one.Problem != nil || one.Sessions != 1 || one.Commits != 8 || one.Events != 12 || len(one.Open) != 1 || !one.Open[0].Deleted {
			t.Errorf("one session: %+v", one)
		}
		none := s.verify(eventlog.VerifyScope{Tenant: tenant, Session: eventlogtest.ID(events.KindSession, "unknown")})
		if none.Problem != nil || none.Sessions != 0 {
			t.Errorf("an unknown session: %+v", none)
		}
	}
}

func TestVerify_RefusesInvalidScopes(t *testing.T) {
	t.Parallel()
	s := newSessionWriter(t, 1)
	for _, bad := range []eventlog.VerifyScope{{Tenant: tenant}, {Session: "ses_*"}, {Session: eventlogtest.ID(events.KindSession, "no tenant")}} {
		if _, err := eventlog.Verify(t.Context(), s.log, bad); err == nil {
			t.Errorf("%+v was accepted", bad)
		}
	}
}

func TestVerify_ReportsChangedCommits(t *testing.T) {
	t.Parallel()
	for name, try := range map[string]struct {
		seq    uint64 // the session that whole writes begins at sequence 1
		change func(*events.Commit)
		says   string
		at     uint64 // sequence at which verify reports the problem
	}{
		"an event":    {2, func(c *events.Commit) { c.Events = []byte(strings.Replace(string(c.Events), "one", "won", 1)) }, "contents hash to", 2},
		"the actor":   {3, func(c *events.Commit) { c.Actor.ID = "someone" }, "contents hash to", 3},
		"the key":     {2, func(c *events.Commit) { c.Actor.Key = "key_2" }, "contents hash to", 2},
		"the user":    {2, func(c *events.Commit) { c.Actor.User = "eve" }, "contents hash to", 2},
		"the service": {2, func(c *events.Commit) { c.Actor.Service = "" }, "contents hash to", 2},
		"the address": {2, func(c *events.Commit) { c.Actor.Address = "192.0.2.2" }, "contents hash to", 2},
		"the version": {2, func(c *events.Commit) { c.V = 1 }, "contents hash to", 2},
		"a commit of version 1 after one of version 2": {4, func(c *events.Commit) {
			life, _, _ := session("s")
			c.V = 1
			*c = c.WithStoredEvents(life, c.Events)
		}, "has version 1, after a commit of version 2", 4},
		"the epoch": {3, func(c *events.Commit) { c.Epoch = 9 }, "contents hash to", 3},
		"the id":    {4, func(c *events.Commit) { c.ID = eventlogtest.ID(events.KindCommit, "else") }, "contents hash to", 4},
		"a commit, hash and all": {2, func(c *events.Commit) {
			life, _, _ := session("s")
			*c = c.WithStoredEvents(life, []byte(strings.Replace(string(c.Events), "one", "won", 1)))
		}, "the commit before it has the hash", 4},
		"the first link": {1, func(c *events.Commit) {
			life, _, _ := session("s")
			c.Prev = strings.Repeat("0", 64)
			*c = c.WithStoredEvents(life, c.Events)
		}, "missing before it", 1},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSessionWriter(t, 1)
			s.writeWholeSession("s")
			if err := s.log.TamperCommit(eventlog.Position{Seq: try.seq}, try.change); err != nil {
				t.Fatal(err)
			}
			p := s.verify(eventlog.VerifyScope{}).Problem
			if p == nil || p.Position.Seq != try.at || !strings.Contains(p.Why, try.says) {
				t.Errorf("verify reports %v, want %q at %d", p, try.says, try.at)
			}
		})
	}
	// The state is not hashed. It is a cache that can be folded again.
	s := newSessionWriter(t, 1)
	s.writeWholeSession("s")
	if err := s.log.TamperCommit(eventlog.Position{Seq: 2}, func(c *events.Commit) { c.State = []byte(`{"v":99}`) }); err != nil {
		t.Fatal(err)
	}
	if p := s.verify(eventlog.VerifyScope{}).Problem; p != nil {
		t.Errorf("a changed state is a problem: %v", p)
	}
}

func TestVerify_ReportsEventsThatWritersNeverProduce(t *testing.T) {
	t.Parallel()
	for name, try := range map[string]struct {
		write func(s *sessionWriter, life, run events.Subject, exe func(int) string) eventlog.Position
		says  string
	}{
		"a second end": {func(s *sessionWriter, _, run events.Subject, exe func(int) string) eventlog.Position {
			return s.write(run, 1, exe(1), events.ExecutionFailed{Code: "X"})
		}, "ended with execution_completed"},
		"an end on both subjects": {func(s *sessionWriter, _, run events.Subject, exe func(int) string) eventlog.Position {
			return s.write(run, 1, exe(2), events.ExecutionCancelled{})
		}, "ended with execution_withdrawn"},
		"an end of what never began": {func(s *sessionWriter, _, run events.Subject, exe func(int) string) eventlog.Position {
			return s.write(run, 1, exe(9), events.ExecutionCompleted{})
		}, "never accepted"},
		"a query twice": {func(s *sessionWriter, life, _ events.Subject, exe func(int) string) eventlog.Position {
			return s.write(life, 0, exe(3), events.MessageAccepted{})
		}, "was accepted before"},
		"life after deletion": {func(s *sessionWriter, life, _ events.Subject, exe func(int) string) eventlog.Position {
			s.write(life, 0, "", events.SessionDeleted{})
			return s.write(life, 0, exe(4), events.MessageAccepted{})
		}, "was deleted before"},
		"deletion before the end of its commit": {func(s *sessionWriter, life, _ events.Subject, _ func(int) string) eventlog.Position {
			return s.write(life, 0, "", events.SessionDeleted{}, events.SessionIdle{})
		}, "not its last event"},
		"a lower epoch": {func(s *sessionWriter, _, run events.Subject, exe func(int) string) eventlog.Position {
			s.write(run, 5, exe(3), events.ExecutionClaimed{Epoch: 5})
			return s.write(run, 4, exe(3), events.ExecutionStarted{})
		}, "under epoch 4, after epoch 5"},
		"an event twice": {func(s *sessionWriter, life, _ events.Subject, _ func(int) string) eventlog.Position {
			d := eventlogtest.Draft("twice", "x")
			s.append(life, d)
			d.ID = eventlogtest.ID(events.KindCommit, "other")
			return s.append(life, d)
		}, "was stored before"},
		"a commit twice": {func(s *sessionWriter, life, _ events.Subject, _ func(int) string) eventlog.Position {
			d := eventlogtest.Draft("again", "x")
			s.append(life, d)
			d.Events = []events.Event{eventlogtest.Message("new", "y")}
			return s.append(life, d)
		}, "this commit id was stored before"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSessionWriter(t, 4)
			life, run, exe := s.writeWholeSession("s")
			at := try.write(s, life, run, exe)
			for _, scope := range []eventlog.VerifyScope{{}, {Tenant: tenant, Session: life.ID}} {
				p := s.verify(scope).Problem
				if p == nil || p.Position != at || !strings.Contains(p.Why, try.says) {
					t.Errorf("verify reports %v, want %q at %s", p, try.says, at)
				}
			}
		})
	}
}

// TestVerify_GoesOnAfterAFault tests that an execution that was accepted twice, as a late retry of an earlier build
// did, is one problem. Verify checks the commits after it. A known problem can be accepted, and all others still
// count.
func TestVerify_GoesOnAfterAFault(t *testing.T) {
	t.Parallel()
	s := newSessionWriter(t, 4)
	life, run, exe := s.writeWholeSession("s")
	retry := events.Draft{ID: eventlogtest.ID(events.KindCommit, "late"), Actor: events.Actor{Kind: "service", ID: "test"}}
	for i, p := range []events.Payload{events.MessageAccepted{Content: "one"}, events.ExecutionDispatched{}} {
		retry.Events = append(retry.Events, events.Event{
			// The first commit of exe(1) has the same ids.
			ID: eventlogtest.ID(events.KindEvent, fmt.Sprint("2-", i)), Time: time.Unix(1_750_000_000, 0), ExecutionID: exe(1), Source: events.FromServer, Data: p,
		})
	}
	twice := s.append(life, retry)
	s.write(run, 2, exe(1), events.ExecutionClaimed{Epoch: 2}, events.ExecutionStarted{Attempt: 1})
	s.write(run, 2, exe(1), events.ExecutionCompleted{Result: "again"})
	_, otherRun, otherExe := s.writeWholeSession("other")
	foreign := s.write(otherRun, 1, otherExe(9), events.ExecutionCompleted{})

	r := s.verify(eventlog.VerifyScope{})
	if len(r.Problems) != 2 || r.Problem == nil || r.Commits != 7+3+7+1 || len(r.Open) != 2 {
		t.Fatalf("both faults, and all commits: %+v", r)
	}
	r = s.verify(eventlog.VerifyScope{Accept: []eventlog.Position{twice}})
	if r.Problem == nil || r.Problem.Position != foreign || len(r.Problems) != 2 {
		t.Fatalf("with the first accepted: %+v", r)
	}
	r = s.verify(eventlog.VerifyScope{Accept: []eventlog.Position{foreign, twice}})
	if r.Problem != nil || len(r.Problems) != 2 || !r.Problems[0].Accepted || !r.Problems[1].Accepted {
		t.Fatalf("with both accepted: %+v", r)
	}
}

// TestVerify_GoesOnAfterACommitThatCannotBeRead tests that verify checks the commits after one whose payload is
// missing.
func TestVerify_GoesOnAfterACommitThatCannotBeRead(t *testing.T) {
	t.Parallel()
	s := newSessionWriter(t, 1)
	_, run, exe := s.writeWholeSession("s")
	s.log.SetPayload(s.log.Payloads()[0], nil)
	end := s.write(run, 1, exe(1), events.ExecutionFailed{Code: "X"})
	r := s.verify(eventlog.VerifyScope{})
	if len(r.Problems) != 2 || r.Problems[0].Position.Seq != 5 || r.Problems[1].Position != end {
		t.Fatalf("faults %+v", r.Problems)
	}
}

func TestVerify_ReportsMissingAndForgedPayloads(t *testing.T) {
	t.Parallel()
	for name, data := range map[string][]byte{"missing": nil, "forged": []byte(`{"result":"forged"}`)} {
		s := newSessionWriter(t, 1)
		s.writeWholeSession("s")
		digests := s.log.Payloads()
		if len(digests) != 1 {
			t.Fatalf("there are %d payloads, want 1", len(digests))
		}
		s.log.SetPayload(digests[0], data)
		p := s.verify(eventlog.VerifyScope{}).Problem
		if p == nil || p.Position.Seq != 5 || !strings.Contains(p.Why, digests[0]) {
			t.Errorf("%s: verify reports %v, want a problem at 5 with the digest", name, p)
		}
	}
}

// logWithGaps is a log without the commits in missing.
type logWithGaps struct {
	eventlog.Log
	missing map[eventlog.Position]bool
}

func (l logWithGaps) Read(ctx context.Context, after eventlog.Position, f eventlog.Filter) iter.Seq2[eventlog.Record, error] {
	return func(yield func(eventlog.Record, error) bool) {
		for rec, err := range l.Log.Read(ctx, after, f) {
			if !l.missing[rec.Position] && !yield(rec, err) {
				return
			}
		}
	}
}

// recordsOf returns the records of a shard.
func (s *sessionWriter) recordsOf(shard int) (list []eventlog.Record) {
	s.t.Helper()
	for rec, err := range s.log.Read(s.t.Context(), eventlog.Position{Shard: shard}, eventlog.Filter{}) {
		if err != nil {
			s.t.Fatal(err)
		}
		list = append(list, rec)
	}
	return list
}

// writeRetiredSession writes a session that was deleted and retired, and another session that was not.
func (s *sessionWriter) writeRetiredSession() (life, run events.Subject) {
	s.t.Helper()
	life, run, _ = s.writeWholeSession("gone")
	s.writeWholeSession("kept")
	s.write(life, 0, "", events.SessionDeleted{})
	s.write(run, 2, "", events.RunRetired{Life: 5, Runs: 2})
	return life, run
}

// TestVerify_AcceptsRemovedContentOfARetiredSession tests that any part of the content of a deleted and retired
// session may be missing: a removal that was interrupted leaves a sound log.
func TestVerify_AcceptsRemovedContentOfARetiredSession(t *testing.T) {
	t.Parallel()
	s := newSessionWriter(t, 1)
	life, run := s.writeRetiredSession()
	s.write(run, 2, "", events.ContentRemoved{Messages: 7})
	all := s.recordsOf(0)
	removable := 0
	for left := 0; left < 1<<7; left++ {
		var v eventlog.Verifier
		removable = 0
		for _, rec := range all {
			end := slices.ContainsFunc(rec.Events, func(e events.Event) bool {
				return e.Type() == "session_deleted" || e.Type() == "run_retired" || e.Type() == "content_removed"
			})
			if (rec.Subject == life || rec.Subject == run) && !end {
				removable++
				if left&(1<<(removable-1)) == 0 {
					continue
				}
			}
			v.Add(rec)
		}
		if p := v.Report().Problem; p != nil {
			t.Fatalf("with the commits %07b left: %v", left, p)
		}
	}
	if removable != 7 {
		t.Errorf("%d commits were removable, want 7", removable)
	}
}

// TestVerify_ReportsCommitsThatNoDeletedSessionExplains tests that missing commits, or a whole missing subject, are
// reported unless session_deleted and run_retired are in the log.
func TestVerify_ReportsCommitsThatNoDeletedSessionExplains(t *testing.T) {
	t.Parallel()
	for name, try := range map[string]struct {
		remove func(rec eventlog.Record, n int, run events.Subject) bool
		says   string
	}{
		"the first commit":        {func(_ eventlog.Record, n int, _ events.Subject) bool { return n == 0 }, "missing before it"},
		"a commit amid the chain": {func(_ eventlog.Record, n int, _ events.Subject) bool { return n == 3 }, "the commit before it has the hash"},
		"the run subject":         {func(rec eventlog.Record, _ int, run events.Subject) bool { return rec.Subject == run }, "2 sequences of the log are missing, of which deleted sessions explain 0"},
		"the whole session":       {func(rec eventlog.Record, _ int, run events.Subject) bool { return rec.Subject.ID == run.ID }, "7 sequences of the log are missing, of which deleted sessions explain 0"},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSessionWriter(t, 1)
			_, run, _ := s.writeWholeSession("open")
			other, _ := s.writeRetiredSession()
			log := logWithGaps{s.log, map[eventlog.Position]bool{}}
			for n, rec := range s.recordsOf(0) {
				if rec.Subject.ID != other.ID && try.remove(rec, n, run) {
					log.missing[rec.Position] = true
				}
			}
			r, err := eventlog.Verify(t.Context(), log, eventlog.VerifyScope{})
			if p := r.Problem; err != nil || p == nil || !strings.Contains(p.Why, try.says) {
				t.Errorf("verify reports %v, %v, want %q", p, err, try.says)
			}
		})
	}
}

// TestVerify_TakesAnImpossibleCountOfADeletionAsUnknown tests that run_retired with a count that cannot be true, as
// earlier builds wrote it, explains no missing commit beyond those that content_removed counts. Verify reports the
// others as undecided, because an interrupted erasure may have removed them.
func TestVerify_TakesAnImpossibleCountOfADeletionAsUnknown(t *testing.T) {
	t.Parallel()
	for name, try := range map[string]struct {
		counts    events.RunRetired
		left      bool // the content of the deleted session is not removed
		purged    bool // the commits of a living session are missing, too
		undecided uint64
	}{
		"a count that wrapped":                              {events.RunRetired{Life: 1<<32 - 1}, false, false, 0},
		"a count that wrapped, beside a purged session":     {events.RunRetired{Life: 1<<32 - 1}, false, true, 7},
		"no commit of life, beside a purged session":        {events.RunRetired{Runs: 7}, false, true, 7},
		"more commits than the log, beside a purged one":    {events.RunRetired{Life: 5, Runs: 40}, false, true, 7},
		"fewer commits than are left, beside a purged one":  {events.RunRetired{Life: 1}, true, true, 7},
		"both counts wrapped, whose sum fits, and a purged": {events.RunRetired{Life: 1<<32 - 1, Runs: 1<<32 - 1}, false, true, 7},
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			s := newSessionWriter(t, 1)
			living, _, _ := s.writeWholeSession("living")
			life, run, _ := s.writeWholeSession("gone")
			s.write(life, 0, "", events.SessionDeleted{})
			retired := s.write(run, 2, "", try.counts)
			if !try.left {
				s.write(run, 2, "", events.ContentRemoved{Messages: 7})
			}
			log := logWithGaps{s.log, map[eventlog.Position]bool{}}
			for _, rec := range s.recordsOf(0) {
				end := rec.Subject == run && rec.Position.Seq >= retired.Seq || slices.ContainsFunc(rec.Events, func(e events.Event) bool { return e.Type() == "session_deleted" })
				log.missing[rec.Position] = !try.left && rec.Subject.ID == life.ID && !end || try.purged && rec.Subject.ID == living.ID
			}
			r, err := eventlog.Verify(t.Context(), log, eventlog.VerifyScope{})
			if err != nil {
				t.Fatal(err)
			}
			if !slices.Equal(r.Uncounted, []eventlog.Position{retired}) || r.Problem != nil || r.Undecided != try.undecided {
				t.Errorf("verify reports %+v, want the count at %s to be unknown and %d commits undecided", r, retired, try.undecided)
			}
		})
	}
}

// TestVerify_SignedHeadsDecideWhatCountsLeaveOpen tests that signed heads show whether missing commits are those of a
// deleted session with an impossible count, or of a living one.
func TestVerify_SignedHeadsDecideWhatCountsLeaveOpen(t *testing.T) {
	t.Parallel()
	key, err := heads.ParsePrivateKey(strings.Repeat("1", 64))
	if err != nil {
		t.Fatal(err)
	}
	s := newSessionWriter(t, 1)
	living, _, _ := s.writeWholeSession("living")
	life, run, _ := s.writeWholeSession("gone")
	s.write(life, 0, "", events.SessionDeleted{})
	retired := s.write(run, 2, "", events.RunRetired{Life: 1<<32 - 1})
	last := s.write(run, 2, "", events.ContentRemoved{Messages: 3}) // an interrupted erasure had removed the other four
	entry := heads.ChainEntry{N: 1, Time: time.Unix(1_750_000_000, 0).UTC(), Through: last.Seq}
	for subject, head := range s.heads {
		entry.Heads = append(entry.Heads, heads.Head{Subject: subject.String(), Seq: head.Seq, Hash: head.Hash})
	}
	stored, _, err := entry.Sign(key)
	if err != nil {
		t.Fatal(err)
	}
	signed := heads.NewChain(0)
	if err := signed.Add(1, stored, key.Public()); err != nil {
		t.Fatal(err)
	}
	for name, try := range map[string]struct {
		heads     []*heads.Chain
		purged    bool
		undecided uint64
		problem   string
	}{
		"sound, without heads":                   {nil, false, 4, ""},
		"sound, with heads":                      {[]*heads.Chain{signed}, false, 0, ""},
		"a living session purged, without heads": {nil, true, 11, ""},
		"a living session purged, with heads":    {[]*heads.Chain{signed}, true, 0, living.ID},
	} {
		log := logWithGaps{s.log, map[eventlog.Position]bool{}}
		for _, rec := range s.recordsOf(0) {
			end := rec.Subject == run && rec.Position.Seq >= retired.Seq || slices.ContainsFunc(rec.Events, func(e events.Event) bool { return e.Type() == "session_deleted" })
			log.missing[rec.Position] = rec.Subject.ID == life.ID && !end || try.purged && rec.Subject.ID == living.ID
		}
		r, err := eventlog.Verify(t.Context(), log, eventlog.VerifyScope{Heads: try.heads})
		if err != nil {
			t.Fatal(err)
		}
		found := ""
		if r.Problem != nil {
			found = r.Problem.Subject
		}
		if r.Undecided != try.undecided || (found == "") != (try.problem == "") || !strings.Contains(found, try.problem) {
			t.Errorf("%s: %d commits undecided and the problem %v, want %d and a problem of %q", name, r.Undecided, r.Problem, try.undecided, try.problem)
		}
	}
}

// TestVerify_ReportsRemovedContentOfADeletedSessionThatIsNotRetired tests that session_deleted alone does not explain
// missing commits: run_retired records that every reader has passed them.
func TestVerify_ReportsRemovedContentOfADeletedSessionThatIsNotRetired(t *testing.T) {
	t.Parallel()
	s := newSessionWriter(t, 1)
	life, _, _ := s.writeWholeSession("s")
	rec, err := s.log.CommitAt(t.Context(), s.write(life, 0, "", events.SessionDeleted{}))
	if err != nil {
		t.Fatal(err)
	}
	var v eventlog.Verifier
	v.Add(rec)
	if p := v.Report().Problem; p == nil || !strings.Contains(p.Why, "missing before it") {
		t.Errorf("verify reports %v", p)
	}
}

func TestVerify_ReportsWritesAfterRetirement(t *testing.T) {
	t.Parallel()
	s := newSessionWriter(t, 1)
	life, run, exe := s.writeWholeSession("s")
	s.write(life, 0, "", events.SessionDeleted{})
	s.write(run, 2, "", events.RunRetired{Life: 5, Runs: 2})
	at := s.write(run, 2, exe(3), events.ExecutionClaimed{Epoch: 2})
	if p := s.verify(eventlog.VerifyScope{}).Problem; p == nil || p.Position != at || !strings.Contains(p.Why, "after run_retired") {
		t.Errorf("verify reports %v", p)
	}
	early := newSessionWriter(t, 1)
	_, run, _ = early.writeWholeSession("s")
	early.write(run, 2, "", events.RunRetired{})
	if p := early.verify(eventlog.VerifyScope{}).Problem; p == nil || !strings.Contains(p.Why, "not deleted before") {
		t.Errorf("verify reports %v", p)
	}
}

func TestParsePosition_RoundTrips(t *testing.T) {
	t.Parallel()
	for _, p := range []eventlog.Position{{}, {Shard: 3, Seq: 48211}, {Seq: 1<<64 - 1}} {
		got, err := eventlog.ParsePosition(p.String())
		if err != nil || got != p {
			t.Errorf("%s reads back as %v, %v", p, got, err)
		}
	}
	for _, bad := range []string{"", "1", "1-", "-1", "a-1", "1-b", "1-2-3", "999-1", "1 -2"} {
		if _, err := eventlog.ParsePosition(bad); err == nil {
			t.Errorf("%q was read as a position", bad)
		}
	}
}
