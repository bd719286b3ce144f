// Package fork computes where a session can be forked: up to which event the fork can share its history, its
// agent's conversation and its files, and from which snapshots. It is pure.
//
// A conversation can be cut at two kinds of events.
//   - Between turns, when no execution runs. The agent's records come from the first snapshot after the end of the
//     last execution, and are used completely. This works for every architecture, and for logs of builds without
//     anchors.
//   - After a block of conversation main with an anchor (events.Block.Anchor), if every earlier tool call of main has
//     its result, and every earlier approval request of main has ended. The records come from a snapshot that contains the block: the first one after the block's
//     execution ended or, while the execution runs, the first one that follows a later anchor, since agents write
//     their records one line late.
package fork

import (
	"cmp"
	"errors"
	"fmt"
	"maps"
	"slices"

	"github.com/spoolhq/spool/pkg/events"
)

// Errors of Finder.ForkPoint that callers may test for.
var (
	// ErrNoSession is returned for a session that has no events or is deleted.
	ErrNoSession = errors.New("there is no such session")
	// ErrSeqZero is returned for a fork at seq 0: seq starts at 1.
	ErrSeqZero = errors.New("events are numbered from 1")
)

// SeqAheadError is returned for a fork at a seq that the session has not reached. LastSeq is the seq of its last event.
type SeqAheadError struct{ LastSeq uint32 }

func (e *SeqAheadError) Error() string {
	return fmt.Sprintf("the session's last event has seq %d", e.LastSeq)
}

// LastEvent is the requested seq of a fork after the last event of the session.
const LastEvent = ^uint32(0)

// ForkPoint describes an event at which a session can be forked, and the options, files and conversation with which the
// fork then begins.
type ForkPoint struct {
	Created events.SessionCreated // with options and metadata as of Forked.Effective
	Forked  events.SessionForked  // without Parent
	Changes []events.Payload      // file_put and file_removed up to Effective that the snapshot of the files does not hold
	// Waits reports whether the session could be forked at a later event, up to the requested one, once the snapshot
	// after the end of an execution is stored.
	Waits bool
}

// snapshot is a snapshot of the session's workspace, as an event workspace_synced describes it.
type snapshot struct {
	id      string
	session string // session that owns the snapshot; "" for this session
	seq     uint32 // seq of the event; 0 if it belongs to another session
	applied uint32 // number of the last file change that the snapshot contains
}

// conversation is the state that an agent resumes from. The zero value is a new conversation.
type conversation struct {
	records snapshot
	agent   string // the agent's own session id
	anchor  string
	lost    bool // the agent cannot continue it
}

// fileChange is a change of a workspace file: an event file_put or file_removed.
type fileChange struct {
	n    uint32
	data events.Payload
}

// candidate is an event at which the session can be forked if the snapshots that the fork needs exist.
type candidate struct {
	seq          uint32
	execution    string // execution of the block with the anchor; "" between turns
	created      events.SessionCreated
	files        snapshot
	changes      []fileChange
	changed      uint32 // number of the last file change
	conversation conversation
}

// Finder reads a session's events in order and finds where the session can be forked. Its memory does not grow with
// the length of the session.
type Finder struct {
	requested uint32

	// The state of the session after the last event.
	lastSeq      uint32
	deleted      bool
	created      events.SessionCreated
	files        snapshot
	changes      []fileChange // after files.applied
	changed      uint32
	waiting      map[string]struct{} // accepted executions that have not ended
	active       string              // the claimed execution that has not ended; "" for none
	last         string              // the execution that was claimed last
	calls        map[string]struct{} // tool calls of conversation main without a result, and its open approval requests
	inherited    conversation        // set if the session itself is a fork
	agent        string              // the agent's own session id; "" until this session has one
	volatile     bool                // the agent cannot continue that session in another process
	restSnapshot snapshot            // the first snapshot after the end of the last execution

	best *candidate // the latest point whose snapshots are known

	// Points that wait for a snapshot.
	restPoint   *candidate // between turns
	anchorPoint *candidate // the last block with an anchor up to the requested seq
	olderAnchor *candidate // the block before, once a later anchor was logged
}

// NewFinder returns a Finder for a fork at seq requested, or after the last event if requested is LastEvent.
func NewFinder(requested uint32) *Finder {
	return &Finder{requested: requested, waiting: map[string]struct{}{}, calls: map[string]struct{}{}}
}

// Clone returns a Finder for a fork at another seq that continues from the last event of w. Both seqs must be at or
// after that event, because the state up to there does not depend on the requested seq. The two Finders share no
// mutable data.
func (w *Finder) Clone(requested uint32) *Finder {
	c := *w
	c.requested = requested
	c.changes = slices.Clip(w.changes)
	c.waiting, c.calls = maps.Clone(w.waiting), maps.Clone(w.calls)
	copies := map[*candidate]*candidate{nil: nil} // two fields may refer to the same point
	for _, p := range []**candidate{&c.best, &c.restPoint, &c.anchorPoint, &c.olderAnchor} {
		if copies[*p] == nil && *p != nil {
			one := **p
			copies[*p] = &one
		}
		*p = copies[*p]
	}
	return &c
}

