package fold

import (
	"github.com/spoolhq/spool/pkg/events"
)

// execution returns an execution's row. If there is none, it creates the row and counts the execution in the session: e is its first event.
func (f *folding) execution(a *aggregate, s *Session, id string, e events.Event) *entry[Execution] {
	x := a.executions[id]
	if x == nil {
		x = &entry[Execution]{row: Execution{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Ord: s.Executions, Phase: phaseQueued, QueuedAt: pgTime(e.Time), FirstSeq: s.Tip,
		}}
		a.executions[id] = x
		s.Executions++
		s.Queued++
		markChanged(&f.executions, x)
	}
	return x
}

// foldExecution folds an event into the row of its execution, which has not ended, and into the counts of the session.
func (f *folding) foldExecution(a *aggregate, s *Session, x *entry[Execution], e events.Event) {
	waited := x.row.waiting()
	switch d := e.Data.(type) {
	case events.MessageAccepted:
		row := markChanged(&f.executions, x)
		row.Metadata, row.Query = jsonValue(d.Metadata), messageStart(d)
		row.RecoveredFrom = rowKey(d.RecoveredFrom)
		if row.Ord == 0 {
			s.Title = row.Query
		}
	case events.ExecutionDispatched:
		markChanged(&f.executions, x).DispatchedAt = pgTimePointer(e.Time)
		s.ActiveExecution = x.row.ID
	case events.ExecutionClaimed:
		row := markChanged(&f.executions, x)
		row.Executor = clean(d.Executor)
		if row.Phase == phaseQueued {
			row.Phase = phaseStarting
		}
	case events.ExecutionStarted:
		row := markChanged(&f.executions, x)
		row.Attempt = int32(d.Attempt)
		row.run()
		if row.StartedAt == nil {
			row.StartedAt = pgTimePointer(e.Time)
		}
	case events.AttemptFailed:
		markChanged(&f.executions, x).Phase = phaseStarting
	case events.ExecutionResolved:
		markChanged(&f.executions, x).Resolved = resolvedValue(d)
	case events.ExecutionPaused:
		markChanged(&f.executions, x).Phase = phasePaused
	case events.ExecutionResumed:
		markChanged(&f.executions, x).run()
	case events.ModelCalled:
		if !x.row.Metered {
			markChanged(&f.executions, x).Metered = true
		}
	case events.MetadataUpdate:
		row := markChanged(&f.executions, x)
		row.setUsage(d.Usage)
		row.CostUSD, row.Model = d.CostUSD, clean(d.Model)
	case events.SandboxUsage:
		row := markChanged(&f.executions, x)
		row.SandboxMs += clampInt64(d.DurationMs)
		row.SandboxCostUSD = finite(row.SandboxCostUSD + d.CostUSD)
	default:
		if events.IsTerminal(e.Type()) {
			f.foldEnd(a, s, x, e)
		}
	}
	if waited && !x.row.waiting() {
		s.Queued--
	}
}

// maxQuery is the longest Execution.Query, in characters.
const maxQuery = 1000

// messageStart returns the first maxQuery characters of a message: of its content, or else of its first part with text.
func messageStart(m events.MessageAccepted) string {
	text := m.Content
	for i := 0; text == "" && i < len(m.Parts); i++ {
		if m.Parts[i].Type == "text" {
			text = m.Parts[i].Text
		}
	}
	text = clean(text)
	n := 0
	for i := range text {
		if n == maxQuery {
			return text[:i]
		}
		n++
	}
	return text
}

// setUsage sets the token counts that the agent reports.
func (x *Execution) setUsage(u events.Usage) {
	x.Input, x.Output = int64(u.InputTokens), int64(u.OutputTokens)
	x.CacheRead, x.CacheWrite = int64(u.CacheReadTokens), int64(u.CacheWriteTokens)
}

// foldEnd folds the terminal event of an execution: it ends the execution's row, and the open calls, sub-agents and approval requests of the execution.
func (f *folding) foldEnd(a *aggregate, s *Session, x *entry[Execution], e events.Event) {
	row := markChanged(&f.executions, x)
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		row.Phase, row.DurationMs, row.Result = phaseCompleted, int64(d.DurationMs), clean(d.Result)
		row.setUsage(d.Usage)
		if d.CostUSD != 0 {
			row.CostUSD = d.CostUSD
		}
	case events.ExecutionFailed:
		row.Phase, row.DurationMs, row.Code, row.Message = phaseFailed, int64(d.DurationMs), clean(d.Code), clean(d.Message)
		row.setUsage(d.Usage)
	case events.ExecutionCancelled:
		row.Phase, row.DurationMs, row.Reason = phaseCancelled, int64(d.DurationMs), clean(d.Reason)
		row.setUsage(d.Usage)
	case events.ExecutionWithdrawn:
		row.Phase, row.Reason = phaseCancelled, clean(d.Reason)
	default:
		// The event's data could not be decoded, but its type shows that the execution ended.
		row.Phase = phaseFailed
	}
	at := pgTime(e.Time)
	row.EndedAt = &at
	if s.ActiveExecution == row.ID {
		s.ActiveExecution = ""
	}
	if !a.complete {
		f.out.Ended = append(f.out.Ended, Ended{a.key, row.ID, at, s.Tip})
	}
	// Changes.Ended handles rows that are not in memory.
	for _, c := range a.calls {
		if c != nil && c.row.Execution == row.ID && c.row.Status == statusPending {
			call := markChanged(&f.calls, c)
			call.Status, call.EndedAt = statusError, &at
		}
	}
	for _, c := range a.conversations {
		if c != nil && c.row.Execution == row.ID && c.row.Status == phaseRunning {
			conversation := markChanged(&f.conversations, c)
			conversation.Status, conversation.EndedAt = phaseFailed, &at
		}
	}
	f.retractApprovals(a, s, row, at)
}

