package codex

import (
	"encoding/json"
	"path"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// conversation is a thread's: the agent's own, or a sub-agent's.
type conversation struct {
	id       string
	parent   string
	block    string // the open block of a sub-agent
	turn     string // a sub-agent's turn that runs
	lastText string
}

// conversationOf names the conversation that a thread's blocks belong to.
func (s *session) conversationOf(thread string) string {
	if thread == s.thread || thread == "" {
		return events.MainConversation
	}
	return thread
}

// activity follows a sub-agent as newer models have them; its blocks come in a thread of its own.
func (s *session) activity(parent string, i item, t *agent.Turn) {
	switch i.Kind {
	case "started":
		s.spawned(parent, i.AgentThread, i.ID, path.Base(i.AgentPath), i.Prompt, t)
	case "interacted":
		s.known(parent, i.AgentThread)
	}
	// The end of its turn tells the rest.
}

// known takes up a sub-agent of an earlier turn, which has no block in this one.
func (s *session) known(parent, thread string) {
	if thread != "" && s.turn.conversations[thread] == nil {
		s.turn.conversations[thread] = &conversation{id: thread, parent: s.conversationOf(parent)}
	}
}

// collaborated follows what an agent does with sub-agents.
func (s *session) collaborated(thread string, w *work, t *agent.Turn) {
	i := w.item
	if i.Tool == "spawnAgent" {
		for _, r := range i.Receivers {
			s.spawned(thread, r, i.ID, "", i.Prompt, t)
		}
		if i.Status == "failed" {
			s.logf(t, "warn", "a sub-agent could not be started")
		}
		return
	}
	if i.Tool != "closeAgent" {
		for _, r := range i.Receivers {
			s.known(thread, r)
		}
	}
	out := ""
	if len(i.AgentStates) > 2 { // more than {}
		out = string(i.AgentStates)
	}
	t.Whole(w.conv, events.Block{
		Kind: events.KindToolResult, ToolUseID: i.ID, Output: out, IsError: i.Status == "failed", DurationMs: i.took(),
	})
}

// spawned opens a sub-agent, once.
func (s *session) spawned(parent, thread, call, name, prompt string, t *agent.Turn) {
	if thread == "" || s.turn.conversations[thread] != nil {
		return
	}
	c := &conversation{id: thread, parent: s.conversationOf(parent)}
	s.turn.conversations[thread] = c
	var input json.RawMessage
	if prompt != "" {
		raw, err := json.Marshal(map[string]string{"prompt": prompt})
		if err == nil { // a text can be encoded
			input = raw
		}
	}
	c.block = t.Open(c.parent, events.Block{Kind: events.KindSubagent, SubagentID: thread, ToolUseID: call, Name: name, Input: input})
	t.Emit(c.parent, events.SubagentSpawned{
		SubagentID: thread, Conversation: thread, ToolUseID: call, Name: name, Parent: c.parent, Prompt: prompt,
	})
}

// subagentDone finishes a sub-agent when its turn has ended.
func (s *session) subagentDone(thread string, ended turn, t *agent.Turn) {
	c := s.turn.conversations[thread]
	if c == nil {
		return
	}
	c.turn = ""
	s.closeSubagent(c, ended.Status != "completed", t)
}

func (s *session) closeSubagent(c *conversation, failed bool, t *agent.Turn) {
	if c.block == "" {
		return
	}
	t.Complete(c.block, func(b *events.Block) {
		b.Output, b.IsError = c.lastText, failed
		if failed {
			b.Status = events.StatusError
		}
	})
	c.block = ""
	t.Emit(c.parent, events.SubagentCompleted{SubagentID: c.id, Conversation: c.id, IsError: failed})
}
