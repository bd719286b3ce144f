package run

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// Errors that a writer may test for.
var (
	// ErrFenced is returned to a writer with an outdated epoch. The writer must stop and must not retry.
	ErrFenced = errors.New("another holder has raised the epoch")
	// ErrRetired is returned for a command on a deleted session whose run subject was retired.
	ErrRetired = errors.New("the session was deleted and its runs are retired")
	// ErrSessionBusy is returned if a session cannot be retired or erased: an execution runs, a sandbox exists, or the
	// session is not retired yet.
	ErrSessionBusy = errors.New("the session is still in use")
	// ErrEnded is returned for a command on an execution that has ended.
	ErrEnded = errors.New("the execution has ended")
)

// Command is a command on a session's runs. The set is sealed.
type Command interface{ command() }

// ClaimExecution is the command that makes an executor the holder, under the next epoch. If the execution was claimed
// too often without progress (State.HasTooManyClaims), the holder must stop the agent and end the execution. If several
// such claims failed too, the execution fails instead of being claimed.
type ClaimExecution struct {
	events.CommandMeta
	ExecutionID string
	Turn        uint32 // number of its dispatch
	Executor    string
}

// RecordEvents is the command that stores what the holder observed: its own events and the events of the runner's
// journal. With the current epoch the writer is the holder. With the next epoch the writer takes over, which is allowed
// only if no execution runs.
type RecordEvents struct {
	Epoch  uint64
	Events []events.Event
}

// EndExecution is the command that ends an execution with its one terminal event. Blocks that are still open are
// completed before that event with status error, with their content from Blocks where it is known.
type EndExecution struct {
	events.CommandMeta
	Epoch       uint64
	ExecutionID string
	N           uint64         // number of the journal entry that reports the end; 0 if the holder itself decided it
	Outcome     events.Payload // ExecutionCompleted, ExecutionFailed or ExecutionCancelled; Decide fills in the duration
	Blocks      map[string]events.Block
	Before      []events.Event // events before the end; separate commits may store them
	With        []events.Event // events that are stored atomically with the end, in the same commit
}

// AbandonExecution is the command that ends, under the next epoch, an execution that no executor claimed or whose
// holder is lost. The session service sends it.
type AbandonExecution struct {
	events.CommandMeta
	ExecutionID string
	Turn        uint32 // number of its dispatch
	By          string // id of the session service's replica or of the executor that ends the execution
	Outcome     events.Payload
	Blocks      map[string]events.Block // the known content of open blocks
}

// RetireRuns is the command that ends the run subject of a deleted session. The janitor sends it.
type RetireRuns struct {
	events.CommandMeta
	Usage []events.DayUsage
	Life  uint32 // commits of the life subject before session_deleted
	Runs  uint32 // commits of the run subject so far
	Audit []events.AuditEntry

	Stored uint64 // bytes that the session's events and objects take
}

// RecordErasure is the command that records that the content of a deleted session was removed. The session's runs must
// be retired (RetireRuns). The janitor sends it.
type RecordErasure struct {
	events.CommandMeta
	Messages, Objects uint32
}

func (RetireRuns) command()       {}
func (RecordErasure) command()    {}
func (ClaimExecution) command()   {}
func (RecordEvents) command()     {}
func (EndExecution) command()     {}
func (AbandonExecution) command() {}

// Decision is the result of a command: the events to append, and their epoch.
type Decision struct {
	Epoch  uint64
	Events []events.Event
	// Whole is the number of last events that one commit must store together. Separate commits may store the events
	// before them, in order: the state is valid after each.
	Whole int
}

// Split divides a decision into decisions that each fit into a commit, in order. If a writer dies between two of
// them, the execution has not ended, and the next holder ends it. The events of the result are encoded.
func (d Decision) Split() ([]Decision, error) {
	sizes, total := make([]int, len(d.Events)), 0
	d.Events = slices.Clone(d.Events)
	for i, e := range d.Events {
		e, _, err := e.Encoded()
		if err != nil {
			return nil, err
		}
		n, err := events.StoredSize(e)
		if err != nil {
			return nil, err
		}
		d.Events[i], sizes[i], total = e, n+1, total+n+1
	}
	var out []Decision
	whole := len(d.Events) - d.Whole
	for start := 0; start < len(d.Events); {
		if total <= events.MaxCommitEventBytes || start == whole {
			return append(out, Decision{Epoch: d.Epoch, Events: d.Events[start:], Whole: d.Whole}), nil
		}
		end, size := start, 0
		for end < whole && (end == start || size+sizes[end] <= events.MaxCommitEventBytes) {
			size += sizes[end]
			end++
		}
		out = append(out, Decision{Epoch: d.Epoch, Events: d.Events[start:end]})
		start, total = end, total-size
	}
	return out, nil
}

