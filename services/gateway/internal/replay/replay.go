// Package replay sends the stored events of a session again, with their original spacing, and between them the text
// in flight that DELTAS still has. A replay holds one page of events and one of text, regardless of the session's
// length. Its client pulls, so a slow client delays only its own replay.
package replay

import (
	"context"
	"encoding/json"
	"errors"
	"io"
	"sync"
	"time"

	"github.com/nats-io/nats.go"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

const (
	pageEvents = 64
	pageBytes  = 256 << 10
	// cost is the number of bytes that a replay takes from the gateway's limit: its pages, and the frames being sent.
	cost = 768 << 10
	// maxBatch is the size in bytes after which Next returns.
	maxBatch = 256 << 10
	// readers is the number of replays of a gateway that may read Postgres and NATS at the same time, so that other
	// reads have capacity. tenantReaders is the part of it that one tenant may use, so that other tenants do not wait
	// for all of its replays.
	readers       = 8
	tenantReaders = readers / 2
)

// Config configures a Player. Every field is required.
type Config struct {
	Live      *live.Hub
	Reads     *reads.Store
	NATS      *nats.Conn
	Admission *admission.Admission
}

// Player opens replays. It is safe for concurrent use.
type Player struct {
	cfg   Config
	slots chan struct{}

	mu      sync.Mutex
	tenants map[string]*tenantSlots // tenants that are reading or waiting
}

// tenantSlots is the part of the slots that one tenant may use.
type tenantSlots struct {
	slots chan struct{}
	users int // replays that hold a slot or wait for one
}

// New returns a Player.
func New(cfg Config) *Player {
	return &Player{cfg: cfg, slots: make(chan struct{}, readers), tenants: map[string]*tenantSlots{}}
}

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
	player *Player
	ask    Request
	place  *live.Reader // reports the session's tip, its deletion, and the stop of the gateway
	held   *admission.Request
	extra  int64 // bytes held beyond cost, for a page with a large event

	tip   uint32
	last  uint32 // seq of the last event to replay
	page  []reads.StoredEvent
	read  uint32 // seq of the last event that was read
	texts texts
	open  map[string]int // replayed bytes of text, by id of each open block with text

	sent     uint32    // seq of the last event that Next returned
	position string    // position of that event
	reached  time.Time // recorded time of the last runner event that Next returned
	pacer    pace.Pacer
	next     *step         // nil until look has found it
	notices  []pace.Notice // sent before anything else
	ended    bool
}

// step is the next item to send: an event or a piece of text.
type step struct {
	due   time.Time
	kept  *reads.StoredEvent
	event events.Wire
	text  *events.Delta
}

// Open starts a replay; the caller must call Close. The error is a *problem.Error that names the invalid field.
func (p *Player) Open(ctx context.Context, ask Request) (*Replay, error) {
	held, err := p.cfg.Admission.Begin(ask.Tenant)
	if err != nil {
		return nil, err
	}
	r := &Replay{player: p, ask: ask, held: held, open: map[string]int{}, pacer: pace.Pacer{Speed: ask.Speed}}
	if err := r.begin(ctx); err != nil {
		r.Close()
		return nil, err
	}
	return r, nil
}

func (r *Replay) begin(ctx context.Context) (err error) {
	if err := r.held.Take(cost); err != nil {
		return err
	}
	if r.place, err = r.player.cfg.Live.JoinTip(ctx, r.ask.Tenant, r.ask.Agents, r.ask.Session); err != nil {
		return err
	}
	r.tip = r.place.Tip()
	if err := r.checkRange(ctx, r.tip); err != nil {
		return err
	}
	if err := r.restrictToExecution(ctx); err != nil {
		return err
	}
	r.texts = texts{
		nc: r.player.cfg.NATS, subject: events.DeltaSubject(r.ask.Tenant, r.ask.Session),
		remedy: "replay again from the event after the last one that came",
	}
	if err := r.seek(ctx, r.ask.From-1); err != nil {
		return err
	}
	r.notices = append(r.notices, pace.Notice{Kind: pace.ReplayStarted, Data: pace.Started{From: r.ask.From, To: r.last, Tip: r.tip, Speed: r.ask.Speed.String()}})
	return nil
}

