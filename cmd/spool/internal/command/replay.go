package command

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/pace"
)

type replayCommand struct {
	server
	Session   string  `arg:"" help:"The session's id."`
	From      uint32  `placeholder:"N" default:"1" help:"Seq of the first event."`
	To        *uint32 `placeholder:"N" help:"Seq of the last event; by default the last event when the replay starts."`
	Speed     string  `placeholder:"1|10|max" default:"1" help:"Factor by which the replay is faster than the original: a positive number, or max."`
	Execution string  `placeholder:"ID" help:"Replay only this execution."`
}

// Run prints the events of a session with the pauses that they had live, divided by the speed.
func (c *replayCommand) Run(a *app) error {
	speed, err := c.check()
	if err != nil {
		return err
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		if c.Execution != "" {
			x, err := cl.Executions.GetExecution(ctx, &spoolv1.GetExecutionRequest{ExecutionId: c.Execution})
			if err != nil {
				return err
			}
			if x.SessionId != c.Session {
				return fmt.Errorf("execution: %s belongs to session %s", c.Execution, x.SessionId)
			}
		}
		p := &player{app: a, only: c.Execution, json: c.JSON, speed: speed, pacer: pace.Pacer{Speed: speed}, calls: map[string]bool{}}
		return p.play(ctx, cl, c.Session, c.From, c.To)
	})
}

func (c *replayCommand) check() (pace.Speed, error) {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return 0, err
	}
	if c.Execution != "" {
		if err := checkID("execution", events.KindExecution, c.Execution); err != nil {
			return 0, err
		}
	}
	if c.From == 0 || c.To != nil && *c.To == 0 {
		return 0, usageError("from, to: the first event of a session has seq 1")
	}
	if c.To != nil && c.From > *c.To {
		return 0, usageError("from: %d is greater than to, which is %d", c.From, *c.To)
	}
	speed, err := pace.ParseSpeed(c.Speed)
	if err != nil {
		return 0, usageError("speed: %w", err)
	}
	return speed, nil
}

// errQuit is the cause of a replay that the user ended.
var errQuit = errors.New("quit")

// player replays one session. Only now may be called by other goroutines.
type player struct {
	app      *app
	only     string // the only execution to show; "" for all
	json     bool   // print events instead of blocks
	speed    pace.Speed
	renderer *terminal.Renderer // nil with json
	keys     <-chan byte        // nil without keys

	pacer  pace.Pacer
	due    time.Time       // when the next event is due
	paused time.Time       // start of the current pause; zero while playing
	target byte            // the key that requested a jump: events up to its target are shown at once; 0 for none
	calls  map[string]bool // tool calls whose input is not known yet, by block
	whole  bool            // the user was told that blocks appear as a whole
	seq    uint32
	to     uint32

	mu sync.Mutex
	at time.Time // recorded time of the last shown event
}

func (p *player) play(ctx context.Context, cl *client.Client, session string, from uint32, to *uint32) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done, err := p.begin(ctx, cancel)
	if err != nil {
		return err
	}
	for one, failed := range cl.Replay(ctx, session, from, to) {
		if err = failed; err == nil {
			err = p.take(ctx, one)
		}
		if err != nil {
			break
		}
	}
	if errors.Is(err, errQuit) || errors.Is(err, io.EOF) {
		err = nil
	}
	return errors.Join(err, done())
}

// begin creates the renderer, and reads keys if both input and output are terminals. done restores the terminal.
func (p *player) begin(ctx context.Context, cancel context.CancelCauseFunc) (done func() error, err error) {
	if p.json {
		return func() error { return nil }, nil
	}
	out, restore := p.app.Out, func() error { return nil }
	if p.app.OutTTY && p.app.Raw != nil {
		if restore, err = p.app.Raw(); err != nil {
			return nil, fmt.Errorf("read keys from the terminal: %w", err)
		}
		out = rawWriter{out}
		p.keys = p.readKeys(cancel)
	}
	p.renderer = p.app.rendererOn(out, p.now)
	if p.keys != nil {
		p.renderer.Hint("space . n e t q")
	}
	spin, stop := context.WithCancel(ctx)
	var spinning sync.WaitGroup
	spinning.Go(func() { p.renderer.Spin(spin) })
	return func() error {
		stop()
		spinning.Wait()
		return errors.Join(p.renderer.Close(), restore())
	}, nil
}

