package usage_test

import (
	"encoding/json"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

// TestFolder_StatesWhatItHasCounted tests that an entry states up to which position of each shard its usage is counted, and that
// a new copy adds the positions to an entry of an earlier version although its tenant does nothing.
func TestFolder_StatesWhatItHasCounted(t *testing.T) {
	t.Parallel()
	w := newWorld(t)
	w.setBudget("a", events.PeriodTotal, events.Budget{Turns: 5})
	id := session("a", 0)
	w.create("a", id)
	first := w.start(nil)
	shard := events.Partition(id) % shards
	requireCounted := func() {
		t.Helper()
		last := w.heads[events.RunSubject("a", id)].Seq
		w.until("the last commit is counted", func() bool { return w.entry("a").Counted[shard] >= last })
		if have := spentOf(w.entry("a"), events.PeriodTotal); have != w.spent["a"] {
			t.Errorf("up to the last commit %+v are counted, want %+v", have, w.spent["a"])
		}
	}
	for n := range 3 {
		w.turn("a", id, n, func() {})
		requireCounted()
	}
	w.awaitCounted() // the last write of the copy
	first.stop()

	have, err := w.kv.Get(t.Context(), "a")
	must(t, err)
	var entry map[string]json.RawMessage
	must(t, json.Unmarshal(have.Value(), &entry))
	delete(entry, "counted")
	body, err := json.Marshal(entry)
	must(t, err)
	_, err = w.kv.Put(t.Context(), "a", body)
	must(t, err)
	w.start(nil)
	requireCounted()
}
