package claudecode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// maxEarlyBytes is the maximum size in bytes of the messages to and from sub-agents that wait for the call of their sub-agent.
const maxEarlyBytes = 8 << 20

// subagentInfo holds the metadata that the CLI records when it starts a sub-agent.
type subagentInfo struct {
	conversation string // the id of its conversation
	depth        uint32 // see conversation.depth
}

// heldHook is a call of the hook of the handshake that the session has not answered yet.
type heldHook struct {
	request string // the CLI's id of the hook's call
	input   hookInput
}

// handleTranscriptLines handles a line of the CLI with lines that it has written to a transcript. It journals those of sub-agents. The lines of the
// session's own transcript are ignored, because the CLI prints their content in other lines.
func (s *session) handleTranscriptLines(l outputLine, t *agent.Turn) error {
	name, isSubagent := strings.CutPrefix(filepath.Base(l.FilePath), "agent-")
	id, isTranscript := strings.CutSuffix(name, ".jsonl")
	if !isSubagent || !isTranscript {
		return nil
	}
	lines, err := decode[[]json.RawMessage](l.Entries, "transcript")
	if err != nil {
		return err
	}
	var errs []error
	for _, raw := range lines {
		e, err := decode[transcriptLine](raw, "line of a transcript")
		if err == nil {
			err = s.handleTranscriptLine(id, e, t)
		}
		errs = append(errs, err)
	}
	return errors.Join(errs...)
}

// noteSubagentStart notes which call of this turn has started the sub-agent with the CLI's id id, and journals the lines of its transcript that
// have come before.
func (s *session) noteSubagentStart(id, call string, t *agent.Turn) error {
	parent, c := s.findCall(call)
	runs := s.turn.conversations[s.subagents[id].conversation]
	if c == nil || !isSubagentTool(c.name) || runs != nil && runs.block != "" {
		return nil
	}
	sub := s.subagentOf(callKey{parent, call})
	s.subagents[id] = subagentInfo{conversation: sub.id, depth: sub.depth}
	return s.handleEarlyLines(id, t)
}

// findCall returns the running call with the id and its conversation, or nil and the main conversation. If calls of several conversations have the
// id, it returns that of the main agent, or else any.
func (s *session) findCall(id string) (conversation string, c *runningCall) {
	for key, found := range s.turn.calls {
		if key.id == id && (c == nil || key.conversation == events.MainConversation) {
			conversation, c = key.conversation, found
		}
	}
	return cmp.Or(conversation, events.MainConversation), c
}

// subagentOf returns the conversation that the call key has begun, or nil.
func (s *session) subagentOf(key callKey) *conversation {
	for _, id := range []string{key.id, nestedName(key)} {
		if c := s.turn.conversations[id]; c != nil && c.begun && c.parent == key.conversation {
			return c
		}
	}
	return nil
}

// nestedName returns the id of the conversation that a call begins if another conversation is named after the call's id.
func nestedName(key callKey) string { return key.conversation + "." + key.id }

// startedConversation returns the id of the conversation at the given depth that a call with the id has begun or will begin.
func (s *session) startedConversation(call string, depth uint32) string {
	if c := s.turn.conversations[call]; call != events.MainConversation && (c == nil || c.depth == depth) {
		return call
	}
	for _, c := range s.openSubagents() {
		if c.depth == depth && c.id == nestedName(callKey{c.parent, call}) {
			return c.id
		}
	}
	return call
}

// handleTranscriptLine journals a line of the transcript of the sub-agent with the CLI's id id. Lines of a sub-agent of an earlier process, which got
// another message, wait for the line with its call, which the CLI may print later. If too many wait, the lines of the sub-agent are journaled in a
// conversation that is named after it.
func (s *session) handleTranscriptLine(id string, e transcriptLine, t *agent.Turn) error {
	if e.Type == "agent_metadata" {
		s.subagents[id] = subagentInfo{conversation: s.startedConversation(e.ToolUseID, e.SpawnDepth), depth: e.SpawnDepth}
		return s.handleEarlyLines(id, t)
	}
	if _, known := s.subagents[id]; !known {
		s.turn.early[id] = append(s.turn.early[id], e)
		if s.turn.earlyBytes += len(e.Message) + len(e.ToolUseResult); s.turn.earlyBytes <= maxEarlyBytes {
			return nil
		}
		s.subagents[id] = subagentInfo{}
		return s.handleEarlyLines(id, t)
	}
	return s.journalTranscriptLine(id, e, t)
}

// handleEarlyLines journals the lines of the transcript of the sub-agent id that have waited for its call.
func (s *session) handleEarlyLines(id string, t *agent.Turn) error {
	lines := s.turn.early[id]
	delete(s.turn.early, id)
	var errs []error
	for _, e := range lines {
		s.turn.earlyBytes -= len(e.Message) + len(e.ToolUseResult)
		errs = append(errs, s.journalTranscriptLine(id, e, t))
	}
	return errors.Join(errs...)
}

