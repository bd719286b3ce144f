package replay

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"time"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

const (
	pageEvents    = 64        // largest number of events that one read returns
	pageBytes     = 256 << 10 // bytes after which a read ends
	maxBatchBytes = 256 << 10 // bytes after which Next returns
)

// replayStep is the next item that a replay sends: an event or a piece of text in flight.
type replayStep struct {
	due    time.Time
	stored *reads.StoredEvent
	event  events.WireEvent
	text   *events.Delta
}

// Next blocks until something is due and returns it: a notice, an event, or text in flight. It returns io.EOF after
// the replay's end, the cause of ctx, or the reason why the replay cannot continue.
func (r *Replay) Next(ctx context.Context) (frames []live.Frame, err error) {
	size := 0
	for size < maxBatchBytes {
		if ctx.Err() != nil {
			return framesOrError(frames, context.Cause(ctx))
		}
		for _, n := range r.notices {
			frames = append(frames, live.Frame{Notice: &n})
		}
		r.notices = nil
		if r.next == nil {
			if err := r.findNextStep(ctx); err != nil {
				return framesOrError(frames, err)
			}
			continue // its notices are sent before the wait
		}
		wait := time.Until(r.next.due)
		switch {
		case wait > 0 && len(frames) > 0:
			return frames, nil
		case wait > 0:
			if err := r.waitDuration(ctx, wait); err != nil {
				return nil, err
			}
		default:
			frame, err := r.takeStep()
			if err != nil {
				return framesOrError(frames, err)
			}
			size += frame.Len(true)
			frames = append(frames, frame)
		}
	}
	return frames, nil
}

// framesOrError returns frames without the error if there are frames, because the next call of Replay.Next will
// return the error again.
func framesOrError(frames []live.Frame, err error) ([]live.Frame, error) {
	if len(frames) > 0 {
		return frames, nil
	}
	return nil, err
}

// waitDuration blocks for the duration d, unless the session or the replay's client ends first.
func (r *Replay) waitDuration(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.reader.Changed():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return r.reader.EndError()
}

// findNextStep finds the next step of the replay and the time at which it is due, or the end of the replay. If it
// skips an event, it finds neither and must be called again.
func (r *Replay) findNextStep(ctx context.Context) error {
	if err := r.reader.EndError(); err != nil {
		return err
	}
	if r.ended {
		return io.EOF
	}
	if len(r.page) == 0 && r.read < r.last {
		if err := r.readEventPage(ctx); err != nil {
			return err
		}
	}
	if len(r.page) == 0 {
		r.ended = true
		r.notices = append(r.notices, pace.Notice{Kind: pace.ReplayEnded, Data: pace.EndedNotice{Seq: r.sent}})
		return nil
	}
	s := replayStep{stored: &r.page[0]}
	if err := json.Unmarshal(s.stored.JSON, &s.event); err != nil {
		return unreadableEventError(err)
	}
	if !r.includesExecution(s.event.ExecutionID) {
		r.advanceClock(s.event)
		r.page = r.page[1:]
		return nil
	}
	text, err := r.textBefore(ctx, s.event)
	if err != nil {
		return err
	}
	at := s.event.Time
	if text != nil {
		s.text, at = text, text.Time
	}
	due, gap := r.pacer.NextDue(at, time.Now())
	s.due = due
	if gap.LeftOut > 0 {
		r.notices = append(r.notices, pace.Notice{Kind: pace.GapShortened, Data: pace.ShortenedNotice{
			Seq: r.sent, GapMs: gap.Original.Milliseconds(), LeftOutMs: gap.LeftOut.Milliseconds(),
		}})
	}
	r.next = &s
	return nil
}

// textBefore returns the next piece of text if it came before an event. The runner journals text and events in one
// order and with one clock. Text of a block that is not open is held until the block's start, or until a later event
// of the runner.
func (r *Replay) textBefore(ctx context.Context, e events.WireEvent) (*events.Delta, error) {
	if len(r.open) == 0 {
		return nil, nil
	}
	for {
		d, ok, err := r.player.peekDelta(ctx, r.request.Tenant, "replay again from the event after the last one that came", r.texts)
		if !ok || err != nil {
			return nil, err
		}
		known, open := r.open[d.BlockID]
		if !open && !d.Time.Before(r.runnerTime) || open && d.Time.After(e.Time) {
			return nil, nil
		}
		from := known - int(d.Offset)
		if !open || from < 0 || from >= len(d.Text) { // the block is complete, text before it is missing, or it was sent already
			r.texts.DropPeeked()
			continue
		}
		d.Offset, d.Text = d.Offset+uint32(from), d.Text[from:] //nolint:gosec // less than the text's length
		return &d, nil
	}
}