// Add processes the session's next event. The first event has seq 1.
func (w *Finder) Add(seq uint32, e events.Event) {
	w.lastSeq = seq
	ends := w.addExecutionEvent(e)
	switch d := e.Data.(type) {
	case events.SessionCreated:
		w.created = d
	case events.SessionForked:
		w.files = snapshot{id: d.Snapshot, session: d.FilesOwner()}
		w.inherited = conversation{records: snapshot{id: d.Records, session: d.RecordsOwner()}, agent: d.AgentSessionID, anchor: d.Anchor}
		if w.best != nil { // session_created is in the same commit as this event
			w.best.files, w.best.conversation = w.files, w.inherited
		}
	case events.SessionOptionsUpdated:
		w.created.Options = d.Options
		if len(d.Metadata) > 0 {
			w.created.Metadata = d.Metadata
		}
	case events.SessionDeleted:
		w.deleted = true
	case events.FilePut:
		w.addChange(d.N, d)
	case events.FileRemoved:
		w.addChange(d.N, d)
	case events.TranscriptWritten:
		w.setAgentSession(e.ExecutionID, d)
	case events.WorkspaceSynced:
		w.addSnapshot(snapshot{id: d.Snapshot, seq: seq, applied: d.Applied})
	case events.ApprovalRequested:
		if e.ConversationID == events.MainConversation {
			w.calls[d.ApprovalID] = struct{}{}
		}
	case events.ApprovalResolved:
		delete(w.calls, d.ApprovalID)
	case events.ApprovalRetracted:
		delete(w.calls, d.ApprovalID)
	case events.BlockStart:
		if d.Block.Status != events.StatusPending {
			w.addBlock(seq, e, d.Block)
		} else if e.ConversationID == events.MainConversation && d.Block.Kind == events.KindToolUse {
			w.calls[d.Block.ToolUseID] = struct{}{}
		}
	case events.BlockComplete:
		w.addBlock(seq, e, d.Block)
	}
	if seq <= w.requested && w.active == "" && (ends || len(w.waiting) == 0) {
		w.addIdleCandidate(seq)
	}
}

// addExecutionEvent updates the executions of the session. It reports whether the event ends the active execution.
func (w *Finder) addExecutionEvent(e events.Event) (ends bool) {
	switch e.Data.(type) {
	case events.MessageAccepted:
		w.waiting[e.ExecutionID] = struct{}{}
	case events.ExecutionClaimed:
		if e.ExecutionID != w.last {
			w.active, w.last, w.restSnapshot, w.restPoint = e.ExecutionID, e.ExecutionID, snapshot{}, nil
		}
	}
	if !events.IsTerminal(e.Type()) {
		return false
	}
	delete(w.waiting, e.ExecutionID)
	if w.active == "" || w.active != e.ExecutionID {
		return false
	}
	w.active = ""
	clear(w.calls)
	return true
}

// addChange records the file change with number n.
func (w *Finder) addChange(n uint32, data events.Payload) {
	w.changes, w.changed = append(w.changes, fileChange{n, data}), n
}

// changesAfter returns the file changes that a snapshot does not contain. applied is the number of the last change that
// the snapshot contains.
func changesAfter(list []fileChange, applied uint32) []fileChange {
	i := slices.IndexFunc(list, func(c fileChange) bool { return c.n > applied })
	if i < 0 {
		return nil
	}
	return list[i:]
}

// setAgentSession records the agent's own session id that an execution reported, also in the candidates of that
// execution.
func (w *Finder) setAgentSession(execution string, d events.TranscriptWritten) {
	agent := d.AgentSessionID
	if agent == "" {
		return
	}
	w.agent, w.volatile = agent, d.Volatile
	for _, p := range []*candidate{w.anchorPoint, w.olderAnchor} {
		if p != nil && p.execution == execution {
			p.conversation.agent = agent
		}
	}
}

// addBlock processes a complete block of the main conversation, after which the session may be forked.
func (w *Finder) addBlock(seq uint32, e events.Event, b events.Block) {
	if e.ConversationID != events.MainConversation {
		return
	}
	switch b.Kind {
	case events.KindToolUse:
		w.calls[b.ToolUseID] = struct{}{}
	case events.KindToolResult:
		delete(w.calls, b.ToolUseID)
	}
	if b.Anchor == "" || e.ExecutionID != w.active {
		return
	}
	w.olderAnchor = cmp.Or(w.anchorPoint, w.olderAnchor)
	if seq <= w.requested && len(w.calls) == 0 {
		w.anchorPoint = w.newCandidate(seq)
		w.anchorPoint.execution, w.anchorPoint.conversation = e.ExecutionID, conversation{agent: w.agent, anchor: b.Anchor}
	}
}

