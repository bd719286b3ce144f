package acp

import (
	"encoding/json"
	"slices"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// conversation is the state of the conversation of the main agent or of a sub-agent: its id and its open text block.
type conversation struct {
	conv    string
	depth   uint32 // 0 for the main agent, 1 for its sub-agents, and so on
	block   string // id of the open text block, "" for none
	kind    events.BlockKind
	message string // the agent's id of the text's message
	said    []byte

	answer   agent.AnswerText
	answered string // the agent's id of the message of the answer
}

// conversationOf returns the conversation that belongs to a session of the protocol, or nil if the session is unknown.
func (s *session) conversationOf(id sdk.SessionId) *conversation {
	if id == s.id {
		return s.main
	}
	return s.subs[id]
}

// ignoredUpdates are the kinds of session/update that are not journaled, because they concern options of the user interface, and titles.
var ignoredUpdates = []string{"available_commands_update", "session_info_update", "config_option_update"}

// handleUpdate handles a session/update: it journals messages and calls of known conversations. It ignores the updates with which an agent repeats
// the earlier conversation of a session that is being loaded.
func (s *session) handleUpdate(m rpcMessage, t *agent.Turn) error {
	u, err := decode[sessionUpdate](m.Params, "session/update")
	if err != nil {
		return err
	}
	kind, err := decode[updateKind](u.Update, "session/update: update")
	if err != nil {
		return err
	}
	if s.loading && string(u.SessionID) == s.resume {
		s.repeated = s.repeated || kind.Kind == "user_message_chunk" || kind.Kind == "agent_message_chunk"
		return nil // it was journaled when it happened
	}
	f := s.conversationOf(u.SessionID)
	if f == nil {
		if slices.Contains(ignoredUpdates, kind.Kind) {
			return nil
		}
		s.journalLog(t, "info", "an update of another session %.100s: %s", u.SessionID, u.Update)
		return nil
	}
	if err := s.journalUpdate(kind.Kind, u.Update, f, t); err != nil {
		return err
	}
	return s.journalHeld(t, false)
}

// journalUpdate journals an update of the conversation f.
func (s *session) journalUpdate(kind string, raw json.RawMessage, f *conversation, t *agent.Turn) error {
	switch kind {
	case "agent_message_chunk":
		c, err := decode[messageChunk](raw, kind)
		if err != nil {
			return err
		}
		return s.appendUnreportedText(f, events.KindAssistantText, c, t)
	case "agent_thought_chunk":
		c, err := decode[messageChunk](raw, kind)
		if err != nil {
			return err
		}
		return s.appendUnreportedText(f, events.KindThinking, c, t)
	case "user_message_chunk":
		c, err := decode[messageChunk](raw, kind)
		if err != nil || f == s.main {
			return err // in the agent's own conversation it repeats the query
		}
		return s.appendText(f, events.KindUserMessage, c, t)
	case "tool_call", "tool_call_update":
		c, err := decode[toolUpdate](raw, kind)
		if err != nil {
			return err
		}
		return s.handleToolUpdate(f, c, kind == "tool_call", t)
	}
	return s.handleOtherUpdate(kind, raw, f, t)
}

// handleOtherUpdate handles a session/update that is neither a message nor a call.
func (s *session) handleOtherUpdate(kind string, raw json.RawMessage, f *conversation, t *agent.Turn) error {
	switch kind {
	case "plan":
		p, err := decode[sdk.SessionUpdatePlan](raw, kind)
		if err != nil {
			return err
		}
		var plan events.Plan
		for _, e := range p.Entries {
			plan.Items = append(plan.Items, events.PlanItem{Content: e.Content, Status: events.ParsePlanStatus(string(e.Status)), Priority: string(e.Priority)})
		}
		t.SetPlan(f.conv, plan)
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
			t.Emit(events.MainConversation, events.MetadataUpdate{CostUSD: s.turnCost(), Model: s.d.Shown})
		}
	case "current_mode_update":
		s.journalLog(t, "info", "%s", raw)
	default:
		if slices.Contains(ignoredUpdates, kind) {
			return nil
		}
		s.journalLog(t, "info", "an update of an unknown kind: %s", raw)
	}
	return nil
}

// turnCost returns the cost of the turn in dollars: the cost of the session less that of the turns before.
func (s *session) turnCost() float64 { return max(0, s.cost-s.began) }

// appendUnreportedText journals the text of an update, without the part that a notice has reported before.
func (s *session) appendUnreportedText(f *conversation, kind events.BlockKind, c messageChunk, t *agent.Turn) error {
	if piece := c.Content.String(); f == s.main && piece != "" {
		rest := s.early.unreportedPart(textBlockKey{kind, c.MessageID}, piece)
		if rest == "" {
			return nil
		}
		c.Content = contentBlock{Type: "text", Text: rest}
	}
	return s.appendText(f, kind, c, t)
}

// appendText journals a piece of text of a conversation: it appends to the open block, or completes that block and opens another if the message or
// the kind differs.
func (s *session) appendText(f *conversation, kind events.BlockKind, c messageChunk, t *agent.Turn) error {
	piece := c.Content.String()
	switch {
	case f.block != "" && f.message != c.MessageID:
		s.completeMessage(f, t)
	case f.block != "" && f.kind != kind:
		f.completeText(t, "")
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
		f.block, f.kind, f.message, f.said = t.OpenBlock(f.conv, b), kind, c.MessageID, nil
		if err := s.repeatStopRequest(); err != nil {
			return err
		}
	}
	f.said = append(f.said, piece...)
	t.AppendText(f.block, piece)
	return nil
}

// completeMessage completes the open text block at the end of its message. The block has an anchor if a fork can cut after the message.
func (s *session) completeMessage(f *conversation, t *agent.Turn) {
	anchor := ""
	if s.d.Anchors && f == s.main {
		anchor = f.message
	}
	f.completeText(t, anchor)
}

// completeText completes the open text block, if there is one. anchor is the anchor of the block, "" for none.
func (f *conversation) completeText(t *agent.Turn, anchor string) {
	if f.block == "" {
		return
	}
	t.CompleteBlock(f.block, func(b *events.Block) { b.Anchor = anchor })
	if f.kind == events.KindAssistantText {
		if f.message != f.answered {
			f.answer.End()
		}
		f.answer.Add(string(f.said))
		f.answered = f.message
	}
	f.block, f.said = "", nil
}
