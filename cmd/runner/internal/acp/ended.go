package acp

import (
	"encoding/json"
	"fmt"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// handlePromptAnswer handles the agent's answer to session/prompt, the request with the query. The answer ends the turn, unless the agent stopped
// because of an interrupt of the turn before: then the query is sent again.
func (s *session) handlePromptAnswer(m rpcMessage, t *agent.Turn) error {
	if !s.pending {
		return nil // the turn has ended already
	}
	if m.Error != nil {
		s.endWhenQuiet(s.requestErrorEnd(m.Error), t)
		return nil
	}
	r, err := decode[sdk.PromptResponse](m.Result, "answer to session/prompt")
	if err != nil {
		s.endWhenQuiet(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: err.Error()}, t)
		return nil
	}
	if s.cut && r.StopReason == sdk.StopReasonEndTurn {
		r.StopReason = sdk.StopReasonMaxTokens
	}
	// An agent that is asked to stop before it has begun may end its turn as if the turn were complete.
	if r.StopReason == sdk.StopReasonEndTurn && !s.shown && s.isInterrupted() {
		r.StopReason, r.Usage = sdk.StopReasonCancelled, nil
	}
	if s.isStopOfEarlierTurn(r.StopReason) {
		t.Emit(events.MainConversation, events.Log{Level: "info", Stream: "runner", Message: "the agent took the interrupt of the turn before for this one's: it is asked again"})
		return s.sendPrompt(t)
	}
	e := s.stopReasonEnd(r.StopReason)
	s.whole = r.StopReason != sdk.StopReasonCancelled
	if r.Usage != nil {
		e.Usage = convertUsage(*r.Usage)
	}
	s.endWhenQuiet(e, t)
	return nil
}

const (
	// quietTime is the time without a line of the agent after which a turn ends whose query was answered.
	quietTime = 250 * time.Millisecond
	// maxQuietWait is the maximum time between the answer to the query and the end of the turn.
	maxQuietWait = 3 * time.Second
)

// endWhenQuiet ends the turn with e once the agent has printed nothing for quietTime, because agents send the end of their text also after the answer
// to the query: that text belongs to the turn. It waits for maxQuietWait at most.
func (s *session) endWhenQuiet(e runner.TurnEnd, t *agent.Turn) {
	s.mu.Lock()
	s.asking = false // the turn cannot be interrupted any more
	s.mu.Unlock()
	s.answered, s.outcome = s.now(), e
	s.awaitQuiet(t)
}

// awaitQuiet ends the turn after quietTime, or when maxQuietWait is over, unless it is called again before that.
func (s *session) awaitQuiet(t *agent.Turn) {
	wait := min(quietTime, maxQuietWait-s.now().Sub(s.answered))
	t.SetAlarm(max(0, wait), func() {
		s.answered = time.Time{}
		if s.whole {
			s.completeMessage(s.main, t)
		}
		s.finishTurn(s.outcome, t)
	})
}

// isStopOfEarlierTurn reports whether the agent ended this turn because of a request to stop the turn before, which was sent more than once. It
// returns true at most once.
func (s *session) isStopOfEarlierTurn(r sdk.StopReason) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := s.late && !s.interrupted
	if late {
		s.late = false
	}
	return late && !s.shown && (r == sdk.StopReasonCancelled || r == sdk.StopReasonEndTurn)
}

// finishTurn completes open blocks, journals the usage and the position of the transcript, and ends the turn with e, to which it adds usage, cost
// and the result.
func (s *session) finishTurn(e runner.TurnEnd, t *agent.Turn) {
	s.mu.Lock()
	s.asking = false
	s.mu.Unlock()
	if s.seen != (events.Usage{}) {
		e.Usage = s.seen // the sum over messages: agents tend to report only the last message
	}
	if e.Outcome == runner.OutcomeCompleted {
		e.Result = s.main.answer.String()
	}
	if err := s.journalHeld(t, true); err != nil {
		s.journalLog(t, "warn", "%s", err)
	}
	s.completeOpenBlocks(t)
	e.CostUSD = s.turnCost()
	if s.ready {
		if e.Usage != (events.Usage{}) || e.CostUSD > 0 {
			t.Emit(events.MainConversation, events.MetadataUpdate{Usage: e.Usage, CostUSD: e.CostUSD, Model: s.d.Shown})
		}
		t.Emit(events.MainConversation, s.transcriptEvent())
	}
	s.pending, s.prompt, s.turnState = false, nil, newTurnState(s.cost)
	t.End(e)
}