// journalTranscriptLine journals a line of the transcript of the sub-agent with the CLI's id id.
func (s *session) journalTranscriptLine(id string, e transcriptLine, t *agent.Turn) error {
	switch e.Type {
	case "assistant":
		m, err := decode[apiMessage](e.Message, "message of a sub-agent")
		if err != nil {
			return err
		}
		return s.handleSubagentAnswer(id, e, m, t)
	case "user":
		m, err := decode[apiMessage](e.Message, "message for a sub-agent")
		if err != nil {
			return err
		}
		s.handleSubagentInput(s.subagentConversation(id), e, m, t)
	}
	return nil
}

// subagentConversation returns the conversation of the sub-agent with the CLI's id id. A sub-agent of an earlier turn, which got another message,
// has no block in this turn.
func (s *session) subagentConversation(id string) *conversation {
	info, name := s.subagents[id], s.conversationName(id)
	c := s.turn.conversations[name]
	if c == nil {
		c = &conversation{id: name, parent: events.MainConversation, depth: max(info.depth, 1)}
		s.turn.conversations[name] = c
	}
	return c
}

// conversationName returns the id of the conversation of the sub-agent with the CLI's id id, or of the main agent for "".
func (s *session) conversationName(id string) string {
	return cmp.Or(s.subagents[id].conversation, id, events.MainConversation)
}

// handleSubagentAnswer journals a message of the model to the sub-agent with the CLI's id id, and answers the hooks that wait for its calls.
func (s *session) handleSubagentAnswer(id string, e transcriptLine, m apiMessage, t *agent.Turn) error {
	c := s.subagentConversation(id)
	if m.Model == "<synthetic>" {
		s.handleSyntheticMessage(outputLine{Error: e.Error}, m, c, t)
		return nil
	}
	if m.ID != c.answer.id { // a message has a line for each of its parts
		c.answer = streamedAnswer{id: m.ID, model: m.Model}
		s.turn.seen = addUsage(s.turn.seen, m.Usage)
		t.Emit(events.MainConversation, events.MetadataUpdate{Usage: s.turn.seen, Model: s.turn.model})
	}
	var errs []error
	for _, p := range m.Content {
		s.journalPart(c, nil, wholePart{contentPart: p, message: m}, t)
		s.turn.held = slices.DeleteFunc(s.turn.held, func(h heldHook) bool {
			if h.input.AgentID != id || h.input.ToolUseID != p.ID {
				return false
			}
			errs = append(errs, s.answerHook(h))
			return true
		})
	}
	if c.result != nil && c.endsWith(c.result) {
		s.finishSubagent(c, t)
	}
	return errors.Join(errs...)
}

// handleSubagentInput journals a message to the model from a sub-agent: its task, or results of its calls.
func (s *session) handleSubagentInput(c *conversation, e transcriptLine, m apiMessage, t *agent.Turn) {
	for _, p := range m.Content {
		switch {
		case p.Type == "tool_result":
			s.journalToolResult(c, callResult{contentPart: p, structured: e.ToolUseResult}, t)
		case p.Type == "text" && !e.IsMeta:
			t.AddBlock(c.id, events.Block{Kind: events.KindUserMessage, Content: p.Text})
		default:
			s.completeSkillLoad(c.id, p.Text, t)
			journalLogf(t, "debug", "a sub-agent told the model: %s", p.Text+p.Content.text())
		}
	}
}

// handleCallHook handles a call of the hook of the handshake, which the CLI makes before every tool call. For a call of a sub-agent it answers when
// the call was journaled: the CLI prints the call later, and must not run it before.
func (s *session) handleCallHook(request string, raw json.RawMessage) error {
	in, err := decode[hookInput](raw, "input of a hook")
	if err != nil {
		return errors.Join(err, s.sendHookDecision(request, events.PermissionDeny, "The call cannot be read."))
	}
	h := heldHook{request: request, input: in}
	if s.pending && in.AgentID != "" && s.hookedCall(h) == nil {
		s.turn.held = append(s.turn.held, h)
		return nil
	}
	return s.answerHook(h)
}

// hookedCall returns the journaled call for which the CLI has called the hook, or nil.
func (s *session) hookedCall(h heldHook) *runningCall {
	return s.turn.calls[callKey{s.conversationName(h.input.AgentID), h.input.ToolUseID}]
}

