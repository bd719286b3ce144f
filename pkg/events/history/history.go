// Package history folds a session's events into the session's state after each event.
//
// A State holds totals and everything that a later event can still change. Final data (ended executions, complete
// blocks, ended sub-agents) is removed from it, because readers get that data from the log or from rows of the read
// models, where it does not change any more. A State therefore stays small in a long session. With a State stored every
// few hundred events, the state at any event is cheap to compute. The package is pure.
package history

import (
	"encoding/json"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/blocks"
)

// Version is the version of State's JSON format. A reader ignores a stored State of another version and folds from
// the start.
const Version = 1

// State is a session after an event. The zero State is a session before its first event.
type State struct {
	V    int       `json:"v"`
	Seq  uint32    `json:"seq"`
	Time time.Time `json:"time"` // of the event

	Session       Session        `json:"session"`
	Executions    []Execution    `json:"executions,omitempty"`    // executions that have not ended, in the order of their start
	Blocks        []Block        `json:"blocks,omitempty"`        // pending blocks, by FirstSeq
	Conversations []Conversation `json:"conversations,omitempty"` // conversations of running sub-agents, by FirstSeq
	Todos         []Todos        `json:"todos,omitempty"`         // lists of the main agent and of running sub-agents
	Ended         Usage          `json:"ended"`                   // usage that ended executions reported; see Reported
	Metered       Metered        `json:"metered"`
	Sandboxed     SandboxTime    `json:"sandboxed,omitzero"`
	Resolved      *Resolved      `json:"resolved,omitempty"` // of the most recently resolved execution
	Sandbox       *Sandbox       `json:"sandbox,omitempty"`  // the most recent sandbox
	Snapshot      *Snapshot      `json:"snapshot,omitempty"` // the most recent snapshot of the workspace
	FileChanges   uint32         `json:"fileChanges"`        // file changes since Snapshot, or since the session's first event if there is none
	Count         Count          `json:"count"`
}

// Session holds the fields of the session itself.
type Session struct {
	Status       string             `json:"status"` // open, closed, deleted
	Agent        string             `json:"agent"`
	AgentVersion string             `json:"agentVersion"`
	Architecture string             `json:"architecture"`
	Provider     string             `json:"provider"`
	AgentRef     events.Reference   `json:"agentRef,omitzero"`
	Instance     events.Reference   `json:"instance,omitzero"`
	Environments []events.Reference `json:"environments,omitempty"`
	Options      events.Options     `json:"options"`
	Metadata     json.RawMessage    `json:"metadata,omitempty"`
	CreatedAt    time.Time          `json:"createdAt"`
	Idle         bool               `json:"idle,omitempty"` // the idle timeout passed since the last dispatch
}

// The statuses of a session.
const (
	StatusOpen    = "open"
	StatusClosed  = "closed"
	StatusDeleted = "deleted"
)

// Execution is an execution that has not ended.
type Execution struct {
	ID           string      `json:"id"`
	FirstSeq     uint32      `json:"firstSeq"`
	Phase        string      `json:"phase"` // queued, starting, running, paused
	Attempt      uint32      `json:"attempt,omitempty"`
	Executor     string      `json:"executor,omitempty"`
	Model        string      `json:"model,omitempty"`
	Usage        Usage       `json:"usage"`
	Sandboxed    SandboxTime `json:"sandboxed,omitzero"`
	QueuedAt     time.Time   `json:"queuedAt"`
	DispatchedAt *time.Time  `json:"dispatchedAt,omitempty"`
	StartedAt    *time.Time  `json:"startedAt,omitempty"` // the first attempt
}

// The phases of an execution that has not ended.
const (
	PhaseQueued   = "queued"
	PhaseStarting = "starting"
	PhaseRunning  = "running"
	PhasePaused   = "paused"
)

// Block is a pending block.
type Block struct {
	FirstSeq uint32       `json:"firstSeq"`
	LastSeq  uint32       `json:"lastSeq"`
	Block    events.Block `json:"block"`
}

// Conversation is the conversation of a running sub-agent.
type Conversation struct {
	ID          string `json:"id"`
	FirstSeq    uint32 `json:"firstSeq"`
	ExecutionID string `json:"executionId"`
}

// Todos is the list of tasks of one conversation.
type Todos struct {
	ConversationID string            `json:"conversationId"`
	Items          []events.TodoItem `json:"items"`
}

