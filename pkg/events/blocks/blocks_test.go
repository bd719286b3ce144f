package blocks_test

import (
	"bytes"
	"encoding/json"
	"os"
	"path/filepath"
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
func feed(t testing.TB, v *blocks.View, raw json.RawMessage) {
	t.Helper()
	var w events.Wire
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
			v := blocks.NewView()
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

// TestText_AnyOrderOfPiecesGivesTheText tests that the pieces of a text, in any order, overlapping and repeated, add
// up to the text, and that a view shows only prefixes of it.
func TestText_AnyOrderOfPiecesGivesTheText(t *testing.T) {
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
		var text blocks.Text
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

// TestView_LostDeltasDoNotChangeTheResult tests that a client ends with the same blocks, independent of which deltas
// it receives and where among the events.
func TestView_LostDeltasDoNotChangeTheResult(t *testing.T) {
	t.Parallel()
	rapid.Check(t, func(t *rapid.T) {
		kept, deltas := history(t)
		full := blocks.NewView()
		for _, e := range kept {
			full.Apply(e)
		}
		partial := blocks.NewView()
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
