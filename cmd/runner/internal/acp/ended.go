package acp

import (
	"encoding/json"
	"fmt"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// promptAnswered handles the agent's answer to session/prompt, the request with the query. The answer ends the turn, unless the agent stopped
// it because of an interrupt of the turn before: then the query is sent again.
func (s *session) promptAnswered(m message, t *agent.Turn) error {
	if !s.pending {
		return nil // the turn has ended already
	}
	if m.Error != nil {
		s.endAfterSubagents(s.requestErrorEnd(m.Error), t)
		return nil
	}
	r, err := decode[sdk.PromptResponse](m.Result, "answer to session/prompt")
	if err != nil {
		s.endAfterSubagents(runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL", Message: err.Error()}, t)
		return nil
	}
	if s.cut && r.StopReason == sdk.StopReasonEndTurn {
		r.StopReason = sdk.StopReasonMaxTokens
	}
	// An agent that is asked to stop before it has begun may end its turn as if the turn were complete.
	if r.StopReason == sdk.StopReasonEndTurn && !s.shown && s.isInterrupted() {
		r.StopReason, r.Usage = sdk.StopReasonCancelled, nil
	}
	if s.isMisdirected(r.StopReason) {
		t.Emit(events.MainConversation, events.Log{Level: "info", Stream: "runner", Message: "the agent took the interrupt of the turn before for this one's: it is asked again"})
		return s.ask(t)
	}
	e := s.endOf(r.StopReason)
	if r.StopReason != sdk.StopReasonCancelled {
		s.closeMessage(s.main, t)
	}
	if r.Usage != nil {
		e.Usage = usage(*r.Usage)
	}
	s.endAfterSubagents(e, t)
	return nil
}

// isMisdirected reports whether an agent ended this turn because of a request to stop the turn before, which it had been
// asked to stop more than once. It returns true at most once.
func (s *session) isMisdirected(r sdk.StopReason) bool {
	s.mu.Lock()
	defer s.mu.Unlock()
	late := s.late && !s.interrupted
	if late {
		s.late = false
	}
	return late && !s.shown && (r == sdk.StopReasonCancelled || r == sdk.StopReasonEndTurn)
}

// endAfterSubagents ends the turn with e. If the turn was completed, it first waits until the agent has repeated the conversations of all
// sub-agents, see repeatSession.
func (s *session) endAfterSubagents(e runner.TurnEnd, t *agent.Turn) {
	if len(s.subs) > 0 && e.Outcome == runner.OutcomeCompleted {
		s.end = func(t *agent.Turn) { s.finish(e, t) }
		return
	}
	s.finish(e, t)
}

// finish ends the turn with e, to which it adds usage, cost and the result. Before, it completes open blocks and journals the usage and the
// position of the transcript.
func (s *session) finish(e runner.TurnEnd, t *agent.Turn) {
	s.mu.Lock()
	s.asking = false
	s.mu.Unlock()
	if s.seen != (events.Usage{}) {
		e.Usage = s.seen // the sum over messages: agents tend to report only the last message
	}
	if e.Outcome == runner.OutcomeCompleted {
		e.Result = s.main.last
	}
	s.completeOpenBlocks(t)
	e.CostUSD = s.spent()
	if s.ready {
		if e.Usage != (events.Usage{}) || e.CostUSD > 0 {
			t.Emit(events.MainConversation, events.MetadataUpdate{Usage: e.Usage, CostUSD: e.CostUSD, Model: s.d.Shown})
		}
		t.Emit(events.MainConversation, s.transcriptWritten())
	}
	s.pending, s.prompt, s.turnState = false, nil, newTurn(s.cost)
	t.End(e)
}

// completeOpenBlocks completes, at the end of a turn, what the agent itself does not end: the block of the to-do list, and the
// sub-agents without a result, which end with an error. Turn.End ends all other open blocks with status error.
func (s *session) completeOpenBlocks(t *agent.Turn) {
	if s.todo != "" {
		t.Complete(s.todo, nil)
	}
	for _, c := range s.calls {
		if c.sub != "" && !c.done {
			t.Emit(c.flow.conv, events.SubagentCompleted{SubagentID: c.ID, Conversation: c.ID, IsError: true, DurationMs: millis(s.now().Sub(c.started))})
		}
	}
}

// endOf returns the end of the turn for a stop reason of the protocol.
func (s *session) endOf(r sdk.StopReason) runner.TurnEnd {
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

// requestErrorEnd returns the end of a turn whose request the agent answered with an error.
func (s *session) requestErrorEnd(e *sdk.RequestError) runner.TurnEnd {
	if s.isInterrupted() {
		return runner.TurnEnd{Outcome: runner.OutcomeInterrupted, Message: describeRequestError(e)}
	}
	return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: s.code(e), Message: describeRequestError(e)}
}

// code returns Spool's error code for an error of the agent. It uses the HTTP status of an earlier notice of the agent,
// else the error code of the protocol, else the HTTP status in the error's text.
func (s *session) code(e *sdk.RequestError) string {
	if s.status != 0 {
		return ModelCode(s.status)
	}
	switch e.Code {
	case -32000: // authentication required
		return "MODEL_UNAUTHORIZED"
	case -32700, -32600, -32601, -32602:
		return "AGENT_PROTOCOL"
	}
	var data struct {
		Status     int `json:"status"`
		StatusCode int `json:"statusCode"`
	}
	if raw, err := json.Marshal(e.Data); err == nil && json.Unmarshal(raw, &data) == nil {
		return ModelCode(max(data.Status, data.StatusCode))
	}
	return "MODEL_ERROR"
}

// ModelCode returns the error code for the HTTP status of a model's answer, or for 0 if the status is unknown.
func ModelCode(status int) string {
	switch status {
	case 401, 403:
		return "MODEL_UNAUTHORIZED"
	case 404:
		return "MODEL_NOT_FOUND"
	case 429:
		return "MODEL_RATE_LIMITED"
	}
	return "MODEL_ERROR"
}

// describeRequestError returns an error as a text. Agents put the useful part into details.
func describeRequestError(e *sdk.RequestError) string {
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

// usage returns the token counts of the protocol as those of an event.
func usage(u sdk.Usage) events.Usage {
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