// callID returns the row key of the tool call that an event is about, or "".
func callID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.BlockStart:
		return blockCallID(d.Block)
	case events.BlockComplete:
		return blockCallID(d.Block)
	case events.PermissionDecided:
		return rowKey(d.ToolUseID)
	case events.ApprovalRequested:
		return rowKey(d.ToolUseID)
	}
	return ""
}

// blockCallID returns the row key of the tool call that a block is about, or "".
func blockCallID(b events.Block) string {
	switch {
	case b.Kind == events.KindToolUse && b.ToolUseID == "":
		return rowKey(b.ID)
	case b.Kind == events.KindToolUse, b.Kind == events.KindToolResult:
		return rowKey(b.ToolUseID)
	}
	return ""
}

// foldCall folds an event into the row of the tool call that it is about: the begin of the call, the permission decision, or the result.
func (f *folding) foldCall(a *aggregate, s *Session, e events.Event) {
	id := callID(e)
	if id == "" {
		return
	}
	var block events.Block
	whole := false
	switch d := e.Data.(type) {
	case events.BlockStart:
		block, whole = d.Block, d.Block.Status != events.StatusPending
	case events.BlockComplete:
		block, whole = d.Block, true
	}
	if block.Kind == events.KindToolResult {
		f.foldResult(a, id, block, whole, e)
		return
	}
	c := a.calls[id]
	if c == nil {
		c = &entry[ToolCall]{row: ToolCall{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Execution: rowKey(e.ExecutionID), Conversation: rowKey(e.ConversationID),
			Status: statusPending, StartedAt: pgTime(e.Time), FirstSeq: s.Tip,
		}}
		a.calls[id] = c
		markChanged(&f.calls, c)
	}
	if d, ok := e.Data.(events.PermissionDecided); ok {
		row := markChanged(&f.calls, c)
		row.Decision = clean(d.Decision)
		if row.ToolName == "" {
			row.ToolName = clean(d.ToolName)
		}
		return
	}
	if d, ok := e.Data.(events.ApprovalRequested); ok {
		if c.row.ToolName == "" {
			markChanged(&f.calls, c).ToolName = clean(d.ToolName)
		}
		return
	}
	if c.row.Block == "" {
		row := markChanged(&f.calls, c)
		row.Block, row.ToolName = rowKey(block.ID), clean(block.ToolName)
	}
}

// foldResult ends the call id with its result, the block b, if whole is set, which means that the block is complete. A result of an unknown call
// has no effect on the rows of calls; it is stored as a block.
func (f *folding) foldResult(a *aggregate, id string, b events.Block, whole bool, e events.Event) {
	c := a.calls[id]
	if !whole || c == nil || c.row.Status != statusPending {
		return
	}
	row := markChanged(&f.calls, c)
	row.Status, row.EndedAt, row.DurationMs = statusComplete, pgTimePointer(e.Time), int64(b.DurationMs)
	if b.IsError || b.Status == events.StatusError {
		row.Status = statusError
	}
}

// conversationID returns the row key of the conversation that an event begins or ends, or "".
func conversationID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.SubagentSpawned:
		return rowKey(d.Conversation)
	case events.SubagentCompleted:
		return rowKey(d.Conversation)
	}
	return ""
}

// foldConversation folds an event about the start or end of a sub-agent into the row of the sub-agent's conversation.
func (f *folding) foldConversation(a *aggregate, s *Session, e events.Event) {
	id := conversationID(e)
	if id == "" {
		return
	}
	c := a.conversations[id]
	switch d := e.Data.(type) {
	case events.SubagentSpawned:
		if c != nil {
			return
		}
		c = &entry[Conversation]{row: Conversation{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Parent: rowKey(d.Parent), Execution: rowKey(e.ExecutionID),
			Subagent: rowKey(d.SubagentID), ToolUseID: rowKey(d.ToolUseID), Name: clean(d.Name), Status: phaseRunning,
			StartedAt: pgTime(e.Time), FirstSeq: s.Tip,
		}}
		a.conversations[id] = c
		markChanged(&f.conversations, c)
	case events.SubagentCompleted:
		if c == nil || c.row.Status != phaseRunning {
			return
		}
		row := markChanged(&f.conversations, c)
		row.Status, row.EndedAt, row.DurationMs = phaseCompleted, pgTimePointer(e.Time), int64(d.DurationMs)
		if d.IsError {
			row.Status = phaseFailed
		}
	}
}
