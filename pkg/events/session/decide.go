package session

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Error is returned for a refused command.
type Error struct {
	Code   string // stable, as in the public API
	Field  string // the invalid field of the request; "" if there is none
	Detail string // one sentence
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }

// The error codes of refused commands.
const (
	CodeNotFound  = "SESSION_NOT_FOUND"
	CodeExists    = "SESSION_EXISTS"
	CodeClosed    = "SESSION_CLOSED"
	CodeQueueFull = "QUEUE_FULL"

	CodeNotRunning   = "EXECUTION_NOT_RUNNING"
	CodeTooManyFiles = "TOO_MANY_FILES"

	CodeNotFailed       = "EXECUTION_NOT_FAILED"
	CodeNotLast         = "EXECUTION_NOT_LAST"
	CodeRecovered       = "EXECUTION_RECOVERED"
	CodeSecretsRequired = "SECRETS_REQUIRED"

	CodeApprovalNotOpen = "APPROVAL_NOT_OPEN"
	CodeApprovalDecided = "APPROVAL_DECIDED"
	CodeNotEditable     = "ARGUMENTS_NOT_SUPPORTED"
	CodeInvalid         = "INVALID_REQUEST"
)

// MaxPendingChanges is the maximum number of file changes that no snapshot contains yet.
const MaxPendingChanges = 1024

// Command is a command on a session. The set is sealed.
type Command interface {
	meta() events.CommandMeta
}

// CommandBase holds the fields that all commands of a session share.
type CommandBase struct{ events.CommandMeta }

func (b CommandBase) meta() events.CommandMeta { return b.CommandMeta }

// CreateSession is the command that creates a session. The caller has validated and resolved all references.
type CreateSession struct {
	CommandBase
	events.SessionCreated
	Files []FileUpload
}

// FileUpload is a file or archive to put into the workspace. The object store already holds its content.
type FileUpload struct {
	Path    string
	Object  string
	Size    uint64
	SHA256  string
	Mode    uint32
	Archive bool
}

// UpdateOptions is the command that replaces the options of a session. nil metadata keeps the former metadata.
type UpdateOptions struct {
	CommandBase
	Options  events.Options // resolved
	Metadata json.RawMessage
}

// PostQuery is the command that accepts a query for a session.
type PostQuery struct {
	CommandBase
	ExecutionID string
	Content     string
	Parts       []events.Part
	Metadata    json.RawMessage
	Files       []FileUpload // files that the turn needs
	Environment map[string]events.Variable
	Permissions events.ExecutionPermissions
	Held        uint32 // number of the last file change that a snapshot contains, from the run state
	ActiveEnded bool   // from the run state: the active execution, if any, has ended
}

// StartSession is the command that creates a session and accepts its first query, in one commit.
type StartSession struct {
	CommandBase
	Create events.SessionCreated
	Post   PostQuery // its CommandBase is not used
}

// ForkSession is the command that creates a session that continues from an event of another session. The first sandbox
// of the fork receives the file changes that the parent had at that event and that the snapshot of the files does not
// contain.
type ForkSession struct {
	CommandBase
	Create  events.SessionCreated
	Forked  events.SessionForked
	Changes []events.Payload // file_put and file_removed of the parent; they are renumbered
}

// RequestInterrupt requests that the running turn stop. It changes nothing if no turn runs.
type RequestInterrupt struct {
	CommandBase
	ActiveEnded bool
}

// RequestCancel ends a queued execution, or requests that a running one stop. It changes nothing after the end.
type RequestCancel struct {
	CommandBase
	ExecutionID string
	ActiveEnded bool
}

// RequestPause requests that a running execution pause.
type RequestPause struct {
	CommandBase
	ExecutionID string
	ActiveEnded bool
}

// RequestResume requests that a paused execution resume. It changes nothing if the execution is not paused.
type RequestResume struct {
	CommandBase
	ExecutionID string
	ActiveEnded bool
}

// RequestTerminate requests that an execution and its sandbox end at once. Without an execution, it requests the
// end of the sandbox and of everything that runs in it.
type RequestTerminate struct {
	CommandBase
	ExecutionID string // "" for the sandbox only
	ActiveEnded bool
	HasSandbox  bool
}