// Decide returns the events that a command causes, or an error if it is refused. A retired run subject refuses
// every command except RecordErasure.
func Decide(s State, c Command) (Decision, error) {
	if _, erase := c.(RecordErasure); s.Retired && !erase {
		return Decision{}, ErrRetired
	}
	switch c := c.(type) {
	case ClaimExecution:
		return decideClaim(s, c)
	case RecordEvents:
		return decideRecord(s, c)
	case EndExecution:
		if c.Epoch != s.Epoch {
			return Decision{}, ErrFenced
		}
		if s.Execution != c.ExecutionID || s.Phase.IsTerminal() {
			return Decision{}, ErrEnded
		}
		return s.decideEnd(s.Epoch, c), nil
	case AbandonExecution:
		return decideAbandon(s, c)
	case RetireRuns:
		if !s.IsIdle() || s.Sandbox.ID != "" {
			return Decision{}, ErrSessionBusy
		}
		m := events.NewEventList(c.CommandMeta)
		m.Add("", events.RunRetired{Usage: c.Usage, Life: c.Life, Runs: c.Runs, Audit: c.Audit, Stored: c.Stored})
		return Decision{Epoch: s.Epoch + 1, Events: m.Events()}, nil
	case RecordErasure:
		if !s.Retired {
			return Decision{}, ErrSessionBusy
		}
		m := events.NewEventList(c.CommandMeta)
		m.Add("", events.ContentRemoved{Messages: c.Messages, Objects: c.Objects})
		return Decision{Epoch: s.Epoch, Events: m.Events()}, nil
	}
	return Decision{}, fmt.Errorf("run: unknown command %T", c)
}

// decideAbandon decides an AbandonExecution. It adds a claim if the execution has none, so that a claim precedes the
// end of every execution.
func decideAbandon(s State, c AbandonExecution) (Decision, error) {
	if s.isTurnOver(c.ExecutionID, c.Turn) {
		return Decision{}, ErrEnded
	}
	epoch := s.Epoch + 1
	if s.Execution == c.ExecutionID {
		return s.decideEnd(epoch, EndExecution{CommandMeta: c.CommandMeta, ExecutionID: c.ExecutionID, Outcome: c.Outcome, Blocks: c.Blocks}), nil
	}
	m := events.NewEventList(events.CommandMeta{CommandID: c.CommandID + "/claim", Now: c.Now})
	m.Add(c.ExecutionID, events.ExecutionClaimed{Epoch: epoch, Executor: c.By, Turn: c.Turn})
	return s.decideEnd(epoch, EndExecution{CommandMeta: c.CommandMeta, ExecutionID: c.ExecutionID, Outcome: c.Outcome, With: m.Events()}), nil
}

// isTurnOver reports whether an execution has ended or was followed by a later one. turn is the number of its turn.
func (s *State) isTurnOver(execution string, turn uint32) bool {
	return s.IsDone(session.QueryRef{ExecutionID: execution, Turn: turn})
}

// decideClaim decides a ClaimExecution.
func decideClaim(s State, c ClaimExecution) (Decision, error) {
	if s.isTurnOver(c.ExecutionID, c.Turn) {
		return Decision{}, ErrEnded
	}
	epoch := s.Epoch + 1
	if s.Execution == c.ExecutionID && s.Claims >= MaxClaimsWithoutProgress+maxStopClaims {
		outcome := ClaimsExhaustedFailure()
		if s.Sandbox.Journal != "" {
			outcome = outcome.WithStopFailure(errors.New("the executors that tried to stop it died"))
		}
		return s.decideEnd(epoch, EndExecution{CommandMeta: c.CommandMeta, ExecutionID: c.ExecutionID, Outcome: outcome}), nil
	}
	m := events.NewEventList(c.CommandMeta)
	m.Add(c.ExecutionID, events.ExecutionClaimed{Epoch: epoch, Executor: c.Executor, Turn: c.Turn})
	return Decision{Epoch: epoch, Events: m.Events()}, nil
}

// ClaimsExhaustedFailure returns the terminal event of an execution that too many executors claimed without progress.
func ClaimsExhaustedFailure() events.ExecutionFailed {
	return events.ExecutionFailed{
		Code:    "CLAIMS_EXHAUSTED",
		Message: fmt.Sprintf("%d executors in a row took the execution and made no progress", MaxClaimsWithoutProgress),
	}
}

