package command

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
)

// maxSummaryColumns is the maximum width of the one-line summary of an event or a block.
const maxSummaryColumns = 121

type eventsCommand struct {
	serverFlags
	Session   string `arg:"" help:"The session's id."`
	After     uint32 `placeholder:"N" help:"Only events with a greater seq."`
	Inherited bool   `help:"The events that a fork inherited, instead of its own; --after N then skips the first N."`
	Follow    bool   `short:"f" help:"Then wait for more events, until Ctrl-C; with --json also print deltas."`
}

// Run prints the events of a session.
func (c *eventsCommand) Run(a *app) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	if c.Follow && c.Inherited {
		return usageError("inherited: inherited events do not grow: leave --follow out")
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		if c.Follow {
			return c.followEvents(ctx, a, cl)
		}
		return c.printStoredEvents(ctx, a, cl)
	})
}

// printStoredEvents prints the events that are stored now.
func (c *eventsCommand) printStoredEvents(ctx context.Context, a *app, cl *client.Client) error {
	read := func(after uint32) (client.EventsPage, error) { return cl.ListEvents(ctx, c.Session, after) }
	if c.Inherited {
		read = func(after uint32) (client.EventsPage, error) { return cl.ListHistory(ctx, c.Session, after) }
	}
	session := ""
	for after := c.After; ; {
		page, err := read(after)
		if err != nil {
			return explainCursorError(err, after)
		}
		for _, e := range page.Events {
			if c.Inherited && !c.JSON && e.Value.SessionID != session {
				session = e.Value.SessionID
				terminal.Fprintln(a.Out, session)
			}
			if err := c.printEvent(a, e.Value, e.Raw); err != nil {
				return err
			}
		}
		if page.Next >= page.End || page.Next <= after {
			return nil
		}
		after = page.Next
	}
}

// followEvents prints the stored events, and then further events until the session is deleted.
func (c *eventsCommand) followEvents(ctx context.Context, a *app, cl *client.Client) error {
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
			return explainCursorError(m.Snapshot.Cause, c.After)
		case m.Lost != nil:
			terminal.Fprintln(a.Err, "spool: connection lost ("+m.Lost.Error()+"), reconnecting")
		case m.Event != nil:
			if err := c.printEvent(a, *m.Event, m.Raw); err != nil {
				return err
			}
			if m.Event.Type == (events.SessionDeleted{}).EventType() {
				return nil
			}
		}
	}
	return context.Cause(ctx)
}

// explainCursorError adds a remedy to err if the server cannot send events from the cursor after.
func explainCursorError(err error, after uint32) error {
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

// printEvent prints an event as one line, or as JSON with --json.
func (c *eventsCommand) printEvent(a *app, e events.WireEvent, raw json.RawMessage) error {
	if c.JSON {
		return a.printJSON(raw)
	}
	if e.Type == events.TextDelta {
		return nil
	}
	_, err := terminal.Fprintf(a.Out, "%6d  %s  %-22s  %s\n", e.Seq, e.Time.Local().Format("15:04:05.000"), string(e.Type), summarizeEvent(e))
	return err
}

// summarizeEvent returns a one-line summary of an event's data.
func summarizeEvent(e events.WireEvent) string {
	s := string(e.Data)
	switch d := e.Event().Data.(type) {
	case events.MessageAccepted:
		s = d.Content
	case events.BlockStart:
		s = summarizeBlock(d.Block)
	case events.BlockComplete:
		s = summarizeBlock(d.Block)
	}
	return shortenSummary(s)
}

// summarizeBlock returns a one-line summary of a block.
func summarizeBlock(b events.Block) string {
	switch {
	case b.Plan != nil:
		done := 0
		for _, item := range b.Plan.Items {
			if item.Status == events.PlanCompleted {
				done++
			}
		}
		return fmt.Sprintf("%s %d of %d completed", strings.TrimSpace(string(b.Kind)+" "+b.Plan.Title), done, len(b.Plan.Items))
	case b.Step != nil:
		return fmt.Sprintf("%s %s %s %s", b.Kind, b.Step.Title, b.Step.Status, b.Step.ErrorMessage)
	case b.Skill != nil:
		return string(b.Kind) + " " + b.Skill.Name
	}
	return string(b.Kind) + " " + b.ToolName + " " + b.Name + " " + b.Content + string(b.Input) + b.Output + b.Message
}
