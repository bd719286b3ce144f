package claudecode

import (
	"bytes"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// conversation is the state of the conversation of the main agent or of a sub-agent.
type conversation struct {
	id     string
	depth  uint32      // 0 for the main agent, 1 for its sub-agents, and so on
	begun  bool        // of the main agent, or the call that starts the sub-agent was journaled
	block  string      // the open subagent block; "" for none
	parent string      // id of the parent conversation
	result *callResult // of the sub-agent's call, until the end of its transcript was read
	last   lastAnswer
	answer streamedAnswer
}

// streamedAnswer is an answer of the model that the CLI is streaming. If the stream breaks in its first block, the CLI repeats the request without
// streaming and does not report that. A whole message with another id follows then, which replaces the streamed text.
type streamedAnswer struct {
	id     string
	model  string
	again  bool // the stream broke, and the CLI requested the answer again
	blocks []*streamedBlock
}

// streamedBlock is a content block that the CLI is streaming. It ends with the CLI's whole block, with the stop event of the stream, or with
// neither; the order is not fixed.
type streamedBlock struct {
	index  int
	part   contentPart // the part as the stream began it
	block  string      // id of the open block in the journal, "" for a part that is journaled when it is complete
	open   bool        // the block in the journal is not complete
	stated bool        // the CLI has printed the whole part
}

// handleStreamEvent handles one event of the model's stream: it opens blocks, appends text to blocks, completes them, and counts the token usage.
func (s *session) handleStreamEvent(l outputLine, t *agent.Turn) error {
	e, err := decode[streamEvent](l.Event, "stream_event")
	if err != nil {
		return err
	}
	c := s.turn.conversations[""]
	switch e.Type {
	case "message_start":
		s.abandonAnswer(c, t)
		c.answer = streamedAnswer{id: e.Message.ID, model: e.Message.Model}
		s.turn.model = e.Message.Model
		s.turn.seen = addUsage(s.turn.seen, apiUsage{Input: e.Message.Usage.Input, CacheRead: e.Message.Usage.CacheRead, CacheWrite: e.Message.Usage.CacheWrite})
		return s.repeatInterrupt()
	case "content_block_start":
		c.answer.blocks = append(c.answer.blocks, s.beginBlock(c, e, t))
	case "content_block_delta":
		if b := c.answer.blockAt(e.Index); b != nil && b.open && b.block != "" {
			t.AppendText(b.block, e.Delta.Text+e.Delta.Thinking+e.Delta.JSON) // one of them; a signature is none
		}
	case "content_block_stop":
		// If the whole block did not come before, the streamed text is all there is.
		if b := c.answer.blockAt(e.Index); b != nil && b.open && b.block != "" {
			b.open = false
			t.CompleteBlock(b.block, nil)
		}
	case "message_delta":
		s.turn.seen = addUsage(s.turn.seen, apiUsage{Output: e.Usage.Output})
		t.Emit(events.MainConversation, events.MetadataUpdate{Usage: s.turn.seen, Model: c.answer.model})
	case "message_stop", "ping":
	default:
		journalLogf(t, "info", "stream event %s", l.Event)
	}
	return nil
}

// beginBlock records a content block that the stream begins, and opens a block in the journal if the kind of the content block is known.
func (s *session) beginBlock(c *conversation, e streamEvent, t *agent.Turn) *streamedBlock {
	b := &streamedBlock{index: e.Index, part: e.Block, open: true}
	switch e.Block.Type {
	case "text":
		b.block = t.OpenBlock(c.id, events.Block{Kind: events.KindAssistantText, Model: c.answer.model})
	case "thinking":
		b.block = t.OpenBlock(c.id, events.Block{Kind: events.KindThinking})
	case "tool_use", "server_tool_use", "mcp_tool_use":
		// The block of a sub-agent needs the whole input, which names the sub-agent.
		if !isSubagentTool(e.Block.Name) {
			b.block = t.OpenBlock(c.id, events.Block{
				Kind: events.KindToolUse, ToolName: e.Block.Name, ToolUseID: e.Block.ID, DisplayName: displayName(e.Block.Name),
			})
		}
	}
	if first := e.Block.Text + e.Block.Thinking; b.block != "" && first != "" {
		t.AppendText(b.block, first)
	}
	return b
}

// abandonAnswer completes the open blocks of the conversation's answer with status error, because another answer replaces it.
func (s *session) abandonAnswer(c *conversation, t *agent.Turn) {
	for _, b := range c.answer.blocks {
		if b.open && b.block != "" {
			b.open = false
			t.CompleteBlock(b.block, func(x *events.Block) { x.Status = events.StatusError })
		}
	}
}

// blockAt returns the last block with the given index in the stream, or nil if there is none.
func (a *streamedAnswer) blockAt(index int) *streamedBlock {
	for _, b := range slices.Backward(a.blocks) {
		if b.index == index {
			return b
		}
	}
	return nil
}

// findBlock returns the streamed block that the whole part p belongs to, or nil: the first block of its type without a whole part and with the same
// id of the call. In an answer that was requested again the ids of calls differ, so any open block of the type counts.
func (a *streamedAnswer) findBlock(p contentPart) *streamedBlock {
	for _, b := range a.blocks {
		if !b.stated && b.part.Type == p.Type && (b.part.ID == p.ID || a.again && b.open) {
			return b
		}
	}
	return nil
}

// handleAssistantLine handles a line with whole parts of an answer of the model to the main agent: it completes the blocks that were streamed, and
// journals the parts that were not.
func (s *session) handleAssistantLine(l outputLine, t *agent.Turn) error {
	m, err := decode[apiMessage](l.Message, "assistant message")
	if err != nil {
		return err
	}
	c := s.turn.conversations[""]
	s.turn.last = l.UUID
	if m.Model == "<synthetic>" {
		s.handleSyntheticMessage(l, m, c, t)
		return nil
	}
	if a := &c.answer; a.id != "" && m.ID != a.id && a.isUnfinished() {
		journalLogf(t, "warn", "the model's stream broke; the agent asked again, and message %s takes the place of %s", m.ID, a.id)
		a.id, a.again = m.ID, true
		s.turn.seen = addUsage(s.turn.seen, m.Usage)
	}
	for i, p := range m.Content {
		var b *streamedBlock
		if m.ID == c.answer.id {
			b = c.answer.findBlock(p)
		}
		s.journalPart(c, b, wholePart{contentPart: p, message: m, anchor: l.blockAnchor(m, i)}, t)
	}
	return nil
}

// isUnfinished reports whether a block of the answer is open and the CLI has not printed its whole part.
func (a *streamedAnswer) isUnfinished() bool {
	return slices.ContainsFunc(a.blocks, func(b *streamedBlock) bool { return b.open && !b.stated })
}

// wholePart is a complete part of a message, with the anchor of its block, as opposed to the pieces of a stream.
type wholePart struct {
	contentPart
	message apiMessage
	anchor  string
}

// journalPart journals a complete part of a message. If b is not nil, it completes the streamed block b with the part; otherwise it journals a new
// block.
func (s *session) journalPart(c *conversation, b *streamedBlock, p wholePart, t *agent.Turn) {
	if b != nil {
		b.stated = true
	}
	c.last.add(p)
	var block events.Block
	switch p.Type {
	case "text":
		block = events.Block{Kind: events.KindAssistantText, Content: p.Text, Model: p.message.Model}
	case "thinking":
		block = events.Block{Kind: events.KindThinking, Content: p.Thinking}
	case "redacted_thinking":
		block = events.Block{Kind: events.KindThinking, Summary: "withheld by the model's provider"}
	case "tool_use", "server_tool_use", "mcp_tool_use":
		s.turn.calls[callKey{c.id, p.ID}] = &runningCall{depth: c.depth, name: p.Name, input: bytes.Clone(p.Input), started: s.now()}
		if isSubagentTool(p.Name) {
			s.beginSubagent(c, p.contentPart, t)
			return
		}
		block = events.Block{
			Kind: events.KindToolUse, ToolName: p.Name, ToolUseID: p.ID, Input: bytes.Clone(p.Input),
			DisplayName: displayName(p.Name), Description: describeInput(p.Input, s.place.Workspace),
		}
	default:
		if p.ToolUseID != "" { // a tool of the model's own service
			s.journalToolResult(c, callResult{contentPart: p.contentPart, anchor: p.anchor}, t)
			return
		}
		journalLogf(t, "info", "content of type %s", p.Type)
		return
	}
	if block.Kind != events.KindThinking { // the CLI leaves a thought at the end out, and takes the turn for one that was broken off
		block.Anchor = p.anchor
	}
	if b == nil || b.block == "" {
		t.AddBlock(c.id, block)
		return
	}
	if !b.open {
		return // the stream's stop came first
	}
	b.open = false
	t.CompleteBlock(b.block, func(x *events.Block) {
		x.Content, x.Model, x.Summary = block.Content, block.Model, block.Summary
		x.ToolName, x.ToolUseID, x.Input = block.ToolName, block.ToolUseID, block.Input
		x.DisplayName, x.Description, x.Anchor = block.DisplayName, block.Description, block.Anchor
	})
}

// handleSyntheticMessage journals a message that the CLI wrote in place of the model: an error of the model, or the answer of a command of the CLI.
func (s *session) handleSyntheticMessage(l outputLine, m apiMessage, c *conversation, t *agent.Turn) {
	why := ""
	if len(l.Error) > 0 && !bytes.Equal(l.Error, []byte("null")) {
		why = string(bytes.Trim(l.Error, `"`))
	}
	text, anchor := m.Content.text(), l.blockAnchor(m, len(m.Content)-1)
	if why == "" {
		t.AddBlock(c.id, events.Block{Kind: events.KindAssistantText, Content: text, Anchor: anchor})
		return
	}
	s.turn.why = why
	t.AddBlock(c.id, events.Block{Kind: events.KindError, Code: modelErrorCode(0, why, text), Message: text, Anchor: anchor})
}

// addUsage returns the sum of two token counts. A counter that would overflow has its largest value.
func addUsage(sum events.Usage, u apiUsage) events.Usage {
	add := func(a, b uint32) uint32 { return uint32(min(uint64(a)+uint64(b), 1<<32-1)) } //nolint:gosec // bounded
	return events.Usage{
		InputTokens: add(sum.InputTokens, u.Input), OutputTokens: add(sum.OutputTokens, u.Output),
		CacheReadTokens: add(sum.CacheReadTokens, u.CacheRead), CacheWriteTokens: add(sum.CacheWriteTokens, u.CacheWrite),
	}
}
