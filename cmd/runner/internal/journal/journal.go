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

// DefaultLimit is the number of bytes that may wait for their acknowledgement before Append blocks.
const DefaultLimit = 64 << 20

// lineOverhead is roughly the memory that a kept line takes in addition to its bytes.
const lineOverhead = 64

// Journal is the journal of one runner process. It is safe for concurrent use.
type Journal struct {
	name  string
	limit int

	mu      sync.Mutex
	first   uint64   // number of lines[0]
	lines   [][]byte // encoded runner.Lines
	bytes   int
	blocks  int
	pace    pace
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

// SetPace limits the rate of the lines that are appended from now on.
func (j *Journal) SetPace(p runner.OutputRate) {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.pace = newPace(p, time.Now())
}

// Slowed reports whether a line had to wait because of the last SetPace. It reports true only once after each SetPace.
func (j *Journal) Slowed() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	slowed := j.pace.slowed && !j.pace.reported
	j.pace.reported = j.pace.slowed
	return slowed
}

// Append numbers the line and keeps it. It blocks while the journal is full, or is filled faster than its pace. When
// ctx ends it keeps the line beyond the limit.
func (j *Journal) Append(ctx context.Context, l runner.JournalLine) {
	j.Room(ctx)
	j.mu.Lock()
	defer j.mu.Unlock()
	j.pace.take(l.Type, len(l.Data))
	l.N = j.first + uint64(len(j.lines))
	raw := encode(l)
	j.lines = append(j.lines, raw)
	j.bytes += len(raw) + lineOverhead
	j.wake()
}

// Room blocks until the journal is neither full nor ahead of its pace, or ctx ends.
func (j *Journal) Room(ctx context.Context) {
	for ctx.Err() == nil {
		j.mu.Lock()
		full, wait, changed := j.bytes >= j.limit, j.pace.wait(time.Now()), j.changed
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

// After returns the encoded lines with numbers greater than n: all of them, or as many as fit in about max bytes, at
// least one. If there is none it returns a channel that is closed when that may have changed.
func (j *Journal) After(n uint64, max int) (lines [][]byte, changed <-chan struct{}) {
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

// Trim removes the lines up to number n, which are stored elsewhere.
func (j *Journal) Trim(n uint64) {
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
	j.wake()
}

// Bounds returns the lowest number of a kept line, or last+1 if none is kept, and the last number that was assigned.
func (j *Journal) Bounds() (first, last uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.first, j.first + uint64(len(j.lines)) - 1
}

// wake notifies callers that wait for a change. The caller must hold mu.
func (j *Journal) wake() {
	close(j.changed)
	j.changed = make(chan struct{})
}

// encode encodes a line. It cannot fail for data that is JSON, as agent.Turn makes it. If the data is not JSON, the
// line holds the error, so that no line is lost.
func encode(l runner.JournalLine) []byte {
	raw, err := marshal(l)
	if err == nil {
		return raw
	}
	l.Type = events.Error{}.EventType()
	l.Data, _ = json.Marshal(events.Error{Code: "INTERNAL", Message: "journal line: " + err.Error()}) //nolint:errchkjson // two strings
	raw, _ = marshal(l)                                                                               //nolint:errcheck // as above
	return raw
}

// marshal returns JSON without HTML escapes.
func marshal(v any) ([]byte, error) {
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, err
	}
	return bytes.TrimSuffix(buf.Bytes(), []byte("\n")), nil
}