// newCandidate returns a candidate at seq with the current state of the session.
func (w *Finder) newCandidate(seq uint32) *candidate {
	return &candidate{seq: seq, created: w.created, files: w.files, changes: w.changes, changed: w.changed}
}

// addIdleCandidate adds the candidate after an event after which no execution runs.
func (w *Finder) addIdleCandidate(seq uint32) {
	p := w.newCandidate(seq)
	switch {
	case w.agent == "":
		p.conversation = w.inherited
	case w.restSnapshot.id != "":
		p.conversation = conversation{records: w.restSnapshot, agent: w.agent, lost: w.volatile}
	default:
		p.conversation.agent, p.conversation.lost = w.agent, w.volatile
		w.restPoint = p
		return
	}
	w.best = p
}

// addSnapshot processes a snapshot of the workspace, and completes the candidates that wait for one.
func (w *Finder) addSnapshot(s snapshot) {
	w.files, w.changes = s, changesAfter(w.changes, s.applied)
	if w.active == "" && w.last != "" && w.restSnapshot.id == "" {
		w.restSnapshot = s
	}
	if p := w.restPoint; p != nil {
		p.conversation.records = s
		// No execution ran since the point, so the snapshot has the files of the point unless a later change was
		// applied.
		if s.applied <= p.changed {
			p.files, p.changes = s, changesAfter(p.changes, s.applied)
		}
		w.restPoint = nil
		w.setBest(p)
	}
	for _, p := range []*candidate{w.anchorPoint, w.olderAnchor} {
		if p == nil || p.conversation.agent == "" || p != w.olderAnchor && p.execution == w.active {
			continue
		}
		p.conversation.records = s
		w.setBest(p)
		if w.olderAnchor = nil; p == w.anchorPoint {
			w.anchorPoint = nil
		}
		return
	}
}

// setBest makes p the best candidate if p is later than the present one.
func (w *Finder) setBest(p *candidate) {
	if w.best == nil || p.seq > w.best.seq {
		w.best = p
	}
}

// IsSettled reports whether later events cannot change the result of ForkPoint, so that the caller can stop reading.
func (w *Finder) IsSettled() bool {
	return w.best != nil && w.lastSeq >= max(w.requested, 2) && !w.best.isBefore(w.restPoint) && !w.best.isBefore(w.anchorPoint)
}

// isBefore reports whether o exists and is later than p.
func (p *candidate) isBefore(o *candidate) bool { return o != nil && p.seq < o.seq }

// ForkPoint returns where the session can be forked. Its error is ErrNoSession, ErrSeqZero or an *SeqAheadError.
func (w *Finder) ForkPoint() (ForkPoint, error) {
	requested := w.requested
	if requested == LastEvent {
		requested = w.lastSeq
	}
	switch {
	case w.deleted || w.lastSeq == 0:
		return ForkPoint{}, ErrNoSession
	case requested == 0:
		return ForkPoint{}, ErrSeqZero
	case requested > w.lastSeq:
		return ForkPoint{}, &SeqAheadError{w.lastSeq}
	case w.best == nil:
		return ForkPoint{}, fmt.Errorf("%w: its first event is not session_created", ErrNoSession)
	}
	p := w.best
	c := ForkPoint{
		Created: p.created,
		Forked: events.SessionForked{
			Asked: requested, Effective: p.seq, Snapshot: p.files.id, SnapshotSeq: p.files.seq, SnapshotSession: p.files.session,
			Records: p.conversation.records.id, RecordsSession: p.conversation.records.session, AgentSessionID: p.conversation.agent, Anchor: p.conversation.anchor,
		},
		Waits: p.isBefore(w.restPoint),
	}
	switch {
	case p.conversation.lost:
		c.Forked.Records, c.Forked.RecordsSession, c.Forked.AgentSessionID, c.Forked.Anchor = "", "", "", ""
		c.Forked.Conversation = events.ForkConversationLost
	case p.conversation.agent == "" && p.created.Transcript == nil:
		c.Forked.Conversation = events.ForkConversationNew
	default:
		c.Forked.Conversation = events.ForkConversationContinued
	}
	if p.conversation.agent != "" { // the records contain the initial conversation
		c.Created.Transcript = nil
	}
	for _, change := range p.changes {
		c.Changes = append(c.Changes, change.data)
	}
	switch {
	case p.seq == requested:
	case p.execution != "":
		c.Forked.Reason = "the agent's conversation cannot be cut at the requested event; the fork starts after the last block before it at which the conversation can be cut"
	default:
		c.Forked.Reason = "a message had no complete answer at the requested event, and the agent's conversation cannot be cut within the answer; the fork starts before that message"
	}
	return c, nil
}
