package run

import (
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// Errors that a writer may branch on.
var (
	// ErrFenced is a writer whose epoch is not the present one: stop, never retry.
	ErrFenced = errors.New("another holder has raised the epoch")
	// ErrRetired is a write about a deleted session whose runs were retired.
	ErrRetired = errors.New("the session was deleted and its runs are retired")
	// ErrBusy is a session that cannot be retired or erased: something runs, a sandbox is left, or it is not retired yet.
	ErrBusy = errors.New("the session is still in use")
	// ErrOver is a write about an execution that has ended.
	ErrOver = errors.New("the execution has ended")
)

// Command is what may be asked of a session's runs. The set is sealed.
type Command interface{ command() }

// Claim makes an executor the holder under the next epoch. Of an execution that was claimed
// too often without progress (State.Exhausted) the holder stops the agent, and ends it. If
// several such claims came to nothing too, the execution fails in place of the claim.
type Claim struct {
	events.Meta
	ExecutionID string
	Turn        uint32 // of its dispatch
	Executor    string
}

// Record writes what the holder saw: its own facts and the journal's. With the
// present epoch it is the holder's; with the next one it takes over, which is
// allowed only when nothing runs.
type Record struct {
	Epoch  uint64
	Events []events.Event
}

// End writes the one terminal event. Blocks that are still open are completed
// before it: with the content in Blocks where it is known, with status error.
type End struct {
	events.Meta
	Epoch       uint64
	ExecutionID string
	N           uint64         // number of the journal line that says so; 0 for the holder's own word
	Outcome     events.Payload // ExecutionCompleted, ExecutionFailed or ExecutionCancelled; durations are filled in
	Blocks      map[string]events.Block
	Before      []events.Event // what happened before the end; a commit of their own may store them
	With        []events.Event // facts that become true with the end: the terminal event's commit stores them
}

// Abandon is the session service's: it ends, with the next epoch, an execution
// that nobody claimed, or whose holder is lost.
type Abandon struct {
	events.Meta
	ExecutionID string
	Turn        uint32 // of its dispatch
	By          string // the copy of the session service, or the executor, that ends it
	Outcome     events.Payload
	Blocks      map[string]events.Block // what is known of the open ones
}

// Retire is the janitor's: it ends the run subject of a deleted session.
type Retire struct {
	events.Meta
	Usage []events.DayUsage
	Life  uint32 // commits of the life subject before session_deleted
	Runs  uint32 // commits of the run subject so far
	Audit []events.Audited

	Stored uint64 // bytes that the session's events and objects take
}

// Erase is the janitor's: it says that the content of a retired session was removed.
type Erase struct {
	events.Meta
	Messages, Objects uint32
}

func (Retire) command()  {}
func (Erase) command()   {}
func (Claim) command()   {}
func (Record) command()  {}
func (End) command()     {}
func (Abandon) command() {}

// Decision is what a command makes true, and under which epoch.
type Decision struct {
	Epoch  uint64
	Events []events.Event
	// Whole is how many of the last events one commit has to store. The events before them
	// may be stored by commits of their own, in order: the state is valid after each.
	Whole int
}

// Split cuts a decision into decisions of which each fits into a commit, in order. A
// writer that dies between two of them leaves an execution that has not ended, which the
// next holder ends.
func (d Decision) Split() ([]Decision, error) {
	sizes, total := make([]int, len(d.Events)), 0
	for i, e := range d.Events {
		n, err := events.StoredSize(e)
		if err != nil {
			return nil, err
		}
		sizes[i], total = n+1, total+n+1
	}
	var out []Decision
	whole := len(d.Events) - d.Whole
	for start := 0; start < len(d.Events); {
		if total <= events.MaxCommitEvents || start == whole {
			return append(out, Decision{Epoch: d.Epoch, Events: d.Events[start:], Whole: d.Whole}), nil
		}
		end, size := start, 0
		for end < whole && (end == start || size+sizes[end] <= events.MaxCommitEvents) {
			size += sizes[end]
			end++
		}
		out = append(out, Decision{Epoch: d.Epoch, Events: d.Events[start:end]})
		start, total = end, total-size
	}
	return out, nil
}

// Decide gives what a command makes true, or why it is refused. A retired run
// subject refuses every command but Erase.
func Decide(s State, c Command) (Decision, error) {
	if _, erase := c.(Erase); s.Retired && !erase {
		return Decision{}, ErrRetired
	}
	switch c := c.(type) {
	case Claim:
		return claim(s, c)
	case Record:
		return record(s, c)
	case End:
		if c.Epoch != s.Epoch {
			return Decision{}, ErrFenced
		}
		if s.Execution != c.ExecutionID || s.Phase.Terminal() {
			return Decision{}, ErrOver
		}
		return s.finish(s.Epoch, c), nil
	case Abandon:
		return abandon(s, c)
	case Retire:
		if !s.Over() || s.Sandbox.ID != "" {
			return Decision{}, ErrBusy
		}
		m := events.NewMint(c.Meta)
		m.Add("", events.RunRetired{Usage: c.Usage, Life: c.Life, Runs: c.Runs, Audit: c.Audit, Stored: c.Stored})
		return Decision{Epoch: s.Epoch + 1, Events: m.Events()}, nil
	case Erase:
		if !s.Retired {
			return Decision{}, ErrBusy
		}
		m := events.NewMint(c.Meta)
		m.Add("", events.ContentRemoved{Messages: c.Messages, Objects: c.Objects})
		return Decision{Epoch: s.Epoch, Events: m.Events()}, nil
	}
	return Decision{}, fmt.Errorf("run: unknown command %T", c)
}

// abandon claims what nobody had claimed, so that every execution has a claim before its end.
func abandon(s State, c Abandon) (Decision, error) {
	if s.past(c.ExecutionID, c.Turn) {
		return Decision{}, ErrOver
	}
	epoch := s.Epoch + 1
	if s.Execution == c.ExecutionID {
		return s.finish(epoch, End{Meta: c.Meta, ExecutionID: c.ExecutionID, Outcome: c.Outcome, Blocks: c.Blocks}), nil
	}
	m := events.NewMint(events.Meta{CommandID: c.CommandID + "/claim", Now: c.Now})
	m.Add(c.ExecutionID, events.ExecutionClaimed{Epoch: epoch, Executor: c.By, Turn: c.Turn})
	return s.finish(epoch, End{Meta: c.Meta, ExecutionID: c.ExecutionID, Outcome: c.Outcome, With: m.Events()}), nil
}

func (s State) past(execution string, turn uint32) bool {
	return s.Past(session.Ref{ExecutionID: execution, Turn: turn})
}

func claim(s State, c Claim) (Decision, error) {
	if s.past(c.ExecutionID, c.Turn) {
		return Decision{}, ErrOver
	}
	epoch := s.Epoch + 1
	if s.Execution == c.ExecutionID && s.Claims >= MaxClaims+stopClaims {
		outcome := ClaimsExhausted()
		if s.Sandbox.Journal != "" {
			outcome = outcome.NotStopped(errors.New("the executors that tried to stop it died"))
		}
		return s.finish(epoch, End{Meta: c.Meta, ExecutionID: c.ExecutionID, Outcome: outcome}), nil
	}
	m := events.NewMint(c.Meta)
	m.Add(c.ExecutionID, events.ExecutionClaimed{Epoch: epoch, Executor: c.Executor, Turn: c.Turn})
	return Decision{Epoch: epoch, Events: m.Events()}, nil
}

// ClaimsExhausted is the end of an execution that too many executors took without progress.
func ClaimsExhausted() events.ExecutionFailed {
	return events.ExecutionFailed{
		Code:    "CLAIMS_EXHAUSTED",
		Message: fmt.Sprintf("%d executors in a row took the execution and made no progress", MaxClaims),
	}
}

// record drops what a journal says about an execution that has ended, or about
// blocks that it never opened, and keeps the rest as it is.
func record(s State, c Record) (Decision, error) {
	if c.Epoch != s.Epoch && !(c.Epoch == s.Epoch+1 && s.Over()) {
		return Decision{}, ErrFenced
	}
	open := map[string]bool{}
	for _, b := range s.Open {
		open[b.ID] = true
	}
	d := Decision{Epoch: c.Epoch}
	for _, e := range c.Events {
		if events.Terminal(e.Type()) {
			return Decision{}, fmt.Errorf("record: %s belongs in End", e.Type())
		}
		if e.ExecutionID != "" && (e.ExecutionID != s.Execution || s.Phase.Terminal()) {
			continue
		}
		switch p := e.Data.(type) {
		case events.EgressDenied:
			if !s.fresh(Line{p.Journal, p.Line}) {
				continue
			}
			s.Egress = Line{p.Journal, p.Line}
		case events.ModelCalled:
			if !s.fresh(Line{p.Journal, p.Line}) {
				continue
			}
			s.Egress = Line{p.Journal, p.Line}
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

// fresh tells whether a line of the proxy's journal is not in the log yet.
func (s State) fresh(l Line) bool { return l.Journal != s.Egress.Journal || l.N > s.Egress.N }

// finish completes the blocks that are open and writes the terminal event. The id of a
// completion derives from the block, not from its place among the others: a holder that
// goes on after some of them were stored writes the rest under the ids that they would have had.
func (s State) finish(epoch uint64, c End) Decision {
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
				ID: events.Derive(events.KindEvent, c.CommandID, "block", open.ID), Time: c.Now,
				ExecutionID: c.ExecutionID, Source: events.FromServer, Data: events.BlockComplete{Block: block},
			})
		}
	}
	d.Events = append(d.Events, c.With...)
	m := events.NewMint(c.Meta)
	m.Add(c.ExecutionID, after.timed(c.ExecutionID, c.Now, c.Outcome))
	last := m.Events()[0]
	last.N = c.N
	d.Events = append(d.Events, last)
	return d
}

// timed fills in duration and, where the outcome has none, usage.
func (s State) timed(execution string, now time.Time, outcome events.Payload) events.Payload {
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
