package claudecode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/record"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// usageTotal is the token usage and the cost in dollars of a process of the CLI since its start.
type usageTotal struct {
	input, output, cacheRead, cacheWrite uint64
	cost                                 float64
}

// usageTotal returns the usage of the process that a result line states, over all models.
func (r resultLine) usageTotal() usageTotal {
	sum := usageTotal{cost: r.TotalCostUSD}
	for _, m := range r.ModelUsage {
		sum.input += m.Input
		sum.output += m.Output
		sum.cacheRead += m.CacheRead
		sum.cacheWrite += m.CacheWrite
	}
	return sum
}

// difference returns the usage and the cost in dollars between two totals of a process. If a counter went down, the CLI has reset it in between,
// and its whole value counts.
func (now usageTotal) difference(before usageTotal) (events.Usage, float64) {
	sub := func(a, b uint64) uint32 {
		if a < b {
			b = 0
		}
		return uint32(min(a-b, 1<<32-1)) //nolint:gosec // bounded
	}
	cost := now.cost - before.cost
	if cost < 0 {
		cost = now.cost
	}
	return events.Usage{
		InputTokens: sub(now.input, before.input), OutputTokens: sub(now.output, before.output),
		CacheReadTokens: sub(now.cacheRead, before.cacheRead), CacheWriteTokens: sub(now.cacheWrite, before.cacheWrite),
	}, cost
}

// handleResult handles a result line, with which the CLI ends a turn: it completes open blocks, journals usage and cost, and ends the turn. It only
// logs the result of a turn that the CLI began without a query.
func (s *session) handleResult(l outputLine, raw []byte, t *agent.Turn) error {
	r, err := decode[resultLine](raw, "result")
	if err != nil {
		return err
	}
	total := r.usageTotal()
	spent, cost := total.difference(s.spent)
	s.spent = total
	if !s.pending || s.foreign && !s.taken {
		s.foreign = false
		journalLogf(t, "warn", "the agent ended a turn that no query asked for: %s", raw)
		return nil
	}
	s.foreign, s.pending = false, false
	if spent == (events.Usage{}) {
		spent = addUsage(events.Usage{}, r.Usage)
	}
	if spent == (events.Usage{}) {
		spent = s.turn.seen // an interrupted answer is not in the CLI's sums
	}
	var errs []error
	for _, id := range slices.Sorted(maps.Keys(s.turn.early)) {
		errs = append(errs, s.handleEarlyLines(id, t))
	}
	for _, h := range s.turn.held { // their lines did not come
		errs = append(errs, s.sendHookDecision(h.request, events.PermissionDeny, outsideTurnMessage))
	}
	s.completeOpenBlocks(t)
	t.Emit(events.MainConversation, events.MetadataUpdate{Usage: spent, CostUSD: cost, Model: cmp.Or(s.turn.model, s.model)})
	s.reportTranscript(cmp.Or(l.SessionID, s.agentSession), t)
	s.expectLastTranscriptLine(t)
	ended := s.turnOutcome(r)
	ended.Usage, ended.CostUSD = spent, cost
	t.End(ended)
	s.turn = newTurnState()
	return errors.Join(errs...)
}

// completeOpenBlocks completes, at the end of a turn, the blocks for which the CLI prints no end: the to-do list, and the block of
// each sub-agent without a result, which gets status error. Turn.End ends all other open blocks with status error.
func (s *session) completeOpenBlocks(t *agent.Turn) {
	for _, c := range s.openSubagents() {
		if c.result != nil { // its transcript has been written, but does not end with the text of the result
			s.finishSubagent(c, t)
			continue
		}
		t.CompleteBlock(c.block, func(b *events.Block) { b.Status, b.IsError = events.StatusError, true })
		t.Emit(c.parent, events.SubagentCompleted{SubagentID: c.id, Conversation: c.id, IsError: true})
	}
}

// turnOutcome returns the outcome of the turn for a result line. The turn has failed if is_error is set, because subtype is success for some
// failures too.
func (s *session) turnOutcome(r resultLine) runner.TurnEnd {
	message := cmp.Or(r.Result, strings.Join(r.Errors, "; "), r.Subtype)
	switch {
	case !r.IsError:
		return runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: s.resultText(r.Result)}
	case s.isInterrupted() && (strings.HasPrefix(r.TerminalReason, "aborted") || r.Subtype == "error_during_execution"):
		return runner.TurnEnd{Outcome: runner.OutcomeInterrupted}
	case r.Subtype == "success":
		return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: modelErrorCode(r.APIErrorStatus, s.turn.why, r.TerminalReason+" "+message), Message: message}
	}
	code := "AGENT_PROTOCOL"
	if r.Subtype == "error_max_turns" {
		code = "TURN_LIMIT"
	}
	return runner.TurnEnd{
		Outcome: runner.OutcomeFailed, Code: code,
		Message: fmt.Sprintf("the agent gave up (%s): %s", cmp.Or(r.TerminalReason, r.Subtype), message),
	}
}

