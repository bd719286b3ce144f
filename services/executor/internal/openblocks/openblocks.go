// Package openblocks reads the blocks that are still being written when their execution, or an attempt of it, ends.
package openblocks

import (
	"context"
	"log/slog"
	"maps"
	"math"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/eventlog"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/run"
)

// DeltaReader reads the text in flight of blocks from the stream DELTAS.
type DeltaReader interface {
	// ReadTexts returns the text of a session's blocks, by block id, from the deltas after a start.
	ReadTexts(ctx context.Context, tenant, session string, from deltas.StartPosition) (map[string]string, error)
}

// A Reader reads the blocks of a session that were opened and not completed. It is safe for concurrent use.
type Reader struct {
	Sessions eventlog.Sessions
	Deltas   DeltaReader
	Now      func() time.Time
	Logger   *slog.Logger
}

// OpenBlocks returns the session's open blocks by id, with their text so far. A block is open if the log, or else unstored, which are
// events that the log does not have yet, has its start and not its completion. If the deltas cannot be read, the blocks have no text. If
// there is no open block, as at the normal end of a turn, OpenBlocks sends no request.
func (r *Reader) OpenBlocks(ctx context.Context, l *eventlog.SessionState, unstored []events.Event) (map[string]events.Block, error) {
	started, completed := blocksLeftOpen(unstored)
	stored := slices.DeleteFunc(slices.Clone(l.Run.Open), func(b run.OpenBlock) bool { return completed[b.ID] })
	blocks, err := r.Sessions.OpenBlocks(ctx, l.ID, stored)
	if err != nil {
		return nil, err
	}
	maps.Copy(blocks, started)
	if len(blocks) == 0 {
		return blocks, nil
	}
	texts, err := r.Deltas.ReadTexts(ctx, l.Tenant, l.ID, r.textStart(stored, blocks, unstored))
	if err != nil {
		r.Logger.Warn("the text of open blocks could not be read", "session", l.ID, "execution", l.Run.Execution, "error", err)
	}
	for id, b := range blocks {
		switch b.Kind {
		case events.KindAssistantText, events.KindThinking:
			b.Content = texts[id]
		case events.KindToolResult:
			b.Output = texts[id]
		}
		blocks[id] = b
	}
	return blocks, nil
}

// textStart returns the position in the stream DELTAS at which the text of the first of the open blocks begins.
func (r *Reader) textStart(stored []run.OpenBlock, blocks map[string]events.Block, unstored []events.Event) deltas.StartPosition {
	from := deltas.StartPosition{After: math.MaxUint64, Time: r.Now()}
	for _, b := range blocks {
		if b.Time.Before(from.Time) {
			from.Time = b.Time
		}
	}
	for _, b := range stored {
		from.After = min(from.After, b.TextAfter)
	}
	for _, e := range unstored {
		if d, ok := e.Data.(events.BlockStart); ok && blocks[d.Block.ID].ID != "" {
			from.After = min(from.After, d.TextAfter)
		}
	}
	if from.After == math.MaxUint64 {
		from.After = 0
	}
	return from
}

// blocksLeftOpen returns the blocks that the events in list open and do not complete, by id, and the ids of the blocks that they complete.
func blocksLeftOpen(list []events.Event) (open map[string]events.Block, completed map[string]bool) {
	open, completed = map[string]events.Block{}, map[string]bool{}
	for _, e := range list {
		switch d := e.Data.(type) {
		case events.BlockStart:
			if d.Block.Status == events.StatusPending {
				open[d.Block.ID] = d.Block
				delete(completed, d.Block.ID)
			}
		case events.BlockComplete:
			delete(open, d.Block.ID)
			completed[d.Block.ID] = true
		}
	}
	return open, completed
}

// CloseBlocks returns an event for each block that is open in the log. The event completes the block with its text so far and the status
// error.
func (r *Reader) CloseBlocks(ctx context.Context, l *eventlog.SessionState) ([]events.Payload, error) {
	known, err := r.OpenBlocks(ctx, l, nil)
	if err != nil {
		return nil, err
	}
	var out []events.Payload
	for _, open := range l.Run.Open {
		b, ok := known[open.ID]
		if !ok {
			b = events.Block{ID: open.ID, Kind: events.KindError, Time: r.Now().UTC(), ConversationID: events.MainConversation}
		}
		b.Status = events.StatusError
		out = append(out, events.BlockComplete{Block: b})
	}
	return out, nil
}
