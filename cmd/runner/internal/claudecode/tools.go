package claudecode

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// isSubagentTool reports whether a tool runs a sub-agent. The CLI lists the tool as Task and calls it Agent.
func isSubagentTool(tool string) bool { return tool == "Agent" || tool == "Task" }

// displayName returns the name of a tool in the form that clients show: "server: tool" for a tool of an MCP server.
func displayName(tool string) string {
	if rest, ok := strings.CutPrefix(tool, "mcp__"); ok {
		server, name, _ := strings.Cut(rest, "__")
		return server + ": " + name
	}
	return tool
}

// toolArguments holds those arguments of the CLI's tools that appear in the description of a call.
type toolArguments struct {
	Description  string `json:"description"`
	FilePath     string `json:"file_path"`
	NotebookPath string `json:"notebook_path"`
	Pattern      string `json:"pattern"`
	Path         string `json:"path"`
	Command      string `json:"command"`
	URL          string `json:"url"`
	Query        string `json:"query"`
	Subject      string `json:"subject"`
	Skill        string `json:"skill"`

	Prompt       string `json:"prompt"`        // Agent
	SubagentType string `json:"subagent_type"` // Agent

	TaskID string            `json:"taskId"` // TaskUpdate
	Status string            `json:"status"`
	Todos  []events.TodoItem `json:"todos"` // TodoWrite
}

// parseToolArguments decodes the known arguments in the input of a call. Arguments of another type are ignored.
func parseToolArguments(input json.RawMessage) toolArguments {
	var a toolArguments
	if len(input) > 0 && json.Unmarshal(input, &a) != nil {
		return toolArguments{}
	}
	return a
}

// describeInput returns a one-line description of a call by its most informative argument, or "". A path in the workspace is made relative.
func describeInput(input json.RawMessage, workspace string) string {
	a := parseToolArguments(input)
	for _, what := range []string{a.Subject, a.Description, a.FilePath, a.NotebookPath, a.Pattern, a.Command, a.URL, a.Query, a.Skill, a.Path} {
		if what == "" {
			continue
		}
		if rel, err := filepath.Rel(workspace, what); filepath.IsAbs(what) && err == nil && filepath.IsLocal(rel) {
			what = rel
		}
		what, _, _ = strings.Cut(what, "\n")
		return what
	}
	return ""
}

// beginSubagent begins the conversation of the sub-agent that the call p starts, and journals its block in the conversation parent. If the
// conversation has begun already, beginSubagent only returns it.
func (s *session) beginSubagent(parent string, p contentPart, t *agent.Turn) *conversation {
	if c := s.turn.conversations[p.ID]; c != nil {
		return c
	}
	a := parseToolArguments(p.Input)
	name := a.SubagentType
	if name == "" && !isSubagentTool(p.Name) {
		name = p.Name
	}
	c := &conversation{id: p.ID, parent: parent}
	s.turn.conversations[p.ID] = c
	c.block = t.OpenBlock(parent, events.Block{
		Kind: events.KindSubagent, SubagentID: p.ID, ToolUseID: p.ID, Name: name, Input: append(json.RawMessage(nil), p.Input...),
	})
	t.Emit(parent, events.SubagentSpawned{
		SubagentID: p.ID, Conversation: c.id, ToolUseID: p.ID, Name: name, Parent: parent, Prompt: a.Prompt,
	})
	return c
}

// handleUserLine handles a line of type user: it journals tool results, the prompt of a sub-agent and the note about an interrupt. A line that
// repeats the query shows that the CLI has accepted the query.
func (s *session) handleUserLine(l outputLine, t *agent.Turn) error {
	if l.IsReplay {
		s.taken = s.taken || s.pending
		return nil
	}
	m, err := decode[apiMessage](l.Message, "user message")
	if err != nil {
		return err
	}
	c := s.conversationOfLine(l, t)
	for i, p := range m.Content {
		anchor := l.blockAnchor(m, i, c.id)
		switch {
		case p.Type == "tool_result":
			s.journalToolResult(c, callResult{contentPart: p, structured: l.ToolUseResult, anchor: anchor}, t)
		case p.Type == "text" && c.block != "":
			t.AddBlock(c.id, events.Block{Kind: events.KindUserMessage, Content: p.Text})
		case p.Type == "text" && strings.HasPrefix(p.Text, "[Request interrupted by user"):
			t.AddBlock(c.id, events.Block{Kind: events.KindSystem, Subtype: "interrupted", Message: p.Text, Anchor: anchor})
		default:
			journalLogf(t, "debug", "the agent told the model: %s", p.Text+p.Content.text())
		}
	}
	return nil
}

// callResult is the result of a tool call, as a line of the CLI has it.
type callResult struct {
	contentPart
	structured json.RawMessage // in the tool's own format
	anchor     string
}