// modelErrorCode returns Spool's error code for a failure of the model: by the HTTP status of the API and the message, or for status 0 by why, the
// CLI's name of the failure, and the message.
func modelErrorCode(status int, why, message string) string {
	if status == 0 {
		switch why {
		case "authentication_failed":
			return "MODEL_UNAUTHORIZED"
		case "model_not_found", "not_found_error":
			return "MODEL_NOT_FOUND"
		case "rate_limit":
			return "MODEL_RATE_LIMITED"
		}
	}
	return agent.ModelErrorCode(status, message)
}

// reportTranscript journals the path of the transcript of the CLI's session. It is called at the first line with the session's id and at the end
// of every turn.
func (s *session) reportTranscript(agentSession string, t *agent.Turn) {
	if agentSession == "" {
		return
	}
	s.agentSession = agentSession
	path, err := (Adapter{}).TranscriptPath(s.place, agentSession)
	if err != nil {
		t.Emit(events.MainConversation, events.Error{Code: "AGENT_PROTOCOL", Message: err.Error()})
		return
	}
	t.Emit(events.MainConversation, events.TranscriptWritten{AgentSessionID: agentSession, Path: path})
}

// expectLastTranscriptLine makes the next snapshot wait for the last line of the turn's answer, because the CLI writes that line to the transcript
// a tenth of a second after it has reported the end of the turn.
func (s *session) expectLastTranscriptLine(t *agent.Turn) {
	if s.turn.last == "" || s.agentSession == "" {
		return
	}
	path, err := (Adapter{}).TranscriptPath(s.place, s.agentSession)
	if err == nil {
		err = record.ExpectText(s.place.State, path, s.turn.last)
	}
	if err != nil {
		journalLogf(t, "warn", "the next snapshot may miss the end of the agent's record: %v", err)
	}
}

// systemLine is a line of the CLI with type system, such as a status or a notification about a sub-agent.
type systemLine struct {
	Status       string  `json:"status"`
	Attempt      int     `json:"attempt"` // api_retry
	MaxRetries   int     `json:"max_retries"`
	RetryDelayMs float64 `json:"retry_delay_ms"`
	ErrorStatus  int     `json:"error_status"`
	Error        string  `json:"error"`
	TaskID       string  `json:"task_id"` // task_started
	ToolUseID    string  `json:"tool_use_id"`
	AgentID      string  `json:"agent_id"` // permission_denied

	ToolName   string `json:"tool_name"` // permission_denied
	ReasonCode string `json:"decision_reason_code"`
	ReasonType string `json:"decision_reason_type"`
	Message    string `json:"message"`

	Compact struct { // compact_boundary
		Trigger   string `json:"trigger"`
		PreTokens int    `json:"pre_tokens"`
	} `json:"compact_metadata"`
}

// handleSystem handles a line of the CLI with type system.
func (s *session) handleSystem(l outputLine, raw []byte, t *agent.Turn) error {
	var n systemLine
	if err := json.Unmarshal(raw, &n); err != nil {
		return fmt.Errorf("system line: %w", err)
	}
	switch l.Subtype {
	case "init": // at the start of every turn
		s.model = l.Model
		s.foreign = !s.pending
		if l.Version != s.version {
			s.version = l.Version
			if l.Version != TestedVersion {
				journalLogf(t, "warn", "Claude Code is version %q; this runner was tested with %s", l.Version, TestedVersion)
			}
		}
		if l.SessionID != s.agentSession {
			s.reportTranscript(l.SessionID, t)
		}
		return s.requestAnnotations()
	case "status":
		if n.Status != "" && n.Status != "requesting" {
			t.AddBlock(events.MainConversation, events.Block{Kind: events.KindSystem, Subtype: "status", Message: n.Status})
		}
	case "compact_boundary":
		t.AddBlock(events.MainConversation, events.Block{
			Kind: events.KindSystem, Subtype: l.Subtype,
			Message: fmt.Sprintf("The conversation was compacted (%s, from %d tokens).", n.Compact.Trigger, n.Compact.PreTokens),
		})
	case "api_retry":
		journalLogf(t, "warn", "the model failed (status %d, %s); attempt %d of %d in %.0f ms", n.ErrorStatus, n.Error, n.Attempt, n.MaxRetries, n.RetryDelayMs)
	case "permission_denied":
		t.Emit(s.conversationOf(n.ToolUseID, n.AgentID), events.AgentDenied{
			ToolName: n.ToolName, ToolUseID: n.ToolUseID, Code: cmp.Or(n.ReasonCode, n.ReasonType), Reason: n.Message,
		})
	case "task_started": // its blocks tell the rest
		return s.noteSubagentStart(n.TaskID, n.ToolUseID, t)
	case "thinking_tokens", "task_progress", "task_updated", "task_notification":
		// The blocks contain the same.
	default:
		journalLogf(t, "info", "%s", raw)
	}
	return nil
}
