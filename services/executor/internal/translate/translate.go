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
	CodeForged     = "FORGED_EVENT" // the type may only be written by the host
	CodeBadLine    = "BAD_LINE"     // the data does not match the type
	CodeJournalGap = "JOURNAL_GAP"  // numbers are missing before the line
)

// maxNameBytes is the maximum length of a conversation's id in bytes.
const maxNameBytes = 128

// Translator converts the lines of a runner's journal to events of one execution. It is not safe for concurrent use.
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

// LineResult is the result of the conversion of a journal line. At most one of its fields is set.
type LineResult struct {
	Event *events.Event
	Delta *events.Delta
	Ended *TurnEnd
	Gap   string // which lines are missing: the journal must not be read any further
}

// TurnEnd is the journal line with which the runner ends the turn.
type TurnEnd struct {
	runner.TurnEnd
	N    uint64
	Time time.Time
}

// TranslateLine converts a journal line of the runner. now is the executor's time.
func (t *Translator) TranslateLine(l runner.JournalLine, now time.Time) []LineResult {
	if l.N <= t.Last {
		return nil // converted before
	}
	if l.N != t.Last+1 {
		return t.TranslateMissing(l.N-1, now)
	}
	t.Last = l.N
	if l.ExecutionID != "" && l.ExecutionID != t.ExecutionID {
		return t.foreignLine(l, now)
	}
	return []LineResult{t.translateLine(l, now)}
}

// TranslateMissing returns the results for missing journal lines, from the one after the last that was converted up to the
// line last: an error event, and the gap. The runner removes only lines that the log has, so the lines after a gap cannot be
// trusted.
func (t *Translator) TranslateMissing(last uint64, now time.Time) []LineResult {
	gap := fmt.Sprintf("lines %d to %d of the runner's journal are missing", t.Last+1, last)
	out := []LineResult{t.errorEvent(t.Last+1, CodeJournalGap, gap, now), {Gap: gap}}
	t.Last = last
	return out
}

// translateLine converts a journal line that belongs to the execution.
func (t *Translator) translateLine(l runner.JournalLine, now time.Time) LineResult {
	at := t.limitTime(l.Time, now)
	switch l.Type {
	case events.TextDelta:
		d, err := runner.DecodeDelta(l.Data)
		if err != nil || d.BlockID == "" {
			return t.badLineError(l, now)
		}
		return LineResult{Delta: &events.Delta{
			BlockID: t.blockID(d.BlockID), ExecutionID: t.ExecutionID, ConversationID: conversationOf(l.ConversationID),
			Epoch: t.Epoch, Offset: d.Offset, Text: d.Delta, Time: at,
		}}
	case runner.AgentStarted:
		var s runner.TurnStart
		if err := json.Unmarshal(l.Data, &s); err != nil {
			return t.badLineError(l, now)
		}
		return t.newEvent(l, at, events.ExecutionStarted{Attempt: t.Attempt, Warm: s.Warm, PID: uint32(max(0, s.PID)), Policy: s.Policy})
	case runner.TurnEnded:
		var e runner.TurnEnd
		if err := json.Unmarshal(l.Data, &e); err != nil {
			e = runner.TurnEnd{Outcome: runner.OutcomeFailed, Code: CodeBadLine, Message: "the end of the turn could not be read: " + err.Error()}
		}
		return LineResult{Ended: &TurnEnd{TurnEnd: e, N: l.N, Time: at}}
	}
	return t.translatePayload(l, at, now)
}

