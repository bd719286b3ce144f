package projector_test

import (
	"encoding/json"
	"testing"

	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/pkg/readmodel"
	"github.com/spoolhq/spool/services/projector"
)

// longTurn appends a turn of 101 events.
func (s *session) longTurn(n int) {
	s.turn(n)
	lines := make([]events.Payload, 90)
	for i := range lines {
		lines[i] = events.Log{Message: "line"}
	}
	s.append(&s.run, s.execution(n), lines...)
}

// TestStates_AreTheFoldOfTheLog tests that the state of a long session is saved every 500 events and equals the fold
// of its log, also by a projector that starts in the middle and by one that keeps almost nothing in memory. A short
// session and a deleted one have no saved state.
func TestStates_AreTheFoldOfTheLog(t *testing.T) {
	t.Parallel()
	w := newWorld(t, 1)
	w.migrate()
	long, short := w.session(0).create(), w.session(0).create()
	short.turn(1)
	little := func(c *projector.Config, _ *projector.Deps) { c.PresentRows, c.BatchCommits = 1, 7 }
	stop := w.start(little)
	for n := range 6 {
		long.longTurn(n)
	}
	w.awaitProjected(long, short)
	stop()
	stop = w.start()
	for n := range 5 {
		long.longTurn(6 + n)
	}
	w.awaitProjected(long, short)
	stop()

	want := map[int64]string{}
	var state history.State
	for n, err := range eventlog.SessionEvents(t.Context(), w.log, long.tenant, long.id) {
		if err != nil {
			t.Fatal(err)
		}
		if state = history.Evolve(state, n.Seq, n.Event); n.Seq%500 == 0 {
			text, err := json.Marshal(state)
			if err != nil {
				t.Fatal(err)
			}
			want[int64(n.Seq)] = string(text)
		}
	}
	if len(want) != 2 {
		t.Fatalf("the log has %d events", state.Seq)
	}
	for seq, text := range want {
		if got := queryOne[string](w, "SELECT state FROM session_states WHERE session = $1 AND seq = $2 AND version = $3", long.id, seq, history.StateVersion); got != text {
			t.Errorf("the state at %d is\n%s\nwant\n%s", seq, got, text)
		}
	}
	if n := queryOne[int](w, "SELECT count(*) FROM session_states"); n != len(want) {
		t.Errorf("%d states are saved, want %d", n, len(want))
	}
	w.sameAsRebuilt()

	w.start()
	long.append(&long.life, "", events.SessionDeleted{})
	w.awaitProjected(long)
	if n := queryOne[int](w, "SELECT count(*) FROM "+readmodel.TableSessionStates); n != 0 {
		t.Errorf("%d states of a deleted session are left", n)
	}
}
