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

// sessionWatcher follows a session and shows its events.
type sessionWatcher struct {
	app          *app
	client       *client.Client
	session      string
	only         string             // the only execution to show; "" for all
	json         bool               // print events instead of blocks
	quiet        bool               // with json: print nothing
	renderer     *terminal.Renderer // nil with json
	prompts      *approvalPrompter  // nil if requests are not decided on this terminal
	onDispatched func()             // called when the execution may be claimed; may be nil
	open         map[string]bool    // executions without an end
	closed       bool               // the session accepts no more messages
	lost         bool               // the connection is lost, and a message about it was printed
	cursor       uint32             // seq of the last received event
	position     string             // position of the last received event; "" if there is none
}

// errSessionEnded is returned when a session will have no further events.
var errSessionEnded = errors.New("the session has ended")

// followToEnd follows the session from the cursor after until the end of the execution w.only, and returns the data of
// the event that ended it. If w.only is "", it follows until the session ends and returns nil.
func (w *sessionWatcher) followToEnd(ctx context.Context, after uint32) (events.Payload, error) {
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
		end, err := w.handleItem(m)
		if errors.Is(err, errSessionEnded) {
			return nil, nil
		}
		if end != nil || err != nil {
			return end, err
		}
	}
	return nil, context.Cause(ctx)
}

// handleItem handles one item of the followed session. It returns the data of the event that ended the execution, if
// the item is that event.
func (w *sessionWatcher) handleItem(m client.FollowItem) (events.Payload, error) {
	switch {
	case m.Event != nil:
		return w.handleEvent(*m.Event, m.Raw)
	case m.Joined:
		w.showConnectionState("", "")
		w.lost = false
	case m.Lost != nil:
		why := terminal.SafeLine(m.Lost.Error())
		w.showConnectionState("connection lost, reconnecting", "connection lost ("+why+"), reconnecting")
		w.lost = true
	case m.Lag != nil:
		if m.Lag.Lagging {
			w.showConnectionState("the server is behind, nothing is lost", "the server is behind; events are late, nothing is lost")
		} else {
			w.showConnectionState("", "")
		}
	case m.Snapshot != nil:
		return w.handleSnapshot(m.Snapshot)
	}
	return nil, nil
}

// showConnectionState shows the state of the connection: text state in the status line of a terminal, otherwise text
// line once on standard error.
func (w *sessionWatcher) showConnectionState(state, line string) {
	if w.renderer != nil {
		w.renderer.SetProgramState(state)
	}
	if (w.renderer == nil || !w.app.OutTTY) && line != "" && !w.lost {
		terminal.Fprintln(w.app.Err, "spool: "+line)
	}
}

// handleEvent shows an event. It returns the event's data if the event ended the execution w.only, and errSessionEnded
// after the last event of the session.
func (w *sessionWatcher) handleEvent(wire events.WireEvent, raw json.RawMessage) (events.Payload, error) {
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
		w.renderer.ShowEvent(e)
	}
	if w.prompts != nil {
		w.prompts.updateQueue(e)
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
		return nil, errSessionEnded
	}
	if events.IsTerminal(e.Type()) {
		delete(w.open, e.ExecutionID)
		if e.ExecutionID == w.only {
			return e.Data, nil
		}
	}
	if w.only == "" && w.closed && len(w.open) == 0 {
		return nil, errSessionEnded
	}
	return nil, nil
}

// showDelta shows the text of a delta.
func (w *sessionWatcher) showDelta(wire events.WireEvent) error {
	if w.renderer == nil {
		return nil
	}
	var d events.Delta
	if err := json.Unmarshal(wire.Data, &d); err != nil {
		return fmt.Errorf("decode delta: %w", err)
	}
	d.ExecutionID, d.ConversationID = wire.ExecutionID, wire.ConversationID
	w.renderer.ShowDelta(d)
	return nil
}

// handleSnapshot shows the blocks of a snapshot, and tells the user that events were skipped. If the execution has
// ended meanwhile, handleSnapshot asks the server for its end and returns it.
func (w *sessionWatcher) handleSnapshot(s *client.FollowSnapshot) (events.Payload, error) {
	w.cursor = s.Seq
	why := "the server continued from a snapshot"
	if s.Cause != nil {
		why = s.Cause.Error()
	}
	notice := fmt.Sprintf("%s; continuing after event %d", why, s.Seq)
	if w.renderer != nil && w.app.OutTTY {
		w.renderer.ShowNote(notice)
	} else {
		terminal.Fprintln(w.app.Err, "spool: "+notice)
	}
	if w.renderer != nil {
		var list []events.Block
		for _, b := range s.Blocks {
			if w.only == "" || b.ExecutionID == w.only {
				list = append(list, b)
			}
		}
		w.renderer.ShowSnapshot(list)
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

// startPrompts lets the user decide approval requests on the terminal, if there is one, until done is called. cl
// returns the current client. interrupt is called when the user types Ctrl-C at a prompt.
func (w *sessionWatcher) startPrompts(ctx context.Context, cl func() *client.Client, interrupt func()) (done func()) {
	if w.renderer == nil || !w.app.canPrompt() {
		return func() {}
	}
	w.prompts = newApprovalPrompter(w.app, w.renderer, cl, interrupt)
	ctx, cancel := context.WithCancel(ctx)
	var asking sync.WaitGroup
	asking.Go(func() { w.prompts.run(ctx) })
	return func() {
		cancel()
		asking.Wait()
	}
}

// startRenderer creates the renderer, and updates its spinner until done is called.
func (w *sessionWatcher) startRenderer(ctx context.Context) (done func() error) {
	if w.json {
		return func() error { return nil }
	}
	w.renderer = w.app.newRenderer()
	ctx, cancel := context.WithCancel(ctx)
	var spinning sync.WaitGroup
	spinning.Go(func() { w.renderer.RunSpinner(ctx) })
	return sync.OnceValue(func() error {
		cancel()
		spinning.Wait()
		return w.renderer.Close()
	})
}
