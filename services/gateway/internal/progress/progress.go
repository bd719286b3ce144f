// Package progress folds the events of one execution into its ExecutionStatus. It is pure. After TrimForSending a status has at most
// 64 KiB, however many events the execution has.
package progress

import (
	"slices"
	"time"

	"google.golang.org/protobuf/types/known/timestamppb"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
	"github.com/spoolhq/spool/pkg/readmodel"
)

// phaseWaitingForApproval is the phase of a running execution with open approval requests.
const phaseWaitingForApproval = "waiting_for_approval"

// The phases of an execution that has ended.
const (
	phaseCompleted = "completed"
	phaseFailed    = "failed"
	phaseCancelled = "cancelled"
)

// The statuses of a sub-agent.
const (
	subagentRunning   = "running"
	subagentCompleted = "completed"
	subagentFailed    = "failed"
)

// New returns the status of an execution that has no events yet.
func New(session, execution string) *spoolv1.ExecutionStatus {
	return &spoolv1.ExecutionStatus{
		SessionId: session, ExecutionId: execution, Phase: history.PhaseQueued,
		MessageCounts: &spoolv1.MessageCounts{}, ToolCallCounts: &spoolv1.ToolCallCounts{}, SubagentCounts: &spoolv1.SubagentCounts{},
		Usage: &spoolv1.Usage{}, Metered: &spoolv1.UsageTotal{},
	}
}

// IsFinalPhase reports whether a phase is one in which an execution ends: completed, failed or cancelled.
func IsFinalPhase(phase string) bool {
	return phase == phaseCompleted || phase == phaseFailed || phase == phaseCancelled
}

// Apply changes s, the status of an execution after the session's previous event, to its status after the event e with the
// given seq. s must be a result of New or of the read models. It may have more open elements than a status that is sent; see
// TrimForSending. Events after the end of the execution change only seq.
func Apply(s *spoolv1.ExecutionStatus, seq uint32, e events.Event) {
	s.Seq = seq
	belongs := e.ExecutionID == s.ExecutionId
	if s.Final || !belongs && s.DispatchedAt == nil {
		return
	}
	at := storedTime(e.Time)
	s.UpdatedAt = at
	if !belongs {
		return
	}
	if s.QueuedAt == nil {
		s.QueuedAt = at
	}
	switch d := e.Data.(type) {
	case events.ExecutionDispatched:
		s.DispatchedAt = at
	case events.ExecutionClaimed:
		if s.Phase == history.PhaseQueued {
			s.Phase = history.PhaseStarting
		}
	case events.ExecutionStarted:
		s.Attempt = d.Attempt
		setRunning(s)
		if s.StartedAt == nil {
			s.StartedAt = at
		}
	case events.AttemptFailed:
		s.Phase = history.PhaseStarting
	case events.ExecutionPaused:
		s.Phase = history.PhasePaused
	case events.ExecutionResumed:
		setRunning(s)
	case events.ApprovalRequested:
		addApproval(s, d, e)
	case events.ApprovalDecided:
		if i := indexApproval(s, d.ApprovalID); i >= 0 {
			s.PendingApprovals[i].Decided = true
		}
	case events.ApprovalResolved:
		removeApproval(s, d.ApprovalID)
	case events.ApprovalRetracted:
		removeApproval(s, d.ApprovalID)
	case events.MetadataUpdate:
		s.Usage, s.CostUsd, s.Model = usageMessage(d.Usage), d.CostUSD, nilIfEmpty(TruncateName(d.Model))
	case events.ModelCalled:
		addMeteredUsage(s.Metered, d)
	case events.SandboxUsage:
		s.SandboxMs += float64(d.DurationMs)
		s.SandboxCostUsd += d.CostUSD
	case events.MessageAccepted:
		addMessage(s, events.Block{
			ID: d.BlockID, Kind: events.KindUserMessage, Status: events.StatusComplete, Time: e.Time,
			Content: d.Content, Parts: d.Parts, ConversationID: events.MainConversation,
		})
	case events.BlockStart:
		applyBlock(s, d.Block, events.StatusPending, e)
	case events.BlockUpdate:
		applyTodos(s, e.ConversationID, d.Updates.TodoList())
	case events.BlockComplete:
		applyBlock(s, d.Block, events.StatusComplete, e)
	case events.PermissionDecided:
		if d.ToolUseID != "" {
			beginCall(s, d.ToolUseID, d.ToolName, e)
		}
	case events.SubagentSpawned:
		beginSubagent(s, d, e)
	case events.SubagentCompleted:
		endSubagent(s, d, e)
	default:
		if events.IsTerminal(e.Type()) {
			endExecution(s, e)
		}
	}
	trimForFolding(s)
}

// storedTime converts a time to a message with the precision of the read models, which is microseconds.
func storedTime(t time.Time) *timestamppb.Timestamp {
	return wirejson.TimestampOf(t.Truncate(time.Microsecond))
}

