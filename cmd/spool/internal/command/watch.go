package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"sync"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

// watcher follows a session and shows its events.
type watcher struct {
	app          *app
	client       *client.Client
	session      string
	only         string             // the only execution to show; "" for all
	json         bool               // print events instead of blocks
	quiet        bool               // with json: print nothing
	renderer     *terminal.Renderer // nil with json
	prompts      *prompter          // nil if requests are not decided on this terminal
	onDispatched func()             // called when the execution may be claimed; may be nil
	open         map[string]bool    // executions without an end
	closed       bool               // the session accepts no more messages
	lost         bool               // the connection is lost, and the user was told
	cursor       uint32             // seq of the last received event
	position     string             // position of that event; "" if there is none
}

// errEnded is returned for a session that has no further events.
var errEnded = errors.New("the session has ended")

// watch follows the session from a cursor until the end of the execution, which it returns. If it shows the whole
// session, it follows until the session ends and returns nil.
func (w *watcher) watch(ctx context.Context, after uint32) (events.Payload, error) {
	if w.open == nil {
		w.open = map[string]bool{}
	}
	for m, err := range w.client.Follow(ctx, w.session, after) {
		if err != nil {
			if cause := context.Cause(ctx); cause != nil {
				return nil, cause
			}
			return nil, err
		}
		end, err := w.take(m)
		if errors.Is(err, errEnded) {
			return nil, nil
		}
		if end != nil || err != nil {
			return end, err
		}
	}
	return nil, context.Cause(ctx)
}

func (w *watcher) take(m client.Message) (events.Payload, error) {
	switch {
	case m.Event != nil:
		return w.event(*m.Event, m.Raw)
	case m.Joined:
		w.say("", "")
		w.lost = false
	case m.Lost != nil:
		why := terminal.Line(m.Lost.Error())
		w.say("connection lost, reconnecting", "connection lost ("+why+"), reconnecting")
		w.lost = true
	case m.Lag != nil:
		if m.Lag.Lagging {
			w.say("the server is behind, nothing is lost", "the server is behind; events are late, nothing is lost")
		} else {
			w.say("", "")
		}
	case m.Snapshot != nil:
		return w.snapshot(m.Snapshot)
	}
	return nil, nil
}

// say shows the state of the connection: in the status line on a terminal, otherwise once on standard error.
func (w *watcher) say(state, line string) {
	if w.renderer != nil {
		w.renderer.State(state)
	}
	if (w.renderer == nil || !w.app.OutTTY) && line != "" && !w.lost {
		fmt.Fprintln(w.app.Err, "spool: "+line)
	}
}

func (w *watcher) event(wire events.WireEvent, raw json.RawMessage) (events.Payload, error) {
	if wire.Type != events.TextDelta {
		w.cursor, w.position = wire.Seq, wire.Position
	}
	if w.only != "" && wire.ExecutionID != "" && wire.ExecutionID != w.only {
		return nil, nil
	}
	if w.onDispatched != nil && wire.Type == (events.ExecutionDispatched{}).EventType() {
		w.onDispatched()
	}
	if w.json && !w.quiet {
		if err := w.app.printJSON(raw); err != nil {
			return nil, err
		}
	}
	if wire.Type == events.TextDelta {
		return nil, w.showDelta(wire)
	}
	e := wire.Event()
	if w.renderer != nil {
		w.renderer.Event(e)
	}
	if w.prompts != nil {
		w.prompts.event(e)
	}
	switch e.Data.(type) {
	case events.MessageAccepted:
		w.open[e.ExecutionID] = true
	case events.SessionClosed:
		w.closed = true
	case events.SessionDeleted:
		if w.only != "" {
			return nil, fmt.Errorf("the session %s was deleted before the query ended", w.session)
		}
		return nil, errEnded
	}
	if events.IsTerminal(e.Type()) {
		delete(w.open, e.ExecutionID)
		if e.ExecutionID == w.only {
			return e.Data, nil
		}
	}
	if w.only == "" && w.closed && len(w.open) == 0 {
		return nil, errEnded
	}
	return nil, nil
}

func (w *watcher) showDelta(wire events.WireEvent) error {
	if w.renderer == nil {
		return nil
	}
	var d events.Delta
	if err := json.Unmarshal(wire.Data, &d); err != nil {
		return fmt.Errorf("decode delta: %w", err)
	}
	d.ExecutionID, d.ConversationID = wire.ExecutionID, wire.ConversationID
	w.renderer.Delta(d)
	return nil
}

// snapshot continues from a snapshot, and tells the user that events were skipped. If the end of the execution was
// among them, snapshot requests it.
func (w *watcher) snapshot(s *client.Snapshot) (events.Payload, error) {
	w.cursor = s.Seq
	why := "the server continued from a snapshot"
	if s.Cause != nil {
		why = s.Cause.Error()
	}
	notice := fmt.Sprintf("%s; continuing after event %d", why, s.Seq)
	if w.renderer != nil && w.app.OutTTY {
		w.renderer.Note(notice)
	} else {
		fmt.Fprintln(w.app.Err, "spool: "+terminal.Line(notice))
	}
	if w.renderer != nil {
		var list []events.Block
		for _, b := range s.Blocks {
			if w.only == "" || b.ExecutionID == w.only {
				list = append(list, b)
			}
		}
		w.renderer.Snapshot(list)
	}
	if w.only == "" {
		return nil, nil
	}
	x, err := w.client.Executions.GetExecution(w.app.ctx, &spoolv1.GetExecutionRequest{ExecutionId: w.only})
	if err != nil {
		return nil, err
	}
	switch x.Phase {
	case "completed":
		u := events.Usage{
			InputTokens: x.Usage.GetInputTokens(), OutputTokens: x.Usage.GetOutputTokens(),
			CacheReadTokens: x.Usage.GetCacheReadTokens(), CacheWriteTokens: x.Usage.GetCacheWriteTokens(),
		}
		return events.ExecutionCompleted{DurationMs: x.DurationMs, Usage: u}, nil
	case "failed":
		return events.ExecutionFailed{Code: x.GetCode(), Message: x.GetMessage()}, nil
	case "cancelled":
		return events.ExecutionCancelled{Reason: x.GetReason()}, nil
	}
	return nil, nil
}

// prompt lets the user decide approval requests on the terminal, if there is one, until done is called. cl returns the present client.
// interrupt is called when the user types Ctrl-C at a prompt.
func (w *watcher) prompt(ctx context.Context, cl func() *client.Client, interrupt func()) (done func()) {
	if w.renderer == nil || !w.app.canPrompt() {
		return func() {}
	}
	w.prompts = newPrompter(w.app, w.renderer, cl, interrupt)
	ctx, cancel := context.WithCancel(ctx)
	var asking sync.WaitGroup
	asking.Go(func() { w.prompts.run(ctx) })
	return func() {
		cancel()
		asking.Wait()
	}
}

// show creates the renderer and runs its spinner until done is called.
func (w *watcher) show(ctx context.Context) (done func() error) {
	if w.json {
		return func() error { return nil }
	}
	w.renderer = w.app.renderer()
	ctx, cancel := context.WithCancel(ctx)
	var spinning sync.WaitGroup
	spinning.Go(func() { w.renderer.Spin(ctx) })
	return sync.OnceValue(func() error {
		cancel()
		spinning.Wait()
		return w.renderer.Close()
	})
}
