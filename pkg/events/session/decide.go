package session

import (
	"encoding/json"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// Error is a refused command.
type Error struct {
	Code   string // stable, as in the public API
	Field  string // of the request, where one is at fault
	Detail string // one sentence
}

func (e *Error) Error() string { return e.Code + ": " + e.Detail }

// The codes of refused commands.
const (
	CodeNotFound = "SESSION_NOT_FOUND"
	CodeExists   = "SESSION_EXISTS"
	CodeClosed   = "SESSION_CLOSED"
	CodeFull     = "QUEUE_FULL"

	CodeNotRunning   = "EXECUTION_NOT_RUNNING"
	CodeTooManyFiles = "TOO_MANY_FILES"
)

// MaxPending is how many file changes may wait for a snapshot that holds them.
const MaxPending = 1024

// Command is what may be asked of a session. The set is sealed.
type Command interface {
	meta() events.Meta
}

// Base is the part that all commands share.
type Base struct{ events.Meta }

func (b Base) meta() events.Meta { return b.Meta }

// Create makes the session. What it names was checked and resolved by the caller.
type Create struct {
	Base
	events.SessionCreated
	Files []File
}

// File is content on its way into the workspace; it is in the object store already.
type File struct {
	Path    string
	Object  string
	Size    uint64
	SHA256  string
	Mode    uint32
	Archive bool
}

// UpdateOptions replaces options; nil metadata leaves the former.
type UpdateOptions struct {
	Base
	Options  events.Options // resolved
	Metadata json.RawMessage
}

// Post accepts a query.
type Post struct {
	Base
	ExecutionID string
	Content     string
	Parts       []events.Part
	Metadata    json.RawMessage
	Files       []File // that the turn is to see
	Environment map[string]events.Variable
	Held        uint32 // the last file change that a snapshot holds, as run says
	ActiveEnded bool   // run says that the active execution, if any, has ended
}

// Start makes a session and accepts its first query, in one commit.
type Start struct {
	Base
	Create events.SessionCreated
	Post   Post // its Base is not used
}

// Fork makes a session that goes on from an event of another one. Its first sandbox gets the file changes that the
// parent had up to there and that the snapshot of the files does not hold.
type Fork struct {
	Base
	Create  events.SessionCreated
	Forked  events.SessionForked
	Changes []events.Payload // file_put and file_removed of the parent; they are numbered anew
}

// RequestInterrupt asks the running turn to stop. Without one it changes nothing.
type RequestInterrupt struct {
	Base
	ActiveEnded bool
}

// RequestCancel ends an execution that waits, or asks one that runs to stop. After the end it changes nothing.
type RequestCancel struct {
	Base
	ExecutionID string
	ActiveEnded bool
}

// RequestPause asks a running execution to stand still.
type RequestPause struct {
	Base
	ExecutionID string
	ActiveEnded bool
}

// RequestResume asks a paused execution to go on. If it is not paused it changes nothing.
type RequestResume struct {
	Base
	ExecutionID string
	ActiveEnded bool
}

// RequestTerminate asks that an execution end at once with the sandbox; without
// an execution, that the sandbox end with whatever runs in it.
type RequestTerminate struct {
	Base
	ExecutionID string // "" for the environment
	ActiveEnded bool
	HasSandbox  bool
}

// RequestSync asks for a snapshot of the workspace.
type RequestSync struct{ Base }

// PutFile puts a file or an archive into the workspace.
type PutFile struct {
	Base
	File
	Held uint32 // the last file change that a snapshot holds, as run says
}

// RemoveFile removes a file or a folder from the workspace.
type RemoveFile struct {
	Base
	Path string
	Held uint32
}

// Delete ends the session for good.
type Delete struct {
	Base
	ActiveEnded bool
}

// Advance dispatches the next query when the active one has ended.
type Advance struct {
	Base
	ActiveEnded bool
}

// Expire acts on a deadline that has passed; which one follows from Now and the state.
type Expire struct {
	Base
	Run RunView
}

// RunView is what a session's deadlines need to know of its runs.
type RunView struct {
	ActiveEnded   bool
	ActiveClaimed bool
	Paused        bool          // the active execution stands still
	PausedFor     time.Duration // how long it did before
	EndedAt       time.Time     // of the last execution that ended; zero for none
	HasSandbox    bool
}

// Decide gives the events that a command makes true, or why it is refused. No
// events and no error means that nothing changes.
func Decide(s State, c Command) ([]events.Event, error) {
	if _, done := s.Did(c.meta().CommandID); done {
		return nil, nil
	}
	m := events.NewMint(c.meta())
	switch c := c.(type) {
	case Create:
		if _, err := create(s, c.SessionCreated, m); err != nil {
			return nil, err
		}
		if err := putAll(State{}, c.Files, 0, m); err != nil {
			return nil, err
		}
		return m.Events(), nil
	case Start:
		if _, err := create(s, c.Create, m); err != nil {
			return nil, err
		}
		return post(State{Status: Open}, c.Post, m)
	case Fork:
		if _, err := create(s, c.Create, m); err != nil {
			return nil, err
		}
		fork(c, m)
		return m.Events(), nil
	}
	if s.Status == None || s.Status == Deleted {
		return nil, &Error{Code: CodeNotFound, Field: "sessionId", Detail: "there is no such session"}
	}
	switch c := c.(type) {
	case UpdateOptions:
		m.Add("", events.SessionOptionsUpdated{Options: c.Options, Metadata: c.Metadata})
	case Post:
		return post(s, c, m)
	case RequestInterrupt:
		if s.running(c.ActiveEnded) && s.Control.N == 0 {
			m.Add(s.Active.ExecutionID, events.InterruptRequested{Control: s.Controls + 1})
		}
	case RequestCancel:
		cancel(s, c, m)
	case RequestPause, RequestResume, RequestTerminate, RequestSync, PutFile, RemoveFile:
		return environment(s, c, m)
	case Delete:
		s.end(m, "session_deleted", c.ActiveEnded)
		m.Add("", events.SessionDeleted{})
	case Advance:
		if s.Status == Open && !s.running(c.ActiveEnded) && len(s.Queue) > 0 {
			m.Add(s.Queue[0].ExecutionID, events.ExecutionDispatched{})
		}
	case Expire:
		expire(s, c, m)
	}
	return m.Events(), nil
}

func create(s State, data events.SessionCreated, m *events.Mint) ([]events.Event, error) {
	if s.Status != None {
		return nil, &Error{CodeExists, "sessionId", "a session with this id exists already"}
	}
	m.Add("", data)
	return m.Events(), nil
}

func fork(c Fork, m *events.Mint) {
	m.Add("", c.Forked)
	for i, change := range c.Changes {
		n := uint32(i + 1) //nolint:gosec // at most MaxPending wait in the parent
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

func post(s State, c Post, m *events.Mint) ([]events.Event, error) {
	if s.Status == Closed {
		return nil, &Error{CodeClosed, "sessionId", "the session is closed and takes no more messages; create another"}
	}
	if len(s.Queue) >= MaxQueue {
		return nil, &Error{CodeFull, "", fmt.Sprintf("%d messages of this session wait already; try again when some have been answered", MaxQueue)}
	}
	if s.queued(c.ExecutionID) >= 0 || s.Active.ExecutionID == c.ExecutionID {
		return nil, nil
	}
	if err := putAll(s, c.Files, c.Held, m); err != nil {
		return nil, err
	}
	m.Add(c.ExecutionID, events.MessageAccepted{
		BlockID: events.Derive(events.KindBlock, c.ExecutionID, "message"),
		Content: c.Content, Parts: c.Parts, Metadata: c.Metadata, Environment: c.Environment,
	})
	running := s.running(c.ActiveEnded)
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

func cancel(s State, c RequestCancel, m *events.Mint) {
	if s.queued(c.ExecutionID) >= 0 {
		m.Add(c.ExecutionID, events.ExecutionWithdrawn{Reason: "cancelled"})
		return
	}
	if s.Active.ExecutionID == c.ExecutionID && s.running(c.ActiveEnded) && s.Control.Kind.strength() < Cancel.strength() {
		m.Add(c.ExecutionID, events.CancelRequested{Control: s.Controls + 1, Reason: "cancelled"})
	}
}

// end withdraws what waits and cancels what runs.
func (s State) end(m *events.Mint, reason string, activeEnded bool) {
	for _, r := range s.Queue {
		m.Add(r.ExecutionID, events.ExecutionWithdrawn{Reason: reason})
	}
	if s.running(activeEnded) && s.Control.Kind.strength() < Cancel.strength() {
		m.Add(s.Active.ExecutionID, events.CancelRequested{Control: s.Controls + 1, Reason: reason})
	}
}

// expire acts on the session limit first, whatever else is due: it ends the rest as well.
func expire(s State, c Expire, m *events.Mint) {
	if at, ok := s.sessionDeadline(); ok && !c.Now.Before(at) {
		s.end(m, "session_closed", c.Run.ActiveEnded)
		m.Add("", events.SessionClosed{Reason: "limit"})
		return
	}
	if at, ok := s.idleDeadline(c.Run); ok && !c.Now.Before(at) {
		m.Add("", events.SessionIdle{IdleMs: uint32(c.Now.Sub(s.touched(c.Run)).Milliseconds())})
	}
}

// running tells whether an execution was dispatched and has not ended.
func (s State) running(activeEnded bool) bool { return s.Active.ExecutionID != "" && !activeEnded }