// endExecution applies the event that ends an execution: it ends the status, its open calls and its running
// sub-agents.
func endExecution(s *spoolv1.ExecutionStatus, e events.Event) {
	at := storedTime(e.Time)
	s.Final, s.EndedAt = true, at
	s.PendingApprovals, s.PendingApprovalCount = nil, 0
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		s.Phase, s.DurationMs, s.Usage = phaseCompleted, d.DurationMs, usageMessage(d.Usage)
		if d.CostUSD != 0 {
			s.CostUsd = d.CostUSD
		}
		SetResult(s, d.Result)
	case events.ExecutionFailed:
		s.Phase, s.DurationMs, s.Usage = phaseFailed, d.DurationMs, usageMessage(d.Usage)
		s.Code, s.Message = nilIfEmpty(TruncateName(d.Code)), nilIfEmpty(TruncateText(d.Message))
	case events.ExecutionCancelled:
		s.Phase, s.DurationMs, s.Usage = phaseCancelled, d.DurationMs, usageMessage(d.Usage)
		s.Reason = nilIfEmpty(TruncateName(d.Reason))
	case events.ExecutionWithdrawn:
		s.Phase, s.Reason = phaseCancelled, nilIfEmpty(TruncateName(d.Reason))
	default: // the data could not be decoded
		s.Phase = phaseFailed
	}
	for _, c := range s.ToolCalls {
		if callIsOpen(c) {
			c.Status, c.EndedAt = string(events.StatusError), at
		}
	}
	s.ToolCallCounts.Error += s.ToolCallCounts.Pending
	s.ToolCallCounts.Pending = 0
	for _, a := range s.Subagents {
		if subagentIsOpen(a) {
			a.Status, a.EndedAt = subagentFailed, at
		}
	}
	s.SubagentCounts.Failed += s.SubagentCounts.Running
	s.SubagentCounts.Running = 0
}

// setRunning sets the phase of an execution whose agent runs.
func setRunning(s *spoolv1.ExecutionStatus) {
	s.Phase = history.PhaseRunning
	if s.PendingApprovalCount > 0 {
		s.Phase = phaseWaitingForApproval
	}
}

// addApproval adds an approval request to the pending ones of a status, unless the status has it already.
func addApproval(s *spoolv1.ExecutionStatus, d events.ApprovalRequested, e events.Event) {
	if indexApproval(s, d.ApprovalID) >= 0 || len(s.PendingApprovals) == MaxOpenElements {
		return
	}
	s.PendingApprovals = append(s.PendingApprovals, NewApproval(d, e.Time))
	s.PendingApprovalCount++
	if s.Phase == history.PhaseRunning {
		setRunning(s)
	}
}

// removeApproval removes an approval request from the pending ones of a status.
func removeApproval(s *spoolv1.ExecutionStatus, id string) {
	i := indexApproval(s, id)
	if i < 0 {
		return
	}
	s.PendingApprovals = slices.Delete(s.PendingApprovals, i, i+1)
	s.PendingApprovalCount--
	if s.Phase == phaseWaitingForApproval {
		setRunning(s)
	}
}

// indexApproval returns the index of a pending approval request, or -1.
func indexApproval(s *spoolv1.ExecutionStatus, id string) int {
	id = readmodel.KeyValue(id)
	return slices.IndexFunc(s.PendingApprovals, func(a *spoolv1.PendingApproval) bool { return a.ApprovalId == id })
}

// applyBlock applies the block of a block_start or block_complete to a status. A block without a status gets
// defaultStatus.
func applyBlock(s *spoolv1.ExecutionStatus, b events.Block, defaultStatus events.BlockStatus, e events.Event) {
	if e.ConversationID != "" {
		b.ConversationID = e.ConversationID
	}
	if b.Time.IsZero() {
		b.Time = e.Time
	}
	whole := defaultStatus == events.StatusComplete || b.Status != events.StatusPending
	if b.Status == "" {
		b.Status = defaultStatus
	}
	switch b.Kind {
	case events.KindUserMessage, events.KindAssistantText:
		addMessage(s, b)
	case events.KindTodo, events.KindPlan:
		applyTodos(s, b.ConversationID, b.TodoList())
	case events.KindToolUse:
		id := b.ToolUseID
		if id == "" {
			id = b.ID
		}
		beginCall(s, id, b.ToolName, e)
	case events.KindToolResult:
		if whole && b.ToolUseID != "" {
			endCall(s, b, e.Time)
		}
	}
}

// addMessage adds a message to a status, or replaces the message if the status has it as pending.
func addMessage(s *spoolv1.ExecutionStatus, b events.Block) {
	m := NewMessage(b)
	i := slices.IndexFunc(s.Messages, func(known *spoolv1.MessageStatus) bool { return known.BlockId == m.BlockId })
	switch {
	case i >= 0 && messageIsOpen(s.Messages[i]):
		m.Time = s.Messages[i].Time
		s.Messages[i] = m
	case i < 0:
		s.Messages = append(s.Messages, m)
		if b.Kind == events.KindUserMessage {
			s.MessageCounts.User++
		} else {
			s.MessageCounts.Assistant++
		}
	}
}

