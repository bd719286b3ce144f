// Package journal stores what the proxy saw of a sandbox until the executor has it in the log. A journal is a file of numbered
// lines. No line is read before it is on disk, so a number never stands for two lines.
package journal

import (
	"bufio"
	"crypto/rand"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"sync"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/api"
)

// Files in a journal's folder.
const (
	linesFile   = "journal.jsonl"
	headFile    = "journal.json"
	damagedFile = "journal.damaged"
)

// trimThreshold is the number of bytes of acknowledged lines from which the journal removes these lines from its file.
const trimThreshold = 64 << 10

// maxReadBytes is the maximum size of the result of ReadLines in bytes, unless a single line is longer.
const maxReadBytes = 256 << 10

// storedHead is the JSON content of headFile: the fields of the journal that must survive when all its lines are removed.
type storedHead struct {
	Journal string `json:"journal"`
	Base    uint64 `json:"base"` // number of the last line that was deleted
}

// Journal holds the lines about one sandbox that the executor has not stored in the log yet: model calls and denials.
// It is safe for concurrent use.
type Journal struct {
	dir   string
	store *Store

	file sync.Mutex // held while the file is read, written or trimmed; locked before mu

	mu      sync.Mutex
	head    storedHead
	acked   uint64
	durable uint64  // the last line on disk
	last    uint64  // the last line that has a number
	ends    []int64 // offset of the end of line head.Base+1+i in the file
	pending []byte  // lines after durable
	lengths []int   // of each pending line
	changed chan struct{}
	denials denialLimiter
}

// openJournal reads the journal in a folder, or creates one.
func openJournal(dir string, store *Store) (*Journal, error) {
	j := &Journal{dir: dir, store: store, changed: make(chan struct{})}
	raw, err := os.ReadFile(filepath.Join(dir, headFile))
	switch {
	case errors.Is(err, fs.ErrNotExist):
		err = j.createEmpty()
	case err == nil:
		if err = json.Unmarshal(raw, &j.head); err == nil {
			err = events.CheckID("journal", events.KindJournal, j.head.Journal)
		}
	}
	if err != nil {
		return nil, fmt.Errorf("journal in %s: %w", dir, err)
	}
	if err := j.loadLines(); err != nil {
		return nil, fmt.Errorf("journal in %s: %w", dir, err)
	}
	return j, nil
}

// createEmpty gives the journal a new name, and writes headFile.
func (j *Journal) createEmpty() error {
	name, err := events.NewID(events.KindJournal, time.Now(), rand.Reader)
	if err != nil {
		return err
	}
	j.head = storedHead{Journal: name}
	return j.writeHead()
}

// writeHead writes headFile.
func (j *Journal) writeHead() error {
	raw, err := json.Marshal(j.head)
	if err != nil {
		return err
	}
	return WriteFile(filepath.Join(j.dir, headFile), raw)
}

// loadLines reads the journal's lines from disk. It cuts off a last line without a newline, which no client has read. If another
// line is damaged, its numbers cannot be trusted: loadLines then renames the file, and begins a journal with another name.
func (j *Journal) loadLines() error {
	path := filepath.Join(j.dir, linesFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	defer f.Close() //nolint:errcheck // what was written is synced below
	j.ends = nil
	next, at, skip := j.head.Base+1, int64(0), int64(0)
	r := bufio.NewReader(f)
	for {
		raw, err := r.ReadBytes('\n')
		if err == io.EOF {
			break
		}
		if err != nil {
			return err
		}
		var l api.JournalLine
		if json.Unmarshal(raw, &l) != nil || l.N > next || l.N < next && next > j.head.Base+1 {
			return j.replaceDamaged(path)
		}
		at += int64(len(raw))
		if l.N <= j.head.Base { // the head was written, but the file not shortened yet
			skip = at
			continue
		}
		j.ends = append(j.ends, at-skip)
		next++
	}
	j.acked, j.durable, j.last = j.head.Base, next-1, next-1
	if skip > 0 {
		rest := make([]byte, at-skip)
		if _, err := f.ReadAt(rest, skip); err != nil && len(rest) > 0 {
			return err
		}
		return WriteFile(path, rest)
	}
	if err := f.Truncate(at); err != nil {
		return err
	}
	return f.Sync()
}

// replaceDamaged renames the damaged file of lines to damagedFile, and begins a journal with another name.
func (j *Journal) replaceDamaged(path string) error {
	if err := os.Rename(path, filepath.Join(j.dir, damagedFile)); err != nil {
		return err
	}
	old := j.head.Journal
	if err := j.createEmpty(); err != nil {
		return err
	}
	j.store.log.Error("a journal is damaged: its file was renamed, and a new journal begins", "folder", j.dir, "journal", old, "next", j.head.Journal)
	return j.loadLines()
}

// Name returns the journal's id, jnl_….
func (j *Journal) Name() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.head.Journal
}