// RequestSync requests a snapshot of the workspace.
type RequestSync struct{ CommandBase }

// PutFile puts a file or an archive into the workspace.
type PutFile struct {
	CommandBase
	FileUpload
	Held uint32 // number of the last file change that a snapshot contains, from the run state
}

// RemoveFile removes a file or a folder from the workspace.
type RemoveFile struct {
	CommandBase
	Path string
	Held uint32
}

// DeleteSession is the command that deletes a session.
type DeleteSession struct {
	CommandBase
	ActiveEnded bool
}

// DispatchNext is the command that dispatches the next query if the active execution has ended.
type DispatchNext struct {
	CommandBase
	ActiveEnded bool
}

// HandleDeadline is the command that handles a passed deadline. Now and the state determine which deadline it is.
type HandleDeadline struct {
	CommandBase
	Run RunView
}

// RunView is the part of the run state on which the deadlines of a session's life depend.
type RunView struct {
	ActiveEnded   bool
	ActiveClaimed bool
	Paused        bool          // the active execution is paused
	Waiting       bool          // the active execution waits for a person's approval
	PausedFor     time.Duration // total time of its earlier pauses and waits
	EndedAt       time.Time     // end of the last ended execution; zero if there is none
	HasSandbox    bool
	ActiveFailed  bool // the active execution has ended and failed
	ActiveStarted bool // its agent received the query
}

// Decide returns the events that a command causes, or an error if it is refused. No events and no error mean that
// the command changes nothing.
func Decide(s State, c Command) ([]events.Event, error) {
	if _, done := s.CommandSeq(c.meta().CommandID); done {
		return nil, nil
	}
	m := events.NewEventList(c.meta())
	switch c := c.(type) {
	case CreateSession:
		if _, err := decideCreate(s, c.SessionCreated, m); err != nil {
			return nil, err
		}
		if err := addFilePuts(State{}, c.Files, 0, m); err != nil {
			return nil, err
		}
		return m.Events(), nil
	case StartSession:
		if _, err := decideCreate(s, c.Create, m); err != nil {
			return nil, err
		}
		return decidePost(State{Status: Open}, c.Post, m)
	case ForkSession:
		if _, err := decideCreate(s, c.Create, m); err != nil {
			return nil, err
		}
		addFork(c, m)
		return m.Events(), nil
	}
	if s.Status == None || s.Status == Deleted {
		return nil, &Error{Code: CodeNotFound, Field: "sessionId", Detail: "there is no such session"}
	}
	switch c := c.(type) {
	case UpdateOptions:
		m.Add("", events.SessionOptionsUpdated{Options: c.Options, Metadata: c.Metadata})
	case PostQuery:
		return decidePost(s, c, m)
	case RecoverExecution:
		return decideRecover(s, c, m)
	case DecideApproval:
		return decideApproval(s, c, m)
	case RequestInterrupt:
		if s.isRunning(c.ActiveEnded) && s.Control.N == 0 {
			m.Add(s.Active.ExecutionID, events.InterruptRequested{Control: s.Controls + 1})
		}
	case RequestCancel:
		addCancel(s, c, m)
	case RequestPause, RequestResume, RequestTerminate, RequestSync, PutFile, RemoveFile:
		return decideWorkspaceCommand(s, c, m)
	case DeleteSession:
		s.endExecutions(m, "session_deleted", c.ActiveEnded)
		m.Add("", events.SessionDeleted{})
	case DispatchNext:
		if s.Status == Open && !s.isRunning(c.ActiveEnded) && len(s.Queue) > 0 {
			m.Add(s.Queue[0].ExecutionID, events.ExecutionDispatched{})
		}
	case HandleDeadline:
		addExpiry(s, c, m)
	}
	return m.Events(), nil
}

// decideCreate decides the creation of a session.
func decideCreate(s State, data events.SessionCreated, m *events.EventList) ([]events.Event, error) {
	if s.Status != None {
		return nil, &Error{CodeExists, "sessionId", "a session with this id exists already"}
	}
	m.Add("", data)
	return m.Events(), nil
}

