// Package translate converts the lines of a runner's journal to events of the log. It is pure. A sandbox is not
// trusted: the host sets the ids of events and blocks, the execution, the epoch, the source and the limits of times,
// and a line that a runner must not write becomes an error event.
package translate

import (
	"encoding/json"
	"fmt"
	"strconv"
	"strings"
	"time"
	"unicode"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/pkg/truncate"
)

// Codes of the error events that replace lines which cannot be converted.
const (
	CodeForged = "FORGED_EVENT" // the type may only be written by the host
	CodeBad    = "BAD_LINE"     // the data does not match the type
	CodeGap    = "JOURNAL_GAP"  // numbers are missing before the line
)

// maxName is the longest id of a conversation in bytes.
const maxName = 128

// Translator converts one journal for one execution. It is not safe for concurrent use.
type Translator struct {
	Journal     string
	ExecutionID string
	Epoch       uint64
	Attempt     uint32    // attempt of the start that the host requested
	Last        uint64    // number of the last line seen
	Time        time.Time // lower limit of event times: the time of the last event, at first that of the claim

	foreign string // the last other execution that was reported
	garbage int
}

// Result is the result of a line: at most one of its fields is set.
type Result struct {
	Event *events.Event
	Delta *events.Delta
	Ended *Ended
	Gap   string // which lines are missing: the journal must not be read any further
}

// Ended is the end of the turn.
type Ended struct {
	runner.TurnEnd
	N    uint64
	Time time.Time
}

// Line converts a line. now is the time by the host's clock.
func (t *Translator) Line(l runner.JournalLine, now time.Time) []Result {
	if l.N <= t.Last {
		return nil // converted before
	}
	if l.N != t.Last+1 {
		return t.Missing(l.N-1, now)
	}
	t.Last = l.N
	if l.ExecutionID != "" && l.ExecutionID != t.ExecutionID {
		return t.stranger(l, now)
	}
	return []Result{t.line(l, now)}
}

// Missing returns the results for lost lines after the last one seen, up to last: an error event, and the gap. The
// runner only leaves out lines that are in the log, so the lines after a gap cannot be trusted.
func (t *Translator) Missing(last uint64, now time.Time) []Result {
	gap := fmt.Sprintf("lines %d to %d of the runner's journal are missing", t.Last+1, last)
	out := []Result{t.complain(t.Last+1, CodeGap, gap, now), {Gap: gap}}
	t.Last = last
	return out
}

func (t *Translator) line(l runner.JournalLine, now time.Time) Result {
	at := t.limitTime(l.Time, now)
	switch l.Type {
	case events.TextDelta:
		d, err := runner.DecodeDelta(l.Data)
		if err != nil || d.BlockID == "" {
			return t.bad(l, now)
		}
		return Result{Delta: &events.Delta{
			BlockID: t.block(d.BlockID), ExecutionID: t.ExecutionID, ConversationID: conversation(l.ConversationID),
			Epoch: t.Epoch, Offset: d.Offset, Text: d.Delta, Time: at,
		}}
	case runner.AgentStarted:
		var s runner.TurnStart
		if err := json.Unmarshal(l.Data, &s); err != nil {
			return t.bad(l, now)
		}
		return t.keep(l, at, events.ExecutionStarted{Attempt: t.Attempt, Warm: s.Warm, PID: uint32(max(0, s.PID)), Policy: s.Policy})
	case runner.TurnEnded:
		var e runner.TurnEnd
		if err := json.Unmarshal(l.Data, &e); err != nil {
			e = runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: CodeBad, Message: "the end of the turn could not be read: " + err.Error()}
		}
		return Result{Ended: &Ended{TurnEnd: e, N: l.N, Time: at}}
	}
	return t.payload(l, at, now)
}

// payload converts the types that a runner may write.
func (t *Translator) payload(l runner.JournalLine, at, now time.Time) Result {
	if _, known := events.Lookup(l.Type); !known {
		return t.keep(l, at, events.Log{
			Level: "warn", Stream: "runner",
			Message: fmt.Sprintf("line of unknown type %.64q: %s", l.Type, truncate.ValidText(string(l.Data), 512)),
		})
	}
	data := events.DecodePayload(l.Type, l.Data)
	switch p := data.(type) {
	case events.BlockStart:
		return t.blockEvent(l, at, p.Block, func(b events.Block) events.Payload { return events.BlockStart{Block: b} }, now)
	case events.BlockComplete:
		if p.Block.Status != events.StatusError {
			p.Block.Status = events.StatusComplete
		}
		return t.blockEvent(l, at, p.Block, func(b events.Block) events.Payload { return events.BlockComplete{Block: b} }, now)
	case events.BlockUpdate:
		if p.BlockID == "" {
			return t.bad(l, now)
		}
		return t.keep(l, at, events.BlockUpdate{BlockID: t.block(p.BlockID), Updates: p.Updates})
	case events.ApprovalRequested:
		if !limitRequest(&p) {
			return t.bad(l, now)
		}
		return t.approval(l, at, p.ApprovalID, func(id string) events.Payload { p.ApprovalID = id; return p }, now)
	case events.ApprovalResolved:
		return t.approval(l, at, p.ApprovalID, func(id string) events.Payload { p.ApprovalID = id; return p }, now)
	case events.ApprovalRetracted:
		p.Reason = truncate.ValidText(p.Reason, maxName)
		return t.approval(l, at, p.ApprovalID, func(id string) events.Payload { p.ApprovalID = id; return p }, now)
	case events.SubagentSpawned, events.SubagentCompleted, events.PermissionDecided, events.AgentDenied, events.TranscriptWritten,
		events.MetadataUpdate, events.Log, events.Error, events.WatchdogWarned:
		return t.keep(l, at, data)
	case events.FileCreated:
		return t.file(l, at, p.Path, data, now)
	case events.FileModified:
		return t.file(l, at, p.Path, data, now)
	case events.FileDeleted:
		return t.file(l, at, p.Path, data, now)
	case events.Opaque:
		return t.bad(l, now)
	}
	return t.complain(l.N, CodeForged, fmt.Sprintf("line %d of the runner claims to be %s, which a runner must not write", l.N, l.Type), now)
}