// Usage is the usage of executions as their agents report it.
type Usage struct {
	InputTokens      uint64  `json:"inputTokens"`
	OutputTokens     uint64  `json:"outputTokens"`
	CacheReadTokens  uint64  `json:"cacheReadTokens,omitempty"`
	CacheWriteTokens uint64  `json:"cacheWriteTokens,omitempty"`
	CostUSD          float64 `json:"costUsd,omitempty"`
}

// SandboxTime is the running time of metered sandboxes, and its cost.
type SandboxTime struct {
	Ms      uint64  `json:"ms,omitempty"`
	CostUSD float64 `json:"costUsd,omitempty"`
}

func (t SandboxTime) plus(d events.SandboxUsage) SandboxTime {
	return SandboxTime{t.Ms + d.DurationMs, t.CostUSD + d.CostUSD}
}

// Metered is the usage of model requests as the egress proxy measured it.
type Metered struct {
	Requests uint64 `json:"requests"`
	Failed   uint64 `json:"failed,omitempty"`
	Usage
}

// Resolved holds the versions to which an execution's references were resolved at its start. It has no variables,
// and so no values of variables.
type Resolved struct {
	Seq          uint32             `json:"seq"`
	ExecutionID  string             `json:"executionId"`
	Agent        events.Reference   `json:"agent,omitzero"` // zero for the built-in agent
	Instance     events.Reference   `json:"instance,omitzero"`
	Environments []events.Reference `json:"environments,omitempty"`
	Skills       []events.SkillUsed `json:"skills,omitempty"`
	MCPServers   []string           `json:"mcpServers,omitempty"`
}

// Sandbox is the most recent sandbox.
type Sandbox struct {
	ID          string     `json:"id"`
	Status      string     `json:"status"` // creating, ready, paused, replaced, terminated, failed
	Reason      string     `json:"reason,omitempty"`
	Provider    string     `json:"provider,omitempty"`
	Engine      string     `json:"engine,omitempty"`
	Image       string     `json:"image,omitempty"`
	Health      string     `json:"health,omitempty"`
	MemoryBytes uint64     `json:"memoryBytes,omitempty"`
	DiskBytes   uint64     `json:"diskBytes,omitempty"`
	CreatedAt   time.Time  `json:"createdAt"`
	EndedAt     *time.Time `json:"endedAt,omitempty"`
}

// Snapshot is a snapshot of the workspace.
type Snapshot struct {
	Name  string    `json:"name"` // as in workspace_synced
	Seq   uint32    `json:"seq"`  // seq of the workspace_synced event
	Time  time.Time `json:"time"`
	Files uint32    `json:"files"`
	Bytes uint64    `json:"bytes"`
}

// Count holds the totals of the session.
type Count struct {
	Executions    uint32 `json:"executions"`
	Blocks        uint32 `json:"blocks"`
	Conversations uint32 `json:"conversations"` // of sub-agents
}

// Fold applies events to a state. The first event must have the seq that follows s.Seq.
func Fold(s State, list ...events.Event) State {
	for _, e := range list {
		s = Evolve(s, s.Seq+1, e)
	}
	return s
}

// Evolve returns the state after an event. It never fails and does not modify s. An unknown type changes only Seq
// and Time.
func Evolve(s State, seq uint32, e events.Event) State {
	if s.Seq == 0 {
		s.V, s.Session = Version, Session{Status: StatusOpen, CreatedAt: e.Time}
	}
	s.Seq, s.Time = seq, e.Time
	s.applySession(e)
	s.applyExecution(e)
	s.applyBlock(e)
	s.applySubagent(e)
	s.applySandbox(e)
	s.applyFiles(e)
	if _, ended := terminalUsage(e); ended {
		s.endExecution(e)
	}
	return s
}

// applySession applies the session's own fields of an event.
func (s *State) applySession(e events.Event) {
	switch d := e.Data.(type) {
	case events.SessionCreated:
		s.Session = Session{
			Status: s.Session.Status, Agent: d.Agent, AgentVersion: d.AgentVersion, Architecture: d.Architecture, Provider: d.Provider,
			AgentRef: d.AgentRef, Instance: d.Instance, Environments: d.Environments, Options: d.Options, Metadata: d.Metadata, CreatedAt: e.Time,
		}
	case events.SessionOptionsUpdated:
		s.Session.Options = d.Options
		if len(d.Metadata) > 0 {
			s.Session.Metadata = d.Metadata
		}
	case events.SessionIdle:
		s.Session.Idle = true
	case events.ExecutionDispatched:
		s.Session.Idle = false
	case events.SessionClosed:
		s.Session.Status = StatusClosed
	case events.SessionDeleted:
		s.Session.Status = StatusDeleted
	case events.ModelCalled:
		s.Metered.Requests++
		if !d.Answered() {
			s.Metered.Failed++
		}
		s.Metered.Usage = s.Metered.plus(usage(d.Usage, d.CostUSD))
	case events.SandboxUsage:
		s.Sandboxed = s.Sandboxed.plus(d)
	case events.ExecutionResolved:
		s.Resolved = &Resolved{s.Seq, e.ExecutionID, d.Agent, d.Instance, d.Environments, d.Skills, d.MCPServers}
	}
}

