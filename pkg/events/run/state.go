// Package run is what happens to a session's executions once they are
// dispatched: who holds them, in which sandbox, how they end. It is pure.
package run

import (
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// Version is the version of State as it is stored beside each commit. Another
// version is not read: the state is folded from zero.
const Version = 3

// MaxClaims is how many claims without progress an execution survives. A claim whose
// holder attached to the running agent, or handed the execution over, is not one of them.
const MaxClaims = 5

// stopClaims is how many further claims may try to stop the agent before the execution is
// ended without that.
const stopClaims = 3

// Phase of an execution.
type Phase string

// The phases that run knows; before its claim an execution is queued.
const (
	Starting  Phase = "starting"
	Running   Phase = "running"
	Paused    Phase = "paused"
	Completed Phase = "completed"
	Failed    Phase = "failed"
	Cancelled Phase = "cancelled"
)

// Terminal tells whether a phase is an end.
func (p Phase) Terminal() bool { return p == Completed || p == Failed || p == Cancelled }

// State is the fold of a session's runs.
type State struct {
	V            int           `json:"v"`
	Epoch        uint64        `json:"epoch,omitempty"`
	Holder       string        `json:"holder,omitempty"`    // executor of the last claim
	Execution    string        `json:"execution,omitempty"` // the last one that run knows
	Turn         uint32        `json:"turn,omitempty"`      // its number within the session
	Phase        Phase         `json:"phase,omitempty"`
	ClaimedAt    time.Time     `json:"claimedAt,omitzero"` // first claim of the execution
	EndedAt      time.Time     `json:"endedAt,omitzero"`
	Attempt      uint32        `json:"attempt,omitempty"`
	Claims       uint32        `json:"claims,omitempty"`   // since the execution last made progress, the present one included
	Died         uint32        `json:"died,omitempty"`     // attempts of the execution that died and are followed by another
	NotBefore    time.Time     `json:"notBefore,omitzero"` // of the next attempt; zero while one runs
	Sandbox      Sandbox       `json:"sandbox,omitzero"`
	Open         []OpenBlock   `json:"open,omitempty"`
	Usage        events.Usage  `json:"usage,omitzero"`         // of the execution
	AgentSession string        `json:"agentSession,omitempty"` // the agent's own session id, to resume by
	PausedAt     time.Time     `json:"pausedAt,omitzero"`
	PausedMs     uint64        `json:"pausedMs,omitempty"`    // how long the execution stood still before
	Lost         Place         `json:"lost,omitzero"`         // a workspace without a sandbox, for the next one to take over
	Snapshot     Snapshot      `json:"snapshot,omitzero"`     // the last one
	Filled       bool          `json:"filled,omitempty"`      // a workspace of the session was filled or stored, or an agent has run in it
	Applied      uint32        `json:"applied,omitempty"`     // the last file change that the sandbox's workspace has
	Synced       uint32        `json:"synced,omitempty"`      // the last sync_requested that was answered
	Syncing      string        `json:"syncing,omitempty"`     // the executor that began to put files into the sandbox at rest, and may still be at it
	Egress       Line          `json:"egress,omitzero"`       // of the proxy's journal: the last line that is in the log
	Resolved     Resolved      `json:"resolved,omitzero"`     // of the execution: where its execution_resolved is
	Calls        uint32        `json:"calls,omitempty"`       // of the execution: requests that models answered, as the egress proxy saw them
	Metered      events.Spent  `json:"metered,omitzero"`      // what the execution took, as the egress proxy saw it
	Told         events.Spent  `json:"told,omitzero"`         // what the present attempt took, as the agent tells
	ToldBefore   events.Spent  `json:"toldBefore,omitzero"`   // the same of the attempts before it
	Retired      bool          `json:"retired,omitempty"`     // the session is deleted, and nothing but content_removed follows
	Output       events.Output `json:"output,omitzero"`       // what the agent said in the execution
	OutputBefore events.Output `json:"outputBefore,omitzero"` // and in those before it
	Before       events.Spent  `json:"before,omitzero"`       // what the session took: turns and time of all executions, sandboxes, and of models what was not for this one
}

// Place is where a workspace is.
type Place struct {
	Workspace string `json:"workspace,omitempty"` // the sandbox that it was made for
	Engine    string `json:"engine,omitempty"`
}

// Spent is what the execution took so far, as far as anybody knows.
func (s State) Spent() events.Spent { return s.Metered.Max(s.ToldBefore.Plus(s.Told)) }

// SessionSpent is what the session took so far, the execution's part included.
func (s State) SessionSpent() events.Spent { return s.Before.Plus(s.Spent()) }

// Resolved is where an execution_resolved is.
type Resolved struct {
	Known bool   `json:"known,omitempty"`
	At    uint64 `json:"at,omitempty"` // stream sequence of its commit; 0 is this commit
}

// Snapshot is a workspace in the object store.
type Snapshot struct {
	ID      string    `json:"id,omitempty"`
	At      time.Time `json:"at,omitzero"`
	Applied uint32    `json:"applied,omitempty"` // the last file change that it holds
}

// Line is a place in a journal.
type Line struct {
	Journal string `json:"journal,omitempty"`
	N       uint64 `json:"n,omitempty"`
}

// Sandbox is the session's present one; the zero value is none.
type Sandbox struct {
	ID       string `json:"id,omitempty"`
	Provider string `json:"provider,omitempty"`
	Engine   string `json:"engine,omitempty"`
	Journal  string `json:"journal,omitempty"` // "" until it is ready
	N        uint64 `json:"n,omitempty"`       // number of the last journal line that is in the log

	Workspace string    `json:"workspace,omitempty"` // the sandbox that its workspace was made for
	ReadyAt   time.Time `json:"readyAt,omitzero"`
	MeteredAt time.Time `json:"meteredAt,omitzero"` // up to here the log has its time in sandbox_usage; zero for nothing
	Paused    bool      `json:"paused,omitempty"`
	Unhealthy bool      `json:"unhealthy,omitempty"`
	Empty     bool      `json:"empty,omitempty"`     // its workspace was new, and nothing was put into it or taken out of it yet
	Unstopped bool      `json:"unstopped,omitempty"` // an execution ended in the log whose agent could not be told to stop: whoever reaches the sandbox stops it first
}

// OpenBlock is a block that has not been completed.
type OpenBlock struct {
	ID string `json:"id"`
	At uint64 `json:"at,omitempty"` // stream sequence of its block_start; 0 is this commit
}

// Ended tells whether an execution is the last one, and has ended.
func (s State) Ended(execution string) bool {
	return s.Execution == execution && s.Phase.Terminal()
}

// Past tells whether a dispatched execution has ended, or was followed by a
// later one, as it seems to a reader whose copy of the life is old. Once true
// it stays true.
func (s State) Past(r session.Ref) bool { return s.Turn > r.Turn || s.Ended(r.ExecutionID) }

// Over tells whether nothing runs: no execution was claimed, or the last one has ended.
func (s State) Over() bool { return s.Execution == "" || s.Phase.Terminal() }

// Exhausted reports whether the present claim is one too many without progress: its holder
// stops the agent and ends the execution.
func (s State) Exhausted() bool { return !s.Over() && s.Claims > MaxClaims }

// TakenOver reports whether another holder had the execution before the present claim, and
// so may have given it to the runner.
func (s State) TakenOver() bool { return !s.Over() && (s.Claims > 1 || s.Attempt > 0) }

// Dying is the number of the attempt that a death of the agent or its sandbox ends now.
func (s State) Dying() uint32 { return max(s.Attempt, s.Died+1) }

// View is what the session's life needs to know.
func (s State) View(l session.State) session.RunView {
	return session.RunView{
		ActiveEnded: s.Past(l.Active), ActiveClaimed: s.Execution == l.Active.ExecutionID,
		Paused: s.Phase == Paused && s.Execution == l.Active.ExecutionID, PausedFor: time.Duration(s.PausedMs) * time.Millisecond, //nolint:gosec // no turn is paused for ages
		EndedAt: s.EndedAt, HasSandbox: s.Sandbox.ID != "",
	}
}

// Settle fills in what referred to the commit itself, once its stream sequence is known.
func (s State) Settle(seq uint64) State {
	s.Open = slices.Clone(s.Open)
	for i := range s.Open {
		if s.Open[i].At == 0 {
			s.Open[i].At = seq
		}
	}
	if s.Resolved.Known && s.Resolved.At == 0 {
		s.Resolved.At = seq
	}
	return s
}

// Fold applies a commit: its epoch, then its events.
func Fold(s State, epoch uint64, list []events.Event) State {
	s.Epoch = max(s.Epoch, epoch)
	for _, e := range list {
		s = Evolve(s, e)
	}
	return s
}

// Evolve is the meaning of each event. It is total: what it does not know changes nothing.
func Evolve(s State, e events.Event) State {
	s.V = Version
	if e.N > s.Sandbox.N {
		s.Sandbox.N, s.Claims = e.N, 0
	}
	if e.N > 0 {
		s.Output = s.Output.Plus(events.OutputOf(e))
	}
	switch d := e.Data.(type) {
	case events.ExecutionClaimed:
		if s.Execution != e.ExecutionID {
			s = s.begin(e)
		}
		s.Epoch, s.Holder, s.Turn = max(s.Epoch, d.Epoch), d.Executor, max(s.Turn, d.Turn)
		s.Claims++
		s.Syncing = ""
	case events.ExecutionAttached, events.ExecutionHandedOver:
		s = s.keepClaim(e)
	case events.ExecutionStarted:
		if s.Attempt == 0 {
			s.Before.Turns++
		} else if d.Attempt > s.Attempt { // another process tells what it took anew
			s.ToldBefore, s.Told = s.ToldBefore.Plus(s.Told), events.Spent{}
		}
		s.Phase, s.Attempt, s.NotBefore, s.Filled = Running, d.Attempt, time.Time{}, true
		s.Sandbox.Unstopped = false // a runner runs one execution at a time
	case events.AttemptFailed:
		s.Phase, s.Claims = Starting, 0
		s.Died, s.NotBefore = s.Died+1, e.Time.Add(time.Duration(d.WaitMs)*time.Millisecond)
	case events.ExecutionCompleted:
		s = s.end(e, Completed, d.Usage)
	case events.ExecutionFailed:
		s.Sandbox.Unstopped = s.Sandbox.Unstopped || d.Unstopped && s.Execution == e.ExecutionID && s.Sandbox.ID != ""
		s = s.end(e, Failed, d.Usage)
	case events.ExecutionCancelled:
		s = s.end(e, Cancelled, d.Usage)
	case events.ExecutionPaused:
		s.Phase, s.PausedAt, s.Claims = Paused, e.Time, 0
	case events.ExecutionResumed:
		s.Phase, s.PausedAt, s.Claims = Running, time.Time{}, 0
		s.PausedMs += uint64(d.PausedMs)
	case events.SandboxCreating, events.SandboxReady, events.SandboxReplaced, events.SandboxTerminated, events.SandboxFailed,
		events.SandboxPaused, events.SandboxResumed, events.SandboxHealth, events.SandboxUsage:
		s = s.evolveSandbox(e)
	case events.FilesApplied:
		s.Applied = d.N
	case events.ExecutionResolved:
		s.Resolved = Resolved{Known: true}
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
		s.Egress = Line{d.Journal, d.Line}
	case events.ModelCalled:
		s.Egress = Line{d.Journal, d.Line}
		took := events.Spent{Tokens: d.Usage.Tokens(), CostUSD: d.CostUSD}
		if e.ExecutionID == s.Execution && d.Answered() {
			s.Calls++
		}
		if e.ExecutionID == s.Execution { // also after its end: the proxy may tell late
			s.Metered = s.Metered.Plus(took)
		} else {
			s.Before = s.Before.Plus(took)
		}
	case events.BlockStart:
		if d.Block.Status == events.StatusPending {
			s.Open = append(slices.Clone(s.Open), OpenBlock{ID: d.Block.ID})
		}
	case events.BlockComplete:
		s.Open = slices.DeleteFunc(slices.Clone(s.Open), func(b OpenBlock) bool { return b.ID == d.Block.ID })
	case events.MetadataUpdate:
		s.Usage, s.Told = d.Usage, events.Spent{Tokens: d.Usage.Tokens(), CostUSD: d.CostUSD}
	case events.TranscriptWritten:
		s.AgentSession = d.AgentSessionID
	case events.RunRetired:
		// What is kept says only that nothing is due, and fences late writers.
		s = State{V: Version, Epoch: s.Epoch, Execution: s.Execution, Turn: s.Turn, Phase: s.Phase, Retired: true}
	}
	return s
}

// keepClaim is the meaning of a claim that did not fail: its holder attached to the running
// agent, or handed the execution over. One claim stays counted, so that TakenOver stays true.
func (s State) keepClaim(e events.Event) State {
	if s.Execution != e.ExecutionID || s.Phase.Terminal() {
		return s // Decide writes no such thing
	}
	switch e.Data.(type) {
	case events.ExecutionAttached:
		s.Claims = min(s.Claims, 1)
	case events.ExecutionHandedOver:
		s.Claims = max(s.Claims, 2) - 1
	}
	return s
}

// evolveSandbox is the meaning of events about the sandbox.
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
		s.Lost = Place{}
	case events.SandboxReplaced:
		s = s.leave(d.Kept)
	case events.SandboxTerminated:
		s = s.leave(d.Kept)
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

// leave forgets the sandbox, but not where its workspace is if it is kept.
func (s State) leave(kept bool) State {
	if kept && s.Sandbox.Workspace != "" {
		s.Lost = Place{s.Sandbox.Workspace, s.Sandbox.Engine}
	}
	s.Sandbox = Sandbox{}
	return s
}

func (s State) begin(e events.Event) State {
	s.Before = s.Before.Plus(s.Spent())
	s.OutputBefore, s.Output = s.OutputBefore.Plus(s.Output), events.Output{}
	s.Execution, s.Phase, s.ClaimedAt, s.EndedAt = e.ExecutionID, Starting, e.Time, time.Time{}
	s.Attempt, s.Claims, s.Open, s.Usage = 0, 0, nil, events.Usage{}
	s.PausedAt, s.PausedMs, s.Resolved = time.Time{}, 0, Resolved{}
	s.Died, s.NotBefore, s.Calls = 0, time.Time{}, 0
	s.Metered, s.Told, s.ToldBefore = events.Spent{}, events.Spent{}, events.Spent{}
	return s
}

func (s State) end(e events.Event, p Phase, u events.Usage) State {
	if s.Execution != e.ExecutionID {
		return s // Decide writes no such thing
	}
	s.Phase, s.EndedAt, s.Usage, s.Claims, s.Open, s.NotBefore = p, e.Time, u, 0, nil, time.Time{}
	s.Before.TimeMs += s.Ran(e.Time)
	return s
}

// Ran is how many milliseconds the execution has run by a time, if it has not ended, without those in which it stood still.
func (s State) Ran(now time.Time) uint64 {
	if !s.PausedAt.IsZero() && now.After(s.PausedAt) {
		now = s.PausedAt
	}
	return uint64(max(0, now.Sub(s.ClaimedAt).Milliseconds()-int64(s.PausedMs))) //nolint:gosec // not negative
}
