// Package journal keeps the numbered lines about what agents did in memory until the executor has stored them. No line
// is lost: while the journal is full, Append blocks.
package journal

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// DefaultLimit is the default of the size in bytes of lines that wait for their acknowledgement, above which Append
// blocks.
const DefaultLimit = 64 << 20

// lineOverhead is roughly the memory in bytes that a line of the journal takes in addition to its content.
const lineOverhead = 64

// Journal keeps the numbered journal lines of one runner process in memory until they are acknowledged. It is safe for
// concurrent use.
type Journal struct {
	name  string
	limit int

	mu      sync.Mutex
	first   uint64   // number of lines[0]
	lines   [][]byte // encoded runner.Lines
	bytes   int
	blocks  int
	pace    linePace
	changed chan struct{} // closed and replaced when lines are added or removed
}

// New returns an empty journal with a new name. limit is in bytes, 0 for DefaultLimit.
func New(now time.Time, entropy io.Reader, limit int) (*Journal, error) {
	name, err := events.NewID(events.KindJournal, now, entropy)
	if err != nil {
		return nil, err
	}
	if limit == 0 {
		limit = DefaultLimit
	}
	if limit < 0 {
		return nil, fmt.Errorf("journal limit: %d bytes, want a positive number", limit)
	}
	return &Journal{name: name, limit: limit, first: 1, changed: make(chan struct{})}, nil
}

// Name returns the journal's id, jnl_….
func (j *Journal) Name() string { return j.name }

// NewBlockID returns an id that is unique within the journal.
func (j *Journal) NewBlockID() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.blocks++
	return fmt.Sprintf("b%d", j.blocks)
}

// SetPace limits the rate at which lines can be appended from now on.
func (j *Journal) SetPace(p runner.OutputRate) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.pace = newLinePace(p, time.Now())
}

// TakeSlowed reports whether a line had to wait because of the last SetPace. It returns true only once after each
// SetPace.
func (j *Journal) TakeSlowed() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	slowed := j.pace.slowed && !j.pace.reported
	j.pace.reported = j.pace.slowed
	return slowed
}

// Append numbers the line and keeps it. It blocks while the journal is full, or grows faster than its pace allows. When
// ctx ends, Append keeps the line although the journal is full.
func (j *Journal) Append(ctx context.Context, l runner.JournalLine) {
	j.AwaitRoom(ctx)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.pace.countLine(l.Type, len(l.Data))
	l.N = j.first + uint64(len(j.lines))
	raw := encodeLine(l)
	j.lines = append(j.lines, raw)
	j.bytes += len(raw) + lineOverhead
	j.notifyWaiters()
}

// AwaitRoom blocks until the journal is not full and its pace allows another line, or ctx ends.
func (j *Journal) AwaitRoom(ctx context.Context) {
	for ctx.Err() == nil {
		j.mu.Lock()
		full, wait, changed := j.bytes >= j.limit, j.pace.waitTime(time.Now()), j.changed
		j.mu.Unlock()
		var paced <-chan time.Time
		switch {
		case full:
		case wait > 0:
			paced, changed = time.After(wait), nil
		default:
			return
		}
		select {
		case <-paced:
		case <-changed:
		case <-ctx.Done():
		}
	}
}

// LinesAfter returns the encoded lines with numbers greater than n: all of them, or as many as fit in about max bytes,
// at least one. If there is none it returns a channel that is closed when there may be one.
func (j *Journal) LinesAfter(n uint64, max int) (lines [][]byte, changed <-chan struct{}) {
	j.mu.Lock()
	defer j.mu.Unlock()
	skip := uint64(0)
	if n >= j.first {
		skip = n - j.first + 1
	}
	if skip >= uint64(len(j.lines)) {
		return nil, j.changed
	}
	size := 0
	for _, raw := range j.lines[skip:] {
		if size += len(raw); size > max && len(lines) > 0 {
			break
		}
		lines = append(lines, raw)
	}
	return lines, nil
}

// TrimUpTo removes the lines with numbers up to n, which the executor has stored.
func (j *Journal) TrimUpTo(n uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	if n < j.first || len(j.lines) == 0 {
		return
	}
	gone := min(n-j.first+1, uint64(len(j.lines)))
	for i, raw := range j.lines[:gone] {
		j.bytes -= len(raw) + lineOverhead
		j.lines[i] = nil
	}
	j.lines = j.lines[gone:]
	j.first += gone
	j.notifyWaiters()
}

// LineRange returns the lowest number of a line in the journal, or last+1 if there is none, and the last number that
// was assigned.
func (j *Journal) LineRange() (first, last uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.first, j.first + uint64(len(j.lines)) - 1
}

// notifyWaiters wakes callers that wait for a change of the journal. The caller must hold mu.
func (j *Journal) notifyWaiters() {
	close(j.changed)
	j.changed = make(chan struct{})
}

// encodeLine returns a line as JSON. It cannot fail for data that is JSON, as agent.Turn produces it. If the data is
// not JSON, the line holds the error, so that no line is lost.
func encodeLine(l runner.JournalLine) []byte {
	raw, err := marshalJSON(l)
	if err == nil {
		return raw
	}
	l.Type = events.Error{}.EventType()
	l.Data, _ = json.Marshal(events.Error{Code: "INTERNAL", Message: "journal line: " + err.Error()}) //nolint:errchkjson // two strings
	raw, _ = marshalJSON(l)                                                                           //nolint:errcheck // as above
	return raw
}

// marshalJSON returns v as JSON without HTML escapes.
func marshalJSON(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}
