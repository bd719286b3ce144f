package command

import (
	"context"
	"encoding/json"
	"fmt"

	"github.com/spoolhq/spool/cmd/spool/internal/client"
	"github.com/spoolhq/spool/cmd/spool/internal/terminal"
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/events"
)

type forkCommand struct {
	serverFlags
	Session  string  `arg:"" help:"The id of the session to fork."`
	At       *uint32 `placeholder:"N" help:"Fork at the event with this seq; by default at the last event."`
	Agent    string  `placeholder:"REF" help:"Another version of the session's agent, or another agent of the same architecture."`
	Metadata string  `placeholder:"JSON" help:"Metadata of the new session; by default the session's."`

	Preview               bool `help:"Make no session, and only print where the fork would begin and whether the conversation comes along."`
	AllowConversationLoss bool `help:"Fork although the agent's conversation is lost: the fork begins a new one."`
}

// Run creates a session that continues from an event of another session, and prints the new session's id. For a preview it
// only prints where the fork would begin.
func (c *forkCommand) Run(a *app) error {
	if err := checkID("session", events.KindSession, c.Session); err != nil {
		return err
	}
	if c.At != nil && *c.At == 0 {
		return usageError("at: events are numbered from 1; leave it out for the last event")
	}
	if c.Metadata != "" && !json.Valid([]byte(c.Metadata)) {
		return usageError("metadata: not valid JSON")
	}
	request := &spoolv1.ForkSessionRequest{SessionId: c.Session, At: c.At, Agent: c.Agent, Preview: c.Preview, AllowConversationLoss: c.AllowConversationLoss}
	if c.Metadata != "" {
		request.Metadata = &spoolv1.Json{Text: c.Metadata}
	}
	return c.withClient(a, func(ctx context.Context, cl *client.Client) error {
		doc, err := client.Call(ctx, cl.Sessions.ForkSession, request)
		if err != nil {
			return err
		}
		if c.JSON {
			return a.printJSON(doc)
		}
		if c.Preview {
			_, err := terminal.Fprintln(a.Out, describeForkOrigin(doc.Value.Parent))
			return err
		}
		if _, err := terminal.Fprintln(a.Out, doc.Value.SessionId); err != nil {
			return err
		}
		terminal.Fprintf(a.Err, "spool: %s\n", describeForkOrigin(doc.Value.Parent))
		return nil
	})
}

// forkConversations are descriptions of what becomes of the conversation in a fork.
var forkConversations = map[string]string{
	events.ForkConversationNew:        "; there is no conversation to continue",
	events.ForkConversationContinued:  "; the agent continues the conversation",
	events.ForkConversationUnverified: "; the agent has to find the conversation's records in another folder: if it does not, the first turn fails with CONVERSATION_LOST",
	events.ForkConversationLost:       "; the conversation is lost: the agent begins a new one",
}

// describeForkOrigin returns a text that states from which session and event a fork continues.
func describeForkOrigin(p *spoolv1.ParentSession) string {
	s := fmt.Sprintf("%s at event %d", p.GetSessionId(), p.GetEffective())
	if p.GetEffective() != p.GetAsked() {
		s += fmt.Sprintf(" (requested %d: %s)", p.GetAsked(), terminal.SafeLine(p.GetReason()))
	}
	switch {
	case p.GetSnapshot() == "":
		s += ", with an empty workspace"
	case p.GetSnapshotSeq() == 0:
		s += ", with the files it started with"
	default:
		s += fmt.Sprintf(", with the files of event %d", p.GetSnapshotSeq())
	}
	return s + forkConversations[p.GetConversation()]
}
