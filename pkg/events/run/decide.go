package run

import (
	"errors"
	"fmt"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/session"
)

// Errors that a writer may branch on.
var (
	// ErrFenced is a writer whose epoch is not the present one: stop, never retry.
	ErrFenced = errors.New("another holder has raised the epoch")
	// ErrOver is a write about an execution that has ended.
	ErrOver = errors.New("the execution has ended")
)

// Command is what may be asked of a session's runs. The set is sealed.
type Command interface{ command() }

// Claim makes an executor the holder under the next epoch. An execution that
// was claimed too often without progress fails instead.
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
	Before      []events.Event // facts that become true with it
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

func (Claim) command()   {}
func (Record) command()  {}
func (End) command()     {}
func (Abandon) command() {}

// Decision is what a command makes true, and under which epoch.
type Decision struct {
	Epoch  uint64
	Events []events.Event
}

// Decide gives what a command makes true, or why it is refused.
func Decide(s State, c Command) (Decision, error) {
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
		return Decision{s.Epoch, s.finish(c.Meta, c.ExecutionID, c.N, c.Outcome, c.Blocks, c.Before)}, nil
	case Abandon:
		return abandon(s, c)
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
		return Decision{epoch, s.finish(c.Meta, c.ExecutionID, 0, c.Outcome, c.Blocks, nil)}, nil
	}
	m := events.NewMint(events.Meta{CommandID: c.CommandID + "/claim", Now: c.Now})
	m.Add(c.ExecutionID, events.ExecutionClaimed{Epoch: epoch, Executor: c.By, Turn: c.Turn})
	return Decision{epoch, s.finish(c.Meta, c.ExecutionID, 0, c.Outcome, nil, m.Events())}, nil
}

func (s State) past(execution string, turn uint32) bool {
	return s.Past(session.Ref{ExecutionID: execution, Turn: turn})
}

func claim(s State, c Claim) (Decision, error) {
	if s.past(c.ExecutionID, c.Turn) {
		return Decision{}, ErrOver
	}
	epoch := s.Epoch + 1
	if s.Execution == c.ExecutionID && s.Claims >= MaxClaims {
		outcome := events.ExecutionFailed{
			Code:    "CLAIMS_EXHAUSTED",
			Message: fmt.Sprintf("%d executors in a row took the execution and made no progress", MaxClaims),
		}
		return Decision{epoch, s.finish(c.Meta, c.ExecutionID, 0, outcome, nil, nil)}, nil
	}
	m := events.NewMint(c.Meta)
	m.Add(c.ExecutionID, events.ExecutionClaimed{Epoch: epoch, Executor: c.Executor, Turn: c.Turn})
	return Decision{epoch, m.Events()}, nil
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

// finish closes what is open and writes the terminal event.
func (s State) finish(meta events.Meta, execution string, n uint64, outcome events.Payload, known map[string]events.Block, before []events.Event) []events.Event {
	m := events.NewMint(meta)
	for _, e := range before {
		m.Keep(e)
	}
	s = Fold(s, s.Epoch, before)
	if s.Execution == execution {
		for _, b := range s.Open {
			block, ok := known[b.ID]
			if !ok {
				block = events.Block{ID: b.ID, Kind: events.KindError, Time: meta.Now, ExecutionID: execution, ConversationID: events.MainConversation}
			}
			block.Status = events.StatusError
			m.Add(execution, events.BlockComplete{Block: block})
		}
	}
	m.Add(execution, s.timed(execution, meta.Now, outcome))
	list := m.Events()
	list[len(list)-1].N = n
	return list
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
