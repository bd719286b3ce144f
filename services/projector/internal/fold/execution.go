package fold

import (
	"github.com/spoolhq/spool/pkg/events"
)

// findOrAddExecution returns the row of the execution id. If there is none, it adds the row, with e as the first event
// of the execution, and counts the execution in the session.
func (f *batchFold) findOrAddExecution(a *sessionRows, s *Session, id string, e events.Event) *cachedRow[Execution] {
	x := a.executions[id]
	if x == nil {
		x = &cachedRow[Execution]{row: Execution{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Ord: s.Executions, Phase: phaseQueued, QueuedAt: postgresTime(e.Time), FirstSeq: s.Tip,
		}}
		a.executions[id] = x
		s.Executions++
		s.Queued++
		markChanged(&f.executions, x)
	}
	return x
}

// foldExecution folds an event into the row of its execution, which has not ended, and into the session's counts of
// executions.
func (f *batchFold) foldExecution(a *sessionRows, s *Session, x *cachedRow[Execution], e events.Event) {
	waited := x.row.isQueued()
	switch d := e.Data.(type) {
	case events.MessageAccepted:
		row := markChanged(&f.executions, x)
		row.Metadata, row.Query = optionalJSON(d.Metadata), queryExcerpt(d)
		row.RecoveredFrom = validRowID(d.RecoveredFrom)
		if row.Ord == 0 {
			s.Title = row.Query
		}
	case events.ExecutionDispatched:
		markChanged(&f.executions, x).DispatchedAt = postgresTimePointer(e.Time)
		s.ActiveExecution = x.row.ID
	case events.ExecutionClaimed:
		row := markChanged(&f.executions, x)
		row.Executor = validText(d.Executor)
		if row.Phase == phaseQueued {
			row.Phase = phaseStarting
		}
	case events.ExecutionStarted:
		row := markChanged(&f.executions, x)
		row.Attempt = int32(d.Attempt)
		row.setRunning()
		if row.StartedAt == nil {
			row.StartedAt = postgresTimePointer(e.Time)
		}
	case events.AttemptFailed:
		markChanged(&f.executions, x).Phase = phaseStarting
	case events.ExecutionResolved:
		markChanged(&f.executions, x).Resolved = resolutionJSON(d)
	case events.ExecutionPaused:
		markChanged(&f.executions, x).Phase = phasePaused
	case events.ExecutionResumed:
		markChanged(&f.executions, x).setRunning()
	case events.ModelCalled:
		if !x.row.Metered {
			markChanged(&f.executions, x).Metered = true
		}
	case events.MetadataUpdate:
		row := markChanged(&f.executions, x)
		row.setReportedTokens(d.Usage)
		row.CostUSD, row.Model = d.CostUSD, validText(d.Model)
	case events.SandboxUsage:
		row := markChanged(&f.executions, x)
		row.SandboxMs += clampInt64(d.DurationMs)
		row.SandboxCostUSD = clampFinite(row.SandboxCostUSD + d.CostUSD)
	default:
		if events.IsTerminal(e.Type()) {
			f.foldExecutionEnd(a, s, x, e)
		}
	}
	if waited && !x.row.isQueued() {
		s.Queued--
	}
}

// maxQueryCharacters is the maximum length of Execution.Query, the beginning of the execution's message, in characters.
const maxQueryCharacters = 1000

// queryExcerpt returns the first maxQueryCharacters characters of a message's content or, if that is empty, of the
// first part of the message that has text.
func queryExcerpt(m events.MessageAccepted) string {
	text := m.Content
	for i := 0; text == "" && i < len(m.Parts); i++ {
		if m.Parts[i].Type == "text" {
			text = m.Parts[i].Text
		}
	}
	text = validText(text)
	n := 0
	for i := range text {
		if n == maxQueryCharacters {
			return text[:i]
		}
		n++
	}
	return text
}

// setReportedTokens sets the token counts of the execution to those that the agent reported.
func (x *Execution) setReportedTokens(u events.Usage) {
	x.Input, x.Output = int64(u.InputTokens), int64(u.OutputTokens)
	x.CacheRead, x.CacheWrite = int64(u.CacheReadTokens), int64(u.CacheWriteTokens)
}