// journalToolResult journals the result of a tool call, and updates the agent's to-do list from the structured result. The result of a sub-agent
// ends the sub-agent's conversation.
func (s *session) journalToolResult(c *conversation, p callResult, t *agent.Turn) {
	var took time.Duration
	conv := c.id
	known := s.turn.calls[p.ToolUseID]
	if known != nil {
		took, conv = s.now().Sub(known.started), known.conv
		delete(s.turn.calls, p.ToolUseID)
	}
	if sub := s.turn.conversations[p.ToolUseID]; sub != nil && sub.block != "" {
		s.finishSubagent(sub, p, took, t)
		return
	}
	t.AddBlock(conv, events.Block{
		Kind: events.KindToolResult, ToolUseID: p.ToolUseID, Output: p.Content.text(), IsError: p.IsError, DurationMs: millis(took), Anchor: p.anchor,
	})
	if known != nil && !p.IsError && s.tasks.applyCall(*known, p.structured) {
		s.journalTodos(t)
	}
}

// finishSubagent ends the conversation of a sub-agent with the result of its call. It journals the sub-agent's last text, which may be in that
// result alone.
func (s *session) finishSubagent(sub *conversation, p callResult, took time.Duration, t *agent.Turn) {
	said := p.Content.text()
	var own struct {
		Content contentParts `json:"content"`
	}
	if json.Unmarshal(p.structured, &own) == nil && len(own.Content) > 0 {
		// The CLI's note to the model about how to go on is left out.
		said = own.Content.text()
		if said != sub.last.lines() {
			t.AddBlock(sub.id, events.Block{Kind: events.KindAssistantText, Content: said, Model: sub.answer.model})
		}
	}
	t.CompleteBlock(sub.block, func(b *events.Block) {
		b.Output, b.IsError, b.DurationMs, b.Anchor = said, p.IsError, millis(took), p.anchor
	})
	t.Emit(sub.parent, events.SubagentCompleted{SubagentID: p.ToolUseID, Conversation: sub.id, IsError: p.IsError, DurationMs: millis(took)})
	sub.block = ""
}

// millis returns a duration in milliseconds.
func millis(d time.Duration) uint32 {
	return uint32(min(max(d.Milliseconds(), 0), 1<<32-1)) //nolint:gosec // bounded
}

// todoTask is an entry of the agent's to-do list.
type todoTask struct {
	id   string
	item events.TodoItem
}

// todoTasks is the agent's to-do list, which several tools of the CLI change.
type todoTasks []todoTask

// applyCall updates the list after a successful tool call, and reports whether the call was one that changes the list. structured is the call's
// result in the tool's own format.
func (l *todoTasks) applyCall(c runningCall, structured json.RawMessage) bool {
	a := parseToolArguments(c.input)
	switch c.name {
	case "TodoWrite":
		*l = nil
		for _, item := range a.Todos {
			*l = append(*l, todoTask{item: item})
		}
	case "TaskCreate":
		var made struct {
			Task struct {
				ID string `json:"id"`
			} `json:"task"`
		}
		if json.Unmarshal(structured, &made) != nil || made.Task.ID == "" {
			return false
		}
		*l = append(*l, todoTask{id: made.Task.ID, item: events.TodoItem{Content: a.Subject, Status: "pending"}})
	case "TaskUpdate":
		l.updateTask(a)
	default:
		return false
	}
	return true
}

// updateTask changes or removes one entry according to the arguments of a call of TaskUpdate. If the entry is not known, because an earlier process
// created it, updateTask adds one.
func (l *todoTasks) updateTask(a toolArguments) {
	for i := range *l {
		t := &(*l)[i]
		if t.id != a.TaskID {
			continue
		}
		if a.Status == "deleted" {
			*l = append((*l)[:i], (*l)[i+1:]...)
			return
		}
		if a.Status != "" {
			t.item.Status = a.Status
		}
		if a.Subject != "" {
			t.item.Content = a.Subject
		}
		return
	}
	if a.Status != "deleted" && a.Status != "" {
		content := a.Subject
		if content == "" {
			content = "Task #" + a.TaskID
		}
		*l = append(*l, todoTask{id: a.TaskID, item: events.TodoItem{Content: content, Status: a.Status}})
	}
}

// journalTodos journals the agent's to-do list. The first call in a turn opens a block, and later calls update that block.
func (s *session) journalTodos(t *agent.Turn) {
	items := make([]events.TodoItem, 0, len(s.tasks))
	for _, task := range s.tasks {
		items = append(items, task.item)
	}
	if s.turn.todo == "" {
		s.turn.todo = t.OpenBlock(events.MainConversation, events.Block{Kind: events.KindTodo, Todos: items})
		return
	}
	t.UpdateBlock(s.turn.todo, events.BlockUpdates{Todos: items})
}
