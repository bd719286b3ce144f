package claudecode

import (
	"encoding/json"
	"path/filepath"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
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

// toolArguments holds the arguments of calls of sub-agents and of lists of tasks.
type toolArguments struct {
	Description string `json:"description"`
	Subject     string `json:"subject"`

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
	args := transcript.ParseMembers(input)
	for _, name := range []string{"subject", "description", "file_path", "notebook_path", "pattern", "command", "url", "query", "skill", "path"} {
		what := transcript.ParseString(args[name])
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

// handleUserLine handles a line of type user of the main agent: it journals tool results and the note about an interrupt. A line that repeats the
// query shows that the CLI has accepted the query.
func (s *session) handleUserLine(l outputLine, t *agent.Turn) error {
	if l.IsReplay {
		s.taken = s.taken || s.pending
		return nil
	}
	m, err := decode[apiMessage](l.Message, "user message")
	if err != nil {
		return err
	}
	c := s.turn.conversations[""]
	for i, p := range m.Content {
		anchor := l.blockAnchor(m, i)
		switch {
		case p.Type == "tool_result":
			s.journalToolResult(c, callResult{contentPart: p, structured: l.ToolUseResult, anchor: anchor}, t)
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
	took       time.Duration
}

// journalToolResult journals the result of a tool call, and updates the agent's to-do list from the structured result. The result of a sub-agent
// ends the sub-agent's conversation.
func (s *session) journalToolResult(c *conversation, p callResult, t *agent.Turn) {
	var took time.Duration
	key := callKey{c.id, p.ToolUseID}
	known := s.turn.calls[key]
	if known != nil {
		took = s.now().Sub(known.started)
		delete(s.turn.calls, key)
	}
	if sub := s.subagentOf(key); sub != nil && sub.block != "" {
		p.took = took
		s.endSubagent(sub, p, t)
		return
	}
	t.AddBlock(c.id, events.Block{
		Kind: events.KindToolResult, ToolUseID: p.ToolUseID, Output: p.Content.text(), IsError: p.IsError, DurationMs: millis(took), Anchor: p.anchor,
	})
	if known != nil && !p.IsError && s.tasks.applyCall(*known, p.structured) {
		s.journalTodos(t)
	}
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