// checkRange checks the requested range of events.
func (r *Replay) checkRange(ctx context.Context, tip uint32) error {
	r.last = tip
	if r.ask.To != nil {
		r.last = *r.ask.To
	}
	ahead := func(field string) error {
		e := problem.New(problem.CursorAhead, field, "value is greater than the seq of the session's last event, which is tip")
		e.Tip = &tip
		return r.player.cfg.Reads.UnlessFolding(ctx, r.ask.Session, e)
	}
	switch {
	case r.ask.From == 0:
		return problem.Invalid("from", "value must be the seq of an event, at least 1")
	case r.last == 0:
		return problem.Invalid("to", "value must be the seq of an event, at least 1")
	case r.ask.From > tip:
		return ahead("from")
	case r.last > tip:
		return ahead("to")
	case r.ask.From > r.last:
		return problem.Invalid("from", "%d is greater than to, which is %d", r.ask.From, r.last)
	}
	return nil
}

// ErrExecutionEnded is the cause of the error of Open if the execution ended before the first requested event.
var ErrExecutionEnded = errors.New("the execution ended before")

// restrictToExecution restricts the range to the requested execution, if any.
func (r *Replay) restrictToExecution(ctx context.Context) error {
	if r.ask.Execution == "" {
		return nil
	}
	first, last, err := r.player.cfg.Reads.Span(ctx, r.ask.Tenant, r.ask.Session, r.ask.Execution)
	switch {
	case err != nil:
		return err
	case first > r.last:
		return problem.Invalid("executionId", "the execution begins with event %d, which comes after those that are asked for", first)
	case last > 0 && last < r.ask.From:
		return problem.Invalid("executionId", "the execution ends with event %d, which comes before those that are asked for", last).Because(ErrExecutionEnded)
	}
	r.ask.From = max(r.ask.From, first)
	if last > 0 {
		r.last = min(r.last, last)
	}
	return nil
}

// has reports whether the replay includes events and text of an execution.
func (r *Replay) has(execution string) bool {
	return r.ask.Execution == "" || execution == r.ask.Execution
}

// seek reads the event before the first one, and the blocks that are open there, whose text is replayed from its
// beginning. The read also detects events that are no longer stored.
func (r *Replay) seek(ctx context.Context, seq uint32) error {
	r.read, r.sent = max(seq, 1)-1, seq
	if err := r.readPage(ctx); err != nil || seq == 0 {
		return err
	}
	var before events.Wire
	if err := json.Unmarshal(r.page[0].JSON, &before); err != nil {
		return unreadable(err)
	}
	r.page = r.page[1:]
	r.position = before.Position
	r.advanceClock(before)
	release, err := r.player.slot(ctx, r.ask.Tenant)
	if err != nil {
		return err
	}
	defer release()
	list, err := r.player.cfg.Reads.OpenBlocks(ctx, r.ask.Tenant, r.ask.Session, r.ask.From)
	since := before.Time
	for _, b := range list {
		if !r.has(b.ExecutionID) {
			continue
		}
		r.open[b.ID] = 0
		if b.Start.Before(since) {
			since = b.Start
		}
	}
	r.texts.since = since.Add(-textEarlier)
	return err
}

// advanceClock records the clock of the runner. It may go back, because the next runner may be on another machine whose
// clock is behind.
func (r *Replay) advanceClock(e events.Wire) {
	if e.Source == events.FromRunner {
		r.reached = e.Time
	}
}

// Close ends the replay and returns the bytes that it holds.
func (r *Replay) Close() {
	if r.place != nil {
		r.place.Close()
	}
	r.held.End()
}

// Session returns the id of the session.
func (r *Replay) Session() string { return r.ask.Session }

// Tip returns the seq of the session's last event when the replay began.
func (r *Replay) Tip() uint32 { return r.tip }

// Cursor returns the seq of the last event that Next returned, or the seq before the first event.
func (r *Replay) Cursor() uint32 { return r.sent }

