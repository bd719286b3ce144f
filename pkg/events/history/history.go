// Package history folds a session's events into the session's state after each event.
//
// A State holds totals and everything that a later event can still change. Final data (ended executions, complete
// blocks, ended sub-agents) is removed from it, because readers get that data from the log or from rows of the read
// models, where it does not change any more. A State therefore stays small in a long session. With a State stored every
// few hundred events, the state at any event is cheap to compute. The package is pure.
package history

import (
	"encoding/json"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// StateVersion is the version of State's JSON format. A reader ignores a stored State of another version and folds the
// events from the start.
const StateVersion = 1

// State is a session after an event. The zero State is a session before its first event.
type State struct {
	V    int       `json:"v"`
	Seq  uint32    `json:"seq"`
	Time time.Time `json:"time"` // of the event

	Session       Session           `json:"session"`
	Executions    []Execution       `json:"executions,omitempty"`    // executions that have not ended, in the order of their start
	Blocks        []Block           `json:"blocks,omitempty"`        // pending blocks, by FirstSeq
	Conversations []Conversation    `json:"conversations,omitempty"` // conversations of running sub-agents, by FirstSeq
	Approvals     []OpenApproval    `json:"approvals,omitempty"`     // open approval requests, in the order of their events
	Todos         []TodoList        `json:"todos,omitempty"`         // lists of the main agent and of running sub-agents
	Ended         Usage             `json:"ended"`                   // usage that ended executions reported; see ReportedUsage
	Metered       MeasuredUsage     `json:"metered"`
	Sandboxed     SandboxTime       `json:"sandboxed,omitzero"`
	Resolved      *ResolvedVersions `json:"resolved,omitempty"` // of the most recently resolved execution
	Sandbox       *Sandbox          `json:"sandbox,omitempty"`  // the most recent sandbox
	Snapshot      *Snapshot         `json:"snapshot,omitempty"` // the most recent snapshot of the workspace
	FileChanges   uint32            `json:"fileChanges"`        // file changes since Snapshot, or since the session's first event if there is none
	Count         Counts            `json:"count"`
}

// Session holds the fields of a State that describe the session itself.
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

// Execution is an execution in a State. States contain only executions that have not ended.
type Execution struct {
	ID           string      `json:"id"`
	FirstSeq     uint32      `json:"firstSeq"`
	Phase        string      `json:"phase"` // queued, starting, running, waiting_for_approval, paused
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
	PhaseWaiting  = "waiting_for_approval"
	PhasePaused   = "paused"
)

// Block is a block in a State. States contain only pending blocks.
type Block struct {
	FirstSeq uint32       `json:"firstSeq"`
	LastSeq  uint32       `json:"lastSeq"`
	Block    events.Block `json:"block"`
}

// Conversation is the conversation of a running sub-agent in a State.
type Conversation struct {
	ID          string `json:"id"`
	FirstSeq    uint32 `json:"firstSeq"`
	ExecutionID string `json:"executionId"`
}

// TodoList is the todo list of one conversation in a State.
type TodoList struct {
	ConversationID string            `json:"conversationId"`
	Items          []events.TodoItem `json:"items"`
}

// Usage is the number of tokens and the cost of executions, as their agents report them.
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

// plus returns t with the time and the cost of one more sandbox_usage event.
func (t SandboxTime) plus(d events.SandboxUsage) SandboxTime {
	return SandboxTime{t.Ms + d.DurationMs, t.CostUSD + d.CostUSD}
}

// MeasuredUsage is the usage of model requests as the egress proxy measured it.
type MeasuredUsage struct {
	Requests uint64 `json:"requests"`
	Failed   uint64 `json:"failed,omitempty"`
	Usage
}

// ResolvedVersions holds the versions to which an execution's references were resolved at its start. It contains no
// variables, and so no values of variables.
type ResolvedVersions struct {
	Seq          uint32             `json:"seq"`
	ExecutionID  string             `json:"executionId"`
	Agent        events.Reference   `json:"agent,omitzero"` // zero for the built-in agent
	Instance     events.Reference   `json:"instance,omitzero"`
	Environments []events.Reference `json:"environments,omitempty"`
	Skills       []events.SkillUsed `json:"skills,omitempty"`
	MCPServers   []string           `json:"mcpServers,omitempty"`
}

// Sandbox is the most recent sandbox of a session in a State.
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

// Snapshot is the last snapshot of a session's workspace in a State.
type Snapshot struct {
	Name  string    `json:"name"` // as in workspace_synced
	Seq   uint32    `json:"seq"`  // seq of the workspace_synced event
	Time  time.Time `json:"time"`
	Files uint32    `json:"files"`
	Bytes uint64    `json:"bytes"`
}

// Counts holds the numbers of a session's executions, blocks and sub-agents' conversations in a State.
type Counts struct {
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
		s.V, s.Session = StateVersion, Session{Status: StatusOpen, CreatedAt: e.Time}
	}
	s.Seq, s.Time = seq, e.Time
	s.applySession(e)
	s.applyExecution(e)
	s.applyBlock(e)
	s.applyApproval(e)
	s.applySubagent(e)
	s.applySandbox(e)
	s.applyFiles(e)
	if _, ended := terminalUsage(e); ended {
		s.endExecution(e)
	}
	return s
}

