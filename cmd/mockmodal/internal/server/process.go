package server

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/spoolhq/spool/cmd/mockmodal/internal/guest"
)

// sandboxProcess is a process in a sandbox: its entrypoint, or one that a client has started with exec.
type sandboxProcess struct {
	conn    net.Conn
	sending sync.Mutex // held while a frame is sent

	stdin          *inputQueue
	stdout, stderr *outputLog
	window         chan struct{} // a slot for each FrameStdin that is not confirmed

	done  chan struct{} // closed when exit is set
	exit  guest.ExitResult
	ended chan struct{} // closed when the streams have ended too
}

// startProcess starts a process in a container. It stores the output of the process in files whose names begin with
// prefix.
func startProcess(ctx context.Context, b *sandboxContainer, spec guest.ExecSpec, prefix string) (*sandboxProcess, error) {
	conn, err := b.dialGuest(ctx, guest.Request{Exec: &spec})
	if err != nil {
		return nil, err
	}
	p := &sandboxProcess{
		conn: conn, stdin: newInputQueue(), stdout: newOutputLog(prefix + ".stdout"), stderr: newOutputLog(prefix + ".stderr"),
		window: make(chan struct{}, guest.MaxUnconfirmedStdin), done: make(chan struct{}), ended: make(chan struct{}),
	}
	reader := bufio.NewReaderSize(conn, 64<<10)
	kind, data, err := guest.ReadFrame(reader)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if kind == guest.FrameExited { // the process did not start
		p.setExit(data)
		if err := p.stderr.append([]byte(p.exit.Error + "\n")); err != nil {
			return nil, err
		}
		p.closeStreams()
		return p, nil
	}
	if spec.DiscardStdout {
		p.stdout.end()
	}
	if spec.DiscardStderr || spec.StderrToStdout {
		p.stderr.end()
	}
	go p.readFrames(reader)
	go p.writeInput()
	return p, nil
}

// readFrames handles the frames that the guest sends about the process, until the process and its streams have ended.
// If the connection ends before that, the container is gone.
func (p *sandboxProcess) readFrames(reader io.Reader) {
	defer p.closeStreams()
	for {
		kind, data, err := guest.ReadFrame(reader)
		if err != nil {
			return
		}
		switch kind {
		case guest.FrameStdout:
			err = p.stdout.appendOrEnd(data)
		case guest.FrameStderr:
			err = p.stderr.appendOrEnd(data)
		case guest.FrameStdinRead:
			<-p.window
		case guest.FrameExited:
			p.setExit(data)
		}
		if err != nil { // the data folder is full or gone
			p.kill()
			return
		}
	}
}

// setExit sets p.exit from the data of a FrameExited.
func (p *sandboxProcess) setExit(data []byte) {
	if err := json.Unmarshal(data, &p.exit); err != nil {
		p.exit = guest.ExitResult{Code: 1, Error: err.Error()}
	}
	close(p.done)
	p.stdin.discardAll()
}

// closeStreams ends the output streams of the process. Without a FrameExited the container is gone, and closeStreams
// sets p.exit to signal 9.
func (p *sandboxProcess) closeStreams() {
	select {
	case <-p.done:
	default:
		p.exit = guest.ExitResult{Signal: 9}
		close(p.done)
	}
	_ = p.conn.Close() // the guest has nothing more to say
	p.stdout.end()
	p.stderr.end()
	p.stdin.discardAll()
	close(p.ended)
}

// kill asks the guest to kill the process group.
func (p *sandboxProcess) kill() { _ = p.sendFrame(guest.FrameKill, nil) }

// killAfter kills the process if it has not ended within d.
func (p *sandboxProcess) killAfter(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		p.kill()
	}
}

// sendFrame sends a frame about the process to the guest.
func (p *sandboxProcess) sendFrame(kind guest.FrameKind, data []byte) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return guest.WriteFrame(p.conn, kind, data)
}

// writeInput sends the queued input of the process to the guest, until the input ends.
func (p *sandboxProcess) writeInput() {
	for {
		data, more := p.stdin.take()
		select {
		case p.window <- struct{}{}:
		case <-p.ended:
			return
		}
		if err := p.sendFrame(guest.FrameStdin, data); err != nil || !more {
			return
		}
	}
}

// maxQueuedInput is the number of bytes of input that are accepted before the process reads
// them.
const (
	maxQueuedInput = 1 << 20
	maxInputFrame  = 64 << 10
)

// inputQueue buffers input for the standard input of a process. Each write states the offset of its data in the input,
// so that a repeated write has no effect.
type inputQueue struct {
	mu       sync.Mutex
	changed  chan struct{} // closed and replaced at every change
	accepted uint64        // bytes
	pending  []byte
	closed   bool // the end of the input was accepted
	gone     bool // no process reads any more
	stream   context.CancelFunc
}

func newInputQueue() *inputQueue { return &inputQueue{changed: make(chan struct{})} }

// wakeWaiters wakes the callers that wait for a change of the queue. The caller must hold mu.
func (q *inputQueue) wakeWaiters() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// write appends data that begins at an offset of the input. It blocks while the queue is full because the process does
// not read.
func (q *inputQueue) write(ctx context.Context, offset uint64, data []byte, eof bool) error {
	for {
		wait, err := q.appendWithinLimit(offset, data, eof)
		if wait == nil {
			return err
		}
		select {
		case <-ctx.Done():
			return status.FromContextError(ctx.Err()).Err()
		case <-wait:
		}
	}
}

