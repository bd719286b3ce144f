package claudecode

import (
	"encoding/json"
	"path/filepath"
	"slices"
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

// toolArguments holds the arguments of calls of sub-agents, plans and skills.
type toolArguments struct {
	Description string `json:"description"`
	Subject     string `json:"subject"`

	Prompt       string `json:"prompt"`        // Agent
	SubagentType string `json:"subagent_type"` // Agent

	TaskID string            `json:"taskId"` // TaskUpdate
	Status string            `json:"status"`
	Todos  []events.TodoItem `json:"todos"` // TodoWrite
	Skill  string            `json:"skill"` // Skill
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
			s.completeSkillLoad(c.id, p.Text, t)
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

// journalToolResult journals the result of a tool call, and the plan or the skill that the call has changed or loaded. The result of a sub-agent
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
	if known != nil && !p.IsError {
		s.journalPlan(c.id, *known, p.structured, t)
		s.beginSkillLoad(c.id, p.ToolUseID, *known, t)
	}
}

// journalPlan journals the plan that a successful call of a conversation has changed, if the tool is one that changes a plan. structured is the
// call's result in the tool's own format. Each agent has its own list of TodoWrite; the tasks are shared by the agent and its sub-agents.
func (s *session) journalPlan(conversation string, c runningCall, structured json.RawMessage, t *agent.Turn) {
	a := parseToolArguments(c.input)
	switch c.name {
	case "TodoWrite":
		var p events.Plan
		for _, item := range a.Todos {
			p.Items = append(p.Items, events.PlanItem{Content: item.Content, Status: events.ParsePlanStatus(item.Status)})
		}
		t.SetPlan(conversation, p)
		return
	case "TaskCreate":
		var made struct {
			Task struct {
				ID string `json:"id"`
			} `json:"task"`
		}
		if json.Unmarshal(structured, &made) != nil || made.Task.ID == "" {
			return
		}
		s.tasks = append(s.tasks, events.PlanItem{ItemID: made.Task.ID, Content: a.Subject, Status: events.PlanPending})
	case "TaskUpdate":
		s.updateTask(a)
	default:
		return
	}
	t.SetPlan(events.MainConversation, events.Plan{Items: slices.Clone(s.tasks)})
}

// updateTask changes or removes one task according to the arguments of a call of TaskUpdate. If the task is not known, because an earlier process
// created it, updateTask adds one.
func (s *session) updateTask(a toolArguments) {
	i := slices.IndexFunc(s.tasks, func(task events.PlanItem) bool { return task.ItemID == a.TaskID })
	switch {
	case a.Status == "deleted":
		s.tasks = slices.DeleteFunc(s.tasks, func(task events.PlanItem) bool { return task.ItemID == a.TaskID })
		return
	case i < 0 && a.Status == "":
		return
	case i < 0:
		i = len(s.tasks)
		s.tasks = append(s.tasks, events.PlanItem{ItemID: a.TaskID, Content: "Task #" + a.TaskID})
	}
	task := &s.tasks[i]
	if a.Status != "" {
		task.Status = events.ParsePlanStatus(a.Status)
	}
	if a.Subject != "" {
		task.Content = a.Subject
	}
}
