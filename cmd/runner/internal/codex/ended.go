package codex

import (
	"cmp"
	"encoding/json"
	"maps"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// since returns the tokens that were used between the counts before and now. A counter that went down was reset, and its whole value counts.
func (now tokenCounts) since(before tokenCounts) tokenCounts {
	sub := func(a, b uint64) uint64 {
		if a < b {
			return a // the CLI began a new sum
		}
		return a - b
	}
	return tokenCounts{
		Input: sub(now.Input, before.Input), Cached: sub(now.Cached, before.Cached),
		CacheWrite: sub(now.CacheWrite, before.CacheWrite), Output: sub(now.Output, before.Output),
	}
}

// plus returns the sum of two counts.
func (now tokenCounts) plus(more tokenCounts) tokenCounts {
	return tokenCounts{
		Input: now.Input + more.Input, Cached: now.Cached + more.Cached,
		CacheWrite: now.CacheWrite + more.CacheWrite, Output: now.Output + more.Output,
	}
}

// usage converts the CLI's token counts to the counts of an event. The CLI counts cached tokens as input, events do not.
func (now tokenCounts) usage() events.Usage {
	small := func(n uint64) uint32 { return uint32(min(n, 1<<32-1)) } //nolint:gosec // bounded
	fresh := now.Input - min(now.Input, now.Cached+now.CacheWrite)
	return events.Usage{
		InputTokens: small(fresh), OutputTokens: small(now.Output),
		CacheReadTokens: small(now.Cached), CacheWriteTokens: small(now.CacheWrite),
	}
}

// handleTurnCompleted handles the CLI's notification that a turn has ended. It ends the session's own turn, or completes a sub-agent.
func (s *session) handleTurnCompleted(n notification, t *agent.Turn) error {
	switch {
	case n.ThreadID != s.thread:
		s.endCommands(n.ThreadID, s.stopping[n.ThreadID])
		delete(s.stopping, n.ThreadID)
		s.completeSubagent(n.ThreadID, n.Turn, t)
	case !s.pending || s.runningTurnID() != "" && n.Turn.ID != s.runningTurnID():
		s.logf(t, "warn", "the agent ended a turn that no query asked for")
	default:
		kept := s.turn.early
		s.endTurn(s.turnOutcome(n.Turn), t)
		return s.handleUnclaimedNotifications(kept, t)
	}
	return nil
}

// endTurn ends the turn with the outcome e, after it has completed the open blocks and stopped the sub-agents.
func (s *session) endTurn(e runner.TurnEnd, t *agent.Turn) {
	s.completeOpenBlocks(e.Outcome == runner.OutcomeInterrupted, t)
	e.Usage = s.turn.usage.usage()
	s.reportTranscript(t)
	t.End(e)
	s.mu.Lock()
	s.turnID, s.interrupted = "", false
	s.mu.Unlock()
	s.resetTurn()
}

// completeOpenBlocks completes, at the end of a turn, the blocks for which the CLI prints no end. It also stops the sub-agents that still run, and
// their commands, because their events after the turn would not be journaled. Commands of the main agent continue in the background by the CLI's
// design, except after an interrupted turn, when completeOpenBlocks stops them too.
func (s *session) completeOpenBlocks(interrupted bool, t *agent.Turn) {
	commands := map[string][]string{}
	for _, id := range slices.Sorted(maps.Keys(s.turn.items)) {
		w := s.turn.items[id]
		if w.item.Type == "commandExecution" && (interrupted || w.thread != s.thread) {
			commands[w.thread] = append(commands[w.thread], w.item.ID)
		}
		journalUnfinishedCall(w, interrupted, t)
	}
	for _, thread := range slices.Sorted(maps.Keys(s.turn.conversations)) {
		c := s.turn.conversations[thread]
		if c.turn != "" {
			s.stopping[thread] = commands[thread]
			delete(commands, thread)
			s.sendTurnInterrupt(thread, c.turn)
		}
		s.closeSubagent(c, true, t)
	}
	for _, thread := range slices.Sorted(maps.Keys(commands)) {
		s.endCommands(thread, commands[thread])
	}
}

// endCommands ends the running commands of a thread that are in items. It requests the list of the thread's commands, and terminateListedCommands
// handles the answer. The CLI lists a command only after the turn of the command has ended.
func (s *session) endCommands(thread string, items []string) {
	if len(items) > 0 {
		s.sendRequest("thread/backgroundTerminals/list", map[string]string{"threadId": thread}, pendingRequest{thread: thread, items: items})
	}
}

// terminateListedCommands handles the answer to the request of endCommands: it ends those commands of was.items that the CLI lists.
func (s *session) terminateListedCommands(was pendingRequest, result json.RawMessage) error {
	r, err := decode[struct {
		Data []struct {
			ItemID    string `json:"itemId"`
			ProcessID string `json:"processId"`
		} `json:"data"`
	}](result, was.method)
	if err != nil {
		return err
	}
	for _, p := range r.Data {
		if slices.Contains(was.items, p.ItemID) {
			s.sendRequest("thread/backgroundTerminals/terminate", map[string]string{"threadId": was.thread, "processId": p.ProcessID}, pendingRequest{})
		}
	}
	return nil
}

// turnOutcome returns the outcome of a turn for the status and the error that the CLI reports.
func (s *session) turnOutcome(u turnInfo) runner.TurnEnd {
	why := cmp.Or(u.Error, s.turn.why, &turnError{})
	switch {
	case u.Status == "completed":
		return runner.TurnEnd{Outcome: runner.OutcomeCompleted, Result: s.turn.answer.String()}
	case u.Status == "interrupted" && s.isInterrupted():
		return runner.TurnEnd{Outcome: runner.OutcomeInterrupted}
	case u.Status == "failed":
		word, status := why.codeAndStatus()
		message := cmp.Or(innerErrorMessage(why.Message), word, "the turn failed")
		return runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: modelErrorCode(word, status, message), Message: message}
	}
	return runner.TurnEnd{
		Outcome: runner.OutcomeFailed, Code: "AGENT_PROTOCOL",
		Message: "the agent gave up (" + u.Status + "): " + cmp.Or(why.Message, "it did not say why"),
	}
}

// modelErrorCode returns Spool's error code for a failure of the model API: by word, the CLI's name of the failure, or else by the HTTP status and the
// message.
func modelErrorCode(word string, status int, message string) string {
	switch word {
	case "unauthorized":
		return "MODEL_UNAUTHORIZED"
	case "modelNotFound":
		return "MODEL_NOT_FOUND"
	case "rateLimitExceeded", "usageLimitExceeded":
		return "MODEL_RATE_LIMITED"
	case "sandboxError", "threadRollbackFailed", "activeTurnNotSteerable":
		return "AGENT_PROTOCOL"
	}
	return agent.ModelErrorCode(status, word+" "+message)
}

// innerErrorMessage extracts the message from the JSON of an error of the model API, which the CLI passes on unchanged when the status is 400.
func innerErrorMessage(message string) string {
	var body struct {
		Error struct {
			Message string `json:"message"`
		} `json:"error"`
	}
	if json.Unmarshal([]byte(message), &body) == nil && body.Error.Message != "" {
		return body.Error.Message
	}
	return message
}

// reportTranscript journals the path of the CLI's transcript. It is called when the first turn of the process has begun, and at the end of every
// turn.
func (s *session) reportTranscript(t *agent.Turn) {
	if s.thread != "" {
		t.Emit(events.MainConversation, events.TranscriptWritten{AgentSessionID: s.thread, Path: s.path})
	}
}