// LineSpan returns the number of the first line that the journal still has, and the number of the last line on disk. If the journal
// has no lines, first is last + 1.
func (j *Journal) LineSpan() (first, last uint64) {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.acked + 1, j.durable
}

// Changed returns a channel that is closed when more lines are on disk.
func (j *Journal) Changed() <-chan struct{} {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.changed
}

// IsFull reports whether unacknowledged lines use more than the journal's limit. The proxy must then begin no request that adds a
// line.
func (j *Journal) IsFull() bool {
	j.mu.Lock()
	defer j.mu.Unlock()
	return j.unacknowledgedBytes() > j.store.maxBytes
}

// unacknowledgedBytes returns the number of bytes of lines that were not acknowledged. The caller holds j.mu.
func (j *Journal) unacknowledgedBytes() int64 {
	n := int64(len(j.pending))
	if len(j.ends) > 0 {
		n += j.ends[len(j.ends)-1]
		if k := int(j.acked - j.head.Base); k > 0 { //nolint:gosec // within ends
			n -= j.ends[k-1]
		}
	}
	return n
}

// AddModelCall adds a line about a model call to the journal, and sets the name of the journal and the line's number in data.
func (j *Journal) AddModelCall(at time.Time, execution string, data events.ModelCalled) error {
	j.mu.Lock()
	defer j.mu.Unlock()
	data.Journal, data.Line = j.head.Journal, j.last+1
	return j.addLine(at, execution, data)
}

// addLine numbers a line and adds it to the lines that the Store writes to disk later. The caller holds j.mu.
func (j *Journal) addLine(at time.Time, execution string, data events.Payload) error {
	raw, err := json.Marshal(data)
	if err != nil {
		return fmt.Errorf("journal line: %w", err)
	}
	raw, err = json.Marshal(api.JournalLine{N: j.last + 1, Type: data.EventType(), Time: at.UTC(), Execution: execution, Data: raw})
	if err != nil {
		return fmt.Errorf("journal line: %w", err)
	}
	j.last++
	j.pending = append(append(j.pending, raw...), '\n')
	j.lengths = append(j.lengths, len(raw)+1)
	j.store.markDirty(j)
	return nil
}

// flushLines writes the pending lines to the journal's file and syncs the file.
func (j *Journal) flushLines() error {
	j.file.Lock()
	defer j.file.Unlock()
	j.mu.Lock()
	buf, lengths := j.pending, j.lengths
	at := j.fileEnd()
	j.mu.Unlock()
	if len(buf) == 0 {
		return nil
	}
	if err := j.writeAndSync(buf, at); err != nil {
		return fmt.Errorf("write journal in %s: %w", j.dir, err)
	}
	j.mu.Lock()
	defer j.mu.Unlock()
	for _, n := range lengths {
		at += int64(n)
		j.ends = append(j.ends, at)
	}
	j.durable += uint64(len(lengths))
	j.pending, j.lengths = append([]byte(nil), j.pending[len(buf):]...), append([]int(nil), j.lengths[len(lengths):]...)
	close(j.changed)
	j.changed = make(chan struct{})
	return nil
}

// fileEnd returns the offset at which the next line is written to the file. The caller holds j.mu.
func (j *Journal) fileEnd() int64 {
	if len(j.ends) == 0 {
		return 0
	}
	return j.ends[len(j.ends)-1]
}

// writeAndSync writes buf to the file at an offset, over bytes that an earlier failed write may have left there, and syncs the
// file.
func (j *Journal) writeAndSync(buf []byte, at int64) error {
	f, err := os.OpenFile(filepath.Join(j.dir, linesFile), os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return err
	}
	_, err = f.WriteAt(buf, at)
	if err == nil {
		err = f.Sync()
	}
	return errors.Join(err, f.Close())
}