// Next blocks until something is due and returns it: a notice, an event, or text in flight. It returns io.EOF after
// the replay's end, the cause of ctx, or the reason why the replay cannot continue.
func (r *Replay) Next(ctx context.Context) (frames []live.Frame, err error) {
	size := 0
	for size < maxBatch {
		if ctx.Err() != nil {
			return framesOrError(frames, context.Cause(ctx))
		}
		for _, n := range r.notices {
			frames = append(frames, live.Frame{Notice: &n})
		}
		r.notices = nil
		if r.next == nil {
			if err := r.look(ctx); err != nil {
				return framesOrError(frames, err)
			}
			continue // its notices are sent before the wait
		}
		wait := time.Until(r.next.due)
		switch {
		case wait > 0 && len(frames) > 0:
			return frames, nil
		case wait > 0:
			if err := r.wait(ctx, wait); err != nil {
				return nil, err
			}
		default:
			frame, err := r.take()
			if err != nil {
				return framesOrError(frames, err)
			}
			size += frame.Len(true)
			frames = append(frames, frame)
		}
	}
	return frames, nil
}

// framesOrError returns frames without the error if there are frames; the next call will return the error again.
func framesOrError(frames []live.Frame, err error) ([]live.Frame, error) {
	if len(frames) > 0 {
		return frames, nil
	}
	return nil, err
}

// wait blocks for d, unless the session or the replay's client ends first.
func (r *Replay) wait(ctx context.Context, d time.Duration) error {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-timer.C:
	case <-r.place.Changed():
	case <-ctx.Done():
		return context.Cause(ctx)
	}
	return r.place.Over()
}

