// Package session decides the commands of a session's life and folds its events. It is pure.
package session

import (
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// StateVersion is the version of State as stored with each commit. A stored state of another version is ignored, and
// the subject is folded from its first commit.
const StateVersion = 4

// Status is the status of a session: open, closed or deleted.
type Status string

// The statuses. None means that the session does not exist.
const (
	None    Status = ""
	Open    Status = "open"
	Closed  Status = "closed"
	Deleted Status = "deleted"
)

// MaxQueuedExecutions is the maximum number of queued executions of a session.
const MaxQueuedExecutions = 256

// maxRememberedCommands is the maximum number of commands that a State remembers, so that a redelivered command changes
// nothing.
const maxRememberedCommands = 64

// State is the state of a session's life, folded from the commits of the life subject.
type State struct {
	V            int            `json:"v"`
	Status       Status         `json:"status,omitempty"`
	CreatedAt    time.Time      `json:"createdAt,omitzero"`
	TouchedAt    time.Time      `json:"touchedAt,omitzero"` // time of the last message, or of the creation
	Agent        string         `json:"agent,omitempty"`
	AgentVersion string         `json:"agentVersion,omitempty"`
	Architecture string         `json:"architecture,omitempty"`
	Provider     string         `json:"provider,omitempty"`
	Options      events.Options `json:"options,omitzero"`

	AgentRef     events.Reference   `json:"agentRef,omitzero"` // with the pinned version; zero for the built-in agent
	Instance     events.Reference   `json:"instance,omitzero"` // with the pinned version; zero for none
	Environments []events.Reference `json:"environments,omitempty"`

	// Fork is the origin of a forked session; nil for other sessions.
	Fork *events.SessionForked `json:"fork,omitempty"`
	// Transcript is the conversation from outside Spool with which the agent starts; nil for a new one.
	Transcript *events.Transcript `json:"transcript,omitempty"`

	Secrets  bool               `json:"secrets,omitempty"` // a message brought its own secrets
	Queue    []QueryRef         `json:"queue,omitempty"`
	Active   QueryRef           `json:"active,omitzero"`  // the last dispatched execution; the run state has its end
	Control  Control            `json:"control,omitzero"` // the strongest control on Active
	Controls uint32             `json:"controls,omitempty"`
	Turns    uint32             `json:"turns,omitempty"`    // number of dispatched executions
	Idle     bool               `json:"idle,omitempty"`     // session_idle, or a termination of the sandbox, came after the last dispatch
	Release  string             `json:"release,omitempty"`  // id of the last event that released the sandbox: idle, terminated, closed, deleted
	Manual   bool               `json:"manual,omitempty"`   // a client requested the last release
	Pause    PauseState         `json:"pause,omitzero"`     // whether Active is to be paused
	Decided  []DecidedApproval  `json:"decided,omitempty"`  // the most recent decisions on approval requests of Active, oldest first
	Syncs    uint32             `json:"syncs,omitempty"`    // number of requested snapshots
	Changes  uint32             `json:"changes,omitempty"`  // number of file changes
	Pending  []FileChange       `json:"pending,omitempty"`  // changes that no snapshot is known to contain, oldest first
	Cause    string             `json:"cause,omitempty"`    // id of the last event that requires work on a sandbox between turns
	Commands []CompletedCommand `json:"commands,omitempty"` // the most recent commands, oldest first

	// Forgotten is the greatest id among the commands that Commands no longer holds, or that a build carried out
	// which did not record command ids. If a command with a greater id was carried out, it is in Commands. Ids are
	// compared only with each other, never with a clock.
	Forgotten string `json:"forgotten,omitempty"`
}

// QueryRef refers to an accepted query in the session's life. The text of the query is only in the log.
type QueryRef struct {
	ExecutionID string    `json:"executionId,omitempty"`
	Message     uint64    `json:"message,omitempty"`  // stream sequence of the commit with message_accepted; 0 means the current commit
	At          time.Time `json:"at,omitzero"`        // time of the dispatch; before it, time of the acceptance
	Dispatch    string    `json:"dispatch,omitempty"` // id of its execution_dispatched event
	Turn        uint32    `json:"turn,omitempty"`     // number of the dispatch within the session: 1, 2, …

	RecoveredFrom string `json:"recoveredFrom,omitempty"` // the failed execution that it recovers
}

// ControlKind is the way in which a user stops a turn: with or without its sandbox, as cancelled or as interrupted.
type ControlKind string

// The controls, weakest first.
const (
	Interrupt ControlKind = "interrupt"
	Cancel    ControlKind = "cancel"
	Terminate ControlKind = "terminate" // also ends the sandbox
)

// strength returns the rank of a control; 0 for none.
func (k ControlKind) strength() int {
	switch k {
	case Interrupt:
		return 1
	case Cancel:
		return 2
	case Terminate:
		return 3
	}
	return 0
}

// Control is a request to stop an execution.
type Control struct {
	N           uint32      `json:"n,omitempty"`
	Kind        ControlKind `json:"kind,omitempty"`
	ExecutionID string      `json:"executionId,omitempty"`
	Reason      string      `json:"reason,omitempty"` // reason for execution_cancelled
	At          time.Time   `json:"at,omitzero"`
	Cause       string      `json:"cause,omitempty"` // id of its event
}

// PauseState states whether a client requested that an execution pause.
type PauseState struct {
	ExecutionID string `json:"executionId,omitempty"`
	Wanted      bool   `json:"wanted,omitempty"`
	Cause       string `json:"cause,omitempty"` // id of the resume_requested event
}

// FileChange refers to a file_put or file_removed event in the session's life. The content of the event is only in the
// log.
type FileChange struct {
	N  uint32 `json:"n"`
	At uint64 `json:"at,omitempty"` // stream sequence of its commit; 0 means the current commit
}

// DecidedApproval refers to a decision on an approval request in the session's life. The content of the decision is
// only in the log.
type DecidedApproval struct {
	ApprovalID string `json:"approvalId"`
	At         uint64 `json:"at,omitempty"`       // stream sequence of its commit; 0 means the current commit
	Decision   string `json:"decision,omitempty"` // one of events.DecisionApprove and the others
}

// CompletedCommand is a command that was carried out.
type CompletedCommand struct {
	ID string `json:"id"`           // id of the command, or of the commit if the commit does not name its command
	At uint64 `json:"at,omitempty"` // stream sequence of its commit; 0 means the current commit
}

// CommitID returns the id of the commit that carries out a command.
func CommitID(command string) string { return events.DeriveID(events.KindCommit, command) }

// CommandSeq returns the stream sequence of the commit that carried out a command, and whether there is one.
func (s *State) CommandSeq(command string) (at uint64, ok bool) {
	id := CommitID(command)
	for _, d := range s.Commands {
		if d.ID == command || d.ID == id {
			return d.At, true
		}
	}
	return 0, false
}

// MayHaveDropped reports whether a command that CommandSeq does not find may have been carried out nevertheless,
// because the state no longer remembers it.
func (s *State) MayHaveDropped(command string) bool { return command <= s.Forgotten }

// ControlOf returns the control on an execution. N is 0 if there is none.
func (s *State) ControlOf(execution string) Control {
	if s.Control.ExecutionID != execution {
		return Control{}
	}
	return s.Control
}

// WithCommitSeq returns the state after its commit was stored: references to the commit have its stream sequence, seq,
// instead of 0.
func (s State) WithCommitSeq(seq uint64) State {
	s.Queue = slices.Clone(s.Queue)
	for i := range s.Queue {
		setCommitSeq(&s.Queue[i].Message, seq)
	}
	if s.Active.ExecutionID != "" {
		setCommitSeq(&s.Active.Message, seq)
	}
	s.Commands = slices.Clone(s.Commands)
	for i := range s.Commands {
		setCommitSeq(&s.Commands[i].At, seq)
	}
	s.Pending = slices.Clone(s.Pending)
	for i := range s.Pending {
		setCommitSeq(&s.Pending[i].At, seq)
	}
	s.Decided = slices.Clone(s.Decided)
	for i := range s.Decided {
		setCommitSeq(&s.Decided[i].At, seq)
	}
	return s
}

// ResumeEventID returns the id of the event that ends a pause of the active execution: the control on the execution, or
// else the last resume_requested.
func (s *State) ResumeEventID() string {
	if c := s.ControlOf(s.Active.ExecutionID); c.N > 0 {
		return c.Cause
	}
	return s.Pause.Cause
}

// ShouldBePaused reports whether a client requested that an execution pause, and neither resumed nor stopped it since.
func (s *State) ShouldBePaused(execution string) bool {
	return s.Pause.Wanted && s.Pause.ExecutionID == execution && s.ControlOf(execution).N == 0
}

// setCommitSeq sets a reference to a commit to seq if the reference is 0.
func setCommitSeq(ref *uint64, seq uint64) {
	if *ref == 0 {
		*ref = seq
	}
}

// maxClockDifference is the maximum difference assumed between the clock that created a command's id and the clock of the
// events' times. It applies if a commit does not name its command.
const maxClockDifference = time.Hour

// Fold applies a commit's events. It remembers the commit if a client's command caused it. id is the id of the
// command, or of the commit if the commit does not name its command.
func Fold(s State, id string, list []events.Event) State {
	outside := false
	for _, e := range list {
		s = Evolve(s, e)
		switch e.Data.(type) {
		case events.ExecutionDispatched, events.SessionIdle, events.SessionClosed:
		default:
			outside = true
		}
	}
	if !outside {
		return s
	}
	if events.CheckID("", events.KindCommand, id) != nil {
		s.Forgotten = max(s.Forgotten, commandIDAfter(list[0].Time.Add(maxClockDifference)))
	}
	s.Commands = append(slices.Clone(s.Commands), CompletedCommand{ID: id})
	if extra := len(s.Commands) - maxRememberedCommands; extra > 0 {
		for _, d := range s.Commands[:extra] {
			if events.CheckID("", events.KindCommand, d.ID) == nil {
				s.Forgotten = max(s.Forgotten, d.ID)
			}
		}
		s.Commands = s.Commands[extra:]
	}
	return s
}

// commandIDAfter returns an id that is greater than the id of every command that was created before at.
func commandIDAfter(at time.Time) string {
	id, err := events.NewID(events.KindCommand, at, zeroReader{})
	if err != nil {
		return "" // zeros never fails
	}
	return id
}

// zeroReader is an endless reader of zero bytes.
type zeroReader struct{}

func (zeroReader) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}