// completeOpenBlocks completes, at the end of a turn, the blocks for which the agent sends no end: the blocks of calls that have not begun and of
// sub-agents without a result, which get status error. Turn.End ends all other open blocks with status error.
func (s *session) completeOpenBlocks(t *agent.Turn) {
	for _, f := range s.subs {
		f.completeText(t, "")
	}
	for _, c := range s.calls {
		switch tool := s.callInfo(c.ToolCall); {
		case c.use != "" && !c.stated:
			s.completeToolUse(c, events.StatusError, t)
		case c.use == "" && tool.Subagent != nil:
			s.openSubagent(c, *tool.Subagent, t)
		}
		if c.sub != "" && !c.done {
			t.Emit(c.flow.conv, events.SubagentCompleted{SubagentID: c.subagent.conv, Conversation: c.subagent.conv, IsError: true, DurationMs: millis(s.now().Sub(c.started))})
		}
	}
}

// stopReasonEnd converts a stop reason of the protocol to the outcome of the turn.
func (s *session) stopReasonEnd(r sdk.StopReason) runner.TurnEnd {
	fail := func(code, message string) runner.TurnEnd {
		return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: code, Message: message}
	}
	switch r {
	case sdk.StopReasonEndTurn:
		return runner.TurnEnd{Outcome: runner.OutcomeCompleted}
	case sdk.StopReasonCancelled:
		if s.isInterrupted() {
			return runner.TurnEnd{Outcome: runner.OutcomeInterrupted}
		}
		return fail("AGENT_PROTOCOL", "the agent cancelled the turn without a request")
	case sdk.StopReasonMaxTokens:
		return fail("MODEL_ERROR", "the model reached its limit of tokens")
	case sdk.StopReasonMaxTurnRequests:
		return fail("TURN_LIMIT", "the agent reached its limit of model calls in a turn")
	case sdk.StopReasonRefusal:
		return fail("MODEL_ERROR", "the agent refused to continue")
	default:
		return fail("AGENT_PROTOCOL", fmt.Sprintf("the agent ended its turn with an unknown reason: %.64q", string(r)))
	}
}

// requestErrorEnd returns the outcome of a turn whose session/prompt the agent answered with an error.
func (s *session) requestErrorEnd(e *answerError) runner.TurnEnd {
	if s.isInterrupted() {
		return runner.TurnEnd{Outcome: runner.OutcomeInterrupted, Message: e.text()}
	}
	return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: s.errorCode(e), Message: e.text()}
}

// errorCode returns Spool's error code for an error that the agent answered. It uses the HTTP status of an earlier notice of the agent, else the
// error code of the protocol, else the HTTP status in the error's text.
func (s *session) errorCode(e *answerError) string {
	if s.status != 0 {
		return agent.ModelErrorCode(s.status, e.text())
	}
	if e.Malformed {
		return "AGENT_PROTOCOL"
	}
	if e.needsLogin() {
		return "MODEL_UNAUTHORIZED"
	}
	switch e.Code {
	case -32700, -32600, -32601, -32602:
		return "AGENT_PROTOCOL"
	}
	var data struct {
		Status     int `json:"status"`
		StatusCode int `json:"statusCode"`
	}
	if raw, err := json.Marshal(e.Data); err == nil && json.Unmarshal(raw, &data) == nil {
		return agent.ModelErrorCode(max(data.Status, data.StatusCode), e.text())
	}
	return agent.ModelErrorCode(0, e.text())
}

// text returns the text of an error that the agent answered, "" for nil. It includes the details, because agents put the useful part there.
func (e *answerError) text() string {
	if e == nil {
		return ""
	}
	var data struct {
		Details string `json:"details"`
		Message string `json:"message"`
	}
	text := e.Message
	if raw, err := json.Marshal(e.Data); err == nil && json.Unmarshal(raw, &data) == nil {
		for _, more := range []string{data.Details, data.Message} {
			if more != "" && more != text {
				text += ": " + more
			}
		}
	}
	if text == "" {
		return fmt.Sprintf("error %d", e.Code)
	}
	return text
}

// convertUsage converts the token counts of the protocol to those of an event.
func convertUsage(u sdk.Usage) events.Usage {
	count := func(n *int) uint32 {
		if n == nil {
			return 0
		}
		return uint32(min(max(*n, 0), 1<<32-1)) //nolint:gosec // bounded
	}
	output := u.OutputTokens
	if u.ThoughtTokens != nil {
		output += *u.ThoughtTokens
	}
	return events.Usage{
		InputTokens: count(&u.InputTokens), OutputTokens: count(&output),
		CacheReadTokens: count(u.CachedReadTokens), CacheWriteTokens: count(u.CachedWriteTokens),
	}
}
