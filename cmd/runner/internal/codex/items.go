package codex

import (
	"encoding/json"
	"fmt"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// runningItem is an item of the CLI's protocol, such as a command or a message, that the CLI has started and not completed.
type runningItem struct {
	thread string
	conv   string
	item   threadItem
	block  string // the open block that text is appended to, "" for none
	half   bool   // the model is still writing the item
	gap    bool   // a paragraph of thinking has ended; a blank line comes before the next text
	denied string // why the call was denied, "" if it was not
	// The policy denied the call, and nobody was asked.
	byPolicy bool
	anchor   string // anchor of the block that shows the item's end
}

// itemKey returns the key of an item in turnState.items. The ids of items are unique within a thread only.
func itemKey(thread, item string) string { return thread + "/" + item }

// isOfRunningTurn reports whether a notification is about the running turn or one of its sub-agents. Other notifications are not journaled.
func (s *session) isOfRunningTurn(n notification) bool {
	if !s.pending {
		return false
	}
	if n.ThreadID != s.thread {
		return s.turn.conversations[n.ThreadID] != nil
	}
	running := s.runningTurnID()
	return running == "" || n.TurnID == running
}

// logLateItem logs the end of an item that an earlier turn left running, such as a command that is a server.
func (s *session) logLateItem(n notification, i threadItem, t *agent.Turn) {
	switch i.Type {
	case "commandExecution":
		output, _ := i.callOutput()
		s.logf(t, "info", "a command of an earlier turn has ended: %s\n%s", i.Command, output)
	case "userMessage":
	case "reasoning":
		if text := strings.Join(append(i.Summary, i.contentTexts()...), "\n\n"); text != "" {
			s.logf(t, "info", "thinking of an earlier turn: %s", text)
		}
	default:
		s.logf(t, "info", "of an earlier turn: %s", n.Item)
	}
}

// handleItemStarted handles the start of an item: it journals a tool call, or opens the block of a message.
func (s *session) handleItemStarted(n notification, t *agent.Turn) error {
	i, err := decode[threadItem](n.Item, "item")
	if err != nil {
		return err
	}
	if !s.isOfRunningTurn(n) {
		return nil // handleItemCompleted logs the end of such an item
	}
	w := &runningItem{thread: n.ThreadID, conv: s.conversationID(n.ThreadID), item: i}
	s.endAnswerBefore(n.ThreadID, i)
	switch i.Type {
	case "userMessage":
		return nil // shown when it is complete
	case "agentMessage":
		w.half = true
		w.block = t.OpenBlock(w.conv, events.Block{Kind: events.KindAssistantText, Model: s.model})
	case "reasoning":
		w.half = true
	case "subAgentActivity":
		s.handleSubagentActivity(n.ThreadID, i, t)
	case "collabAgentToolCall":
		if i.Tool != "spawnAgent" {
			s.openCallBlock(w, t)
		}
	default:
		s.openCallBlock(w, t)
	}
	s.turn.items[itemKey(n.ThreadID, i.ID)] = w
	return nil
}

// openCallBlock journals the tool_use block of an item that is a tool call. It does nothing for other items.
func (s *session) openCallBlock(w *runningItem, t *agent.Turn) {
	u, ok := w.item.toolCallBlock()
	if !ok {
		return
	}
	u.Kind, u.ToolUseID = events.KindToolUse, w.item.ID
	t.AddBlock(w.conv, u)
}

// toolCallBlock returns a block, without a kind, with the name, the description and the input of the tool call that the item is. The bool is false
// for items that are not tool calls.
func (i threadItem) toolCallBlock() (events.Block, bool) {
	b := func(tool, display, description string, input any) (events.Block, bool) {
		raw, err := json.Marshal(input)
		if err != nil {
			raw = nil // parsed JSON always marshals
		}
		return events.Block{ToolName: tool, DisplayName: display, Description: description, Input: raw}, true
	}
	switch i.Type {
	case "commandExecution":
		var what []string
		for _, a := range i.Actions {
			what = append(what, a.Command)
		}
		return b("shell", "Shell", strings.Join(what, " && "), map[string]any{"command": i.Command, "cwd": i.Cwd})
	case "fileChange":
		return b("apply_patch", "Edit files", i.patchSummary(), map[string]any{"changes": i.Changes})
	case "mcpToolCall":
		return b("mcp__"+i.Server+"__"+i.Tool, i.Server+": "+i.Tool, "", i.Arguments)
	case "dynamicToolCall":
		return b(i.Tool, i.Tool, "", i.Arguments)
	case "webSearch":
		return b("web_search", "Web search", i.Query, map[string]any{"query": i.Query, "action": i.Action})
	case "imageView":
		return b("view_image", "View image", i.Path, map[string]any{"path": i.Path})
	case "collabAgentToolCall":
		return b(i.Tool, "Sub-agents: "+i.Tool, i.Prompt, map[string]any{"agents": i.Receivers, "prompt": i.Prompt})
	}
	return events.Block{}, false
}

// patchSummary returns the files that a patch changes in one line: A for added, M for changed, D for deleted, R for moved files.
func (i threadItem) patchSummary() string {
	var out []string
	for _, c := range i.Changes {
		switch {
		case c.Kind.MovePath != "":
			out = append(out, "R "+c.Path+" -> "+c.Kind.MovePath)
		case c.Kind.Type == "add":
			out = append(out, "A "+c.Path)
		case c.Kind.Type == "delete":
			out = append(out, "D "+c.Path)
		default:
			out = append(out, "M "+c.Path)
		}
	}
	return strings.Join(out, ", ")
}

// handleItemCompleted handles the end of an item: it completes the block of the item, or journals a block. The text of the completed item replaces
// the text of its deltas.
func (s *session) handleItemCompleted(n notification, t *agent.Turn) error {
	i, err := decode[threadItem](n.Item, "item")
	if err != nil {
		return err
	}
	if !s.isOfRunningTurn(n) {
		s.logLateItem(n, i, t)
		return nil
	}
	at := itemKey(n.ThreadID, i.ID)
	w := s.turn.items[at]
	if w == nil {
		w = &runningItem{thread: n.ThreadID, conv: s.conversationID(n.ThreadID)}
		s.endAnswerBefore(n.ThreadID, i)
		if i.Type != "subAgentActivity" && i.Type != "collabAgentToolCall" {
			w.item = i
			s.openCallBlock(w, t)
		}
	}
	delete(s.turn.items, at)
	w.item, w.anchor = i, s.itemAnchor(n, i)
	if w.denied != "" {
		s.sendDenialReason(n.ThreadID, n.TurnID, w)
	}
	switch i.Type {
	case "userMessage":
		if n.ThreadID != s.thread {
			t.AddBlock(w.conv, events.Block{Kind: events.KindUserMessage, Content: strings.TrimSpace(strings.Join(i.contentTexts(), "\n"))})
		}
	case "agentMessage":
		s.finishMessage(w, t)
	case "reasoning":
		finishThinking(w, t)
	case "subAgentActivity":
		s.handleSubagentActivity(n.ThreadID, i, t)
	case "collabAgentToolCall":
		s.handleCollaboration(n.ThreadID, w, t)
	case "plan":
		t.AddBlock(w.conv, events.Block{Kind: events.KindSystem, Subtype: "plan", Message: i.Text})
	case "contextCompaction":
		t.AddBlock(w.conv, events.Block{Kind: events.KindSystem, Subtype: "compact_boundary", Message: "The conversation was compacted."})
	case "enteredReviewMode", "exitedReviewMode":
		t.AddBlock(w.conv, events.Block{Kind: events.KindSystem, Subtype: "status", Message: i.Type + ": " + i.Review})
	default:
		if _, ok := i.toolCallBlock(); !ok {
			s.logf(t, "info", "%s", n.Item)
			return nil
		}
		s.finishCall(w, t)
	}
	return nil
}

// answerOf returns the last answer of the agent of a thread, or nil if the thread is unknown.
func (s *session) answerOf(thread string) *agent.AnswerText {
	if thread == s.thread {
		return &s.turn.answer
	}
	if c := s.turn.conversations[thread]; c != nil {
		return &c.answer
	}
	return nil
}

// endAnswerBefore ends the last answer of a thread's agent if the item, which begins, is no part of an answer.
func (s *session) endAnswerBefore(thread string, i threadItem) {
	if a := s.answerOf(thread); a != nil && i.Type != "agentMessage" && i.Type != "reasoning" {
		a.End()
	}
}

// finishMessage completes the block of a message of the model. The last answer of the main agent is the result of the turn.
func (s *session) finishMessage(w *runningItem, t *agent.Turn) {
	if a := s.answerOf(w.thread); a != nil {
		a.Add(w.item.Text)
	}
	if w.block == "" {
		t.AddBlock(w.conv, events.Block{Kind: events.KindAssistantText, Content: w.item.Text, Model: s.model, Anchor: w.anchor})
		return
	}
	t.CompleteBlock(w.block, func(b *events.Block) { b.Content, b.Anchor = w.item.Text, w.anchor })
}

// finishThinking completes the thinking block of an item. If no block is open, it journals one only if the item has text, which most have not.
func finishThinking(w *runningItem, t *agent.Turn) {
	summary, content := strings.Join(w.item.Summary, "\n\n"), strings.Join(w.item.contentTexts(), "\n\n")
	whole := events.Block{Kind: events.KindThinking, Content: content, Summary: summary}
	if content == "" {
		whole.Content, whole.Summary = summary, ""
	}
	switch {
	case w.block != "":
		t.CompleteBlock(w.block, func(b *events.Block) {
			if whole.Content != "" {
				b.Content, b.Summary = whole.Content, whole.Summary
			}
		})
	case whole.Content != "":
		t.AddBlock(w.conv, whole)
	}
}

// finishCall journals the result of a tool call, or completes the block in which its output was streamed.
func (s *session) finishCall(w *runningItem, t *agent.Turn) {
	i := w.item
	r := events.Block{Kind: events.KindToolResult, ToolUseID: i.ID, DurationMs: i.callDuration(), Anchor: w.anchor}
	r.Output, r.IsError = i.callOutput()
	if i.Status == "declined" {
		r.Output = strings.TrimSuffix("Declined: "+w.denied, ": ")
	}
	if w.block == "" {
		t.AddBlock(w.conv, r)
		return
	}
	t.CompleteBlock(w.block, func(b *events.Block) {
		// The streamed output is kept if the completed item does not repeat it.
		if i.Type == "mcpToolCall" || i.Output != nil || b.Output == "" {
			b.Output = r.Output
		} else {
			b.Output += exitCodeSuffix(b.Output, i.Exit)
		}
		b.IsError, b.DurationMs, b.Anchor = r.IsError, r.DurationMs, r.Anchor
	})
}

// callOutput returns the output of a tool call, and whether the call failed.
func (i threadItem) callOutput() (output string, failed bool) {
	failed = i.Status == "failed" || i.Status == "declined"
	switch i.Type {
	case "commandExecution":
		if i.Output != nil {
			output = *i.Output
		}
		return output + exitCodeSuffix(output, i.Exit), failed || i.Exit != nil && *i.Exit != 0
	case "fileChange":
		if failed {
			return "The patch was not applied.", true
		}
		return i.patchSummary(), false
	case "mcpToolCall":
		if i.Error != nil {
			return i.Error.Message, true
		}
		return i.Result.text(), failed
	}
	return "", failed
}

// exitCodeSuffix returns the text "Exit code N" that is appended to the output of a command, after a newline if the output does not end in one. It
// returns "" for exit code 0 and for an unknown one.
func exitCodeSuffix(output string, code *int) string {
	if code == nil || *code == 0 {
		return ""
	}
	if output != "" && !strings.HasSuffix(output, "\n") {
		return fmt.Sprintf("\nExit code %d", *code)
	}
	return fmt.Sprintf("Exit code %d", *code)
}

// text returns the result of an MCP tool as text. Content that is not text is named by its type.
func (r *mcpResult) text() string {
	if r == nil {
		return ""
	}
	var out []string
	for _, c := range r.Content {
		if c.Type == "text" {
			out = append(out, c.Text)
		} else {
			out = append(out, "["+c.Type+"]")
		}
	}
	if len(out) == 0 && len(r.Structured) > 0 && string(r.Structured) != "null" {
		return string(r.Structured)
	}
	return strings.Join(out, "\n")
}

// callDuration returns the duration of a tool call in milliseconds: the longer of the duration that the CLI states and the time from the start to
// the end of the item. The stated duration leaves out the time before the CLI first looked at the command.
func (i threadItem) callDuration() uint32 {
	ms := i.DurationMs
	if i.StartedAt > 0 && i.CompletedAt > 0 {
		ms = max(ms, i.CompletedAt-i.StartedAt)
	}
	return uint32(min(max(ms, 0), 1<<32-1)) //nolint:gosec // bounded
}

// journalUnfinishedCall journals a result for a tool call that has not ended by the end of the turn: a note that the call was interrupted or still
// runs.
func journalUnfinishedCall(w *runningItem, interrupted bool, t *agent.Turn) {
	if _, ok := w.item.toolCallBlock(); !ok {
		return
	}
	note := "[still at work when the turn ended]"
	if interrupted {
		note = "[interrupted]"
	}
	if w.block == "" {
		t.AddBlock(w.conv, events.Block{Kind: events.KindToolResult, ToolUseID: w.item.ID, Output: note, IsError: interrupted})
		return
	}
	t.CompleteBlock(w.block, func(b *events.Block) {
		if b.Output != "" && !strings.HasSuffix(b.Output, "\n") {
			b.Output += "\n"
		}
		b.Output += note
		b.IsError = interrupted
	})
}