// maxPath is the longest path of a file in bytes.
const maxPath = 4096

func (t *Translator) file(l runner.JournalLine, at time.Time, path string, data events.Payload, now time.Time) Result {
	if path == "" || len(path) > maxPath {
		return t.bad(l, now)
	}
	return t.keep(l, at, data)
}

func (t *Translator) blockEvent(l runner.JournalLine, at time.Time, b events.Block, wrap func(events.Block) events.Payload, now time.Time) Result {
	main := conversation(l.ConversationID) == events.MainConversation
	switch {
	case b.ID == "" || b.Kind == "":
		return t.bad(l, now)
	case b.Kind == events.KindUserMessage && main:
		return t.complain(l.N, CodeForged, fmt.Sprintf("line %d of the runner claims to be a message of the user", l.N), now)
	}
	b.ID = t.block(b.ID)
	b.ExecutionID, b.ConversationID = t.ExecutionID, conversation(l.ConversationID)
	if b.Time.IsZero() || b.Time.After(at) {
		b.Time = at
	}
	switch b.Status {
	case events.StatusPending, events.StatusComplete, events.StatusError:
	default:
		b.Status = events.StatusPending
	}
	return t.keep(l, at, wrap(b))
}

// Garbage returns the result for a line that is not a journal line: it is shown, not dropped. id distinguishes such
// lines of different streams.
func (t *Translator) Garbage(id, text string, tooLong bool, now time.Time) Result {
	t.garbage++
	what := "the runner printed a line that is not a journal line: "
	if tooLong {
		what = fmt.Sprintf("the runner printed a line of more than %d bytes, which begins: ", runner.MaxLineLength)
	}
	return Result{Event: &events.Event{
		ID:          events.Derive(events.KindEvent, id, "garbage", strconv.Itoa(t.garbage)),
		Time:        t.limitTime(now, now),
		ExecutionID: t.ExecutionID, ConversationID: events.MainConversation, Source: events.FromRunner,
		Data: events.Log{Level: "error", Stream: "runner", Message: what + truncate.ValidText(text, 1024)},
	}}
}

// stranger handles a line about another execution: a rest of an execution that was ended from outside, or a forgery. It
// reports each such execution once.
func (t *Translator) stranger(l runner.JournalLine, now time.Time) []Result {
	if t.foreign == l.ExecutionID {
		return nil
	}
	t.foreign = l.ExecutionID
	return []Result{t.keep(l, t.limitTime(now, now), events.Log{
		Level: "warn", Stream: "runner",
		Message: fmt.Sprintf("line %d is about execution %.64q, which does not run: dropped, as are others about it", l.N, l.ExecutionID),
	})}
}

func (t *Translator) bad(l runner.JournalLine, now time.Time) Result {
	return t.complain(l.N, CodeBad, fmt.Sprintf("line %d of the runner: the data of %.64q cannot be read: %s", l.N, l.Type, truncate.ValidText(string(l.Data), 512)), now)
}

func (t *Translator) complain(n uint64, code, message string, now time.Time) Result {
	return t.keep(runner.JournalLine{N: n, ExecutionID: t.ExecutionID, ConversationID: events.MainConversation}, t.limitTime(now, now), events.Error{Code: code, Message: message})
}

func (t *Translator) keep(l runner.JournalLine, at time.Time, data events.Payload) Result {
	execution := t.ExecutionID
	if l.ExecutionID == "" && betweenTurns(data) {
		execution = ""
	}
	return Result{Event: &events.Event{
		ID: events.Derive(events.KindEvent, t.Journal, strconv.FormatUint(l.N, 10)), Time: at,
		ExecutionID: execution, ConversationID: conversation(l.ConversationID), Source: events.FromRunner, N: l.N, Data: data,
	}}
}

// betweenTurns reports whether a runner may write a line of this type while no execution runs.
func betweenTurns(data events.Payload) bool {
	switch data.(type) {
	case events.Log, events.Error, events.FileCreated, events.FileModified, events.FileDeleted:
		return true
	}
	return false
}

// limitTime limits a runner's time to the range from the last event to now.
func (t *Translator) limitTime(said, now time.Time) time.Time {
	if said.IsZero() || said.After(now) {
		said = now
	}
	if said.Before(t.Time) {
		said = t.Time
	}
	t.Time = said
	return said
}

func (t *Translator) block(local string) string {
	return events.Derive(events.KindBlock, t.Journal, local)
}

// conversation returns the conversation of a name: the agent's own if the name is empty or not printable.
func conversation(name string) string {
	if name == "" || len(name) > maxName || strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0 {
		return events.MainConversation
	}
	return name
}