// applySession applies an event to the fields of the session itself: options, metadata and status.
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
		s.Metered.Usage = s.Metered.plus(newUsage(d.Usage, d.CostUSD))
	case events.SandboxUsage:
		s.Sandboxed = s.Sandboxed.plus(d)
	case events.ExecutionResolved:
		s.Resolved = &ResolvedVersions{s.Seq, e.ExecutionID, d.Agent, d.Instance, d.Environments, d.Skills, d.MCPServers}
	}
}

// ActiveExecution returns the execution that was dispatched and has not ended, or nil if there is none.
func (s State) ActiveExecution() *Execution {
	for i := range s.Executions {
		if s.Executions[i].DispatchedAt != nil {
			return &s.Executions[i]
		}
	}
	return nil
}

// QueuedCount returns the number of executions that wait to be dispatched.
func (s State) QueuedCount() (n uint32) {
	for _, x := range s.Executions {
		if x.DispatchedAt == nil && x.Phase == PhaseQueued {
			n++
		}
	}
	return n
}

// ReportedUsage returns the usage of all executions so far, as their agents report it.
func (s State) ReportedUsage() Usage {
	u := s.Ended
	for _, x := range s.Executions {
		u = u.plus(x.Usage)
	}
	return u
}

// newUsage returns the Usage of tokens and a cost.
func newUsage(u events.Usage, cost float64) Usage {
	return Usage{uint64(u.InputTokens), uint64(u.OutputTokens), uint64(u.CacheReadTokens), uint64(u.CacheWriteTokens), cost}
}

// plus returns the sum of u and o.
func (u Usage) plus(o Usage) Usage {
	return Usage{
		u.InputTokens + o.InputTokens, u.OutputTokens + o.OutputTokens, u.CacheReadTokens + o.CacheReadTokens,
		u.CacheWriteTokens + o.CacheWriteTokens, u.CostUSD + o.CostUSD,
	}
}

// UnprojectableData is the data of an event in the read models whose content could not be stored there. The read models
// only record that the event exists.
const UnprojectableData = `{"unprojectable":true}`

// EventFromReadModel converts an event that the read models store to the form that Evolve takes.
func EventFromReadModel(w events.WireEvent) events.Event {
	if string(w.Data) == UnprojectableData {
		return events.Event{ID: w.ID, Time: w.Time, ExecutionID: w.ExecutionID, ConversationID: w.ConversationID, Source: w.Source, Data: events.OpaquePayload{Name: w.Type}}
	}
	return w.Event()
}
