package codex

import (
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// ignoredMethods are the methods of notifications that are not journaled: the blocks and the end of the turn show their content, or they concern
// accounts, windows and lists, which the runner does not use.
var ignoredMethods = []string{
	"thread/started", "thread/status/changed", "thread/goal/cleared", "thread/name/updated", "thread/closed", "thread/settings/updated",
	"turn/diff/updated", "account/rateLimits/updated", "account/updated", "remoteControl/status/changed",
	"mcpServer/startupStatus/updated", "item/plan/delta", "item/fileChange/outputDelta", "item/fileChange/patchUpdated",
	"item/commandExecution/terminalInteraction", "skills/changed", "thread/readState/changed", "thread/queue/changed", "rawResponseItem/completed", "rawResponse/completed",
}

// handleNotification decodes and handles a notification of the CLI, and then the kept notifications of sub-agents that have become known by it. It
// keeps a notification about a thread that is not known yet.
func (s *session) handleNotification(l outputLine, raw []byte, t *agent.Turn) error {
	n, err := decode[notification](l.Params, l.Method)
	if err != nil {
		return err
	}
	if s.keepEarlyNotification(l, n, raw) {
		return nil
	}
	if err := s.dispatchNotification(l, n, raw, t); err != nil {
		return err
	}
	return s.handleEarlyNotifications(t)
}

// dispatchNotification handles a notification according to its method. It logs unknown ones.
func (s *session) dispatchNotification(l outputLine, n notification, raw []byte, t *agent.Turn) error {
	switch l.Method {
	case "turn/started":
		s.handleTurnStarted(n, t)
	case "turn/completed":
		return s.handleTurnCompleted(n, t)
	case "item/started":
		return s.handleItemStarted(n, t)
	case "item/completed":
		return s.handleItemCompleted(n, t)
	case "item/agentMessage/delta":
		s.appendText(n, t, n.Delta)
	case "item/reasoning/summaryTextDelta", "item/reasoning/textDelta":
		s.appendThinking(n, t)
	case "item/reasoning/summaryPartAdded":
		if w := s.turn.items[itemKey(n.ThreadID, n.ItemID)]; w != nil && n.SummaryIndex > 0 {
			w.gap = true
		}
	case "item/commandExecution/outputDelta", "item/mcpToolCall/progress":
		s.appendOutput(n, t)
	case "turn/plan/updated":
		if s.isOfRunningTurn(n) {
			s.journalPlan(n, t)
		}
	case "thread/tokenUsage/updated":
		s.countUsage(n, t)
	case "error":
		s.handleModelFailure(n, t)
	case "model/rerouted":
		s.logf(t, "warn", "the model is %s now", n.ToModel)
		s.model = n.ToModel
	case "warning", "guardianWarning", "configWarning", "deprecationNotice":
		s.logWarning(n, t)
	default:
		if !slices.Contains(ignoredMethods, l.Method) {
			s.logf(t, "info", "%s", raw)
		}
	}
	return nil
}

// logWarning journals a warning of the CLI as a log event.
func (s *session) logWarning(n notification, t *agent.Turn) {
	level, message := "warn", strings.TrimSpace(strings.Join([]string{n.Message, n.Summary, n.Details}, " "))
	if strings.Contains(message, "bubblewrap") {
		level = "debug" // the CLI's own command sandbox is not used
	}
	s.logf(t, level, "%s", message)
}

// handleTurnStarted stores the id of a turn of the session or of a sub-agent that has begun. It stops a turn that belongs to no query.
func (s *session) handleTurnStarted(n notification, t *agent.Turn) {
	if n.ThreadID != s.thread {
		if c := s.turn.conversations[n.ThreadID]; c != nil {
			c.turn = n.Turn.ID
			if s.isTooDeep(n.ThreadID) {
				s.sendTurnInterrupt(n.ThreadID, n.Turn.ID)
			}
		} else if !s.pending {
			s.sendTurnInterrupt(n.ThreadID, n.Turn.ID) // its parent's turn is over: its events would not be recorded
		}
		return
	}
	if !s.pending {
		// Its events would not be recorded.
		s.logf(t, "warn", "the agent began a turn that no query asked for")
		s.sendTurnInterrupt(n.ThreadID, n.Turn.ID)
		return
	}
	s.setTurnID(n.Turn.ID)
}

// appendText appends text to the open block of a message.
func (s *session) appendText(n notification, t *agent.Turn, text string) {
	w := s.turn.items[itemKey(n.ThreadID, n.ItemID)]
	if w == nil || w.block == "" || text == "" {
		return
	}
	t.AppendText(w.block, text)
}

// appendThinking appends text to a thinking block. The first text opens the block.
func (s *session) appendThinking(n notification, t *agent.Turn) {
	w := s.turn.items[itemKey(n.ThreadID, n.ItemID)]
	if w == nil || n.Delta == "" {
		return
	}
	if w.block == "" {
		w.block = t.OpenBlock(w.conv, events.Block{Kind: events.KindThinking})
	} else if w.gap {
		t.AppendText(w.block, "\n\n")
	}
	w.gap = false
	t.AppendText(w.block, n.Delta)
}

// appendOutput appends to the output of a tool call. The first output opens the block of the call's result.
func (s *session) appendOutput(n notification, t *agent.Turn) {
	w := s.turn.items[itemKey(n.ThreadID, n.ItemID)]
	text := n.Delta
	if n.Message != "" {
		text = n.Message + "\n"
	}
	if w == nil || text == "" {
		return
	}
	if w.block == "" {
		w.block = t.OpenBlock(w.conv, events.Block{Kind: events.KindToolResult, ToolUseID: n.ItemID})
	}
	t.AppendText(w.block, text)
}

// journalPlan journals the plan of a thread.
func (s *session) journalPlan(n notification, t *agent.Turn) {
	p := events.Plan{Explanation: n.Explanation}
	for _, item := range n.Plan {
		status := events.ParsePlanStatus(item.Status)
		if item.Status == "inProgress" {
			status = events.PlanInProgress
		}
		p.Items = append(p.Items, events.PlanItem{Content: item.Step, Status: status})
	}
	t.SetPlan(s.conversationID(n.ThreadID), p)
}

// countUsage adds the tokens that the model has used to the usage of the turn, and journals the usage. The tokens are the difference between the
// thread's total and its previous total, or those of the last request if no previous total is known.
func (s *session) countUsage(n notification, t *agent.Turn) {
	total := n.TokenUsage.Total
	before, known := s.totals[n.ThreadID]
	s.totals[n.ThreadID] = total
	if !s.isOfRunningTurn(n) || s.runningTurnID() == "" {
		return // reported when a thread is resumed
	}
	now := n.TokenUsage.Last
	if known {
		now = total.since(before)
	}
	if now == (tokenCounts{}) {
		return
	}
	s.turn.usage = s.turn.usage.plus(now)
	t.Emit(s.conversationID(n.ThreadID), events.MetadataUpdate{Usage: s.turn.usage.usage(), Model: s.model})
}

// handleModelFailure handles a failed request to the model. It completes the blocks that the model was writing with status error, because they will
// not continue. If the CLI does not retry, the failure becomes the reason why the turn fails.
func (s *session) handleModelFailure(n notification, t *agent.Turn) {
	if a := s.answerOf(n.ThreadID); a != nil {
		a.End() // a repeated request gets another answer
	}
	for id, w := range s.turn.items {
		if w.thread == n.ThreadID && w.half && w.block != "" {
			t.CompleteBlock(w.block, func(b *events.Block) { b.Status = events.StatusError })
			delete(s.turn.items, id)
		}
	}
	if n.WillRetry {
		s.logf(t, "warn", "the model failed: %s", strings.TrimSuffix(n.Error.Message+": "+n.Error.Additional, ": "))
		return
	}
	if n.ThreadID == s.thread {
		s.turn.why = &n.Error
		return
	}
	s.logf(t, "warn", "a sub-agent failed: %s", n.Error.Message)
}