// foldExecutionEnd folds the terminal event of an execution: it ends the execution's row, and the open calls, sub-agents and approval requests of the execution.
func (f *batchFold) foldExecutionEnd(a *sessionRows, s *Session, x *cachedRow[Execution], e events.Event) {
	row := markChanged(&f.executions, x)
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		row.Phase, row.DurationMs, row.Result = phaseCompleted, int64(d.DurationMs), validText(d.Result)
		row.setReportedTokens(d.Usage)
		if d.CostUSD != 0 {
			row.CostUSD = d.CostUSD
		}
	case events.ExecutionFailed:
		row.Phase, row.DurationMs, row.Code, row.Message = phaseFailed, int64(d.DurationMs), validText(d.Code), validText(d.Message)
		row.setReportedTokens(d.Usage)
	case events.ExecutionCancelled:
		row.Phase, row.DurationMs, row.Reason = phaseCancelled, int64(d.DurationMs), validText(d.Reason)
		row.setReportedTokens(d.Usage)
	case events.ExecutionWithdrawn:
		row.Phase, row.Reason = phaseCancelled, validText(d.Reason)
	default:
		// The event's data could not be decoded, but its type shows that the execution ended.
		row.Phase = phaseFailed
	}
	at := postgresTime(e.Time)
	row.EndedAt = &at
	if s.ActiveExecution == row.ID {
		s.ActiveExecution = ""
	}
	if !a.complete {
		f.out.Ended = append(f.out.Ended, EndedExecution{a.key, row.ID, at, s.Tip})
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

// toolCallID returns the row id of the tool call that an event is about, or "" for another event.
func toolCallID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.BlockStart:
		return blockToolCallID(d.Block)
	case events.BlockComplete:
		return blockToolCallID(d.Block)
	case events.PermissionDecided:
		return validRowID(d.ToolUseID)
	case events.ApprovalRequested:
		return validRowID(d.ToolUseID)
	}
	return ""
}

// blockToolCallID returns the row id of the tool call that a block begins or whose result it is, or "" for another
// block.
func blockToolCallID(b events.Block) string {
	switch {
	case b.Kind == events.KindToolUse && b.ToolUseID == "":
		return validRowID(b.ID)
	case b.Kind == events.KindToolUse, b.Kind == events.KindToolResult:
		return validRowID(b.ToolUseID)
	}
	return ""
}

// foldToolCall folds an event about a tool call into the call's row: the begin of the call, the permission decision, or
// the result.
func (f *batchFold) foldToolCall(a *sessionRows, s *Session, e events.Event) {
	id := toolCallID(e)
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
		f.foldToolResult(a, id, block, whole, e)
		return
	}
	c := a.calls[id]
	if c == nil {
		c = &cachedRow[ToolCall]{row: ToolCall{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Execution: validRowID(e.ExecutionID), Conversation: validRowID(e.ConversationID),
			Status: statusPending, StartedAt: postgresTime(e.Time), FirstSeq: s.Tip,
		}}
		a.calls[id] = c
		markChanged(&f.calls, c)
	}
	if d, ok := e.Data.(events.PermissionDecided); ok {
		row := markChanged(&f.calls, c)
		row.Decision = validText(d.Decision)
		if row.ToolName == "" {
			row.ToolName = validText(d.ToolName)
		}
		return
	}
	if d, ok := e.Data.(events.ApprovalRequested); ok {
		if c.row.ToolName == "" {
			markChanged(&f.calls, c).ToolName = validText(d.ToolName)
		}
		return
	}
	if c.row.Block == "" {
		row := markChanged(&f.calls, c)
		row.Block, row.ToolName = validRowID(block.ID), validText(block.ToolName)
	}
}

// foldToolResult ends the row of the tool call id with its result, the block b. It does nothing unless whole is set,
// which means that the block is complete, or if there is no row of the call.
func (f *batchFold) foldToolResult(a *sessionRows, id string, b events.Block, whole bool, e events.Event) {
	c := a.calls[id]
	if !whole || c == nil || c.row.Status != statusPending {
		return
	}
	row := markChanged(&f.calls, c)
	row.Status, row.EndedAt, row.DurationMs = statusComplete, postgresTimePointer(e.Time), int64(b.DurationMs)
	if b.IsError || b.Status == events.StatusError {
		row.Status = statusError
	}
}

// conversationID returns the row id of the conversation that an event begins or ends, or "" for another event.
func conversationID(e events.Event) string {
	switch d := e.Data.(type) {
	case events.SubagentSpawned:
		return validRowID(d.Conversation)
	case events.SubagentCompleted:
		return validRowID(d.Conversation)
	}
	return ""
}

// foldConversation folds an event about the start or end of a sub-agent into the row of the sub-agent's conversation.
func (f *batchFold) foldConversation(a *sessionRows, s *Session, e events.Event) {
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
		c = &cachedRow[Conversation]{row: Conversation{
			Tenant: a.key.Tenant, Session: a.key.ID, ID: id, Parent: validRowID(d.Parent), Execution: validRowID(e.ExecutionID),
			Subagent: validRowID(d.SubagentID), ToolUseID: validRowID(d.ToolUseID), Name: validText(d.Name), Status: phaseRunning,
			StartedAt: postgresTime(e.Time), FirstSeq: s.Tip,
		}}
		a.conversations[id] = c
		markChanged(&f.conversations, c)
	case events.SubagentCompleted:
		if c == nil || c.row.Status != phaseRunning {
			return
		}
		row := markChanged(&f.conversations, c)
		row.Status, row.EndedAt, row.DurationMs = phaseCompleted, postgresTimePointer(e.Time), int64(d.DurationMs)
		if d.IsError {
			row.Status = phaseFailed
		}
	}
}
