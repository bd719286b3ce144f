package command

import (
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	"github.com/spoolhq/spool/pkg/events"
)

type forkCommand struct {
	server
	Session  string  `arg:"" help:"The id of the session to fork."`
	At       *uint32 `placeholder:"N" help:"Fork at the event with this seq; by default at the last event."`
	Agent    string  `placeholder:"REF" help:"Another version of the session's agent, or another agent of the same architecture."`
	Metadata string  `placeholder:"JSON" help:"Metadata of the new session; by default the session's."`
}

// Run forks a session.
func (c *forkCommand) Run(a *app) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	if c.At != nil && *c.At == 0 {
		return usage("at: events are numbered from 1; leave it out for the last event")
	}
	if c.Metadata != "" && !json.Valid([]byte(c.Metadata)) {
		return usage("metadata: not valid JSON")
	}
	ctx, cancel := a.interruptible()
	defer cancel()
	cl, err := c.connect(ctx, a)
	if err != nil {
		return err
	}
	defer cl.Close()
	doc, err := cl.Fork(ctx, c.Session, client.Fork{At: c.At, Agent: c.Agent, Metadata: json.RawMessage(c.Metadata)})
	if err != nil {
		return err
	}
	if c.JSON {
		return a.json(doc)
	}
	if _, err := fmt.Fprintln(a.Out, doc.Value.SessionID); err != nil {
		return err
	}
	fmt.Fprintf(a.Err, "spool: %s\n", forkedFrom(doc.Value.Parent))
	return nil
}

// forkedFrom describes the start of a fork.
func forkedFrom(p client.Parent) string {
	s := fmt.Sprintf("%s at event %d", p.SessionID, p.Effective)
	if p.Effective != p.Asked {
		s += fmt.Sprintf(" (requested %d: %s)", p.Asked, terminal.Line(p.Reason))
	}
	switch {
	case p.Snapshot == "":
		s += ", with an empty workspace"
	case p.SnapshotSeq == 0:
		s += ", with the files it started with"
	default:
		s += fmt.Sprintf(", with the files of event %d", p.SnapshotSeq)
	}
	return s
}