// withoutClientText returns the options of a deleted session without the text that a client wrote, because the state
// stored with session_deleted is kept forever. HostPath stays: while a turn is being ended, the executor must not take
// the folder for an empty workspace of the session.
func withoutClientText(o events.Options) events.Options {
	o.Image, o.Command, o.ModelSettings, o.Egress = "", nil, events.ModelSettings{}, nil
	return o
}

// Evolve returns the state after an event. It never fails: an unknown event changes nothing.
func Evolve(s State, e events.Event) State {
	s.V = StateVersion
	switch d := e.Data.(type) {
	case events.SessionCreated:
		s.Status, s.CreatedAt, s.TouchedAt = Open, e.Time, e.Time
		s.Agent, s.AgentVersion, s.Architecture, s.Provider, s.Options = d.Agent, d.AgentVersion, d.Architecture, d.Provider, d.Options
		s.AgentRef, s.Instance, s.Environments, s.Transcript = d.AgentRef, d.Instance, d.Environments, d.Transcript
	case events.SessionForked:
		s.Fork = &d
	case events.SessionOptionsUpdated:
		s.Options = d.Options
	case events.SessionIdle:
		s.Idle, s.Release, s.Manual = true, e.ID, false
	case events.SessionClosed:
		s.Status, s.Release = Closed, e.ID
	case events.SessionDeleted:
		s.Status, s.Release = Deleted, e.ID
		s.Options = withoutClientText(s.Options)
	case events.MessageAccepted:
		s.TouchedAt = e.Time
		s.Queue = append(slices.Clone(s.Queue), QueryRef{ExecutionID: e.ExecutionID, At: e.Time, RecoveredFrom: d.RecoveredFrom})
		for _, v := range d.Environment {
			s.Secrets = s.Secrets || v.Secret
		}
	case events.ExecutionDispatched:
		if i := s.queueIndex(e.ExecutionID); i >= 0 {
			s.Active, s.Queue = s.Queue[i], slices.Delete(slices.Clone(s.Queue), i, i+1)
			s.Turns++
			s.Active.At, s.Active.Dispatch, s.Active.Turn = e.Time, e.ID, s.Turns
			s.Control, s.Idle, s.Pause, s.Decided = Control{}, false, PauseState{}, nil
		}
	case events.ExecutionWithdrawn:
		if i := s.queueIndex(e.ExecutionID); i >= 0 {
			s.Queue = slices.Delete(slices.Clone(s.Queue), i, i+1)
		}
	case events.InterruptRequested:
		s = s.withControl(Control{d.Control, Interrupt, e.ExecutionID, "interrupted", e.Time, e.ID})
	case events.CancelRequested:
		s = s.withControl(Control{d.Control, Cancel, e.ExecutionID, d.Reason, e.Time, e.ID})
	case events.TerminateRequested:
		s = s.withControl(Control{d.Control, Terminate, e.ExecutionID, d.Reason, e.Time, e.ID})
		s.Idle, s.Release, s.Manual = true, e.ID, true
	case events.PauseRequested:
		s.Controls = max(s.Controls, d.Control)
		s.Pause = PauseState{ExecutionID: e.ExecutionID, Wanted: true}
	case events.ResumeRequested:
		s.Controls = max(s.Controls, d.Control)
		s.Pause = PauseState{ExecutionID: e.ExecutionID, Cause: e.ID}
	case events.ApprovalDecided:
		s.Decided = append(slices.Clone(s.Decided), DecidedApproval{ApprovalID: d.ApprovalID, Decision: d.Decision})
		if extra := len(s.Decided) - maxRememberedDecisions; extra > 0 {
			s.Decided = s.Decided[extra:]
		}
	case events.SyncRequested:
		s.Syncs, s.Cause = max(s.Syncs, d.Sync), e.ID
	case events.FilePut:
		s = s.withChange(d.N, d.Held, e.ID)
	case events.FileRemoved:
		s = s.withChange(d.N, d.Held, e.ID)
	}
	return s
}

// withControl returns the state after a control on an execution.
func (s State) withControl(c Control) State {
	s.Controls = max(s.Controls, c.N)
	if s.Active.ExecutionID == c.ExecutionID && c.ExecutionID != "" && c.Kind.strength() > s.Control.Kind.strength() {
		s.Control = c
	}
	return s
}

// withChange returns the state after file change n. held is the number of the last change that a snapshot contains,
// cause the id of the event.
func (s State) withChange(n, held uint32, cause string) State {
	s.Changes, s.Cause = max(s.Changes, n), cause
	s.Pending = append(slices.Clone(s.ChangesAfter(held)), FileChange{N: n})
	return s
}

// ChangesAfter returns the pending file changes with a number greater than n.
func (s *State) ChangesAfter(n uint32) []FileChange {
	i := slices.IndexFunc(s.Pending, func(c FileChange) bool { return c.N > n })
	if i < 0 {
		return nil
	}
	return s.Pending[i:]
}

// queueIndex returns an execution's index in the queue, or -1.
func (s *State) queueIndex(execution string) int {
	return slices.IndexFunc(s.Queue, func(r QueryRef) bool { return r.ExecutionID == execution })
}
