package link

import (
	"bytes"
	"io"
	"sync"

	"github.com/spoolhq/spool/pkg/runner"
)

// queueBytes is the size in bytes of the journal lines that a queue holds. While it is full, no further lines are read
// from the runner.
const queueBytes = 2 * runner.MaxLineLength

// garbageKept is the number of bytes at the beginning of an unreadable line that Item.Garbage has.
const garbageKept = 2 << 10

// Item is a journal line of the runner, or the beginning of a line that could not be decoded.
type Item struct {
	Line    *runner.JournalLine // nil for a line that cannot be read
	Garbage string              // the beginning of such a line
	TooLong bool                // the line was longer than runner.MaxLineLength
}

// queue holds the items that were received and not taken yet, in order. push blocks while the queue is full.
type queue struct {
	ready chan struct{}

	mu     sync.Mutex
	room   *sync.Cond
	items  []Item
	sizes  []int
	bytes  int
	closed bool
}

func newQueue() *queue {
	q := &queue{ready: make(chan struct{}, 1)}
	q.room = sync.NewCond(&q.mu)
	return q
}

// push adds an item. It blocks while the queue is full, and returns false if the queue was closed.
func (q *queue) push(it Item, size int) bool {
	q.mu.Lock()
	defer q.mu.Unlock()
	for q.bytes >= queueBytes && !q.closed {
		q.room.Wait()
	}
	if q.closed {
		return false
	}
	q.items, q.sizes, q.bytes = append(q.items, it), append(q.sizes, size), q.bytes+size
	select {
	case q.ready <- struct{}{}:
	default:
	}
	return true
}

func (q *queue) pop() (Item, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == 0 {
		return Item{}, false
	}
	it := q.items[0]
	q.items[0] = Item{}
	q.bytes -= q.sizes[0]
	q.items, q.sizes = q.items[1:], q.sizes[1:]
	q.room.Signal()
	return it, true
}

func (q *queue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.room.Broadcast()
}

const (
	// firstBuffer is the size of a lineReader's buffer at first, and again after a long line.
	firstBuffer = 2 << 10
	// keptBuffer is the largest buffer that a lineReader keeps while it waits for a line. A session writes long lines rarely, and an
	// executor has a thousand sessions.
	keptBuffer = 4 << 10
	// maxEmptyReads is the maximum number of consecutive reads of a stream that return neither bytes nor an error.
	maxEmptyReads = 100
)

// lineReader splits a stream into lines of at most limit bytes. It skips the rest of a longer line. Its buffer grows to the length of the
// line that it reads.
type lineReader struct {
	r       io.Reader
	limit   int
	first   int    // size of the buffer at first
	buf     []byte // buf[start:end] is what was read and not returned
	start   int
	end     int
	scanned int // buf[start:scanned] has no newline
	err     error
}

func newLineReader(r io.Reader, limit, first int) *lineReader {
	return &lineReader{r: r, limit: limit, first: first}
}

// readLine returns the next line without its newline, and whether it was cut. A last line without a newline is returned
// with io.EOF. The line is valid until the next call of readLine.
func (l *lineReader) readLine() (line []byte, cut bool, err error) {
	for {
		if i := bytes.IndexByte(l.buf[l.scanned:l.end], '\n'); i >= 0 {
			i += l.scanned
			line, cut = l.line(i)
			l.start, l.scanned = i+1, i+1
			return line, cut, nil
		}
		l.scanned = l.end
		if l.end-l.start > l.limit {
			return l.cutLine()
		}
		if l.err != nil {
			line, cut = l.line(l.end)
			l.start = l.end
			return line, cut, l.err
		}
		l.read()
	}
}

// line returns the line that begins at l.start and ends at end. cut reports whether it was cut to the limit.
func (l *lineReader) line(end int) (line []byte, cut bool) {
	line = l.buf[l.start:end]
	if cut = len(line) > l.limit; cut {
		line = line[:l.limit]
	}
	return bytes.TrimRight(line, "\r\n"), cut
}

// cutLine returns the beginning of a line that is too long and whose newline was not read yet, and skips the rest.
func (l *lineReader) cutLine() (line []byte, cut bool, err error) {
	line = bytes.TrimRight(bytes.Clone(l.buf[l.start:l.start+l.limit]), "\r\n")
	for {
		l.start, l.scanned = l.end, l.end
		if l.err != nil {
			return line, true, l.err
		}
		l.read()
		if i := bytes.IndexByte(l.buf[l.start:l.end], '\n'); i >= 0 {
			l.start += i + 1
			l.scanned = l.start
			return line, true, nil
		}
	}
}

// read reads from the stream into the buffer, which it makes larger if it is full.
func (l *lineReader) read() {
	switch {
	case l.start == l.end && cap(l.buf) > keptBuffer, l.buf == nil:
		l.buf, l.start, l.end, l.scanned = make([]byte, l.first), 0, 0, 0
	case l.end == len(l.buf) && l.start > len(l.buf)/2, l.start == l.end:
		copy(l.buf, l.buf[l.start:l.end])
		l.start, l.end, l.scanned = 0, l.end-l.start, l.scanned-l.start
	case l.end == len(l.buf):
		larger := make([]byte, min(4*len(l.buf), l.limit+l.first))
		copy(larger, l.buf[l.start:l.end])
		l.buf, l.start, l.end, l.scanned = larger, 0, l.end-l.start, l.scanned-l.start
	}
	for range maxEmptyReads {
		n, err := l.r.Read(l.buf[l.end:])
		l.end += n
		if l.err = err; n > 0 || err != nil {
			return
		}
	}
	l.err = io.ErrNoProgress
}
