// Package run decides what happens to a session's executions after their dispatch: which executor holds them, in
// which sandbox they run, how they end. It is pure.
package run

import (
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// StateVersion is the version of State as stored with each commit. A stored state of another version is ignored, and
// the subject is folded from its first commit.
const StateVersion = 4

// MaxClaimsWithoutProgress is the number of claims without progress that an execution survives. A claim does not count if its
// holder attached to the running agent or handed the execution over.
const MaxClaimsWithoutProgress = 5

// maxStopClaims is the number of claims beyond MaxClaimsWithoutProgress whose holders may try to stop the agent. After them the
// execution ends although the agent was not stopped.
const maxStopClaims = 3

// Phase is the phase of an execution, from starting to completed, failed or cancelled.
type Phase string

// The phases of a claimed execution. Before its claim an execution is queued.
const (
	Starting  Phase = "starting"
	Running   Phase = "running"
	Waiting   Phase = "waiting_for_approval" // at least one approval request is open
	Paused    Phase = "paused"
	Completed Phase = "completed"
	Failed    Phase = "failed"
	Cancelled Phase = "cancelled"
)

// IsTerminal reports whether a phase is final.
func (p Phase) IsTerminal() bool { return p == Completed || p == Failed || p == Cancelled }

// State is the state of a session's runs, folded from the commits of the run subject.
type State struct {
	V              int                `json:"v"`
	Epoch          uint64             `json:"epoch,omitempty"`
	Holder         string             `json:"holder,omitempty"`    // executor of the last claim
	Execution      string             `json:"execution,omitempty"` // the last claimed execution
	Turn           uint32             `json:"turn,omitempty"`      // number of its dispatch within the session
	Phase          Phase              `json:"phase,omitempty"`
	ClaimedAt      time.Time          `json:"claimedAt,omitzero"` // first claim of the execution
	EndedAt        time.Time          `json:"endedAt,omitzero"`
	Attempt        uint32             `json:"attempt,omitempty"`
	Claims         uint32             `json:"claims,omitempty"`   // claims since the execution last made progress, including the current one
	DiedAttempts   uint32             `json:"died,omitempty"`     // attempts of the execution that died and were or will be followed by another
	NotBefore      time.Time          `json:"notBefore,omitzero"` // start time of the next attempt; zero while an attempt runs
	Sandbox        Sandbox            `json:"sandbox,omitzero"`
	Open           []OpenBlock        `json:"open,omitempty"`
	Usage          events.Usage       `json:"usage,omitzero"`         // of the execution
	AgentSession   string             `json:"agentSession,omitempty"` // the agent's own session id, used to resume it
	Continues      string             `json:"continues,omitempty"`    // AgentSession when the execution was first claimed; "" if the session had no conversation
	PausedAt       time.Time          `json:"pausedAt,omitzero"`
	PausedMs       uint64             `json:"pausedMs,omitempty"`    // total time of earlier pauses
	Approvals      []OpenApproval     `json:"approvals,omitempty"`   // open approval requests, oldest first
	Approved       []string           `json:"approved,omitempty"`    // classes of which a person has approved all requests of the execution
	WaitingAt      time.Time          `json:"waitingAt,omitzero"`    // time since which an approval request is open
	WaitedMs       uint64             `json:"waitedMs,omitempty"`    // total time of earlier waits for approvals
	Lost           WorkspaceLocation  `json:"lost,omitzero"`         // a workspace without a sandbox, which the next sandbox takes over
	Snapshot       Snapshot           `json:"snapshot,omitzero"`     // the last snapshot
	Filled         bool               `json:"filled,omitempty"`      // a workspace of the session was restored or stored, or an agent has run in it
	Applied        uint32             `json:"applied,omitempty"`     // number of the last file change applied to the sandbox's workspace
	Synced         uint32             `json:"synced,omitempty"`      // number of the last answered sync_requested
	Syncing        string             `json:"syncing,omitempty"`     // the executor that started to apply files to the sandbox between turns, and may still be doing so
	Egress         JournalPosition    `json:"egress,omitzero"`       // last line of the egress proxy's journal that is in the log
	Resolved       ResolvedLocation   `json:"resolved,omitzero"`     // where the execution_resolved of the execution is
	Calls          uint32             `json:"calls,omitempty"`       // model requests of the execution that were answered, as the egress proxy counted them
	Metered        events.BudgetUsage `json:"metered,omitzero"`      // usage of the execution as the egress proxy measured it
	Reported       events.BudgetUsage `json:"told,omitzero"`         // usage of the current attempt as the agent reports it
	ReportedBefore events.BudgetUsage `json:"toldBefore,omitzero"`   // usage of the earlier attempts as the agent reported it
	Retired        bool               `json:"retired,omitempty"`     // the session is deleted, and only content_removed may follow
	Output         events.OutputSize  `json:"output,omitzero"`       // output of the agent in the execution
	OutputBefore   events.OutputSize  `json:"outputBefore,omitzero"` // output of the agent in earlier executions
	Before         events.BudgetUsage `json:"before,omitzero"`       // usage of the session outside Metered and Reported: turns and time of all executions, sandbox time, and model requests of other executions
}

// WorkspaceLocation states where a workspace is: its engine, and the sandbox for which it was created.
type WorkspaceLocation struct {
	Workspace string `json:"workspace,omitempty"` // id of the sandbox for which it was created
	Engine    string `json:"engine,omitempty"`
}

// TotalUsage returns the usage of the execution so far: the greater of the measured and the reported values.
func (s *State) TotalUsage() events.BudgetUsage {
	return s.Metered.Max(s.ReportedBefore.Plus(s.Reported))
}

// SessionUsage returns the usage of the session so far, including the current execution.
func (s *State) SessionUsage() events.BudgetUsage { return s.Before.Plus(s.TotalUsage()) }

// ResolvedLocation states whether an execution has an execution_resolved event, and the stream sequence of its commit.
type ResolvedLocation struct {
	Known bool   `json:"known,omitempty"`
	At    uint64 `json:"at,omitempty"` // stream sequence of its commit; 0 means the current commit
}

// Snapshot is a stored snapshot of the workspace.
type Snapshot struct {
	ID      string    `json:"id,omitempty"`
	At      time.Time `json:"at,omitzero"`
	Applied uint32    `json:"applied,omitempty"` // number of the last file change that it contains
}

// JournalPosition is the number of an entry in a journal, and the id of the journal.
type JournalPosition struct {
	Journal string `json:"journal,omitempty"`
	N       uint64 `json:"n,omitempty"`
}

// Sandbox is the session's current sandbox. The zero value means none.
type Sandbox struct {
	ID       string `json:"id,omitempty"`
	Provider string `json:"provider,omitempty"`
	Engine   string `json:"engine,omitempty"`
	Journal  string `json:"journal,omitempty"` // "" until it is ready
	N        uint64 `json:"n,omitempty"`       // number of the last journal entry that is in the log

	Workspace string    `json:"workspace,omitempty"` // id of the sandbox for which its workspace was created
	ReadyAt   time.Time `json:"readyAt,omitzero"`
	MeteredAt time.Time `json:"meteredAt,omitzero"` // end of the time that sandbox_usage events cover; zero if there are none
	Paused    bool      `json:"paused,omitempty"`
	Unhealthy bool      `json:"unhealthy,omitempty"`
	Empty     bool      `json:"empty,omitempty"`     // the workspace was new, and nothing was written to it or stored from it yet
	Unstopped bool      `json:"unstopped,omitempty"` // an execution ended without its agent being stopped: the next executor that reaches the sandbox stops the agent first
}

// OpenApproval is an approval request that was neither resolved nor retracted.
type OpenApproval struct {
	ID       string              `json:"id"`
	Kind     events.ApprovalKind `json:"kind,omitempty"`
	At       uint64              `json:"at,omitempty"` // stream sequence of its approval_requested; 0 means the current commit
	Time     time.Time           `json:"time,omitzero"`
	Class    string              `json:"class,omitempty"`
	Editable bool                `json:"editable,omitempty"`
}

// OpenBlock is a block that is not complete.
type OpenBlock struct {
	ID string `json:"id"`
	At uint64 `json:"at,omitempty"` // stream sequence of its block_start; 0 means the current commit
	// TextAfter is the sequence in the stream DELTAS after which the block's text begins; 0 means that it is not known.
	TextAfter uint64 `json:"textAfter,omitempty"`
}

// HasEnded reports whether execution is the session's last one and has ended.
func (s *State) HasEnded(execution string) bool {
	return s.Execution == execution && s.Phase.IsTerminal()
}

// IsDone reports whether a dispatched execution has ended or was followed by a later one. The reader's view of the
// session's life may be old. Once true, the result stays true.
func (s *State) IsDone(r session.QueryRef) bool { return s.Turn > r.Turn || s.HasEnded(r.ExecutionID) }

// IsIdle reports whether no execution runs: none was claimed, or the last one has ended.
func (s *State) IsIdle() bool { return s.Execution == "" || s.Phase.IsTerminal() }

// HasTooManyClaims reports whether the execution was claimed more than MaxClaimsWithoutProgress times without progress: the holder
// stops the agent and ends the execution.
func (s *State) HasTooManyClaims() bool { return !s.IsIdle() && s.Claims > MaxClaimsWithoutProgress }

// WasTakenOver reports whether another holder claimed the execution before the current claim, and may have started it
// in the runner.
func (s *State) WasTakenOver() bool { return !s.IsIdle() && (s.Claims > 1 || s.Attempt > 0) }

// CurrentAttempt returns the number of the attempt that ends if the agent or its sandbox dies now.
func (s *State) CurrentAttempt() uint32 { return max(s.Attempt, s.DiedAttempts+1) }

// RunView returns the part of the run state on which the session's life depends.
func (s *State) RunView(l *session.State) session.RunView {
	return session.RunView{
		ActiveEnded: s.IsDone(l.Active), ActiveClaimed: s.Execution == l.Active.ExecutionID,
		Paused: s.Phase == Paused && s.Execution == l.Active.ExecutionID, PausedFor: s.SuspendedTime(),
		Waiting: s.Phase == Waiting && s.Execution == l.Active.ExecutionID,
		EndedAt: s.EndedAt, HasSandbox: s.Sandbox.ID != "",
		ActiveFailed:  s.Execution == l.Active.ExecutionID && s.Phase == Failed,
		ActiveStarted: s.Execution == l.Active.ExecutionID && s.Attempt > 0,
	}
}

// WithCommitSeq returns the state after its commit was stored: references to the commit have its stream sequence, seq,
// instead of 0.
func (s State) WithCommitSeq(seq uint64) State {
	s.Open = slices.Clone(s.Open)
	for i := range s.Open {
		if s.Open[i].At == 0 {
			s.Open[i].At = seq
		}
	}
	s.Approvals = slices.Clone(s.Approvals)
	for i := range s.Approvals {
		if s.Approvals[i].At == 0 {
			s.Approvals[i].At = seq
		}
	}
	if s.Resolved.Known && s.Resolved.At == 0 {
		s.Resolved.At = seq
	}
	return s
}

// Fold returns the state after a commit with the given epoch and events.
func Fold(s State, epoch uint64, list []events.Event) State {
	s.Epoch = max(s.Epoch, epoch)
	for _, e := range list {
		s = Evolve(s, e)
	}
	return s
}

// Evolve returns the state after an event. It never fails: an unknown event changes nothing.
func Evolve(s State, e events.Event) State {
	s.V = StateVersion
	if e.N > s.Sandbox.N {
		s.Sandbox.N, s.Claims = e.N, 0
	}
	if e.N > 0 {
		s.Output = s.Output.Plus(events.OutputSizeOf(e))
	}
	switch d := e.Data.(type) {
	case events.ExecutionClaimed:
		if s.Execution != e.ExecutionID {
			s = s.beginExecution(e)
		}
		s.Epoch, s.Holder, s.Turn = max(s.Epoch, d.Epoch), d.Executor, max(s.Turn, d.Turn)
		s.Claims++
		s.Syncing = ""
	case events.ExecutionAttached, events.ExecutionHandedOver:
		s = s.withoutFailedClaims(e)
	case events.ExecutionStarted:
		if s.Attempt == 0 {
			s.Before.Turns++
		} else if d.Attempt > s.Attempt { // a new process reports its usage from zero
			s.ReportedBefore, s.Reported = s.ReportedBefore.Plus(s.Reported), events.BudgetUsage{}
		}
		s.Phase, s.Attempt, s.NotBefore, s.Filled = Running, d.Attempt, time.Time{}, true
		s.Sandbox.Unstopped = false // a runner runs one execution at a time, so the former agent has stopped
	case events.ApprovalRequested:
		s = s.withOpenApproval(e, d)
	case events.ApprovalResolved:
		if d.All && d.Class != "" && !slices.Contains(s.Approved, d.Class) {
			s.Approved = append(slices.Clone(s.Approved), d.Class)
		}
		s = s.withoutApproval(e, d.ApprovalID)
	case events.ApprovalRetracted:
		s = s.withoutApproval(e, d.ApprovalID)
	case events.AttemptFailed:
		s.Phase, s.Claims = Starting, 0
		s.DiedAttempts, s.NotBefore = s.DiedAttempts+1, e.Time.Add(time.Duration(d.WaitMs)*time.Millisecond)
	case events.ExecutionCompleted:
		s = s.endExecution(e, Completed, d.Usage)
	case events.ExecutionFailed:
		s.Sandbox.Unstopped = s.Sandbox.Unstopped || d.Unstopped && s.Execution == e.ExecutionID && s.Sandbox.ID != ""
		s = s.endExecution(e, Failed, d.Usage)
	case events.ExecutionCancelled:
		s = s.endExecution(e, Cancelled, d.Usage)
	case events.ExecutionPaused:
		s = s.endApprovalWait(e.Time)
		s.Phase, s.PausedAt, s.Claims = Paused, e.Time, 0
	case events.ExecutionResumed:
		s.Phase, s.PausedAt, s.Claims = Running, time.Time{}, 0
		if len(s.Approvals) > 0 {
			s.Phase, s.WaitingAt = Waiting, e.Time
		}
		s.PausedMs += uint64(d.PausedMs)
	case events.SandboxCreating, events.SandboxReady, events.SandboxReplaced, events.SandboxTerminated, events.SandboxFailed,
		events.SandboxPaused, events.SandboxResumed, events.SandboxHealth, events.SandboxUsage:
		s = s.evolveSandbox(e)
	case events.FilesApplied:
		s.Applied = d.N
	case events.ExecutionResolved:
		s.Resolved = ResolvedLocation{Known: true}
	case events.WorkspaceRestored:
		s.Sandbox.Empty, s.Filled = false, true
		if d.Snapshot == s.Snapshot.ID {
			s.Applied = s.Snapshot.Applied
		}
	case events.WorkspaceSyncStarted:
		s.Syncing = d.Executor
	case events.WorkspaceSynced:
		s.Syncing = ""
		s.Snapshot = Snapshot{ID: d.Snapshot, At: e.Time, Applied: d.Applied}
		s.Synced, s.Sandbox.Empty, s.Filled = max(s.Synced, d.Request), false, true
	case events.EgressDenied:
		s.Egress = JournalPosition{d.Journal, d.Line}
	case events.ModelCalled:
		s.Egress = JournalPosition{d.Journal, d.Line}
		took := events.BudgetUsage{Tokens: d.Usage.Tokens(), CostUSD: d.CostUSD}
		if e.ExecutionID == s.Execution && d.Answered() {
			s.Calls++
		}
		if e.ExecutionID == s.Execution { // also after the end of the execution: the proxy may report late
			s.Metered = s.Metered.Plus(took)
		} else {
			s.Before = s.Before.Plus(took)
		}
	case events.BlockStart:
		if d.Block.Status == events.StatusPending {
			s.Open = append(slices.Clone(s.Open), OpenBlock{ID: d.Block.ID, TextAfter: d.TextAfter})
		}
	case events.BlockComplete:
		s.Open = slices.DeleteFunc(slices.Clone(s.Open), func(b OpenBlock) bool { return b.ID == d.Block.ID })
	case events.MetadataUpdate:
		s.Usage, s.Reported = d.Usage, events.BudgetUsage{Tokens: d.Usage.Tokens(), CostUSD: d.CostUSD}
	case events.TranscriptWritten:
		s.AgentSession = d.AgentSessionID
	case events.RunRetired:
		// The remaining state shows that no work is due, and refuses late writers.
		s = State{V: StateVersion, Epoch: s.Epoch, Execution: s.Execution, Turn: s.Turn, Phase: s.Phase, Retired: true}
	}
	return s
}

// withoutFailedClaims applies an event with which a claim succeeded: its holder attached to the running agent, or
// handed the execution over. Such claims no longer count, except one, so that WasTakenOver stays true.
func (s State) withoutFailedClaims(e events.Event) State {
	if s.Execution != e.ExecutionID || s.Phase.IsTerminal() {
		return s // Decide does not produce such events
	}
	switch e.Data.(type) {
	case events.ExecutionAttached:
		s.Claims = min(s.Claims, 1)
	case events.ExecutionHandedOver:
		s.Claims = max(s.Claims, 2) - 1
	}
	return s
}

// withOpenApproval returns the state after an approval_requested event.
func (s State) withOpenApproval(e events.Event, d events.ApprovalRequested) State {
	if s.Execution != e.ExecutionID || s.Phase.IsTerminal() {
		return s // Decide does not produce such events
	}
	if len(s.Approvals) == 0 && s.Phase != Paused {
		s.WaitingAt = e.Time
	}
	s.Approvals = append(slices.Clone(s.Approvals), OpenApproval{ID: d.ApprovalID, Kind: d.Kind, Time: e.Time, Class: d.Class, Editable: d.Editable})
	if s.Phase == Running {
		s.Phase = Waiting
	}
	return s
}

// withoutApproval returns the state after an event that ends an approval request.
func (s State) withoutApproval(e events.Event, id string) State {
	i := slices.IndexFunc(s.Approvals, func(a OpenApproval) bool { return a.ID == id })
	if i < 0 {
		return s
	}
	s.Approvals = slices.Delete(slices.Clone(s.Approvals), i, i+1)
	if len(s.Approvals) > 0 {
		return s
	}
	s = s.endApprovalWait(e.Time)
	if s.Phase == Waiting {
		s.Phase = Running
	}
	return s
}

// endApprovalWait returns the state in which the current wait for approvals, if there is one, has ended: its time is
// added to WaitedMs.
func (s State) endApprovalWait(now time.Time) State {
	if !s.WaitingAt.IsZero() {
		s.WaitedMs += uint64(max(0, now.Sub(s.WaitingAt).Milliseconds())) //nolint:gosec // not negative
		s.WaitingAt = time.Time{}
	}
	return s
}

// evolveSandbox returns the state after an event about the sandbox.
func (s State) evolveSandbox(e events.Event) State {
	switch d := e.Data.(type) {
	case events.SandboxCreating:
		s.Sandbox = Sandbox{ID: d.SandboxID, Provider: d.Provider, Engine: d.Engine}
	case events.SandboxReady:
		s.Sandbox = Sandbox{
			ID: d.SandboxID, Provider: d.Provider, Engine: d.Engine, Journal: d.Journal,
			Workspace: d.Workspace, ReadyAt: e.Time, Empty: d.Empty,
		}
		if s.Sandbox.Workspace == "" {
			s.Sandbox.Workspace = d.SandboxID
		}
		if d.Empty {
			s.Applied = 0
		}
		s.Lost = WorkspaceLocation{}
	case events.SandboxReplaced:
		s = s.withoutSandbox(d.Kept)
	case events.SandboxTerminated:
		s = s.withoutSandbox(d.Kept)
	case events.SandboxFailed:
		s.Sandbox = Sandbox{}
	case events.SandboxPaused:
		s.Sandbox.Paused = true
	case events.SandboxResumed:
		s.Sandbox.Paused = false
	case events.SandboxHealth:
		s.Sandbox.Unhealthy = d.Status == events.Unhealthy
	case events.SandboxUsage:
		s.Before.CostUSD += d.CostUSD
		if d.SandboxID == s.Sandbox.ID && e.Time.After(s.Sandbox.MeteredAt) {
			s.Sandbox.MeteredAt = e.Time
		}
	}
	return s
}

// withoutSandbox returns the state without the sandbox. If its workspace is kept, the state records its location.
func (s State) withoutSandbox(kept bool) State {
	if kept && s.Sandbox.Workspace != "" {
		s.Lost = WorkspaceLocation{s.Sandbox.Workspace, s.Sandbox.Engine}
	}
	s.Sandbox = Sandbox{}
	return s
}

// beginExecution returns the state after the first claim of an execution.
func (s State) beginExecution(e events.Event) State {
	s.Before = s.Before.Plus(s.TotalUsage())
	s.OutputBefore, s.Output = s.OutputBefore.Plus(s.Output), events.OutputSize{}
	s.Execution, s.Phase, s.ClaimedAt, s.EndedAt = e.ExecutionID, Starting, e.Time, time.Time{}
	s.Attempt, s.Claims, s.Open, s.Usage, s.Continues = 0, 0, nil, events.Usage{}, s.AgentSession
	s.PausedAt, s.PausedMs, s.Resolved = time.Time{}, 0, ResolvedLocation{}
	s.Approvals, s.Approved, s.WaitingAt, s.WaitedMs = nil, nil, time.Time{}, 0
	s.DiedAttempts, s.NotBefore, s.Calls = 0, time.Time{}, 0
	s.Metered, s.Reported, s.ReportedBefore = events.BudgetUsage{}, events.BudgetUsage{}, events.BudgetUsage{}
	return s
}

// endExecution returns the state after the terminal event of an execution. p is the final phase.
func (s State) endExecution(e events.Event, p Phase, u events.Usage) State {
	if s.Execution != e.ExecutionID {
		return s // Decide does not produce such events
	}
	s.Phase, s.EndedAt, s.Usage, s.Claims, s.Open, s.NotBefore = p, e.Time, u, 0, nil, time.Time{}
	s.Before.TimeMs += s.RunMilliseconds(e.Time)
	s.Approvals, s.Approved, s.WaitingAt = nil, nil, time.Time{}
	return s
}

// SuspendedTime returns the time for which the execution was paused or waited for approvals, without the current pause
// or wait.
func (s *State) SuspendedTime() time.Duration {
	return time.Duration(s.PausedMs+s.WaitedMs) * time.Millisecond //nolint:gosec // sessions end long before an overflow
}

// RunMilliseconds returns how many milliseconds the execution has run by now, without its pauses and waits for approvals. The
// execution must not have ended.
func (s *State) RunMilliseconds(now time.Time) uint64 {
	for _, since := range []time.Time{s.PausedAt, s.WaitingAt} {
		if !since.IsZero() && now.After(since) {
			now = since
		}
	}
	return uint64(max(0, now.Sub(s.ClaimedAt).Milliseconds()-s.SuspendedTime().Milliseconds())) //nolint:gosec // not negative
}
