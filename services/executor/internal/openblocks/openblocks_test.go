package openblocks_test

import (
	"context"
	"errors"
	"log/slog"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/openblocks"
	"github.com/spoolhq/spool/services/executor/internal/runlog"
	"github.com/spoolhq/spool/services/executor/internal/runlog/runlogtest"
)

// texts has the text of blocks, and records where its last read began.
type texts struct {
	texts map[string]string
	err   error
	from  deltas.StartPosition
	reads int
}

func (d *texts) ReadTexts(_ context.Context, _, _ string, from deltas.StartPosition) (map[string]string, error) {
	d.from = from
	d.reads++
	return d.texts, d.err
}

func newReader(b *runlogtest.Fixture, d *texts) *openblocks.Reader {
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
	x := bed.ClaimExecution()
	text, output, complete, late := block("blk_text", events.KindAssistantText), block("blk_output", events.KindToolResult), block("blk_complete", events.KindThinking), block("blk_late", events.KindThinking)
	open(t, x, text, output, complete)
	d := &texts{texts: map[string]string{"blk_text": "half a sent", "blk_output": "line 1", "blk_late": "I thi"}}
	got, err := newReader(bed, d).OpenBlocks(t.Context(), x.Session, x.NewEvents(events.BlockStart{Block: late}, events.BlockComplete{Block: complete}))
	if err != nil {
		t.Fatal(err)
	}
	if len(got) != 3 || got["blk_text"].Content != "half a sent" || got["blk_output"].Output != "line 1" || got["blk_output"].Content != "" || got["blk_late"].Content != "I thi" {
		t.Errorf("open blocks: %+v", got)
	}
	if d.from.After != 0 || !d.from.Time.Equal(text.Time) {
		t.Errorf("the deltas are read from %+v, and the first block began at %s", d.from, text.Time)
	}
}

// TestOpen_ReadsAfterTheFirstBlock: the deltas are read from the lowest position of the open blocks, also of unstored ones.
func TestOpen_ReadsAfterTheFirstBlock(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.ClaimExecution()
	facts := []events.Payload{
		events.BlockStart{Block: block("blk_complete", events.KindAssistantText), TextAfter: 3},
		events.BlockStart{Block: block("blk_open", events.KindAssistantText), TextAfter: 17},
	}
	if err := x.AppendFacts(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}
	d := &texts{}
	late := x.NewEvents(events.BlockStart{Block: block("blk_late", events.KindThinking), TextAfter: 20}, events.BlockComplete{Block: block("blk_complete", events.KindAssistantText)})
	if _, err := newReader(bed, d).OpenBlocks(t.Context(), x.Session, late); err != nil {
		t.Fatal(err)
	}
	if d.from.After != 17 {
		t.Errorf("the deltas are read after %d, want 17", d.from.After)
	}
}

// TestOpen_Nothing: no deltas are read where no block is open.
func TestOpen_Nothing(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	d := &texts{}
	if got, err := newReader(bed, d).OpenBlocks(t.Context(), bed.ClaimExecution().Session, nil); err != nil || len(got) > 0 || d.reads > 0 {
		t.Errorf("%v, %v, %d reads", got, err, d.reads)
	}
}

// TestClose: every open block is completed as failed, also if its text cannot be read.
func TestClose(t *testing.T) {
	t.Parallel()
	bed := runlogtest.New(t)
	x := bed.ClaimExecution()
	open(t, x, block("blk_a", events.KindAssistantText), block("blk_b", events.KindToolResult))
	facts, err := newReader(bed, &texts{err: errors.New("DELTAS is away")}).CloseBlocks(t.Context(), x.Session)
	if err != nil || len(facts) != 2 {
		t.Fatalf("%v, %v", facts, err)
	}
	if err := x.AppendFacts(t.Context(), facts...); err != nil {
		t.Fatal(err)
	}
	if l := bed.LoadSession(); len(l.Run.Open) > 0 {
		t.Errorf("still open: %v", l.Run.Open)
	}
	for _, f := range facts {
		if b := f.(events.BlockComplete).Block; b.Status != events.StatusError {
			t.Errorf("block %s has status %s", b.ID, b.Status)
		}
	}
}