// rawWriter writes to a raw terminal, which needs explicit carriage returns.
type rawWriter struct{ io.Writer }

// Write writes all of b, and inserts a carriage return before each line feed that has none.
func (w rawWriter) Write(b []byte) (int, error) {
	text := bytes.ReplaceAll(bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n")), []byte("\n"), []byte("\r\n"))
	if _, err := w.Writer.Write(text); err != nil {
		return 0, err
	}
	return len(b), nil
}

// now returns the time in the replay, for the renderer.
func (p *player) now() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at
}

// The keys.
const (
	keyPause  = ' '
	keyStep   = '.' // pause after the next event
	keyTool   = 'n' // jump to the next tool call
	keyError  = 'e' // jump to the next error
	keyTurn   = 't' // jump to the next turn
	keyQuit   = 'q'
	keyCancel = 0x03 // Ctrl-C, which is not a signal in raw mode
)

// maxTypedKeys is the number of keys that wait while the replay reads from the server. Further keys are dropped, so
// that q and Ctrl-C are always read.
const maxTypedKeys = 64

// readKeys returns the typed keys. Its goroutine ends with the input or with the process.
func (p *player) readKeys(cancel context.CancelCauseFunc) <-chan byte {
	keys := make(chan byte, maxTypedKeys)
	go func() {
		defer close(keys)
		b := make([]byte, 1)
		for {
			if _, err := p.app.In.Read(b); err != nil {
				return
			}
			switch b[0] {
			case keyQuit:
				cancel(errQuit)
			case keyCancel:
				cancel(errInterrupted)
			}
			select {
			case keys <- b[0]:
			default:
			}
		}
	}()
	return keys
}

// take shows one item from the server when it is due.
func (p *player) take(ctx context.Context, one client.ReplayItem) error {
	switch {
	case one.Started != nil:
		p.seq, p.to = one.Started.From-1, one.Started.To
		return nil
	case one.Whole != nil:
		if !p.whole && p.only == "" && one.Whole.ShownBytes == 0 {
			p.whole = true
			p.note("the deltas are no longer stored: blocks appear as a whole")
		}
		return nil
	case p.only != "" && one.Event.ExecutionID != p.only:
		return nil
	}
	e := one.Event.Event()
	if err := p.wait(ctx, e.Time); err != nil {
		return err
	}
	return p.show(one, e)
}

// wait blocks until an event with the given recorded time is due, and handles keys meanwhile.
func (p *player) wait(ctx context.Context, at time.Time) error {
	due, gap := p.pacer.NextDue(at, time.Now())
	p.due = due
	for p.target == 0 {
		var timer <-chan time.Time
		if p.paused.IsZero() {
			timer = time.After(time.Until(p.due))
			p.noteGap(gap)
			gap = pace.Gap{}
		}
		select { // keys have priority at any speed
		case key, ok := <-p.keys:
			p.handleKey(key, ok)
			continue
		default:
		}
		select {
		case <-ctx.Done():
			return context.Cause(ctx)
		case <-timer:
			return nil
		case key, ok := <-p.keys:
			p.handleKey(key, ok)
		}
	}
	return context.Cause(ctx)
}

// noteGap prints that a gap was shortened.
func (p *player) noteGap(gap pace.Gap) {
	if gap.LeftOut > 0 {
		p.note(fmt.Sprintf("no events for %s, of which %s are skipped", roundedDuration(gap.Original), roundedDuration(gap.LeftOut)))
	}
}

// roundedDuration formats a duration for people.
func roundedDuration(d time.Duration) string {
	switch {
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Microsecond).String()
}

