package fanout

import (
	"encoding/json"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/test/bench/system"
)

// session returns the events of an execution with one block.
func session(t *testing.T, written time.Time) (list []events.WireEvent) {
	t.Helper()
	seq := uint32(0)
	add := func(typ events.Type, data any) {
		raw, err := json.Marshal(data)
		if err != nil {
			t.Fatal(err)
		}
		w := events.WireEvent{Type: typ, Time: written, ExecutionID: "exe", Source: events.FromRunner, Data: raw}
		if typ != events.TextDelta {
			seq++
		}
		w.Seq = seq
		list = append(list, w)
	}
	block := events.Block{ID: "b", Kind: events.KindAssistantText}
	add(events.BlockStart{}.EventType(), events.BlockStart{Block: block})
	for i := range piecesPerBlock {
		add(events.TextDelta, map[string]any{"blockId": "b", "offset": len(block.Content), "delta": system.TimestampText(written.Add(time.Duration(i)))})
		block.Content += system.TimestampText(written.Add(time.Duration(i)))
	}
	add(events.BlockComplete{}.EventType(), events.BlockComplete{Block: block})
	add(events.ExecutionCompleted{}.EventType(), struct{}{})
	return list
}

func TestReader_FailsUnlessEverythingCameOnceAndInOrder(t *testing.T) {
	t.Parallel()
	written := time.Unix(1_750_000_000, 0)
	received := written.Add(20 * time.Millisecond)
	all := measureWindow{From: written, To: written.Add(time.Second)}
	read := func(blocks int, list []events.WireEvent) (*sessionClient, error) {
		c := &sessionClient{session: "ses", execution: "exe", blocks: blocks}
		for _, w := range list {
			if ended, err := c.checkAndMeasureEvent(w, received, all); ended || err != nil {
				return c, err
			}
		}
		return c, nil
	}
	list := session(t, written)
	c, err := read(1, list)
	if err != nil || len(c.samples) != piecesPerBlock+2 || c.inWindow != piecesPerBlock+2 {
		t.Errorf("%d samples, %d in the window, %v; want %d", len(c.samples), c.inWindow, err, piecesPerBlock+2)
	}
	last := len(list) - 1
	swapped := slices.Clone(list)
	swapped[4], swapped[5] = swapped[5], swapped[4]
	for name, bad := range map[string]struct {
		list   []events.WireEvent
		blocks int
		err    string
	}{
		"lost text":        {slices.Delete(slices.Clone(list), 4, 5), 1, "are lost"},
		"lost event":       {slices.Delete(slices.Clone(list), last-1, last), 1, "is lost"},
		"text twice":       {slices.Insert(slices.Clone(list), 4, list[4]), 1, "duplicated"},
		"event twice":      {slices.Insert(slices.Clone(list), last, list[last-1]), 1, "duplicated"},
		"text in disorder": {swapped, 1, "are lost"},
		"end too early":    {list, 2, "want 36 and 4"},
	} {
		if _, err := read(bad.blocks, bad.list); err == nil || !strings.Contains(err.Error(), bad.err) {
			t.Errorf("%s: error %v, want %q", name, err, bad.err)
		}
	}
}

func TestPercentile_OfHistogram(t *testing.T) {
	t.Parallel()
	h := []int64{90, 8, 0, 2}
	if a, b, c := percentileIndex(h, 0.5), percentileIndex(h, 0.98), percentileIndex(h, 0.99); a != 0 || b != 1 || c != 3 {
		t.Errorf("percentiles %d, %d and %d, want 0, 1 and 3", a, b, c)
	}
	if percentileIndex(make([]int64, 3), 0.99) != 0 {
		t.Error("an empty histogram has a percentile above 0")
	}
}
