package codex

import (
	"cmp"
	"encoding/json"
	"path"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// conversation is the state of the conversation of a thread, which belongs to the main agent or to a sub-agent.
type conversation struct {
	id     string
	parent string
	depth  uint32 // 1 for a sub-agent of the main agent, 2 for one that it starts, and so on
	block  string // the open block of a sub-agent
	turn   string // the running turn of a sub-agent
	answer agent.AnswerText
}

// conversationID returns the id of the conversation that belongs to a thread.
func (s *session) conversationID(thread string) string {
	if thread == s.thread || thread == "" {
		return events.MainConversation
	}
	return thread
}

// handleSubagentActivity handles an item of type subAgentActivity, with which newer models report that a sub-agent has started or got a message. The
// sub-agent's own items come as notifications of its thread.
func (s *session) handleSubagentActivity(parent string, i threadItem, t *agent.Turn) {
	switch i.Kind {
	case "started":
		s.openSubagent(parent, i.AgentThread, i.ID, path.Base(i.AgentPath), i.Prompt, t)
	case "interacted":
		s.addEarlierSubagent(parent, i.AgentThread)
	}
	// The end of its turn reports the rest.
}

// addEarlierSubagent makes the thread of a sub-agent of an earlier turn known to this turn, so that its items are journaled. The sub-agent has no
// block in this turn.
func (s *session) addEarlierSubagent(parent, thread string) {
	if thread != "" && s.turn.conversations[thread] == nil {
		s.turn.conversations[thread] = &conversation{id: thread, parent: s.conversationID(parent), depth: cmp.Or(s.depths[thread], s.depthOf(parent)+1)}
	}
}

// depthOf returns the depth of a thread: 0 for the main agent, 1 for its sub-agents, and so on.
func (s *session) depthOf(thread string) uint32 {
	if c := s.turn.conversations[thread]; c != nil {
		return c.depth
	}
	return 0
}

// isTooDeep reports whether a thread belongs to a sub-agent below the deepest level that the query allows. The CLI starts such a sub-agent without
// asking; then the sub-agent's turn is stopped and its calls are denied.
func (s *session) isTooDeep(thread string) bool {
	return s.turn.maxDepth > 0 && s.depthOf(thread) > s.turn.maxDepth
}

// handleCollaboration handles the end of a call with which an agent starts or controls sub-agents: it opens their blocks, or journals the call's
// result.
func (s *session) handleCollaboration(thread string, w *runningItem, t *agent.Turn) {
	i := w.item
	if i.Tool == "spawnAgent" {
		for _, r := range i.Receivers {
			s.openSubagent(thread, r, i.ID, "", i.Prompt, t)
		}
		if i.Status == "failed" {
			s.logf(t, "warn", "a sub-agent could not be started")
		}
		return
	}
	if i.Tool != "closeAgent" {
		for _, r := range i.Receivers {
			s.addEarlierSubagent(thread, r)
		}
	}
	out := ""
	if len(i.AgentStates) > 2 { // more than {}
		out = string(i.AgentStates)
	}
	t.AddBlock(w.conv, events.Block{
		Kind: events.KindToolResult, ToolUseID: i.ID, Output: out, IsError: i.Status == "failed", DurationMs: i.callDuration(),
	})
}

// openSubagent begins the conversation of the sub-agent with the given thread, and opens the sub-agent's block in the conversation of the thread
// parent. It does nothing if the conversation has begun.
func (s *session) openSubagent(parent, thread, call, name, prompt string, t *agent.Turn) {
	if thread == "" || s.turn.conversations[thread] != nil {
		return
	}
	c := &conversation{id: thread, parent: s.conversationID(parent), depth: s.depthOf(parent) + 1}
	s.turn.conversations[thread], s.depths[thread] = c, c.depth
	var input json.RawMessage
	if prompt != "" {
		raw, err := json.Marshal(map[string]string{"prompt": prompt})
		if err == nil { // strings always marshal
			input = raw
		}
	}
	c.block = t.OpenBlock(c.parent, events.Block{Kind: events.KindSubagent, SubagentID: thread, ToolUseID: call, Name: name, Input: input})
	t.Emit(c.parent, events.SubagentSpawned{
		SubagentID: thread, Conversation: thread, ToolUseID: call, Name: name, Parent: c.parent, Prompt: prompt, Depth: c.depth,
	})
}

// completeSubagent completes the block of a sub-agent whose turn has ended.
func (s *session) completeSubagent(thread string, ended turnInfo, t *agent.Turn) {
	c := s.turn.conversations[thread]
	if c == nil {
		return
	}
	c.turn = ""
	s.closeSubagent(c, ended.Status != "completed", t)
}

// closeSubagent completes the block of the sub-agent of a conversation, if the block is open, with the sub-agent's last message.
func (s *session) closeSubagent(c *conversation, failed bool, t *agent.Turn) {
	if c.block == "" {
		return
	}
	t.CompleteBlock(c.block, func(b *events.Block) {
		b.Output, b.IsError = c.answer.String(), failed
		if failed {
			b.Status = events.StatusError
		}
	})
	c.block = ""
	t.Emit(c.parent, events.SubagentCompleted{SubagentID: c.id, Conversation: c.id, IsError: failed})
}
