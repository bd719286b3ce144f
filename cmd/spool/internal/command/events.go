package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
)

// summaryColumns is the maximum width of the summary of an event or a block in its line.
const summaryColumns = 121

type eventsCommand struct {
	server
	Session   string `arg:"" help:"The session's id."`
	After     uint32 `placeholder:"N" help:"Only events with a greater seq."`
	Inherited bool   `help:"The events that a fork inherited, instead of its own; --after N then skips the first N."`
	Follow    bool   `short:"f" help:"Then wait for more events, until Ctrl-C; with --json also print deltas."`
}

// Run prints the log of a session.
func (c *eventsCommand) Run(a *app) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	if c.Follow && c.Inherited {
		return usageError("inherited: inherited events do not grow: leave --follow out")
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		if c.Follow {
			return c.follow(ctx, a, cl)
		}
		return c.read(ctx, a, cl)
	})
}

// read prints the stored events.
func (c *eventsCommand) read(ctx context.Context, a *app, cl *client.Client) error {
	read := func(after uint32) (client.EventsPage, error) { return cl.Events(ctx, c.Session, after) }
	if c.Inherited {
		read = func(after uint32) (client.EventsPage, error) { return cl.History(ctx, c.Session, after) }
	}
	session := ""
	for after := c.After; ; {
		page, err := read(after)
		if err != nil {
			return cursorError(err, after)
		}
		for _, e := range page.Events {
			if c.Inherited && !c.JSON && e.Value.SessionID != session {
				session = e.Value.SessionID
				fmt.Fprintln(a.Out, terminal.Line(session))
			}
			if err := c.print(a, e.Value, e.Raw); err != nil {
				return err
			}
		}
		if page.Next >= page.End || page.Next <= after {
			return nil
		}
		after = page.Next
	}
}

// follow prints the stored events, and then further events until the session is deleted.
func (c *eventsCommand) follow(ctx context.Context, a *app, cl *client.Client) error {
	for m, err := range cl.Follow(ctx, c.Session, c.After) {
		switch {
		case err != nil && context.Cause(ctx) != nil:
			return context.Cause(ctx)
		case err != nil:
			return err
		case m.Snapshot != nil:
			if m.Snapshot.Cause == nil {
				return fmt.Errorf("the server sent a snapshot of event %d instead of events", m.Snapshot.Seq)
			}
			return cursorError(m.Snapshot.Cause, c.After)
		case m.Lost != nil:
			fmt.Fprintln(a.Err, "spool: connection lost ("+terminal.Line(m.Lost.Error())+"), reconnecting")
		case m.Event != nil:
			if err := c.print(a, *m.Event, m.Raw); err != nil {
				return err
			}
			if m.Event.Type == (events.SessionDeleted{}).EventType() {
				return nil
			}
		}
	}
	return context.Cause(ctx)
}

// cursorError adds the remedy to the error of a cursor that the server cannot serve.
func cursorError(err error, after uint32) error {
	switch {
	case client.IsCode(err, client.CodeCursorExpired):
		return fmt.Errorf("after: events after %d are no longer stored; `spool attach SESSION` shows the resulting blocks (%s)", after, client.CodeCursorExpired)
	case client.IsCode(err, client.CodeCursorAhead):
		last := ""
		var e *client.Error
		if errors.As(err, &e) && e.Tip != nil {
			last = fmt.Sprintf("; its last is %d", *e.Tip)
		}
		return fmt.Errorf("after: the session has no event %d yet%s (%s)", after, last, client.CodeCursorAhead)
	}
	return err
}

func (c *eventsCommand) print(a *app, e events.WireEvent, raw json.RawMessage) error {
	if c.JSON {
		return a.printJSON(raw)
	}
	if e.Type == events.TextDelta {
		return nil
	}
	_, err := fmt.Fprintf(a.Out, "%6d  %s  %-22s  %s\n", e.Seq, e.Time.Local().Format("15:04:05.000"), terminal.Line(string(e.Type)), summary(e))
	return err
}

// summary returns a short form of an event's data.
func summary(e events.WireEvent) string {
	s := string(e.Data)
	switch d := e.Event().Data.(type) {
	case events.MessageAccepted:
		s = d.Content
	case events.BlockStart:
		s = blockSummary(d.Block)
	case events.BlockComplete:
		s = blockSummary(d.Block)
	}
	return summaryLine(s)
}

func blockSummary(b events.Block) string {
	return string(b.Kind) + " " + b.ToolName + " " + b.Name + " " + b.Content + string(b.Input) + b.Output + b.Message
}