// answerHook answers a call of the hook of the handshake. It denies the start of a sub-agent below the deepest level that the query allows, and
// otherwise makes the CLI ask about the call if the policy has to decide.
func (s *session) answerHook(h heldHook) error {
	c := s.hookedCall(h)
	switch limit := s.turn.maxDepth; {
	case c != nil && limit > 0 && c.depth >= limit && isSubagentTool(h.input.ToolName):
		return s.sendHookDecision(h.request, events.PermissionDeny,
			fmt.Sprintf("Sub-agents may be started %d levels below the agent (limits.subagentDepth). This one would be at level %d.", limit, c.depth+1))
	case s.scope.checked:
		return s.sendHookDecision(h.request, events.PermissionAsk, "")
	}
	return s.sendControlResponse(h.request, hookOutput{})
}

// sendHookDecision answers a call of the hook of the handshake with a decision, and for a denial the reason that the model gets.
func (s *session) sendHookDecision(request, decision, reason string) error {
	return s.sendControlResponse(request, hookOutput{Output: &hookDecision{Event: "PreToolUse", Decision: decision, Reason: reason}})
}

// beginSubagent begins the conversation of the sub-agent that the call p starts, and journals its block in the conversation parent. If the
// sub-agent runs already, beginSubagent does nothing.
func (s *session) beginSubagent(parent *conversation, p contentPart, t *agent.Turn) {
	key := callKey{parent.id, p.ID}
	c := s.subagentOf(key)
	if c != nil && c.result != nil { // the model repeats the id
		s.finishSubagent(c, t)
	}
	switch named := s.turn.conversations[p.ID]; {
	case c != nil && c.block != "":
		return
	case c != nil: // it has ended
	case named == nil && p.ID != events.MainConversation:
		c = &conversation{id: p.ID}
	case named != nil && !named.begun: // lines of its transcript came first
		c = named
	default:
		c = &conversation{id: nestedName(key)}
	}
	c.begun, c.parent, c.depth = true, parent.id, parent.depth+1
	s.turn.conversations[c.id] = c
	a := parseToolArguments(p.Input)
	c.block = t.OpenBlock(parent.id, events.Block{
		Kind: events.KindSubagent, SubagentID: c.id, ToolUseID: p.ID, Name: a.SubagentType, Input: append(json.RawMessage(nil), p.Input...),
	})
	t.Emit(parent.id, events.SubagentSpawned{
		SubagentID: c.id, Conversation: c.id, ToolUseID: p.ID, Name: a.SubagentType, Parent: parent.id, Prompt: a.Prompt, Depth: c.depth,
	})
}

// endSubagent ends the conversation of a sub-agent with the result of its call. The CLI may print the result before the last lines of the
// sub-agent's transcript; then the conversation ends when these have been handled.
func (s *session) endSubagent(sub *conversation, p callResult, t *agent.Turn) {
	sub.result = &p
	if p.IsError || sub.endsWith(&p) {
		s.finishSubagent(sub, t)
	}
}

// endsWith reports whether the last answer in the conversation of a sub-agent is the end of the result r of its call, or
// the result the end of the answer.
func (c *conversation) endsWith(r *callResult) bool {
	last, result := c.last.lines(), r.subagentText()
	return last != "" && (strings.HasSuffix(result, last) || result != "" && strings.HasSuffix(last, result))
}

// subagentText returns the text of a sub-agent's result, without the note to the model about how to go on that the CLI adds.
func (r callResult) subagentText() string {
	parts := r.Content
	if n := len(parts); n > 1 && strings.HasPrefix(parts[n-1].Text, "agentId: ") {
		parts = parts[:n-1]
	}
	return parts.text()
}

// finishSubagent journals the end of a sub-agent whose result is known.
func (s *session) finishSubagent(sub *conversation, t *agent.Turn) {
	r := sub.result
	t.CompleteBlock(sub.block, func(b *events.Block) {
		b.Output, b.IsError, b.DurationMs, b.Anchor = r.subagentText(), r.IsError, millis(r.took), r.anchor
	})
	t.Emit(sub.parent, events.SubagentCompleted{SubagentID: sub.id, Conversation: sub.id, IsError: r.IsError, DurationMs: millis(r.took)})
	sub.block, sub.result = "", nil
}

// openSubagents returns the conversations of the sub-agents whose blocks are open, the deepest first.
func (s *session) openSubagents() []*conversation {
	var out []*conversation
	for _, c := range s.turn.conversations {
		if c.block != "" {
			out = append(out, c)
		}
	}
	slices.SortFunc(out, func(a, b *conversation) int { return cmp.Or(cmp.Compare(b.depth, a.depth), cmp.Compare(a.id, b.id)) })
	return out
}

// millis returns a duration in milliseconds.
func millis(d time.Duration) uint32 {
	return uint32(min(max(d.Milliseconds(), 0), 1<<32-1)) //nolint:gosec // bounded
}