// handleKey handles a key. ok is false if no more keys can come.
func (p *player) handleKey(key byte, ok bool) {
	switch {
	case !ok:
		p.keys = nil
		p.resume()
	case key == keyPause && p.paused.IsZero():
		p.paused = time.Now()
	case key == keyPause:
		p.resume()
	case key == keyStep:
		if p.paused.IsZero() {
			p.paused = time.Now()
		}
		p.target = key
	case key == keyTool, key == keyError, key == keyTurn:
		p.target = key
	}
	p.showStatus()
}

// resume continues after a pause.
func (p *player) resume() {
	if p.paused.IsZero() {
		return
	}
	pause := time.Since(p.paused)
	p.pacer.Delay(pause)
	p.due, p.paused = p.due.Add(pause), time.Time{}
}

// show shows an event or a delta.
func (p *player) show(one client.ReplayItem, e events.Event) error {
	p.mu.Lock()
	p.at = e.Time
	p.mu.Unlock()
	kept := one.Event.Type != events.TextDelta
	if kept {
		p.seq = one.Event.Seq
	}
	p.showStatus()
	w := watcher{app: p.app, renderer: p.renderer, json: p.json, open: map[string]bool{}}
	if _, err := w.event(*one.Event, one.Raw); err != nil && !errors.Is(err, errEnded) {
		return err
	}
	if kept && p.reached(e) {
		p.target = 0
		p.pacer.ContinueFrom(e.Time, time.Now())
		if !p.paused.IsZero() {
			p.paused = time.Now()
		}
		p.showStatus()
	}
	if p.only != "" && events.IsTerminal(e.Type()) {
		return io.EOF
	}
	return nil
}

// reached reports whether an event is the target of a jump.
func (p *player) reached(e events.Event) bool {
	call := p.isCall(e)
	switch p.target {
	case keyStep:
		return true
	case keyTool:
		return call
	case keyError:
		return isFailure(e)
	case keyTurn:
		_, begins := e.Data.(events.ExecutionDispatched)
		return begins
	}
	return false
}

// isCall reports whether an event completes the input of a tool call, which is when the call is shown.
func (p *player) isCall(e events.Event) bool {
	switch d := e.Data.(type) {
	case events.BlockStart:
		if d.Block.Kind != events.KindToolUse {
			return false
		}
		open := (d.Block.Status == "" || d.Block.Status == events.StatusPending) && len(d.Block.Input) == 0
		if open {
			p.calls[d.Block.ID] = true
		}
		return !open
	case events.BlockUpdate:
		return len(d.Updates.Input) > 0 && p.isKnown(d.BlockID)
	case events.BlockComplete:
		return p.isKnown(d.Block.ID)
	}
	return false
}

// isKnown reports whether a block is a tool call with incomplete input, and forgets it.
func (p *player) isKnown(block string) bool {
	waits := p.calls[block]
	delete(p.calls, block)
	return waits
}

// isFailure reports whether an event records a failure.
func isFailure(e events.Event) bool {
	switch d := e.Data.(type) {
	case events.Error, events.ExecutionFailed, events.AttemptFailed, events.SandboxFailed:
		return true
	case events.BlockStart:
		return isFailed(d.Block)
	case events.BlockComplete:
		return isFailed(d.Block)
	}
	return false
}

func isFailed(b events.Block) bool {
	return b.Kind == events.KindError || b.Status == events.StatusError || b.IsError
}

// showStatus shows the position of the replay.
func (p *player) showStatus() {
	if p.renderer == nil {
		return
	}
	speed := p.speed.String()
	if p.speed != pace.MaxSpeed {
		speed += "x"
	}
	text := fmt.Sprintf("event %d of %d · %s · %s", p.seq, p.to, p.now().Local().Format("15:04:05"), speed)
	if !p.paused.IsZero() {
		text += " · paused"
	}
	p.renderer.State(text)
}

// note prints a message of the replay itself: within the shown session on a terminal, otherwise on standard error.
func (p *player) note(text string) {
	if p.renderer != nil && p.app.OutTTY {
		p.renderer.Note(text)
	} else {
		fmt.Fprintln(p.app.Err, "spool: "+terminal.Line(text))
	}
}
