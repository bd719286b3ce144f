package worker

import (
	"encoding/json"
	"strconv"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/link"
	"github.com/spoolhq/spool/services/executor/internal/translate"
)

// readLines handles the lines that have arrived.
func (f *follower) readLines() {
	for !f.isFull() {
		it, ok := f.agent.Link.Next()
		if !ok {
			return
		}
		now := f.w.deps.Now().UTC()
		if it.Line == nil {
			f.handleResult(f.translator.Garbage(f.garbageID(), it.Garbage, it.TooLong, now))
			continue
		}
		for _, r := range f.translator.Line(*it.Line, now) {
			f.handleResult(r)
		}
	}
}

// garbageID returns an id for lines that cannot be read. It is unique to this stream, since such lines have no number.
func (f *follower) garbageID() string {
	return f.translator.Journal + "/" + strconv.FormatUint(f.Epoch, 10) + "/" + strconv.FormatUint(uint64(f.Session.Run.Died), 10)
}

// handleResult publishes text at once, and keeps events for the next commit.
func (f *follower) handleResult(r translate.Result) {
	switch {
	case r.Delta != nil && (!f.keepsText(len(r.Delta.Text)) || f.w.deps.Room.Low()): // the complete block will have the text
	case r.Delta != nil:
		raw, err := json.Marshal(r.Delta)
		if err == nil {
			err = f.w.deps.Deltas.Publish(events.DeltaSubject(f.Session.Tenant, f.Session.ID), raw)
		}
		if err != nil {
			f.Log.Debug("text in flight was lost", "error", err)
		}
	case r.Ended != nil:
		f.ended = r.Ended
	case r.Gap != "":
		f.gap = r.Gap
	case r.Event != nil && !f.keepsEvent(*r.Event):
	case r.Event != nil:
		if err := f.commits.Add(*r.Event); err != nil {
			f.Log.Error("an event cannot be encoded and is dropped", "n", r.Event.N, "error", err)
			return
		}
		if b, ok := r.Event.Data.(events.BlockStart); ok && b.Block.Status == events.StatusPending {
			f.commits.Expedite() // clients show its text only after this event
		}
	}
}

// startCommit starts a commit of the pending events if one is due.
func (f *follower) startCommit() {
	if !f.commits.IsDue() || f.waitsForRoom() {
		return
	}
	lnk := f.agent.Link
	f.commits.Start(f.ctx, func(line uint64) { f.acknowledge(lnk, line) })
}

// acknowledge allows the runner to drop the journal up to line n, which the log holds.
func (f *follower) acknowledge(l *link.Link, n uint64) {
	if err := l.Acknowledge(f.Epoch, n); err != nil {
		f.Log.Debug("the journal could not be acknowledged", "error", err)
	}
}