// applyTodos sets the items of the agent's plan or todo list, if items are not nil and are not those of a sub-agent.
func applyTodos(s *spoolv1.ExecutionStatus, conversation string, items []events.TodoItem) {
	if items != nil && conversation == events.MainConversation {
		SetTodos(s, items)
	}
}

// beginCall adds the tool call with an id to a status, unless the status has it already.
func beginCall(s *spoolv1.ExecutionStatus, id, tool string, e events.Event) {
	id = readmodel.KeyValue(id)
	if i := indexCall(s, id); i >= 0 {
		if s.ToolCalls[i].ToolName == "" {
			s.ToolCalls[i].ToolName = TruncateName(tool)
		}
		return
	}
	s.ToolCallCounts.Pending++
	s.ToolCalls = append(s.ToolCalls, &spoolv1.ToolCallStatus{
		ToolUseId: id, ToolName: TruncateName(tool), Status: string(events.StatusPending), ConversationId: readmodel.KeyValue(e.ConversationID), StartedAt: storedTime(e.Time),
	})
}

// endCall ends the tool call to which a complete tool_result belongs.
func endCall(s *spoolv1.ExecutionStatus, result events.Block, at time.Time) {
	i := indexCall(s, readmodel.KeyValue(result.ToolUseID))
	if i < 0 || !callIsOpen(s.ToolCalls[i]) {
		return
	}
	c := s.ToolCalls[i]
	c.Status, c.EndedAt, c.DurationMs = string(events.StatusComplete), storedTime(at), result.DurationMs
	s.ToolCallCounts.Pending--
	if result.IsError || result.Status == events.StatusError {
		c.Status = string(events.StatusError)
		s.ToolCallCounts.Error++
		return
	}
	s.ToolCallCounts.Complete++
}

// indexCall returns the index of a tool call, or -1.
func indexCall(s *spoolv1.ExecutionStatus, id string) int {
	return slices.IndexFunc(s.ToolCalls, func(c *spoolv1.ToolCallStatus) bool { return c.ToolUseId == id })
}

// beginSubagent adds a sub-agent to a status, unless the status has it already.
func beginSubagent(s *spoolv1.ExecutionStatus, d events.SubagentSpawned, e events.Event) {
	conversation := readmodel.KeyValue(d.Conversation)
	if conversation == "" || indexSubagent(s, conversation) >= 0 {
		return
	}
	s.SubagentCounts.Running++
	s.Subagents = append(s.Subagents, &spoolv1.SubagentStatus{
		SubagentId: readmodel.KeyValue(d.SubagentID), ConversationId: conversation, Name: TruncateName(d.Name), Status: subagentRunning, StartedAt: storedTime(e.Time),
	})
}

// endSubagent ends a running sub-agent of a status.
func endSubagent(s *spoolv1.ExecutionStatus, d events.SubagentCompleted, e events.Event) {
	i := indexSubagent(s, readmodel.KeyValue(d.Conversation))
	if i < 0 || !subagentIsOpen(s.Subagents[i]) {
		return
	}
	a := s.Subagents[i]
	a.Status, a.EndedAt, a.DurationMs = subagentCompleted, storedTime(e.Time), d.DurationMs
	s.SubagentCounts.Running--
	if d.IsError {
		a.Status = subagentFailed
		s.SubagentCounts.Failed++
		return
	}
	s.SubagentCounts.Completed++
}

// indexSubagent returns the index of the sub-agent with a conversation, or -1.
func indexSubagent(s *spoolv1.ExecutionStatus, conversation string) int {
	return slices.IndexFunc(s.Subagents, func(a *spoolv1.SubagentStatus) bool { return a.ConversationId == conversation })
}

func messageIsOpen(m *spoolv1.MessageStatus) bool   { return m.Status == string(events.StatusPending) }
func callIsOpen(c *spoolv1.ToolCallStatus) bool     { return c.Status == string(events.StatusPending) }
func subagentIsOpen(a *spoolv1.SubagentStatus) bool { return a.Status == subagentRunning }

// usageMessage converts the usage of an execution to an API message.
func usageMessage(u events.Usage) *spoolv1.Usage {
	return &spoolv1.Usage{InputTokens: u.InputTokens, OutputTokens: u.OutputTokens, CacheReadTokens: u.CacheReadTokens, CacheWriteTokens: u.CacheWriteTokens}
}

// addMeteredUsage adds the usage of a model request, as the egress proxy metered it, to a sum.
func addMeteredUsage(t *spoolv1.UsageTotal, d events.ModelCalled) {
	t.Requests++
	if !d.Answered() {
		t.Failed++
	}
	t.InputTokens += float64(d.Usage.InputTokens)
	t.OutputTokens += float64(d.Usage.OutputTokens)
	t.CacheReadTokens += float64(d.Usage.CacheReadTokens)
	t.CacheWriteTokens += float64(d.Usage.CacheWriteTokens)
	t.CostUsd += d.CostUSD
}