// translatePayload converts a journal line whose data is an event that a runner may write.
func (t *Translator) translatePayload(l runner.JournalLine, at, now time.Time) LineResult {
	if _, known := events.LookupType(l.Type); !known {
		return t.newEvent(l, at, events.Log{
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
			return t.badLineError(l, now)
		}
		return t.newEvent(l, at, events.BlockUpdate{BlockID: t.blockID(p.BlockID), Updates: p.Updates})
	case events.ApprovalRequested:
		if !limitRequest(&p) {
			return t.badLineError(l, now)
		}
		return t.approvalEvent(l, at, p.ApprovalID, func(id string) events.Payload { p.ApprovalID = id; return p }, now)
	case events.ApprovalResolved:
		return t.approvalEvent(l, at, p.ApprovalID, func(id string) events.Payload { p.ApprovalID = id; return p }, now)
	case events.ApprovalRetracted:
		p.Reason = truncate.ValidText(p.Reason, maxNameBytes)
		return t.approvalEvent(l, at, p.ApprovalID, func(id string) events.Payload { p.ApprovalID = id; return p }, now)
	case events.SubagentSpawned, events.SubagentCompleted, events.PermissionDecided, events.AgentDenied, events.TranscriptWritten,
		events.MetadataUpdate, events.Log, events.Error, events.WatchdogWarned:
		return t.newEvent(l, at, data)
	case events.FileCreated:
		return t.fileEvent(l, at, p.Path, data, now)
	case events.FileModified:
		return t.fileEvent(l, at, p.Path, data, now)
	case events.FileDeleted:
		return t.fileEvent(l, at, p.Path, data, now)
	case events.OpaquePayload:
		return t.badLineError(l, now)
	}
	return t.errorEvent(l.N, CodeForged, fmt.Sprintf("line %d of the runner claims to be %s, which a runner must not write", l.N, l.Type), now)
}

// maxPathBytes is the maximum length of a file's path in bytes.
const maxPathBytes = 4096

// fileEvent returns an event about the file at a path, or an error event if the path is not valid.
func (t *Translator) fileEvent(l runner.JournalLine, at time.Time, path string, data events.Payload, now time.Time) LineResult {
	if path == "" || len(path) > maxPathBytes {
		return t.badLineError(l, now)
	}
	return t.newEvent(l, at, data)
}

// blockEvent returns an event about a block of a conversation, or an error event if the runner must not write such a block.
func (t *Translator) blockEvent(l runner.JournalLine, at time.Time, b events.Block, wrap func(events.Block) events.Payload, now time.Time) LineResult {
	main := conversationOf(l.ConversationID) == events.MainConversation
	switch {
	case b.ID == "" || b.Kind == "":
		return t.badLineError(l, now)
	case b.Kind == events.KindUserMessage && main:
		return t.errorEvent(l.N, CodeForged, fmt.Sprintf("line %d of the runner claims to be a message of the user", l.N), now)
	}
	b.ID = t.blockID(b.ID)
	b.ExecutionID, b.ConversationID = t.ExecutionID, conversationOf(l.ConversationID)
	if b.Time.IsZero() || b.Time.After(at) {
		b.Time = at
	}
	switch b.Status {
	case events.StatusPending, events.StatusComplete, events.StatusError:
	default:
		b.Status = events.StatusPending
	}
	return t.newEvent(l, at, wrap(b))
}

// TranslateGarbage returns an event that shows a line of the runner which is not a journal line. id distinguishes such lines
// of different streams.
func (t *Translator) TranslateGarbage(id, text string, tooLong bool, now time.Time) LineResult {
	t.garbage++
	what := "the runner printed a line that is not a journal line: "
	if tooLong {
		what = fmt.Sprintf("the runner printed a line of more than %d bytes, which begins: ", runner.MaxLineLength)
	}
	return LineResult{Event: &events.Event{
		ID:          events.DeriveID(events.KindEvent, id, "garbage", strconv.Itoa(t.garbage)),
		Time:        t.limitTime(now, now),
		ExecutionID: t.ExecutionID, ConversationID: events.MainConversation, Source: events.FromRunner,
		Data: events.Log{Level: "error", Stream: "runner", Message: what + truncate.ValidText(text, 1024)},
	}}
}

// foreignLine handles a journal line that names another execution, which was ended from outside, or which the runner forged.
// It returns a warning for the first line of each such execution.
func (t *Translator) foreignLine(l runner.JournalLine, now time.Time) []LineResult {
	if t.foreign == l.ExecutionID {
		return nil
	}
	t.foreign = l.ExecutionID
	return []LineResult{t.newEvent(l, t.limitTime(now, now), events.Log{
		Level: "warn", Stream: "runner",
		Message: fmt.Sprintf("line %d is about execution %.64q, which does not run: dropped, as are others about it", l.N, l.ExecutionID),
	})}
}

// badLineError returns an error event in place of a journal line whose data does not match its type.
func (t *Translator) badLineError(l runner.JournalLine, now time.Time) LineResult {
	return t.errorEvent(l.N, CodeBadLine, fmt.Sprintf("line %d of the runner: the data of %.64q cannot be read: %s", l.N, l.Type, truncate.ValidText(string(l.Data), 512)), now)
}

// errorEvent returns an error event in place of the journal line n.
func (t *Translator) errorEvent(n uint64, code, message string, now time.Time) LineResult {
	return t.newEvent(runner.JournalLine{N: n, ExecutionID: t.ExecutionID, ConversationID: events.MainConversation}, t.limitTime(now, now), events.Error{Code: code, Message: message})
}

// newEvent returns data as the event of a journal line.
func (t *Translator) newEvent(l runner.JournalLine, at time.Time, data events.Payload) LineResult {
	execution := t.ExecutionID
	if l.ExecutionID == "" && isAllowedBetweenTurns(data) {
		execution = ""
	}
	return LineResult{Event: &events.Event{
		ID: events.DeriveID(events.KindEvent, t.Journal, strconv.FormatUint(l.N, 10)), Time: at,
		ExecutionID: execution, ConversationID: conversationOf(l.ConversationID), Source: events.FromRunner, N: l.N, Data: data,
	}}
}

// isAllowedBetweenTurns reports whether a runner may write an event of this type while no execution runs.
func isAllowedBetweenTurns(data events.Payload) bool {
	switch data.(type) {
	case events.Log, events.Error, events.FileCreated, events.FileModified, events.FileDeleted:
		return true
	}
	return false
}

// limitTime limits the time said of a journal line to the range from the last event to now.
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

// blockID returns the id that a block has in the log. local is the runner's id of the block.
func (t *Translator) blockID(local string) string {
	return events.DeriveID(events.KindBlock, t.Journal, local)
}

// conversationOf returns the id of the conversation that a journal line names: that of the session's own agent if the name
// is empty, too long or not printable.
func conversationOf(name string) string {
	if name == "" || len(name) > maxNameBytes || strings.IndexFunc(name, func(r rune) bool { return !unicode.IsPrint(r) }) >= 0 {
		return events.MainConversation
	}
	return name
}
