package projector_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/topology"
)

func TestPoison_GoesToDeadWithoutBlockingTheGroup(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	s := w.session(3).create()
	ack, err := w.js.Publish(t.Context(), w.log.Partitioning().Subject(s.run.Subject), []byte(`{"v":1,"events":"garbage"`))
	if err != nil {
		t.Fatal(err)
	}
	next := w.session(3).create()
	w.start()
	w.awaitProjected(next)
	want := fmt.Sprintf("0-%d", ack.Sequence)
	if got := queryOne[string](w, "SELECT position||' '||subject FROM poison"); got != want+" "+w.log.Partitioning().Subject(s.run.Subject) {
		t.Errorf("poison is %q", got)
	}
	dead, err := w.js.Stream(t.Context(), topology.StreamDead)
	if err != nil {
		t.Fatal(err)
	}
	m, err := dead.GetLastMsgForSubject(t.Context(), topology.DeadSubject(w.log.Partitioning().Subject(s.run.Subject)))
	if err != nil {
		t.Fatal(err)
	}
	if m.Header.Get(topology.HeaderDeadSequence) != fmt.Sprint(ack.Sequence) || !strings.Contains(m.Header.Get(topology.HeaderDeadReason), "decode commit") {
		t.Errorf("headers in DEAD: %v", m.Header)
	}
	s.append(&s.life, "", events.SessionIdle{})
	w.awaitProjected(s)
	if tip := queryOne[int](w, "SELECT tip FROM sessions WHERE id = $1", s.id); tip != 2 {
		t.Errorf("tip is %d, want 2: a commit that cannot be decoded has no seq", tip)
	}
	w.sameAsRebuilt()
}

// TestLostPayload_KeepsItsSeq tests that events whose data is missing in the object store keep their seq.
func TestLostPayload_KeepsItsSeq(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	s := w.session(3).create()
	s.append(&s.run, "", events.Log{Message: strings.Repeat("x", 400_000)}, events.Log{Message: "small"})
	s.append(&s.run, "", events.Log{Message: "after"})
	bucket, err := w.js.ObjectStore(t.Context(), topology.BucketPayloads)
	if err != nil {
		t.Fatal(err)
	}
	list, err := bucket.List(t.Context())
	if err != nil || len(list) != 1 {
		t.Fatalf("payloads: %v, %v", list, err)
	}
	if err := bucket.Delete(t.Context(), list[0].Name); err != nil {
		t.Fatal(err)
	}
	w.start()
	w.awaitProjected(s)
	if got := queryOne[string](w, "SELECT string_agg(seq||' '||type, ',' ORDER BY seq) FROM events"); got != "1 session_created,2 log,3 log,4 log" {
		t.Errorf("events are %s", got)
	}
	if got := queryOne[int](w, "SELECT count(*) FROM poison"); got != 1 {
		t.Errorf("%d commits are noted, want 1", got)
	}
	w.sameAsRebuilt()
}

// TestRefusedRows_DoNotBlockOthers tests that a commit that Postgres refuses permanently is stored without its data
// and reported, and does not block other commits.
func TestRefusedRows_DoNotBlockOthers(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	w.exec("ALTER TABLE executions ADD CONSTRAINT of_a_test CHECK (code <> 'BOOM')")
	s, other := w.session(5).create(), w.session(5).create()
	x := s.post(1)
	s.append(&s.run, x, events.ExecutionFailed{Code: "BOOM", Message: "m"})
	other.turn(1)
	s.turn(2)
	w.start()
	w.awaitProjected(s, other)
	w.checkAgainstLog(other)
	if got := queryOne[string](w, "SELECT subject||' '||reason FROM poison"); !strings.HasPrefix(got, w.log.Partitioning().Subject(s.run.Subject)+" postgres refuses the rows: ") {
		t.Errorf("poison is %q", got)
	}
	if got := queryOne[string](w, "SELECT string_agg(seq||'', ',' ORDER BY seq) FROM events WHERE session = $1", s.id); !strings.HasPrefix(got, "1,2,3,4,5,6,7,8,") {
		t.Errorf("seqs are %s", got)
	}
	if got := queryOne[string](w, "SELECT event::json->>'data' FROM events WHERE type = 'execution_failed'"); got != `{"unprojectable":true}` {
		t.Errorf("the refused event is %s", got)
	}
}
