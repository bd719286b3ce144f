package openblocks_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/openblocks"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
)

// deltas has the text of blocks, and records the time since which it was read.
type deltas struct {
	texts map[string]string
	err   error
	since time.Time
	reads int
}

func (d *deltas) Texts(_ context.Context, _, _ string, since time.Time) (map[string]string, error) {
	d.since = since
	d.reads++
	return d.texts, d.err
}

func newReader(b *runlogtest.Fixture, d *deltas) *openblocks.Reader {
	return &openblocks.Reader{Sessions: b.Writer.Sessions, Deltas: d, Now: time.Now, Logger: slog.New(slog.DiscardHandler)}
}

func block(id string, kind events.BlockKind) events.Block {
	return events.Block{ID: id, Kind: kind, Status: events.StatusPending, Time: time.Now().UTC(), ConversationID: events.MainConversation}
}

// open appends the start of blocks to the log.
func open(t *testing.T, x *runlog.Execution, list ...events.Block) {
	t.Helper()
	for _, b := range list {
		if err := x.AppendFacts(t.Context(), events.BlockStart{Block: b}); err != nil {
			t.Fatal(err)
		}
	}
}

// TestOpen: blocks of the log and of unstored events have the text of their deltas, in the field of their kind.
func TestOpen(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.Claim()
	text, output, complete, late := block("blk_text", events.KindAssistantText), block("blk_output", events.KindToolResult), block("blk_complete", events.KindThinking), block("blk_late", events.KindThinking)
	open(t, x, text, output, complete)
	d := &deltas{texts: map[string]string{"blk_text": "half a sent", "blk_output": "line 1", "blk_late": "I thi"}}
	got, err := newReader(bed, d).Open(t.Context(), x.Session, x.NewEvents(events.BlockStart{Block: late}, events.BlockComplete{Block: complete}))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got["blk_text"].Content != "half a sent" || got["blk_output"].Output != "line 1" || got["blk_output"].Content != "" || got["blk_late"].Content != "I thi" {
		t.Errorf("open blocks: %+v", got)
	}
	if !d.since.Before(text.Time) {
		t.Errorf("the deltas are read since %s, and the first block began at %s", d.since, text.Time)
	}
}

// TestOpen_Nothing: no deltas are read where no block is open.
func TestOpen_Nothing(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	d := &deltas{}
	if got, err := newReader(bed, d).Open(t.Context(), bed.Claim().Session, nil); err != nil || len(got) > 0 || d.reads > 0 {
		t.Errorf("%v, %v, %d reads", got, err, d.reads)
	}
}

// TestClose: every open block is completed as failed, also if its text cannot be read.
func TestClose(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.Claim()
	open(t, x, block("blk_a", events.KindAssistantText), block("blk_b", events.KindToolResult))
	facts, err := newReader(bed, &deltas{err: errors.New("DELTAS is away")}).Close(t.Context(), x.Session)
	if err != nil || len(facts) != 2 {
		t.Fatalf("%v, %v", facts, err)
	}
	if err := x.AppendFacts(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}
	if l := bed.Load(); len(l.Run.Open) > 0 {
		t.Errorf("still open: %v", l.Run.Open)
	}
	for _, f := range facts {
		if b := f.(events.BlockComplete).Block; b.Status != events.StatusError {
			t.Errorf("block %s has status %s", b.ID, b.Status)
		}
	}
}
