package system_test

import (
	"encoding/json"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// sent returns a message that a gateway sends about one block.
func sent(t *testing.T, typ events.Type, seq uint32, data any) events.WireEvent {
	t.Helper()
	raw, err := json.Marshal(data)
	if err != nil {
		t.Fatal(err)
	}
	return events.WireEvent{Type: typ, Seq: seq, Data: raw}
}

func text(t *testing.T, seq uint32, offset int, piece string) events.WireEvent {
	return sent(t, events.TextDelta, seq, map[string]any{"blockId": "b", "offset": offset, "delta": piece})
}

func whole(t *testing.T, seq uint32, content string) events.WireEvent {
	return sent(t, "block_complete", seq, events.BlockComplete{Block: events.Block{ID: "b", Kind: events.KindAssistantText, Content: content}})
}

func TestStamps(t *testing.T) {
	t.Parallel()
	began := time.Unix(1_750_000_000, 0)
	a, b := system.TimestampText(began), system.TimestampText(began.Add(10*time.Millisecond))
	at := began.Add(30 * time.Millisecond)
	var s system.TimestampChecker
	for i, step := range []struct {
		w    events.WireEvent
		late []time.Duration
	}{
		{sent(t, "block_start", 1, struct{}{}), nil},
		{text(t, 1, 0, a), []time.Duration{30 * time.Millisecond}},
		{whole(t, 2, a+b), []time.Duration{20 * time.Millisecond}}, // what was shown before does not count again
	} {
		late, err := s.CheckEvent(step.w, at)
		if err != nil || len(late) != len(step.late) || len(late) > 0 && late[0] != step.late[0] {
			t.Errorf("step %d gives %v, %v, want %v", i, late, err, step.late)
		}
	}
	if s.Pieces != 2 || s.Kept != 2 {
		t.Errorf("%d pieces and %d events", s.Pieces, s.Kept)
	}
	for what, list := range map[string][]events.WireEvent{
		"seq 2 came after 0":       {sent(t, "log", 2, struct{}{})},
		"seq 1 came after 1":       {sent(t, "log", 1, struct{}{}), sent(t, "log", 1, struct{}{})},
		"came after event 0":       {text(t, 1, 0, a)},
		"text from 24 came after":  {text(t, 0, 24, b)},
		"text from 0 came after":   {text(t, 0, 0, a), text(t, 0, 0, a)},
		"another text than was":    {text(t, 0, 0, a), whole(t, 1, b)},
		"no whole pieces":          {text(t, 0, 0, a[:20])},
		"invalid syntax":           {text(t, 0, 0, strings.Repeat("x", system.TimestampTextBytes))},
		"cannot unmarshal":         {sent(t, events.TextDelta, 0, []int{})},
		"block b is complete with": {text(t, 0, 0, b), whole(t, 1, "")},
	} {
		var s system.TimestampChecker
		var err error
		for _, w := range list {
			if _, err = s.CheckEvent(w, at); err != nil {
				break
			}
		}
		if err == nil || !strings.Contains(err.Error(), what) {
			t.Errorf("want %q, got %v", what, err)
		}
	}
}

func TestStamps_CheckTextAgainAfterJoin(t *testing.T) {
	t.Parallel()
	began := time.Unix(1_750_000_000, 0)
	a, b := system.TimestampText(began), system.TimestampText(began.Add(10*time.Millisecond))
	for name, c := range map[string]struct {
		again events.WireEvent
		err   string
	}{
		"whole text again":      {text(t, 0, 0, a+b), ""},
		"text from the middle":  {text(t, 0, system.TimestampTextBytes, b), "24 bytes are lost"},
		"another text":          {text(t, 0, 0, b+b), "differs from the text that was shown"},
		"event of another time": {sent(t, "log", 2, struct{}{}), "event 1 is lost"},
	} {
		var s system.TimestampChecker
		if _, err := s.CheckEvent(text(t, 0, 0, a), began); err != nil {
			t.Fatal(err)
		}
		s.HandleRejoin()
		ages, err := s.CheckEvent(c.again, began)
		if c.err != "" {
			if err == nil || !strings.Contains(err.Error(), c.err) {
				t.Errorf("%s: error %v, want %q", name, err, c.err)
			}
			continue
		}
		if err != nil || len(ages) != 1 || s.Pieces != 2 {
			t.Errorf("%s: %d ages, %d pieces, %v; want the second piece once", name, len(ages), s.Pieces, err)
		}
	}
}