// applyExecution applies an event to its execution.
func (s *State) applyExecution(e events.Event) {
	i := slices.IndexFunc(s.Executions, func(x Execution) bool { return x.ID == e.ExecutionID })
	if i < 0 {
		if e.ExecutionID == "" || !canBegin(e) {
			return
		}
		// The list is copied because other states share it.
		s.Executions = append(slices.Clone(s.Executions), Execution{ID: e.ExecutionID, FirstSeq: s.Seq, Phase: PhaseQueued, QueuedAt: e.Time})
		s.Count.Executions++
		i = len(s.Executions) - 1
	}
	if x, changed := updateExecution(s.Executions[i], e); changed {
		s.Executions = slices.Clone(s.Executions)
		s.Executions[i] = x
	}
}

// canBegin reports whether an event can be the first event of an execution. Other events may follow the end of an
// execution and must not reopen it.
func canBegin(e events.Event) bool {
	switch e.Data.(type) {
	case events.MessageAccepted, events.ExecutionDispatched:
		return true
	}
	return false
}

// updateExecution returns x after an event, and whether the event changes it.
func updateExecution(x Execution, e events.Event) (_ Execution, changed bool) {
	switch d := e.Data.(type) {
	case events.ExecutionDispatched:
		x.DispatchedAt = &e.Time
	case events.ExecutionClaimed:
		x.Executor = d.Executor
		if x.Phase == PhaseQueued {
			x.Phase = PhaseStarting
		}
	case events.ExecutionStarted:
		x.Phase, x.Attempt = PhaseRunning, d.Attempt
		if x.StartedAt == nil {
			x.StartedAt = &e.Time
		}
	case events.AttemptFailed:
		x.Phase = PhaseStarting
	case events.ExecutionPaused:
		x.Phase = PhasePaused
	case events.ExecutionResumed:
		x.Phase = PhaseRunning
	case events.MetadataUpdate:
		x.Usage, x.Model = usage(d.Usage, d.CostUSD), d.Model
	case events.SandboxUsage:
		x.Sandboxed = x.Sandboxed.plus(d)
	default:
		return x, false
	}
	return x, true
}

// terminalUsage returns the usage that a terminal event reports, and whether the event is terminal.
func terminalUsage(e events.Event) (u Usage, ended bool) {
	switch d := e.Data.(type) {
	case events.ExecutionCompleted:
		return usage(d.Usage, d.CostUSD), true
	case events.ExecutionFailed:
		return usage(d.Usage, 0), true
	case events.ExecutionCancelled:
		return usage(d.Usage, 0), true
	}
	return u, events.Terminal(e.Type())
}

// endExecution removes the ended execution and its conversations. It runs after the other parts of Evolve.
func (s *State) endExecution(e events.Event) {
	i := slices.IndexFunc(s.Executions, func(x Execution) bool { return x.ID == e.ExecutionID })
	if i < 0 {
		return
	}
	u, _ := terminalUsage(e)
	if u.CostUSD == 0 {
		u.CostUSD = s.Executions[i].Usage.CostUSD
	}
	s.Ended = s.Ended.plus(u)
	s.Executions = slices.Delete(slices.Clone(s.Executions), i, i+1)
	for _, c := range s.Conversations {
		if c.ExecutionID == e.ExecutionID {
			s.removeConversation(c.ID)
		}
	}
}

// applyBlock applies an event to the block that it changes.
func (s *State) applyBlock(e events.Event) {
	id := blocks.Target(e)
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
	if next.Kind == events.KindTodo && next.Todos != nil {
		s.setTodos(next.ConversationID, next.Todos)
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
	s.Todos = slices.DeleteFunc(slices.Clone(s.Todos), func(t Todos) bool { return t.ConversationID == conversation })
	s.Todos = append(s.Todos, Todos{conversation, items})
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
		s.Todos = slices.DeleteFunc(slices.Clone(s.Todos), func(t Todos) bool { return t.ConversationID == conversation })
	}
}

