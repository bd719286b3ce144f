package check_test

import (
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/chaos/check"
)

const heron = "Der Reiher fängt einen Fisch, und wartet dann wieder."

// heronPieces returns the whole text in pieces, some of which split a character.
func heronPieces() (pieces []check.TextPiece) {
	for from := 0; from < len(heron); from += 5 {
		pieces = append(pieces, check.TextPiece{Block: "blk_1", Offset: uint32(from), Text: heron[from:min(from+5, len(heron))], Seq: 2, After: 2}) //nolint:gosec // small numbers
	}
	return pieces
}

func checkPieces(pieces []check.TextPiece) []string {
	return check.CompareWithLog(check.Observations{
		Texts:   map[string]string{"blk_1": heron, "blk_2": "Then it flies home."},
		Streams: []check.ClientRecord{{Client: "SSE", Session: "ses_1", Pieces: pieces}},
	})
}

// TestCheck_AcceptsTextInFlight tests that a client may receive text twice after it reconnects, and the end of a text
// only with its block.
func TestCheck_AcceptsTextInFlight(t *testing.T) {
	t.Parallel()
	again := check.TextPiece{Block: "blk_1", Text: heron[:22], Seq: 2, After: 2}
	other := check.TextPiece{Block: "blk_2", Text: "Then", Seq: 4, After: 4}
	for name, pieces := range map[string][]check.TextPiece{
		"whole":       heronPieces(),
		"from anew":   slices.Insert(heronPieces(), 3, again),
		"end unseen":  heronPieces()[:4],
		"two blocks":  append(heronPieces(), other),
		"interleaved": slices.Insert(heronPieces(), 4, other),
	} {
		if wrong := checkPieces(pieces); wrong != nil {
			t.Errorf("%s: Check found %q", name, wrong)
		}
	}
}

// TestCheck_FindsWrongTextInFlight drops each piece but the last, swaps it with the next, changes it, and sends it
// too early.
func TestCheck_FindsWrongTextInFlight(t *testing.T) {
	t.Parallel()
	for i := range heronPieces()[1:] {
		for name, c := range map[string]struct {
			change func(list []check.TextPiece) []check.TextPiece
			want   string
		}{
			"dropped":       {func(list []check.TextPiece) []check.TextPiece { return slices.Delete(list, i, i+1) }, "instead of"},
			"reordered":     {func(list []check.TextPiece) []check.TextPiece { list[i], list[i+1] = list[i+1], list[i]; return list }, "instead of"},
			"changed":       {func(list []check.TextPiece) []check.TextPiece { list[i].Text = "REIHE"; return list }, "in the log"},
			"too long":      {func(list []check.TextPiece) []check.TextPiece { list[i].Text += heron; return list }, "in the log"},
			"shifted":       {func(list []check.TextPiece) []check.TextPiece { list[i+1].Offset--; return list }, "in the log"},
			"too early":     {func(list []check.TextPiece) []check.TextPiece { list[i].Seq++; return list }, "came with seq 3 after event 2"},
			"without block": {func(list []check.TextPiece) []check.TextPiece { list[i].Block = "blk_3"; return list }, "does not complete"},
		} {
			if wrong := checkPieces(c.change(heronPieces())); len(wrong) != 1 || !strings.HasPrefix(wrong[0], "SSE of ses_1: piece ") || !strings.Contains(wrong[0], c.want) {
				t.Errorf("piece %d %s: Check found %q", i+1, name, wrong)
			}
		}
	}
}