// look finds the next step and its due time, or the end of the replay. It finds neither if it skips an event.
func (r *Replay) look(ctx context.Context) error {
	if err := r.place.Over(); err != nil {
		return err
	}
	if r.ended {
		return io.EOF
	}
	if len(r.page) == 0 && r.read < r.last {
		if err := r.readPage(ctx); err != nil {
			return err
		}
	}
	if len(r.page) == 0 {
		r.ended = true
		r.notices = append(r.notices, pace.Notice{Kind: pace.ReplayEnded, Data: pace.Ended{Seq: r.sent}})
		return nil
	}
	s := step{kept: &r.page[0]}
	if err := json.Unmarshal(s.kept.JSON, &s.event); err != nil {
		return unreadable(err)
	}
	if !r.has(s.event.ExecutionID) {
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
	due, gap := r.pacer.Step(at, time.Now())
	s.due = due
	if gap.LeftOut > 0 {
		r.notices = append(r.notices, pace.Notice{Kind: pace.GapShortened, Data: pace.Shortened{
			Seq: r.sent, GapMs: gap.Original.Milliseconds(), LeftOutMs: gap.LeftOut.Milliseconds(),
		}})
	}
	r.next = &s
	return nil
}

// textBefore returns the next piece of text if it came before an event. The runner journals text and events in one
// order and with one clock. Text of a block that is not open is held until the block's start, or until a later event
// of the runner.
func (r *Replay) textBefore(ctx context.Context, e events.Wire) (*events.Delta, error) {
	for {
		d, ok, err := r.player.head(ctx, r.ask.Tenant, &r.texts)
		if !ok || err != nil {
			return nil, err
		}
		known, open := r.open[d.BlockID]
		if !open && !d.Time.Before(r.reached) || open && d.Time.After(e.Time) {
			return nil, nil
		}
		from := known - int(d.Offset)
		if !open || from < 0 || from >= len(d.Text) { // the block is complete, text before it is missing, or it was sent already
			r.texts.drop()
			continue
		}
		d.Offset, d.Text = d.Offset+uint32(from), d.Text[from:] //nolint:gosec // less than the text's length
		return &d, nil
	}
}

// take returns the frame of the next step, which is due. If a notice must precede it, take returns the notice and
// must be called again.
func (r *Replay) take() (live.Frame, error) {
	s := r.next
	if s.text != nil {
		return r.takeText(*s.text)
	}
	e := s.event.Event()
	if done, ok := e.Data.(events.BlockComplete); ok {
		shown, open := r.open[done.Block.ID]
		delete(r.open, done.Block.ID)
		if open && shown < len(done.Block.Content) {
			return live.Frame{Notice: &pace.Notice{Kind: pace.BlockWhole, Data: pace.Whole{
				Seq: s.event.Seq, BlockID: done.Block.ID, ShownBytes: shown,
			}}}, nil
		}
	}
	if b, ok := e.Data.(events.BlockStart); ok && (b.Block.Status == "" || b.Block.Status == events.StatusPending) &&
		(b.Block.Kind == events.KindAssistantText || b.Block.Kind == events.KindThinking) { // other kinds have no text in flight
		r.open[b.Block.ID] = 0
	}
	r.advanceClock(s.event)
	r.sent, r.position = s.event.Seq, s.event.Position
	kept := r.page[0]
	r.page, r.next = r.page[1:], nil
	return live.Frame{Seq: kept.Seq, Type: kept.Type, JSON: kept.JSON, Metadata: kept.Metadata}, nil
}

func (r *Replay) takeText(d events.Delta) (live.Frame, error) {
	w, err := d.ToWire(r.ask.Session, r.sent, r.position)
	if err != nil {
		return live.Frame{}, problem.From(err)
	}
	raw, err := live.Encode(w)
	if err != nil {
		return live.Frame{}, problem.From(err)
	}
	r.open[d.BlockID] += len(d.Text)
	r.texts.drop()
	r.next = nil
	return live.Frame{Seq: r.sent, Type: events.TextDelta, JSON: raw}, nil
}

// readPage reads the next events.
func (r *Replay) readPage(ctx context.Context) error {
	release, err := r.player.slot(ctx, r.ask.Tenant)
	if err != nil {
		return err
	}
	defer release()
	page, err := r.player.cfg.Reads.Events(ctx, r.ask.Tenant, r.ask.Session, reads.Query{
		After: r.read, Limit: int(min(pageEvents, r.last-r.read)), Metadata: true, Bytes: pageBytes,
	})
	if err != nil {
		return cursorError(err)
	}
	size := int64(0)
	for _, e := range page.Events {
		size += int64(len(e.JSON) + e.Metadata.Len())
	}
	if err := r.holdExtra(max(0, size-pageBytes)); err != nil {
		return err
	}
	if len(page.Events) == 0 {
		err := problem.New(problem.Internal, "", "the read models hold no event after one that is not the last").Because(errors.New(r.ask.Session))
		return r.player.cfg.Reads.UnlessFolding(ctx, r.ask.Session, err)
	}
	r.page, r.read = page.Events, page.Events[len(page.Events)-1].Seq
	return nil
}

// holdExtra takes the bytes by which a page exceeds cost from the gateway's limit.
func (r *Replay) holdExtra(n int64) error {
	if n > r.extra {
		if err := r.held.Take(n - r.extra); err != nil {
			return err
		}
	} else {
		r.held.Return(r.extra - n)
	}
	r.extra = n
	return nil
}

// cursorError converts an error about the cursor to one about from, which is the field that the client sent.
func cursorError(err error) error {
	var p *problem.Error
	if errors.As(err, &p) && p.Field == "after" {
		of := *p
		of.Field = "from"
		return &of
	}
	return err
}

func unreadable(err error) error {
	return problem.New(problem.Internal, "", "an event in the read models is not valid").Because(err)
}

// head calls texts.head and waits for a slot if that reads from NATS.
func (p *Player) head(ctx context.Context, tenant string, t *texts) (events.Delta, bool, error) {
	if len(t.page) == 0 && !t.done {
		release, err := p.slot(ctx, tenant)
		if err != nil {
			return events.Delta{}, false, err
		}
		defer release()
	}
	return t.head(ctx)
}

// slot blocks until the tenant may read.
func (p *Player) slot(ctx context.Context, tenant string) (release func(), err error) {
	s := p.join(tenant)
	select {
	case s.slots <- struct{}{}:
	case <-ctx.Done():
		p.leave(tenant, s)
		return nil, context.Cause(ctx)
	}
	giveUp := func() {
		<-s.slots
		p.leave(tenant, s)
	}
	select {
	case p.slots <- struct{}{}:
	case <-ctx.Done():
		giveUp()
		return nil, context.Cause(ctx)
	}
	return func() {
		<-p.slots
		giveUp()
	}, nil
}

// join returns the slots of a tenant with one more user.
func (p *Player) join(tenant string) *tenantSlots {
	p.mu.Lock()
	defer p.mu.Unlock()
	s := p.tenants[tenant]
	if s == nil {
		s = &tenantSlots{slots: make(chan struct{}, tenantReaders)}
		p.tenants[tenant] = s
	}
	s.users++
	return s
}

// leave removes a user of a tenant's slots, and removes slots without users.
func (p *Player) leave(tenant string, s *tenantSlots) {
	p.mu.Lock()
	defer p.mu.Unlock()
	if s.users--; s.users == 0 {
		delete(p.tenants, tenant)
	}
}
