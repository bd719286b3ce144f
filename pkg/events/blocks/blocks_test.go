package blocks_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"pgregory.net/rapid"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// vector is a test case for every implementation of the reducer: feed holds the wire events in the order in which a
// client receives them; blocks holds the blocks that the client must show.
type vector struct {
	Doc    string            `json:"doc"`
	Feed   []json.RawMessage `json:"feed"`
	Blocks json.RawMessage   `json:"blocks"`
}

// feed applies one wire event to a view.
func feed(t testing.TB, v *blocks.BlockView, raw json.RawMessage) {
	t.Helper()
	var w events.WireEvent
	if err := json.Unmarshal(raw, &w); err != nil {
		t.Fatal(err)
	}
	if w.Type != events.TextDelta {
		v.Apply(w.Event())
		return
	}
	d := events.Delta{ExecutionID: w.ExecutionID, ConversationID: w.ConversationID}
	if err := json.Unmarshal(w.Data, &d); err != nil {
		t.Fatal(err)
	}
	v.ApplyDelta(d)
}

func TestView_MatchesTheSharedVectors(t *testing.T) {
	t.Parallel()
	files, err := filepath.Glob("testdata/*.json")
	if err != nil || len(files) < 8 {
		t.Fatalf("%d vectors, %v", len(files), err)
	}
	for _, f := range files {
		t.Run(strings.TrimSuffix(filepath.Base(f), ".json"), func(t *testing.T) {
			t.Parallel()
			raw, err := os.ReadFile(f)
			if err != nil {
				t.Fatal(err)
			}
			var vec vector
			dec := json.NewDecoder(bytes.NewReader(raw))
			dec.DisallowUnknownFields()
			if err := dec.Decode(&vec); err != nil {
				t.Fatal(err)
			}
			v := blocks.NewBlockView()
			for _, e := range vec.Feed {
				feed(t, v, e)
			}
			got, err := json.Marshal(v.Blocks())
			if err != nil {
				t.Fatal(err)
			}
			var want bytes.Buffer
			if err := json.Compact(&want, vec.Blocks); err != nil {
				t.Fatal(err)
			}
			if string(got) != want.String() {
				t.Fatalf("%s\n got %s\nwant %s", vec.Doc, got, want.String())
			}
		})
	}
}

// TestStreamedText_AnyOrderOfPiecesGivesTheText tests that the pieces of a text, in any order, overlapping and repeated, add
// up to the text, and that a view shows only prefixes of it.
func TestStreamedText_AnyOrderOfPiecesGivesTheText(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		whole := rapid.StringN(0, 60, -1).Draw(t, "text")
		var pieces []events.Delta
		for i := 0; i < len(whole); {
			n := rapid.IntRange(1, len(whole)-i).Draw(t, "length")
			pieces = append(pieces, events.Delta{Offset: uint32(i), Text: whole[i : i+n]})
			i += n
		}
		for range rapid.IntRange(0, 5).Draw(t, "extra") {
			if len(whole) == 0 {
				break
			}
			i := rapid.IntRange(0, len(whole)-1).Draw(t, "from")
			j := rapid.IntRange(i, len(whole)).Draw(t, "to")
			pieces = append(pieces, events.Delta{Offset: uint32(i), Text: whole[i:j]})
		}
		var text blocks.StreamedText
		var shown string
		for _, d := range rapid.Permutation(pieces).Draw(t, "order") {
			shown += text.Add(d)
			if shown != text.Known || !strings.HasPrefix(whole, shown) {
				t.Fatalf("shown %q, known %q, of %q", shown, text.Known, whole)
			}
		}
		if shown != whole || len(text.Waiting) != 0 {
			t.Fatalf("shown %q of %q, %d pieces wait", shown, whole, len(text.Waiting))
		}
	})
}

// addSmallPieces adds a text of the given size in pieces of 100 bytes, and calls check now and then.
func addSmallPieces(text *blocks.StreamedText, size int, check func()) {
	piece := strings.Repeat("x", 100)
	for n := 0; n < size; n += len(piece) {
		text.Add(events.Delta{Offset: uint32(n), Text: piece})
		if check != nil && n%(1<<20) < len(piece) {
			check()
		}
	}
}