// takeStep returns the frame of the next step, which is due. If a notice must precede it, takeStep returns the notice and
// must be called again.
func (r *Replay) takeStep() (live.Frame, error) {
	s := r.next
	if s.text != nil {
		return r.takeTextFrame(*s.text)
	}
	e := s.event.Event()
	if done, ok := e.Data.(events.BlockComplete); ok {
		shown, open := r.open[done.Block.ID]
		delete(r.open, done.Block.ID)
		if open && shown < len(done.Block.Content) {
			return live.Frame{Notice: &pace.Notice{Kind: pace.BlockWhole, Data: pace.BlockWholeNotice{
				Seq: s.event.Seq, BlockID: done.Block.ID, ShownBytes: shown,
			}}}, nil
		}
	}
	if b, ok := e.Data.(events.BlockStart); ok && (b.Block.Status == "" || b.Block.Status == events.StatusPending) &&
		hasTextInFlight(b.Block.Kind) {
		r.openBlock(b.Block.ID, deltas.BlockStartPosition(b))
	}
	r.advanceClock(s.event)
	r.sent, r.position = s.event.Seq, s.event.Position
	kept := r.page[0]
	r.page, r.next = r.page[1:], nil
	return live.Frame{Seq: kept.Seq, Type: kept.Type, JSON: kept.JSON, Metadata: kept.Metadata}, nil
}

// takeTextFrame returns the frame of a delta, which is due, and advances the position in the text of its block.
func (r *Replay) takeTextFrame(d events.Delta) (live.Frame, error) {
	raw, err := d.AppendWire(nil, r.request.Session, r.sent, r.position)
	if err != nil {
		return live.Frame{}, problem.From(err)
	}
	r.open[d.BlockID] += len(d.Text)
	r.texts.DropPeeked()
	r.next = nil
	return live.Frame{Seq: r.sent, Type: events.TextDelta, JSON: raw}, nil
}

// readEventPage reads the next page of events from Postgres.
func (r *Replay) readEventPage(ctx context.Context) error {
	release, err := r.player.acquireReadSlot(ctx, r.request.Tenant)
	if err != nil {
		return err
	}
	defer release()
	page, err := r.player.cfg.Reads.Events(ctx, r.request.Tenant, r.request.Session, reads.EventQuery{
		After: r.read, Limit: int(min(pageEvents, r.last-r.read)), Metadata: true, Bytes: pageBytes,
	})
	if err != nil {
		return fromFieldError(err)
	}
	size := int64(0)
	for _, e := range page.Events {
		size += int64(len(e.JSON) + e.Metadata.Len())
	}
	if err := r.adjustHeldBytes(max(0, size-pageBytes)); err != nil {
		return err
	}
	if len(page.Events) == 0 {
		err := problem.New(problem.Internal, "", "the read models do not contain the event after one that is not the last").WithCause(errors.New(r.request.Session))
		return r.player.cfg.Reads.MissingUnlessFolding(ctx, r.request.Session, err)
	}
	r.page, r.read = page.Events, page.Events[len(page.Events)-1].Seq
	return nil
}

// adjustHeldBytes takes the bytes by which a page exceeds pageBytes from the gateway's limit, or returns those that a smaller
// page does not need.
func (r *Replay) adjustHeldBytes(n int64) error {
	if n > r.extraBytes {
		if err := r.held.ReserveBytes(n - r.extraBytes); err != nil {
			return err
		}
	} else {
		r.held.ReturnBytes(r.extraBytes - n)
	}
	r.extraBytes = n
	return nil
}

// fromFieldError converts an error about the cursor to an error about the field from, which is the field that the
// client sent.
func fromFieldError(err error) error {
	var p *problem.Error
	if errors.As(err, &p) && p.Field == "after" {
		renamed := *p
		renamed.Field = "from"
		return &renamed
	}
	return err
}

// unreadableEventError returns the problem for an event that cannot be decoded.
func unreadableEventError(err error) error {
	return problem.New(problem.Internal, "", "an event in the read models is not valid").WithCause(err)
}
