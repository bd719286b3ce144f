package reads

import (
	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/api/wirejson"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/history"
)

// SessionMessage returns the session as it was after the event of p, as an API message.
func (p SessionState) SessionMessage() *spoolv1.Session {
	was := p.State.Session
	out := &spoolv1.Session{
		SessionId: p.ID, Status: was.Status, Agent: was.Agent, AgentVersion: was.AgentVersion, Architecture: was.Architecture, Sandbox: was.Provider,
		SessionOptions: sessionOptionsMessage(was.Options), Metadata: wirejson.JSONFromText(string(was.Metadata)),
		CreatedAt: wirejson.TimestampOf(was.CreatedAt), UpdatedAt: wirejson.TimestampOf(p.Time), Tip: p.Seq, Position: p.Position,
		Queued: p.QueuedCount(), Executions: p.Count.Executions, Idle: was.Idle, Title: p.Title,
		SandboxMs: float64(p.Sandboxed.Ms), SandboxCostUsd: p.Sandboxed.CostUSD,
		AgentRef: nilIfEmpty(was.AgentRef.String()), Instance: nilIfEmpty(was.Instance.String()), Environments: referenceStrings(was.Environments),
		Parent: ParentMessage(p.Parent),
	}
	if x := p.ActiveExecution(); x != nil {
		out.ActiveExecutionId = &x.ID
	}
	if n := p.Snapshot; n != nil {
		out.Snapshot, out.SnapshotAt, out.WorkspaceFiles, out.WorkspaceBytes = &n.Name, wirejson.TimestampOf(n.Time), n.Files, float64(n.Bytes)
	}
	if b := p.State.Sandbox; b != nil {
		out.CurrentSandbox = &spoolv1.CurrentSandbox{
			SandboxId: b.ID, State: b.Status, Health: nilIfEmpty(b.Health), Reason: nilIfEmpty(b.Reason), Provider: b.Provider, Engine: b.Engine, Image: nilIfEmpty(b.Image),
			CreatedAt: wirejson.TimestampOf(b.CreatedAt), EndedAt: timestampMessage(b.EndedAt), MemoryBytes: float64(b.MemoryBytes), DiskBytes: float64(b.DiskBytes),
		}
	}
	return out
}

// referenceStrings returns references as strings.
func referenceStrings(list []events.Reference) (out []string) {
	for _, r := range list {
		out = append(out, r.String())
	}
	return out
}

// TodoListMessages returns the session's todo lists as API messages, the agent's own list first.
func (p SessionState) TodoListMessages() (out []*spoolv1.TodoList) {
	for _, t := range p.Todos {
		list := &spoolv1.TodoList{ConversationId: t.ConversationID}
		for _, item := range t.Items {
			list.Items = append(list.Items, &spoolv1.TodoItem{Content: item.Content, Status: item.Status})
		}
		if t.ConversationID == events.MainConversation {
			out = append([]*spoolv1.TodoList{list}, out...)
		} else {
			out = append(out, list)
		}
	}
	return out
}

// ResolvedVersionsMessage returns the references of the last execution, resolved to versions, as an API message, or
// nil if there are none.
func (p SessionState) ResolvedVersionsMessage() *spoolv1.ResolvedVersions {
	r := p.Resolved
	if r == nil {
		return nil
	}
	out := &spoolv1.ResolvedVersions{
		Seq: r.Seq, ExecutionId: r.ExecutionID, Agent: nilIfEmpty(r.Agent.String()), Instance: nilIfEmpty(r.Instance.String()),
		Environments: referenceStrings(r.Environments), McpServers: r.MCPServers,
	}
	for _, skill := range r.Skills {
		out.Skills = append(out.Skills, skill.Ref.String())
	}
	return out
}

// UsageTotalMessage converts a sum of usage to an API message.
func UsageTotalMessage(u history.Usage) *spoolv1.UsageTotal {
	return &spoolv1.UsageTotal{
		InputTokens: float64(u.InputTokens), OutputTokens: float64(u.OutputTokens),
		CacheReadTokens: float64(u.CacheReadTokens), CacheWriteTokens: float64(u.CacheWriteTokens), CostUsd: u.CostUSD,
	}
}

// MeteredUsageMessage converts a sum of metered usage to an API message.
func MeteredUsageMessage(m history.MeasuredUsage) *spoolv1.UsageTotal {
	out := UsageTotalMessage(m.Usage)
	out.Requests, out.Failed = float64(m.Requests), float64(m.Failed)
	return out
}
