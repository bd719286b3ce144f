package link

import (
	"bytes"
	"io"
	"sync"

	"github.com/spoolhq/spool/pkg/runner"
)

// queueBytes is the size limit in bytes of the items in an itemQueue. While the queue is full, the Link reads no further lines from the
// runner.
const queueBytes = 2 * runner.MaxLineLength

// maxGarbageBytes is the number of bytes at the beginning of a line that is not a journal line which JournalItem.Garbage keeps.
const maxGarbageBytes = 2 << 10

// JournalItem is a journal line of the runner, or the beginning of a line that could not be decoded.
type JournalItem struct {
	Line    *runner.JournalLine // nil for a line that cannot be read
	Garbage string              // the beginning of such a line
	TooLong bool                // the line was longer than runner.MaxLineLength
}

// itemQueue holds items that were received and not read yet, in order. push blocks while the queue is full.
type itemQueue struct {
	ready chan struct{}

	mu     sync.Mutex
	room   *sync.Cond
	items  []JournalItem
	sizes  []int
	bytes  int
	closed bool
}

func newItemQueue() *itemQueue {
	q := &itemQueue{ready: make(chan struct{}, 1)}
	q.room = sync.NewCond(&q.mu)
	return q
}

// push adds an item of the given size. It blocks while the queue is full, and returns false if the queue was closed.
func (q *itemQueue) push(it JournalItem, size int) bool {
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

// pop removes and returns the first item, and false if the queue is empty.
func (q *itemQueue) pop() (JournalItem, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if len(q.items) == 0 {
		return JournalItem{}, false
	}
	it := q.items[0]
	q.items[0] = JournalItem{}
	q.bytes -= q.sizes[0]
	q.items, q.sizes = q.items[1:], q.sizes[1:]
	q.room.Signal()
	return it, true
}

// close ends a blocked push, and makes every later one return false.
func (q *itemQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.closed = true
	q.room.Broadcast()
}

const (
	// initialBufferBytes is the size of a lineReader's buffer at the start, and again after a long line.
	initialBufferBytes = 2 << 10
	// maxKeptBufferBytes is the size of the largest buffer that a lineReader keeps while it waits for a line. Long lines are rare, and an
	// executor has a thousand sessions.
	maxKeptBufferBytes = 4 << 10
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

// readLine returns the next line without its newline. cut is true if the line was longer than the limit. A last line without a newline is
// returned together with io.EOF. The line is valid until the next call of readLine.
func (l *lineReader) readLine() (line []byte, cut bool, err error) {
	for {
		if i := bytes.IndexByte(l.buf[l.scanned:l.end], '\n'); i >= 0 {
			i += l.scanned
			line, cut = l.lineUntil(i)
			l.start, l.scanned = i+1, i+1
			return line, cut, nil
		}
		l.scanned = l.end
		if l.end-l.start > l.limit {
			return l.cutLine()
		}
		if l.err != nil {
			line, cut = l.lineUntil(l.end)
			l.start = l.end
			return line, cut, l.err
		}
		l.fillBuffer()
	}
}

// lineUntil returns the line in the buffer that ends at the index end. cut is true if the line was cut to the limit.
func (l *lineReader) lineUntil(end int) (line []byte, cut bool) {
	line = l.buf[l.start:end]
	if cut = len(line) > l.limit; cut {
		line = line[:l.limit]
	}
	return bytes.TrimRight(line, "\r\n"), cut
}

// cutLine returns the beginning of a line that is longer than the limit, and skips the rest of the line in the stream.
func (l *lineReader) cutLine() (line []byte, cut bool, err error) {
	line = bytes.TrimRight(bytes.Clone(l.buf[l.start:l.start+l.limit]), "\r\n")
	for {
		l.start, l.scanned = l.end, l.end
		if l.err != nil {
			return line, true, l.err
		}
		l.fillBuffer()
		if i := bytes.IndexByte(l.buf[l.start:l.end], '\n'); i >= 0 {
			l.start += i + 1
			l.scanned = l.start
			return line, true, nil
		}
	}
}

// fillBuffer reads from the stream into the buffer. It first enlarges a full buffer.
func (l *lineReader) fillBuffer() {
	switch {
	case l.start == l.end && cap(l.buf) > maxKeptBufferBytes, l.buf == nil:
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
