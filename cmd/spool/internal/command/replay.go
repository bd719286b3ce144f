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
	serverFlags
	Session   string  `arg:"" help:"The session's id."`
	From      uint32  `placeholder:"N" default:"1" help:"Seq of the first event."`
	To        *uint32 `placeholder:"N" help:"Seq of the last event; by default the last event when the replay starts."`
	Speed     string  `placeholder:"1|10|max" default:"1" help:"Factor by which the replay is faster than the original: a positive number, or max."`
	Execution string  `placeholder:"ID" help:"Replay only this execution."`
}

// Run shows the events of a session again, with their original pauses divided by the speed.
func (c *replayCommand) Run(a *app) error {
	speed, err := c.checkFlags()
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
		p := &replayPlayer{app: a, only: c.Execution, json: c.JSON, speed: speed, pacer: pace.Pacer{Speed: speed}, calls: map[string]bool{}}
		return p.play(ctx, cl, c.Session, c.From, c.To)
	})
}

// checkFlags returns the speed of the replay, or a usage error if flags are invalid.
func (c *replayCommand) checkFlags() (pace.Speed, error) {
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

// errReplayQuit is the cause of a replay that the user has ended with a key.
var errReplayQuit = errors.New("quit")

// replayPlayer shows the replay of one session. Only replayTime may be called from other goroutines.
type replayPlayer struct {
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
	whole  bool            // the message that blocks appear as a whole was printed
	seq    uint32
	to     uint32

	mu sync.Mutex
	at time.Time // recorded time of the last shown event
}

// play shows the events of a session from the seq from up to the seq to.
func (p *replayPlayer) play(ctx context.Context, cl *client.Client, session string, from uint32, to *uint32) (err error) {
	ctx, cancel := context.WithCancelCause(ctx)
	defer cancel(nil)
	done, err := p.startRenderer(ctx, cancel)
	if err != nil {
		return err
	}
	for one, failed := range cl.Replay(ctx, session, from, to) {
		if err = failed; err == nil {
			err = p.showWhenDue(ctx, one)
		}
		if err != nil {
			break
		}
	}
	if errors.Is(err, errReplayQuit) || errors.Is(err, io.EOF) {
		err = nil
	}
	return errors.Join(err, done())
}

// startRenderer creates the renderer. If input and output are terminals, it also puts the terminal into raw mode and
// reads keys. done closes the renderer and restores the terminal.
func (p *replayPlayer) startRenderer(ctx context.Context, cancel context.CancelCauseFunc) (done func() error, err error) {
	if p.json {
		return func() error { return nil }, nil
	}
	out, restore := p.app.Out, func() error { return nil }
	if p.app.OutTTY && p.app.Raw != nil {
		if restore, err = p.app.Raw(); err != nil {
			return nil, fmt.Errorf("read keys from the terminal: %w", err)
		}
		out = crlfWriter{out}
		p.keys = p.readKeys(cancel)
	}
	p.renderer = terminal.New(p.app.rendererConfig(out, p.replayTime))
	if p.keys != nil {
		p.renderer.SetHint("space . n e t q")
	}
	spin, stop := context.WithCancel(ctx)
	var spinning sync.WaitGroup
	spinning.Go(func() { p.renderer.RunSpinner(spin) })
	return func() error {
		stop()
		spinning.Wait()
		return errors.Join(p.renderer.Close(), restore())
	}, nil
}

// crlfWriter is a writer to a terminal in raw mode. It writes a carriage return before each line feed, which such a
// terminal needs.
type crlfWriter struct{ io.Writer }

// Write writes b, with a carriage return before each line feed that has none.
func (w crlfWriter) Write(b []byte) (int, error) {
	text := bytes.ReplaceAll(bytes.ReplaceAll(b, []byte("\r\n"), []byte("\n")), []byte("\n"), []byte("\r\n"))
	if _, err := w.Writer.Write(text); err != nil {
		return 0, err
	}
	return len(b), nil
}

// replayTime returns the recorded time of the last shown event, as the clock of the renderer.
func (p *replayPlayer) replayTime() time.Time {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.at
}

// The keys.
const (
	keyPause     = ' '
	keyStep      = '.' // pause after the next event
	keyNextTool  = 'n' // jump to the next tool call
	keyNextError = 'e' // jump to the next error
	keyNextTurn  = 't' // jump to the next turn
	keyQuit      = 'q'
	keyCtrlC     = 0x03 // Ctrl-C, which is not a signal in raw mode
)

// maxTypedKeys is the number of typed keys that are kept while the replay waits for the server. Further keys are
// dropped, so that the reader does not block before a q or Ctrl-C.
const maxTypedKeys = 64

// readKeys returns a channel with the keys that the user types. Its goroutine ends with the input or with the process.
func (p *replayPlayer) readKeys(cancel context.CancelCauseFunc) <-chan byte {
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
				cancel(errReplayQuit)
			case keyCtrlC:
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

// showWhenDue waits until an item from the server is due, and shows it.
func (p *replayPlayer) showWhenDue(ctx context.Context, one client.ReplayItem) error {
	switch {
	case one.Started != nil:
		p.seq, p.to = one.Started.From-1, one.Started.To
		return nil
	case one.Whole != nil:
		if !p.whole && p.only == "" && one.Whole.ShownBytes == 0 {
			p.whole = true
			p.printNote("the deltas are no longer stored: blocks appear as a whole")
		}
		return nil
	case p.only != "" && one.Event.ExecutionID != p.only:
		return nil
	}
	e := one.Event.Event()
	if err := p.waitUntilDue(ctx, e.Time); err != nil {
		return err
	}
	return p.showItem(one, e)
}

// waitUntilDue blocks until an event with the recorded time at is due. Meanwhile it handles keys.
func (p *replayPlayer) waitUntilDue(ctx context.Context, at time.Time) error {
	due, gap := p.pacer.NextDue(at, time.Now())
	p.due = due
	for p.target == 0 {
		var timer <-chan time.Time
		if p.paused.IsZero() {
			timer = time.After(time.Until(p.due))
			p.printGap(gap)
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

// printGap prints that a long time without events was shortened.
func (p *replayPlayer) printGap(gap pace.Gap) {
	if gap.LeftOut > 0 {
		p.printNote(fmt.Sprintf("no events for %s, of which %s are skipped", formatDuration(gap.Original), formatDuration(gap.LeftOut)))
	}
}

// formatDuration formats a duration for people, with few digits.
func formatDuration(d time.Duration) string {
	switch {
	case d >= time.Minute:
		return d.Round(time.Second).String()
	case d >= time.Second:
		return d.Round(100 * time.Millisecond).String()
	}
	return d.Round(time.Microsecond).String()
}

// handleKey handles a key that the user has typed. ok is false when no more keys can come.
func (p *replayPlayer) handleKey(key byte, ok bool) {
	switch {
	case !ok:
		p.keys = nil
		p.resumePlayback()
	case key == keyPause && p.paused.IsZero():
		p.paused = time.Now()
	case key == keyPause:
		p.resumePlayback()
	case key == keyStep:
		if p.paused.IsZero() {
			p.paused = time.Now()
		}
		p.target = key
	case key == keyNextTool, key == keyNextError, key == keyNextTurn:
		p.target = key
	}
	p.showStatus()
}

// resumePlayback ends a pause, and shifts the times at which the next events are due.
func (p *replayPlayer) resumePlayback() {
	if p.paused.IsZero() {
		return
	}
	pause := time.Since(p.paused)
	p.pacer.Delay(pause)
	p.due, p.paused = p.due.Add(pause), time.Time{}
}

// showItem shows an event or a delta.
func (p *replayPlayer) showItem(one client.ReplayItem, e events.Event) error {
	p.mu.Lock()
	p.at = e.Time
	p.mu.Unlock()
	kept := one.Event.Type != events.TextDelta
	if kept {
		p.seq = one.Event.Seq
	}
	p.showStatus()
	w := sessionWatcher{app: p.app, renderer: p.renderer, json: p.json, open: map[string]bool{}}
	if _, err := w.handleEvent(*one.Event, one.Raw); err != nil && !errors.Is(err, errSessionEnded) {
		return err
	}
	if kept && p.isJumpTarget(e) {
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

// isJumpTarget reports whether the replay has reached the event to which the user has jumped.
func (p *replayPlayer) isJumpTarget(e events.Event) bool {
	call := p.completesToolInput(e)
	switch p.target {
	case keyStep:
		return true
	case keyNextTool:
		return call
	case keyNextError:
		return isFailure(e)
	case keyNextTurn:
		_, begins := e.Data.(events.ExecutionDispatched)
		return begins
	}
	return false
}

// completesToolInput reports whether an event completes the input of a tool call. At that event the call is shown.
func (p *replayPlayer) completesToolInput(e events.Event) bool {
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
		return len(d.Updates.Input) > 0 && p.takeIncompleteCall(d.BlockID)
	case events.BlockComplete:
		return p.takeIncompleteCall(d.Block.ID)
	}
	return false
}

// takeIncompleteCall reports whether a block is a tool call whose input was incomplete, and removes it from p.calls.
func (p *replayPlayer) takeIncompleteCall(block string) bool {
	waits := p.calls[block]
	delete(p.calls, block)
	return waits
}

// isFailure reports whether an event records an error or a failure.
func isFailure(e events.Event) bool {
	switch d := e.Data.(type) {
	case events.Error, events.ExecutionFailed, events.AttemptFailed, events.SandboxFailed:
		return true
	case events.BlockStart:
		return isFailedBlock(d.Block)
	case events.BlockComplete:
		return isFailedBlock(d.Block)
	}
	return false
}

// isFailedBlock reports whether a block is an error, or a tool result that is one.
func isFailedBlock(b events.Block) bool {
	return b.Kind == events.KindError || b.Status == events.StatusError || b.IsError
}

// showStatus shows the position, time and speed of the replay in the status line.
func (p *replayPlayer) showStatus() {
	if p.renderer == nil {
		return
	}
	speed := p.speed.String()
	if p.speed != pace.MaxSpeed {
		speed += "x"
	}
	text := fmt.Sprintf("event %d of %d · %s · %s", p.seq, p.to, p.replayTime().Local().Format("15:04:05"), speed)
	if !p.paused.IsZero() {
		text += " · paused"
	}
	p.renderer.SetProgramState(text)
}

// printNote prints a message about the replay: on a terminal between the blocks of the session, otherwise on standard
// error.
func (p *replayPlayer) printNote(text string) {
	if p.renderer != nil && p.app.OutTTY {
		p.renderer.ShowNote(text)
	} else {
		terminal.Fprintln(p.app.Err, "spool: "+text)
	}
}
