package acp

import (
	"encoding/json"
	"slices"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// flow is the state of the conversation of the main agent or of a sub-agent.
type flow struct {
	conv    string
	block   string // id of the open text block, "" for none
	kind    events.BlockKind
	message string // the agent's id of the text's message
	said    []byte
	last    string // the last text that was finished
}

// flow returns the conversation of a session of the protocol, or nil if the session is unknown.
func (s *session) flow(id sdk.SessionId) *flow {
	if id == s.id {
		return s.main
	}
	return s.subs[id]
}

// ignoredUpdates are the kinds of updates that are not journaled: options of the user interface, and titles.
var ignoredUpdates = []string{"available_commands_update", "session_info_update", "config_option_update"}

// handleUpdate handles a session/update: it journals messages and calls of known conversations. It ignores the updates with which an agent
// repeats the earlier conversation of a session that it loads.
func (s *session) handleUpdate(m message, t *agent.Turn) error {
	u, err := decode[update](m.Params, "session/update")
	if err != nil {
		return err
	}
	kind, err := decode[updateKind](u.Update, "session/update: update")
	if err != nil {
		return err
	}
	if s.loading && string(u.SessionID) == s.resume {
		return nil // it was journaled when it happened
	}
	f := s.flow(u.SessionID)
	if f == nil {
		if slices.Contains(ignoredUpdates, kind.Kind) {
			return nil
		}
		s.log(t, "info", "an update of another session %.100s: %s", u.SessionID, u.Update)
		return nil
	}
	switch kind.Kind {
	case "agent_message_chunk":
		c, err := decode[chunk](u.Update, kind.Kind)
		if err != nil {
			return err
		}
		return s.appendUpdate(f, events.KindAssistantText, c, t)
	case "agent_thought_chunk":
		c, err := decode[chunk](u.Update, kind.Kind)
		if err != nil {
			return err
		}
		return s.appendUpdate(f, events.KindThinking, c, t)
	case "user_message_chunk":
		c, err := decode[chunk](u.Update, kind.Kind)
		if err != nil || f == s.main {
			return err // in the agent's own conversation it repeats the query
		}
		return s.appendText(f, events.KindUserMessage, c, t)
	case "tool_call", "tool_call_update":
		c, err := decode[toolUpdate](u.Update, kind.Kind)
		if err != nil {
			return err
		}
		return s.handleTool(f, c, t)
	}
	return s.handleOtherUpdate(kind.Kind, u.Update, f, t)
}

// handleOtherUpdate handles updates other than messages and calls.
func (s *session) handleOtherUpdate(kind string, raw json.RawMessage, f *flow, t *agent.Turn) error {
	switch kind {
	case "plan":
		p, err := decode[sdk.SessionUpdatePlan](raw, kind)
		if err != nil {
			return err
		}
		items := make([]events.TodoItem, 0, len(p.Entries))
		for _, e := range p.Entries {
			items = append(items, events.TodoItem{Content: e.Content, Status: string(e.Status)})
		}
		s.showTodos(items, t)
	case "usage_update":
		u, err := decode[sdk.SessionUsageUpdate](raw, kind)
		if err != nil {
			return err
		}
		if f != s.main {
			return nil // the whole list has it
		}
		// The fill level of the context does not show the tokens that were used; the cost does.
		if u.Cost != nil && u.Cost.Currency == "USD" && u.Cost.Amount != s.cost {
			s.cost = u.Cost.Amount
			t.Emit(events.MainConversation, events.MetadataUpdate{CostUSD: s.spent(), Model: s.d.Shown})
		}
	case "current_mode_update":
		s.log(t, "info", "%s", raw)
	default:
		if slices.Contains(ignoredUpdates, kind) {
			return nil
		}
		s.log(t, "info", "an update of an unknown kind: %s", raw)
	}
	return nil
}

// spent returns the cost of the turn: that of the session less that of the turns before.
func (s *session) spent() float64 { return max(0, s.cost-s.began) }

// appendUpdate journals the text of an update, except for the part that a notice had before.
func (s *session) appendUpdate(f *flow, kind events.BlockKind, c chunk, t *agent.Turn) error {
	if piece := c.Content.String(); f == s.main && piece != "" {
		rest := s.early.unreported(textKey{kind, c.MessageID}, piece)
		if rest == "" {
			return nil
		}
		c.Content = content{Type: "text", Text: rest}
	}
	return s.appendText(f, kind, c, t)
}

// appendText journals a piece of text of a conversation: it appends to the open block, or completes that and opens another if the message or
// the kind differs.
func (s *session) appendText(f *flow, kind events.BlockKind, c chunk, t *agent.Turn) error {
	piece := c.Content.String()
	switch {
	case f.block != "" && f.message != c.MessageID:
		s.closeMessage(f, t)
	case f.block != "" && f.kind != kind:
		f.close(t, "")
	}
	if f.block == "" {
		if piece == "" {
			return nil
		}
		b := events.Block{Kind: kind}
		if kind == events.KindAssistantText {
			b.Model = s.d.Shown
		}
		s.shown = true
		f.block, f.kind, f.message, f.said = t.Open(f.conv, b), kind, c.MessageID, nil
		if err := s.requestStopAgain(); err != nil {
			return err
		}
	}
	f.said = append(f.said, piece...)
	t.Text(f.block, piece)
	return nil
}

// closeMessage completes the open text block at the end of its message. The block has an anchor if a fork can cut after the message.
func (s *session) closeMessage(f *flow, t *agent.Turn) {
	anchor := ""
	if s.d.Anchors && f == s.main {
		anchor = f.message
	}
	f.close(t, anchor)
}

// close completes the open text block, if there is one, with an anchor, "" for none.
func (f *flow) close(t *agent.Turn, anchor string) {
	if f.block == "" {
		return
	}
	t.Complete(f.block, func(b *events.Block) { b.Anchor = anchor })
	if f.kind == events.KindAssistantText {
		f.last = string(f.said)
	}
	f.block, f.said = "", nil
}

// showTodos journals the agent's to-do list. It opens one block in a turn, and updates it after that.
func (s *session) showTodos(items []events.TodoItem, t *agent.Turn) {
	if s.todo == "" {
		s.todo = t.Open(events.MainConversation, events.Block{Kind: events.KindTodo, Todos: items})
		return
	}
	t.Update(s.todo, events.BlockUpdates{Todos: items})
}