// applySandbox applies the events of the most recent sandbox.
func (s *State) applySandbox(e events.Event) {
	box := func(id string) *Sandbox {
		if s.Sandbox == nil || s.Sandbox.ID != id {
			s.Sandbox = &Sandbox{ID: id, CreatedAt: e.Time}
		} else {
			copied := *s.Sandbox
			s.Sandbox = &copied
		}
		return s.Sandbox
	}
	gone := func(id, status, reason string) {
		if s.Sandbox != nil && s.Sandbox.ID == id && s.Sandbox.EndedAt == nil {
			b := box(id)
			b.Status, b.Reason, b.EndedAt = status, reason, &e.Time
		}
	}
	switch d := e.Data.(type) {
	case events.SandboxCreating:
		b := box(d.SandboxID)
		b.Status, b.Provider, b.Engine = "creating", d.Provider, d.Engine
	case events.SandboxReady:
		b := box(d.SandboxID)
		b.Status, b.Provider, b.Engine, b.Image = "ready", d.Provider, d.Engine, d.Image
	case events.SandboxPaused:
		box(d.SandboxID).Status = "paused"
	case events.SandboxResumed:
		box(d.SandboxID).Status = "ready"
	case events.SandboxHealth:
		b := box(d.SandboxID)
		b.Health, b.MemoryBytes, b.DiskBytes = d.Status, d.MemoryBytes, d.DiskBytes
		if b.EndedAt == nil {
			b.Reason = d.Reason
		}
	case events.SandboxReplaced:
		gone(d.SandboxID, "replaced", d.Lost)
	case events.SandboxTerminated:
		gone(d.SandboxID, "terminated", d.Reason)
	case events.SandboxFailed:
		gone(d.SandboxID, "failed", d.Code+": "+d.Message)
	}
}

// FileChanges returns the types of the events that record a difference between the workspace and its last snapshot.
func FileChanges() []events.Type {
	return []events.Type{
		events.FileCreated{}.EventType(), events.FileModified{}.EventType(), events.FileDeleted{}.EventType(),
		events.FilePut{}.EventType(), events.FileRemoved{}.EventType(),
	}
}

// applyFiles applies an event of the workspace: it stores the last snapshot, and counts the file changes since that snapshot.
func (s *State) applyFiles(e events.Event) {
	switch d := e.Data.(type) {
	case events.WorkspaceSynced:
		if d.Snapshot != "" {
			s.Snapshot, s.FileChanges = &Snapshot{d.Snapshot, s.Seq, e.Time, d.Files, d.Bytes}, 0
		}
	case events.FileCreated, events.FileModified, events.FileDeleted, events.FilePut, events.FileRemoved:
		s.FileChanges++
	}
}

// Active returns the execution that was dispatched and has not ended, or nil if there is none.
func (s State) Active() *Execution {
	for i := range s.Executions {
		if s.Executions[i].DispatchedAt != nil {
			return &s.Executions[i]
		}
	}
	return nil
}

// Queued returns the number of executions that wait to be dispatched.
func (s State) Queued() (n uint32) {
	for _, x := range s.Executions {
		if x.DispatchedAt == nil && x.Phase == PhaseQueued {
			n++
		}
	}
	return n
}

// Reported returns the usage of all executions so far, as their agents report it.
func (s State) Reported() Usage {
	u := s.Ended
	for _, x := range s.Executions {
		u = u.plus(x.Usage)
	}
	return u
}

func usage(u events.Usage, cost float64) Usage {
	return Usage{uint64(u.InputTokens), uint64(u.OutputTokens), uint64(u.CacheReadTokens), uint64(u.CacheWriteTokens), cost}
}

func (u Usage) plus(o Usage) Usage {
	return Usage{
		u.InputTokens + o.InputTokens, u.OutputTokens + o.OutputTokens, u.CacheReadTokens + o.CacheReadTokens,
		u.CacheWriteTokens + o.CacheWriteTokens, u.CostUSD + o.CostUSD,
	}
}

// Unprojectable is the data of an event whose content the read models could not store; they only record that it
// exists.
const Unprojectable = `{"unprojectable":true}`

// Kept returns a stored event of the read models in the form that Evolve takes.
func Kept(w events.Wire) events.Event {
	if string(w.Data) == Unprojectable {
		return events.Event{ID: w.ID, Time: w.Time, ExecutionID: w.ExecutionID, ConversationID: w.ConversationID, Source: w.Source, Data: events.Opaque{Name: w.Type}}
	}
	return w.Event()
}
