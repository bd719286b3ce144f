package link

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"sync"

	"github.com/spoolhq/spool/pkg/runner"
)

// queueBytes is the size of journal lines that the queue holds. While it is full, the runner has to wait.
const queueBytes = 2 * runner.MaxLine

// garbageKept is the part of an unreadable line that is passed on, in bytes.
const garbageKept = 2 << 10

// Item is a journal line, or the beginning of a line that cannot be read, for the log.
type Item struct {
	Line    *runner.Line // nil for a line that cannot be read
	Garbage string       // the beginning of such a line
	TooLong bool         // the line was longer than runner.MaxLine
}

// queue holds items in order. push blocks while the queue is full.
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

// push returns false if the queue was closed.
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

// lineReader splits a stream into lines of at most limit bytes. It skips the rest of a longer line.
type lineReader struct {
	r     *bufio.Reader
	limit int
}

func newLineReader(r io.Reader, limit int) *lineReader {
	return &lineReader{bufio.NewReaderSize(r, 64<<10), limit}
}

// next returns a line without its newline, and whether it was cut. A last line without a newline is returned with
// io.EOF.
func (l *lineReader) next() (line []byte, cut bool, err error) {
	for {
		piece, err := l.r.ReadSlice('\n')
		if room := l.limit - len(line); len(piece) > room+1 {
			cut = true
			line = append(line, piece[:max(room, 0)]...)
		} else {
			line = append(line, piece...)
		}
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		return bytes.TrimRight(line, "\r\n"), cut, err
	}
}