// TestStreamedText_AllocatesInProportionToTheText tests that a block of 50 MB that grows by small pieces does not copy its text
// at each of them. It counts the allocations of the process, so it does not run beside other tests.
func TestStreamedText_AllocatesInProportionToTheText(t *testing.T) {
	const size, most = 50_000_000, 8 * 50_000_000
	allocated := func() uint64 {
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.TotalAlloc
	}
	before := allocated()
	var text blocks.StreamedText
	addSmallPieces(&text, size, func() {
		if n := allocated() - before; n > most {
			t.Fatalf("%d bytes were allocated for the first %d bytes of the text, at most %d are allowed for all", n, len(text.Known), most)
		}
	})
	if n := allocated() - before; len(text.Known) != size || n > most {
		t.Errorf("a text of %d bytes allocated %d", len(text.Known), n)
	}
}

// BenchmarkText adds a text of 1 MB in pieces of 100 bytes.
func BenchmarkText(b *testing.B) {
	b.ReportAllocs()
	b.SetBytes(1 << 20)
	for b.Loop() {
		addSmallPieces(&blocks.StreamedText{}, 1<<20, nil)
	}
}

// TestStreamedText_ContinuesFromAKnownText tests that a caller may set Known, before and after pieces were added.
func TestStreamedText_ContinuesFromAKnownText(t *testing.T) {
	t.Parallel()
	text := blocks.StreamedText{Known: "Hello"}
	if fresh := text.Add(events.Delta{Offset: 3, Text: "lo, wo"}); fresh != ", wo" || text.Known != "Hello, wo" {
		t.Errorf("fresh %q, known %q", fresh, text.Known)
	}
	before := text.Known
	text.Known = "Adieu, wo"
	text.Add(events.Delta{Offset: 11, Text: "d"})
	if fresh := text.Add(events.Delta{Offset: 9, Text: "rl"}); fresh != "rld" || text.Known != "Adieu, world" {
		t.Errorf("fresh %q, known %q", fresh, text.Known)
	}
	if before != "Hello, wo" {
		t.Errorf("a text that was returned became %q", before)
	}
}

// TestView_LostDeltasDoNotChangeTheResult tests that a client ends with the same blocks, independent of which deltas
// it receives and where among the events.
func TestView_LostDeltasDoNotChangeTheResult(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kept, deltas := history(t)
		full := blocks.NewBlockView()
		for _, e := range kept {
			full.Apply(e)
		}
		partial := blocks.NewBlockView()
		for _, e := range kept {
			for _, d := range deltas {
				if rapid.IntRange(0, 3).Draw(t, "deliver") == 0 {
					partial.ApplyDelta(d)
				}
			}
			partial.Apply(e)
		}
		if full.String() != partial.String() {
			t.Fatalf("with deltas\n%swithout\n%s", partial, full)
		}
	})
}

// history draws complete blocks and the deltas that precede them.
func history(t *rapid.T) ([]events.Event, []events.Delta) {
	var kept []events.Event
	var deltas []events.Delta
	for i := range rapid.IntRange(1, 4).Draw(t, "blocks") {
		b := events.Block{ID: string(rune('a' + i)), Kind: events.KindAssistantText, Status: events.StatusPending, Time: time.Unix(int64(i), 0).UTC()}
		kept = append(kept, events.Event{ExecutionID: "x", Time: b.Time, Data: events.BlockStart{Block: b}})
		text := rapid.StringN(1, 12, -1).Draw(t, "text")
		cut := rapid.IntRange(0, len(text)).Draw(t, "cut")
		deltas = append(deltas, events.Delta{BlockID: b.ID, Text: text[:cut]}, events.Delta{BlockID: b.ID, Offset: uint32(cut), Text: text[cut:]})
		b.Content, b.Status = text, events.StatusComplete
		kept = append(kept, events.Event{ExecutionID: "x", Time: b.Time, Data: events.BlockComplete{Block: b}})
	}
	return kept, deltas
}