// ReadLines returns lines after a line number, each with its newline, and the number of the last of them. It returns no lines if
// there are none on disk yet.
func (j *Journal) ReadLines(after uint64) ([]byte, uint64, error) {
	j.file.Lock()
	defer j.file.Unlock()
	j.mu.Lock()
	after = max(after, j.acked)
	if after >= j.durable {
		j.mu.Unlock()
		return nil, after, nil
	}
	i := int(after - j.head.Base) //nolint:gosec // at most len(ends)
	var from int64
	if i > 0 {
		from = j.ends[i-1]
	}
	to := j.ends[i]
	for i++; i < len(j.ends) && j.ends[i]-from <= maxReadBytes; i++ {
		to = j.ends[i]
	}
	last := j.head.Base + uint64(i) //nolint:gosec // an index
	j.mu.Unlock()

	f, err := os.Open(filepath.Join(j.dir, linesFile))
	if err != nil {
		return nil, after, fmt.Errorf("read journal: %w", err)
	}
	defer f.Close() //nolint:errcheck // only read
	buf := make([]byte, to-from)
	if _, err := f.ReadAt(buf, from); err != nil {
		return nil, after, fmt.Errorf("read journal in %s: %w", j.dir, err)
	}
	return buf, last, nil
}

// AheadError is returned for the acknowledgement of a line that is not on disk yet.
type AheadError struct{ Line, Last uint64 }

func (e *AheadError) Error() string {
	return fmt.Sprintf("line %d is acknowledged, but the last one is %d", e.Line, e.Last)
}

// AckLines acknowledges the lines up to the number n, so that the journal removes them. A lower number than before changes nothing. The
// error is an *AheadError or an error of the disk.
func (j *Journal) AckLines(n uint64) error {
	j.file.Lock()
	defer j.file.Unlock()
	j.mu.Lock()
	defer j.mu.Unlock()
	if n > j.durable {
		return &AheadError{Line: n, Last: j.durable}
	}
	if n <= j.acked {
		return nil
	}
	j.acked = n
	k := int(j.acked - j.head.Base) //nolint:gosec // at most len(ends)
	cut := j.ends[k-1]
	if cut < trimThreshold {
		return nil
	}
	return j.trimLines(k, cut)
}

// trimLines removes the first k lines, which have cut bytes, from the file. It writes the head first, so that no line number is
// used twice. The caller holds both locks of the journal.
func (j *Journal) trimLines(k int, cut int64) error {
	path := filepath.Join(j.dir, linesFile)
	raw, err := os.ReadFile(path)
	if err != nil {
		return fmt.Errorf("trim journal: %w", err)
	}
	if int64(len(raw)) < j.fileEnd() {
		return fmt.Errorf("trim journal in %s: the file has %d bytes instead of %d", j.dir, len(raw), j.fileEnd())
	}
	old := j.head.Base
	j.head.Base = j.acked
	if err := j.writeHead(); err != nil {
		j.head.Base = old
		return fmt.Errorf("trim journal: %w", err)
	}
	rest := make([]int64, 0, len(j.ends)-k)
	for _, e := range j.ends[k:] {
		rest = append(rest, e-cut)
	}
	if err := WriteFile(path, raw[cut:j.fileEnd()]); err != nil {
		j.head.Base = old // the file is unchanged, and the head on disk says how many lines to skip
		return fmt.Errorf("trim journal: %w", err)
	}
	j.ends = rest
	return nil
}

// WriteFile replaces a file atomically. The file is on disk when WriteFile returns.
func WriteFile(path string, data []byte) error {
	dir := filepath.Dir(path)
	tmp, err := os.CreateTemp(dir, ".tmp-")
	if err != nil {
		return err
	}
	_, err = tmp.Write(data)
	if err == nil {
		err = tmp.Sync()
	}
	if err = errors.Join(err, tmp.Close()); err == nil {
		err = os.Rename(tmp.Name(), path)
	}
	if err != nil {
		return errors.Join(err, os.Remove(tmp.Name()))
	}
	return SyncDir(dir)
}

// SyncDir syncs the entries of a folder to disk.
func SyncDir(dir string) error {
	d, err := os.Open(dir)
	if err != nil {
		return err
	}
	return errors.Join(d.Sync(), d.Close())
}
