// Package replay sends the stored events of a session again, with their original spacing, and between them the text
// in flight that DELTAS still has. A replay holds one page of events and one of text, regardless of the session's
// length. Its client pulls, so a slow client delays only its own replay.
package replay

import (
	"context"
	"encoding/json"
	"errors"
	"time"

	"github.com/spoolhq/spool/pkg/deltas"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// replayCostBytes is the number of bytes that each replay takes from the gateway's in-flight limit. It stands for the
// replay's pages of events, and the frames that are being sent.
const replayCostBytes = 768 << 10

// Request describes a replay.
type Request struct {
	Tenant  string
	Agents  []string // slugs of the only agents whose sessions may be replayed; empty means all
	Session string
	From    uint32  // seq of the first event, at least 1
	To      *uint32 // seq of the last event; nil means the session's present last event
	Speed   pace.Speed
	// Execution restricts the replay to the events of one execution; empty means all events.
	Execution string
}

// Replay is one replay for one client. Its methods must be called by one goroutine.
type Replay struct {
	player     *Player
	request    Request
	reader     *live.Reader // reports the session's tip, its deletion, and the stop of the gateway
	held       *admission.Request
	extraBytes int64 // bytes held beyond replayCostBytes, for a page with a large event

	tip   uint32
	last  uint32 // seq of the last event to replay
	page  []reads.StoredEvent
	read  uint32         // seq of the last event that was read
	texts *deltas.Reader // nil while no block with text is open: text of other blocks is not sent
	open  map[string]int // replayed bytes of text, by id of each open block with text

	sent       uint32    // seq of the last event that Next returned
	position   string    // position of that event
	runnerTime time.Time // recorded time of the last runner event that Next returned
	pacer      pace.Pacer
	next       *replayStep   // nil until findNextStep has found it
	notices    []pace.Notice // sent before anything else
	ended      bool
}

// Open starts a replay; the caller must call Close. The error is a *problem.Error that names the invalid field.
func (p *Player) Open(ctx context.Context, request Request) (*Replay, error) {
	held, err := p.cfg.Admission.Begin(request.Tenant)
	if err != nil {
		return nil, err
	}
	r := &Replay{player: p, request: request, held: held, open: map[string]int{}, pacer: pace.Pacer{Speed: request.Speed}}
	if err := r.begin(ctx); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

// begin validates the request of the replay, and reads the events and open blocks with which the replay begins.
func (r *Replay) begin(ctx context.Context) (err error) {
	if err := r.held.ReserveBytes(replayCostBytes); err != nil {
		return err
	}
	if r.reader, err = r.player.cfg.Live.JoinTip(ctx, r.request.Tenant, r.request.Agents, r.request.Session); err != nil {
		return err
	}
	r.tip = r.reader.Tip()
	if err := r.checkRange(ctx, r.tip); err != nil {
		return err
	}
	if err := r.restrictToExecution(ctx); err != nil {
		return err
	}
	if err := r.seekAfter(ctx, r.request.From-1); err != nil {
		return err
	}
	r.notices = append(r.notices, pace.Notice{Kind: pace.ReplayStarted, Data: pace.StartedNotice{From: r.request.From, To: r.last, Tip: r.tip, Speed: r.request.Speed.String()}})
	return nil
}

// checkRange returns a problem unless the requested events exist; tip is the session's last event.
func (r *Replay) checkRange(ctx context.Context, tip uint32) error {
	r.last = tip
	if r.request.To != nil {
		r.last = *r.request.To
	}
	ahead := func(field string) error {
		e := problem.New(problem.CursorAhead, field, "value is greater than the seq of the session's last event, which is tip")
		e.Tip = &tip
		return r.player.cfg.Reads.MissingUnlessFolding(ctx, r.request.Session, e)
	}
	switch {
	case r.request.From == 0:
		return problem.Invalid("from", "value must be the seq of an event, at least 1")
	case r.last == 0:
		return problem.Invalid("to", "value must be the seq of an event, at least 1")
	case r.request.From > tip:
		return ahead("from")
	case r.last > tip:
		return ahead("to")
	case r.request.From > r.last:
		return problem.Invalid("from", "%d is greater than to, which is %d", r.request.From, r.last)
	}
	return nil
}

// ErrExecutionEnded is the cause of the error of Player.Open if the requested execution ended before the first
// requested event.
var ErrExecutionEnded = errors.New("the execution ended before")

// restrictToExecution restricts the replayed events to those of the requested execution, if the request names one.
func (r *Replay) restrictToExecution(ctx context.Context) error {
	if r.request.Execution == "" {
		return nil
	}
	first, last, err := r.player.cfg.Reads.ExecutionSpan(ctx, r.request.Tenant, r.request.Session, r.request.Execution)
	switch {
	case err != nil:
		return err
	case first > r.last:
		return problem.Invalid("executionId", "the execution begins with event %d, which comes after the requested events", first)
	case last > 0 && last < r.request.From:
		return problem.Invalid("executionId", "the execution ends with event %d, which comes before the requested events", last).WithCause(ErrExecutionEnded)
	}
	r.request.From = max(r.request.From, first)
	if last > 0 {
		r.last = min(r.last, last)
	}
	return nil
}

// includesExecution reports whether the replay sends the events and the text of an execution: it does for all, unless
// the request names one.
func (r *Replay) includesExecution(execution string) bool {
	return r.request.Execution == "" || execution == r.request.Execution
}

// seekAfter moves the replay to the position after the event seq. It reads that event, and the blocks that are open
// after it, whose text the replay sends from its beginning. The read also detects events that are no longer stored.
func (r *Replay) seekAfter(ctx context.Context, seq uint32) error {
	r.read, r.sent = max(seq, 1)-1, seq
	if err := r.readEventPage(ctx); err != nil || seq == 0 {
		return err
	}
	var before events.WireEvent
	if err := json.Unmarshal(r.page[0].JSON, &before); err != nil {
		return unreadableEventError(err)
	}
	r.page = r.page[1:]
	r.position = before.Position
	r.advanceClock(before)
	release, err := r.player.acquireReadSlot(ctx, r.request.Tenant)
	if err != nil {
		return err
	}
	defer release()
	list, err := r.player.cfg.Reads.OpenBlocksAt(ctx, r.request.Tenant, r.request.Session, r.request.From)
	for _, b := range list {
		if r.includesExecution(b.ExecutionID) {
			r.openBlock(b.ID, b.From)
		}
	}
	return err
}

// openBlock makes the replay send the text of a block, beginning at the position from of DELTAS.
func (r *Replay) openBlock(id string, from deltas.StartPosition) {
	switch {
	case r.texts == nil:
		r.texts = deltas.NewReader(r.player.cfg.NATS, r.player.cfg.Partitions, r.request.Tenant, r.request.Session, from)
	case len(r.open) == 0:
		r.texts.SkipTo(from)
	default:
	}
	r.open[id] = 0
}

// advanceClock sets the replay's clock to the time at which the runner wrote an event. The clock may go back, because
// the next runner may be on another machine whose clock is behind.
func (r *Replay) advanceClock(e events.WireEvent) {
	if e.Source == events.FromRunner {
		r.runnerTime = e.Time
	}
}

// Close ends the replay and returns its bytes to the gateway's limit.
func (r *Replay) Close() {
	if r.reader != nil {
		r.reader.Close()
	}
	r.held.End()
}

// Session returns the id of the session.
func (r *Replay) Session() string { return r.request.Session }

// Tip returns the seq of the session's last event when the replay began.
func (r *Replay) Tip() uint32 { return r.tip }

// Cursor returns the seq of the last event that Next returned, or the seq before the first event.
func (r *Replay) Cursor() uint32 { return r.sent }