// decideRecord decides a RecordEvents. It drops journal events about an execution that has ended, and about blocks and
// approval requests that are not open. It keeps all other events unchanged.
func decideRecord(s State, c RecordEvents) (Decision, error) {
	if c.Epoch != s.Epoch && !(c.Epoch == s.Epoch+1 && s.IsIdle()) {
		return Decision{}, ErrFenced
	}
	open, approvals := map[string]bool{}, map[string]bool{}
	for _, b := range s.Open {
		open[b.ID] = true
	}
	for _, a := range s.Approvals {
		approvals[a.ID] = true
	}
	d := Decision{Epoch: c.Epoch}
	for _, e := range c.Events {
		if events.IsTerminal(e.Type()) {
			return Decision{}, fmt.Errorf("record events: %s must be the outcome of EndExecution", e.Type())
		}
		if e.ExecutionID != "" && (e.ExecutionID != s.Execution || s.Phase.IsTerminal()) {
			continue
		}
		switch p := e.Data.(type) {
		case events.EgressDenied:
			if !s.isNewJournalEntry(JournalPosition{p.Journal, p.Line}) {
				continue
			}
			s.Egress = JournalPosition{p.Journal, p.Line}
		case events.ModelCalled:
			if !s.isNewJournalEntry(JournalPosition{p.Journal, p.Line}) {
				continue
			}
			s.Egress = JournalPosition{p.Journal, p.Line}
		case events.ApprovalRequested:
			if approvals[p.ApprovalID] || len(approvals) >= events.MaxOpenApprovals {
				continue
			}
			approvals[p.ApprovalID] = true
		case events.ApprovalResolved:
			if !approvals[p.ApprovalID] {
				continue
			}
			delete(approvals, p.ApprovalID)
		case events.ApprovalRetracted:
			if !approvals[p.ApprovalID] {
				continue
			}
			delete(approvals, p.ApprovalID)
		case events.BlockStart:
			if open[p.Block.ID] {
				continue
			}
			open[p.Block.ID] = p.Block.Status == events.StatusPending
		case events.BlockUpdate:
			if !open[p.BlockID] {
				continue
			}
		case events.BlockComplete:
			if !open[p.Block.ID] {
				continue
			}
			open[p.Block.ID] = false
		}
		d.Events = append(d.Events, e)
	}
	return d, nil
}

// isNewJournalEntry reports whether an entry of the egress proxy's journal is not in the log yet.
func (s *State) isNewJournalEntry(l JournalPosition) bool {
	return l.Journal != s.Egress.Journal || l.N > s.Egress.N
}

// decideEnd decides an EndExecution: it completes the open blocks, retracts the open approval requests, and appends the
// terminal event. The id of a completion is derived from the block and not from its index: a holder that continues
// after some completions were stored writes the others under the same ids.
func (s State) decideEnd(epoch uint64, c EndExecution) Decision {
	d := Decision{Epoch: epoch, Events: slices.Clone(c.Before), Whole: len(c.With) + 1}
	after := Fold(Fold(s, s.Epoch, c.Before), s.Epoch, c.With)
	if s = Fold(s, s.Epoch, c.Before); s.Execution == c.ExecutionID {
		for _, open := range s.Open {
			block, ok := c.Blocks[open.ID]
			if !ok {
				block = events.Block{ID: open.ID, Kind: events.KindError, Time: c.Now, ExecutionID: c.ExecutionID, ConversationID: events.MainConversation}
			}
			block.Status = events.StatusError
			d.Events = append(d.Events, events.Event{
				ID: events.DeriveID(events.KindEvent, c.CommandID, "block", open.ID), Time: c.Now,
				ExecutionID: c.ExecutionID, Source: events.FromServer, Data: events.BlockComplete{Block: block},
			})
		}
	}
	if s.Execution == c.ExecutionID {
		d.Events = append(d.Events, s.retractApprovals(c.CommandMeta, "execution_ended")...)
	}
	d.Events = append(d.Events, c.With...)
	m := events.NewEventList(c.CommandMeta)
	m.Add(c.ExecutionID, after.withDuration(c.ExecutionID, c.Now, c.Outcome))
	last := m.Events()[0]
	last.N = c.N
	d.Events = append(d.Events, last)
	return d
}

// retractApprovals returns an approval_retracted event for each open approval request. The ids of the events are derived from
// the requests, as those of the completed blocks in decideEnd are from the blocks.
func (s State) retractApprovals(m events.CommandMeta, reason string) []events.Event {
	var list []events.Event
	for _, a := range s.Approvals {
		list = append(list, events.Event{
			ID: events.DeriveID(events.KindEvent, m.CommandID, "approval", a.ID), Time: m.Now,
			ExecutionID: s.Execution, Source: events.FromServer, Data: events.ApprovalRetracted{ApprovalID: a.ID, Reason: reason},
		})
	}
	return list
}

// withDuration returns a terminal event with the duration of the execution, and with its usage if the event has none.
func (s State) withDuration(execution string, now time.Time, outcome events.Payload) events.Payload {
	var took uint32
	var usage events.Usage
	if s.Execution == execution {
		took = uint32(max(0, now.Sub(s.ClaimedAt).Milliseconds()))
		usage = s.Usage
	}
	switch o := outcome.(type) {
	case events.ExecutionCompleted:
		o.DurationMs = took
		if o.Usage == (events.Usage{}) {
			o.Usage = usage
		}
		return o
	case events.ExecutionFailed:
		o.DurationMs = took
		if o.Usage == (events.Usage{}) {
			o.Usage = usage
		}
		return o
	case events.ExecutionCancelled:
		o.DurationMs = took
		if o.Usage == (events.Usage{}) {
			o.Usage = usage
		}
		return o
	}
	return outcome
}