// appendWithinLimit appends as much of the data as the queue has room for. If data is left, it returns a channel that
// is closed when the queue changes, and the caller tries again.
func (q *inputQueue) appendWithinLimit(offset uint64, data []byte, eof bool) (<-chan struct{}, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if offset > q.accepted {
		return nil, status.Errorf(codes.InvalidArgument, "offset beyond received bytes: %d of %d", offset, q.accepted)
	}
	rest := data[min(q.accepted-offset, uint64(len(data))):]
	if len(rest) > 0 && (q.closed || q.gone) {
		return nil, status.Error(codes.FailedPrecondition, "stdin is closed")
	}
	if room := min(maxQueuedInput-len(q.pending), len(rest)); room > 0 {
		q.pending = append(q.pending, rest[:room]...)
		q.accepted += uint64(room)
		rest = rest[room:]
		q.wakeWaiters()
	}
	if len(rest) > 0 {
		return q.changed, nil
	}
	if eof && !q.closed {
		q.closed = true
		q.wakeWaiters()
	}
	return nil, nil
}

// take blocks until the queue has input, and removes and returns a part of it. At the end of the input it returns
// false.
func (q *inputQueue) take() ([]byte, bool) {
	for {
		q.mu.Lock()
		if n := min(len(q.pending), maxInputFrame); n > 0 && !q.gone {
			data := q.pending[:n:n]
			q.pending = q.pending[n:]
			q.wakeWaiters()
			q.mu.Unlock()
			return data, true
		}
		if q.closed || q.gone {
			q.mu.Unlock()
			return nil, false
		}
		wait := q.changed
		q.mu.Unlock()
		<-wait
	}
}

// discardAll drops all queued input. It is called when the process no longer reads.
func (q *inputQueue) discardAll() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.gone, q.pending = true, nil
	q.wakeWaiters()
}

// inputStatus returns how many bytes of input were accepted, and whether the input has ended.
func (q *inputQueue) inputStatus() (uint64, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.accepted, q.closed
}

// replaceWriter cancels the stream that writes to the queue, if there is one. If cancel is not nil, the caller's stream
// becomes the new writer, which the next call cancels with it.
func (q *inputQueue) replaceWriter(cancel context.CancelFunc) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.stream != nil {
		q.stream()
	}
	q.stream = cancel
}

// outputLog stores everything that a process writes to its standard output or its standard error in a file. The file is
// created with the first byte.
type outputLog struct {
	path string

	mu      sync.Mutex
	changed chan struct{} // closed and replaced at every change
	file    *os.File
	size    uint64
	ended   bool
}

func newOutputLog(path string) *outputLog {
	return &outputLog{path: path, changed: make(chan struct{})}
}

// appendOrEnd appends data to the log. If data is empty, it ends the log.
func (l *outputLog) appendOrEnd(data []byte) error {
	if len(data) == 0 {
		l.end()
		return nil
	}
	return l.append(data)
}

// append writes data to the file and wakes the readers of the log.
func (l *outputLog) append(data []byte) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.file == nil {
		file, err := os.OpenFile(l.path, os.O_WRONLY|os.O_CREATE|os.O_TRUNC, 0o600)
		if err != nil {
			return err
		}
		l.file = file
	}
	n, err := l.file.Write(data)
	l.size += uint64(n)
	close(l.changed)
	l.changed = make(chan struct{})
	return err
}

// end ends the log, so that its readers return after the last byte. It may be called more than once.
func (l *outputLog) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	l.ended = true
	if l.file != nil {
		_ = l.file.Close() // readers only get what was written
	}
	close(l.changed)
}

// maxOutputChunk is the maximum number of bytes of output in one message to a client.
const maxOutputChunk = 256 << 10

// read calls send for all output from an offset on, and returns when the output ends.
func (l *outputLog) read(ctx context.Context, offset uint64, send func(offset uint64, data []byte) error) error {
	var file *os.File
	defer func() {
		if file != nil {
			_ = file.Close() // read only
		}
	}()
	for {
		l.mu.Lock()
		size, ended, changed := l.size, l.ended, l.changed
		l.mu.Unlock()
		if offset > size && ended {
			return status.Errorf(codes.InvalidArgument, "offset %d is beyond the end of the output, %d", offset, size)
		}
		if offset >= size {
			if ended {
				return nil
			}
			select {
			case <-ctx.Done():
				return status.FromContextError(ctx.Err()).Err()
			case <-changed:
			}
			continue
		}
		if file == nil {
			var err error
			if file, err = os.Open(l.path); err != nil {
				return status.Errorf(codes.NotFound, "the output is gone: %v", err)
			}
		}
		data := make([]byte, min(size-offset, maxOutputChunk))
		if _, err := file.ReadAt(data, int64(offset)); err != nil {
			return status.Errorf(codes.Internal, "read the output: %v", err)
		}
		if err := send(offset, data); err != nil {
			return err
		}
		offset += uint64(len(data))
	}
}