// addFork adds the events of a ForkSession.
func addFork(c ForkSession, m *events.EventList) {
	m.Add("", c.Forked)
	for i, change := range c.Changes {
		n := uint32(i + 1) //nolint:gosec // at most MaxPendingChanges changes are pending in the parent
		switch d := change.(type) {
		case events.FilePut:
			d.N, d.Held = n, 0
			m.Add("", d)
		case events.FileRemoved:
			d.N, d.Held = n, 0
			m.Add("", d)
		}
	}
}

// decidePost decides a PostQuery: the query is dispatched at once or queued.
func decidePost(s State, c PostQuery, m *events.EventList) ([]events.Event, error) {
	if s.Status == Closed {
		return nil, newClosedError()
	}
	if len(s.Queue) >= MaxQueuedExecutions {
		return nil, &Error{CodeQueueFull, "", fmt.Sprintf("%d messages of this session are queued already; try again when some have been answered", MaxQueuedExecutions)}
	}
	if s.queueIndex(c.ExecutionID) >= 0 || s.Active.ExecutionID == c.ExecutionID {
		return nil, nil
	}
	if err := addFilePuts(s, c.Files, c.Held, m); err != nil {
		return nil, err
	}
	m.Add(c.ExecutionID, events.MessageAccepted{
		BlockID: events.DeriveID(events.KindBlock, c.ExecutionID, "message"),
		Content: c.Content, Parts: c.Parts, Metadata: c.Metadata, Environment: c.Environment, Permissions: c.Permissions,
	})
	running := s.isRunning(c.ActiveEnded)
	if !running && len(s.Queue) == 0 {
		m.Add(c.ExecutionID, events.ExecutionDispatched{})
		return m.Events(), nil
	}
	ahead := len(s.Queue)
	if running {
		ahead++
	}
	m.Add(c.ExecutionID, events.ExecutionQueued{Ahead: uint32(ahead)})
	return m.Events(), nil
}

func newClosedError() *Error {
	return &Error{CodeClosed, "sessionId", "the session is closed and accepts no more messages; create another session"}
}

// addCancel adds the event of a RequestCancel.
func addCancel(s State, c RequestCancel, m *events.EventList) {
	if s.queueIndex(c.ExecutionID) >= 0 {
		m.Add(c.ExecutionID, events.ExecutionWithdrawn{Reason: "cancelled"})
		return
	}
	if s.Active.ExecutionID == c.ExecutionID && s.isRunning(c.ActiveEnded) && s.Control.Kind.strength() < Cancel.strength() {
		m.Add(c.ExecutionID, events.CancelRequested{Control: s.Controls + 1, Reason: "cancelled"})
	}
}

// endExecutions adds the events that withdraw all queued executions and cancel the active one.
func (s State) endExecutions(m *events.EventList, reason string, activeEnded bool) {
	for _, r := range s.Queue {
		m.Add(r.ExecutionID, events.ExecutionWithdrawn{Reason: reason})
	}
	if s.isRunning(activeEnded) && s.Control.Kind.strength() < Cancel.strength() {
		m.Add(s.Active.ExecutionID, events.CancelRequested{Control: s.Controls + 1, Reason: reason})
	}
}

// addExpiry adds the event of the deadline that has passed. It checks the session limit first, because closing the
// session also ends everything else.
func addExpiry(s State, c HandleDeadline, m *events.EventList) {
	if at, ok := s.sessionDeadline(); ok && !c.Now.Before(at) {
		s.endExecutions(m, "session_closed", c.Run.ActiveEnded)
		m.Add("", events.SessionClosed{Reason: "limit"})
		return
	}
	if at, ok := s.idleDeadline(c.Run); ok && !c.Now.Before(at) {
		m.Add("", events.SessionIdle{IdleMs: uint32(c.Now.Sub(s.lastActivity(c.Run)).Milliseconds())})
	}
}

// isRunning reports whether an execution was dispatched and has not ended.
func (s *State) isRunning(activeEnded bool) bool { return s.Active.ExecutionID != "" && !activeEnded }
