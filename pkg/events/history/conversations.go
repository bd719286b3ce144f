package history

import (
	"slices"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// applyBlock applies a block event to the pending block that it starts, changes or completes.
func (s *State) applyBlock(e events.Event) {
	id := blocks.ChangedBlockID(e)
	if id == "" {
		return
	}
	i := slices.IndexFunc(s.Blocks, func(b Block) bool { return b.Block.ID == id })
	was := Block{FirstSeq: s.Seq}
	var prev *events.Block
	if i >= 0 {
		was = s.Blocks[i]
		prev = &was.Block
	}
	next := blocks.Reduce(prev, e)
	if next == nil {
		return
	}
	if i < 0 {
		s.Count.Blocks++
	}
	if list := next.TodoList(); list != nil {
		s.setTodos(next.ConversationID, list)
	}
	now := Block{was.FirstSeq, s.Seq, *next}
	pending := next.Status == events.StatusPending
	switch {
	case i >= 0 && pending:
		s.Blocks = slices.Clone(s.Blocks)
		s.Blocks[i] = now
	case i >= 0:
		s.Blocks = slices.Delete(slices.Clone(s.Blocks), i, i+1)
	case pending:
		s.Blocks = append(slices.Clone(s.Blocks), now)
	}
}

// setTodos replaces the todos of a conversation.
func (s *State) setTodos(conversation string, items []events.TodoItem) {
	s.Todos = slices.DeleteFunc(slices.Clone(s.Todos), func(t TodoList) bool { return t.ConversationID == conversation })
	s.Todos = append(s.Todos, TodoList{conversation, items})
}

// applySubagent applies the start and the end of a sub-agent.
func (s *State) applySubagent(e events.Event) {
	switch d := e.Data.(type) {
	case events.SubagentSpawned:
		if slices.ContainsFunc(s.Conversations, func(c Conversation) bool { return c.ID == d.Conversation }) {
			return
		}
		s.Conversations = append(slices.Clone(s.Conversations), Conversation{d.Conversation, s.Seq, e.ExecutionID})
		s.Count.Conversations++
	case events.SubagentCompleted:
		s.removeConversation(d.Conversation)
	}
}

// removeConversation removes an ended sub-agent and its list of tasks.
func (s *State) removeConversation(conversation string) {
	s.Conversations = slices.DeleteFunc(slices.Clone(s.Conversations), func(c Conversation) bool { return c.ID == conversation })
	if conversation != events.MainConversation {
		s.Todos = slices.DeleteFunc(slices.Clone(s.Todos), func(t TodoList) bool { return t.ConversationID == conversation })
	}
}
