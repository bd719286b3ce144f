package worker

import (
	"context"
	"encoding/json"
	"strconv"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// read takes the lines that are there.
func (f *follower) read() {
	for !f.full() {
		it, ok := f.agent.Link.Next()
		if !ok {
			return
		}
		now := f.w.d.Now().UTC()
		if it.Line == nil {
			f.keep(f.tr.Garbage(f.garbageID(), it.Garbage, it.TooLong, now))
			continue
		}
		for _, r := range f.tr.Line(*it.Line, now) {
			f.keep(r)
		}
	}
}

// garbageID is unique to this stream, since such lines have no number.
func (f *follower) garbageID() string {
	return f.tr.Journal + "/" + strconv.FormatUint(f.epoch, 10) + "/" + strconv.FormatUint(uint64(f.l.Run.Died), 10)
}

// keep passes on what a line became: text at once, events to the next commit.
func (f *follower) keep(r translate.Result) {
	switch {
	case r.Delta != nil && (!f.keepsText(len(r.Delta.Text)) || f.w.d.Room.Low()): // the block's end has the text
	case r.Delta != nil:
		raw, err := json.Marshal(r.Delta)
		if err == nil {
			err = f.w.d.Deltas.Publish(events.DeltaSubject(f.l.Tenant, f.l.ID), raw)
		}
		if err != nil {
			f.log.Debug("text in flight was lost", "error", err)
		}
	case r.Ended != nil:
		f.ended = r.Ended
	case r.Gap != "":
		f.gap = r.Gap
	case r.Event != nil && !f.keepsEvent(*r.Event):
	case r.Event != nil:
		raw, err := json.Marshal(r.Event)
		if err != nil {
			f.log.Error("an event cannot be encoded and is dropped", "n", r.Event.N, "error", err)
			return
		}
		f.pending, f.size = append(f.pending, *r.Event), f.size+len(raw)
		if b, ok := r.Event.Data.(events.BlockStart); ok && b.Block.Status == events.StatusPending {
			f.notBefore = time.Time{} // its text is shown to nobody before it
		}
	}
}

// commit starts an append of what is pending, unless one is under way or it is too early.
func (f *follower) commit() {
	if f.appending || len(f.pending) == 0 {
		return
	}
	if early := time.Until(f.notBefore); early > 0 {
		f.window.Reset(early)
		return
	}
	if f.waitsForRoom() {
		return
	}
	list := f.pending
	f.pending, f.size, f.appending = nil, 0, true
	lnk, l := f.agent.Link, f.l
	f.waiting.Go(func() {
		stored, err := f.appendEvents(f.base, l, list)
		if err == nil {
			f.acknowledge(lnk, stored.Run.Sandbox.N)
		}
		f.appended <- commitResult{stored, err}
	})
}

// acknowledge lets the runner forget the journal up to line n, which the log holds.
func (f *follower) acknowledge(l *link.Link, n uint64) {
	if err := l.Acknowledge(f.epoch, n); err != nil {
		f.log.Debug("the journal could not be acknowledged", "error", err)
	}
}

// settle waits for the append in flight and stores what is pending.
func (f *follower) settle(ctx context.Context) error {
	if err := f.idle(ctx); err != nil {
		return err
	}
	list := f.pending
	f.pending, f.size = nil, 0
	return f.record(ctx, list)
}
