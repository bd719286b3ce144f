package cli_test

import (
	"encoding/json"
	"slices"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// betweenTurns are the types that need no execution.
var betweenTurns = []events.Type{"file_created", "file_modified", "file_deleted", "log", "error"}

// check checks the invariants of a journal: its numbers have no gaps; for each execution the start comes first, and the
// end once and last; and no block is left open.
func check(t *testing.T, lines []runner.JournalLine) {
	t.Helper()
	open := map[string]string{}
	text := map[string]int{}
	state := map[string]string{}
	for i, l := range lines {
		if i > 0 && l.N != lines[i-1].N+1 {
			t.Fatalf("line %d follows %d", l.N, lines[i-1].N)
		}
		if l.ExecutionID == "" && slices.Contains(betweenTurns, l.Type) {
			continue
		}
		if state[l.ExecutionID] == "" && l.Type != runner.AgentStarted {
			t.Errorf("%s begins with %s", l.ExecutionID, l.Type)
		}
		if state[l.ExecutionID] == "ended" {
			t.Errorf("%s goes on with %s after its end", l.ExecutionID, l.Type)
		}
		state[l.ExecutionID] = "begun"
		switch l.Type {
		case "block_start":
			if b := decode[events.BlockStart](t, l).Block; b.Status == events.StatusPending {
				open[b.ID] = l.ExecutionID
			}
		case events.TextDelta:
			d := decode[runner.TextDelta](t, l)
			if open[d.BlockID] == "" || int(d.Offset) != text[d.BlockID] {
				t.Errorf("delta at %d of block %s, open %q, want offset %d", d.Offset, d.BlockID, open[d.BlockID], text[d.BlockID])
			}
			text[d.BlockID] += len(d.Delta)
		case "block_complete":
			b := decode[events.BlockComplete](t, l).Block
			if open[b.ID] == "" || b.Status == events.StatusPending {
				t.Errorf("completion of %s, which is not open, or with status %s", b.ID, b.Status)
			}
			delete(open, b.ID)
		case runner.TurnEnded:
			state[l.ExecutionID] = "ended"
			for id, e := range open {
				if e == l.ExecutionID {
					t.Errorf("block %s is open at the end of %s", id, e)
				}
			}
		}
	}
}

func decode[T any](t *testing.T, l runner.JournalLine) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(l.Data, &v); err != nil {
		t.Fatalf("line %d %s: %v", l.N, l.Type, err)
	}
	return v
}

func ended(t *testing.T, lines []runner.JournalLine) runner.TurnEnd {
	t.Helper()
	return decode[runner.TurnEnd](t, lines[len(lines)-1])
}

// find returns the first line of a type.
func find[T events.Payload](t *testing.T, lines []runner.JournalLine) T {
	t.Helper()
	var zero T
	for _, l := range lines {
		if l.Type == zero.EventType() {
			return decode[T](t, l)
		}
	}
	t.Fatalf("no line of type %s", zero.EventType())
	return zero
}
