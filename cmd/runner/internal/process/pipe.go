package process

import (
	"bufio"
	"bytes"
	"errors"
	"io"
	"os"
	"sync"
	"time"
)

// stderrTailSize is the number of bytes of standard error that are kept to explain why a process exited.
const stderrTailSize = 4 << 10

// Limits of what is read from a pipe after the process has ended, because a descendant may print for ever. A pipe holds at most 1 MiB by default.
const (
	maxBytesAfterExit = 1 << 20
	maxWaitAfterExit  = 3 * time.Second // the sum of the times for which reads wait
)

// pipeReader reads the lines that a process prints to a pipe.
type pipeReader struct {
	file   *os.File
	stream Stream
	p      *Process

	bytesAfterExit  int
	waitedAfterExit time.Duration
}

// Read reads from the pipe. It returns io.EOF at the end of the pipe, or when the process has ended and nothing arrived
// for drainTimeAfterExit, or a limit of what is read after its end is reached.
func (r *pipeReader) Read(b []byte) (int, error) {
	for {
		afterExit := r.p.gone.Load()
		if afterExit {
			if r.bytesAfterExit >= maxBytesAfterExit || r.waitedAfterExit >= maxWaitAfterExit {
				return 0, io.EOF
			}
			if err := r.file.SetReadDeadline(time.Now().Add(drainTimeAfterExit)); err != nil {
				return 0, err
			}
		}
		start := time.Now()
		n, err := r.file.Read(b)
		if afterExit {
			r.bytesAfterExit += n
			r.waitedAfterExit += time.Since(start)
		}
		if n == 0 && errors.Is(err, os.ErrDeadlineExceeded) {
			if !afterExit {
				continue // the process ended meanwhile: read what it left
			}
			return 0, io.EOF
		}
		return n, err
	}
}

// sendLines sends the lines of the pipe to the channel of Process.Lines until the pipe ends. A line longer than limit
// is cut; text without a newline at the end is a line.
func (r *pipeReader) sendLines(limit int) {
	in := bufio.NewReaderSize(r, 64<<10)
	var data []byte
	var size int64
	for {
		piece, err := in.ReadSlice('\n')
		size += int64(len(piece))
		data = append(data, piece[:min(len(piece), limit-len(data))]...)
		if errors.Is(err, bufio.ErrBufferFull) {
			continue
		}
		if size > 0 && !r.sendLine(data, size) {
			return
		}
		if err != nil {
			if !errors.Is(err, io.EOF) {
				r.p.group.log.Error("read an agent's pipe", "stream", r.stream, "err", err)
			}
			return
		}
		data, size = nil, 0
	}
}

// sendLine sends a line to the channel of Process.Lines. It returns false if the process is being ended.
func (r *pipeReader) sendLine(data []byte, size int64) bool {
	cut := size > int64(len(data))
	if !cut {
		data = bytes.TrimRight(data, "\r\n")
		size = int64(len(data))
	}
	if r.stream == Stderr {
		r.p.tail.addLine(data)
	}
	select {
	case r.p.lines <- Line{Stream: r.stream, Data: data, Size: size}:
		return true
	case <-r.p.halt:
		return false
	}
}

// outputTail holds the last stderrTailSize bytes of a process's standard error.
type outputTail struct {
	mu  sync.Mutex
	end []byte
}

// addLine appends a line and drops the oldest bytes beyond stderrTailSize.
func (t *outputTail) addLine(line []byte) {
	t.mu.Lock()
	defer t.mu.Unlock()
	t.end = append(append(t.end, line...), '\n')
	over := len(t.end) - stderrTailSize
	if over <= 0 {
		return
	}
	// Cut at the beginning of a word: half of a secret would not be found and redacted.
	rest := t.end[over:]
	if end := bytes.IndexAny(rest, " \n"); end >= 0 && end < len(rest)-1 {
		rest = rest[end+1:]
	}
	t.end = bytes.Clone(rest)
}

// String returns the kept text as valid UTF-8.
func (t *outputTail) String() string {
	t.mu.Lock()
	defer t.mu.Unlock()
	return string(bytes.TrimSpace(bytes.ToValidUTF8(t.end, []byte("\uFFFD"))))
}

// lineQueue writes lines to the stdin of a process in a goroutine, so that senders never wait for the process.
type lineQueue struct {
	file   *os.File
	mu     sync.Mutex
	lines  [][]byte
	wake   chan struct{} // holds one token while there is something to do
	closed bool
}

// newLineQueue returns an empty lineQueue for the pipe f.
func newLineQueue(f *os.File) *lineQueue { return &lineQueue{file: f, wake: make(chan struct{}, 1)} }

// addLine queues a line. It drops the line if the queue is closed.
func (q *lineQueue) addLine(line []byte) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.lines = append(q.lines, line)
		q.wakeWriter()
	}
}

// close makes writeLines close the pipe after the queued lines. It does not wait for that.
func (q *lineQueue) close() {
	q.mu.Lock()
	defer q.mu.Unlock()
	if !q.closed {
		q.closed = true
		q.wakeWriter()
	}
}

// wakeWriter wakes the goroutine that runs writeLines, if the goroutine waits for lines.
func (q *lineQueue) wakeWriter() {
	select {
	case q.wake <- struct{}{}:
	default:
	}
}

// writeLines writes queued lines until the queue is closed. It returns false if the process has closed its stdin before.
func (q *lineQueue) writeLines() bool {
	defer q.file.Close() //nolint:errcheck // a broken pipe shows as the process's exit
	for range q.wake {
		q.mu.Lock()
		lines, closed := q.lines, q.closed
		q.lines = nil
		q.mu.Unlock()
		for _, line := range lines {
			if _, err := q.file.Write(line); err != nil {
				q.close()
				return false
			}
		}
		if closed {
			return true
		}
	}
	return true
}
