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

// process is an exec of a sandbox, or its entrypoint.
type process struct {
	conn    net.Conn
	sending sync.Mutex // serialises frames

	stdin          *inputQueue
	stdout, stderr *outputLog
	window         chan struct{} // a slot for each Stdin frame that is not confirmed

	done  chan struct{} // closed when exit is set
	exit  guest.Exit
	ended chan struct{} // closed when the streams have ended too
}

// startProcess starts a process in a container. It stores the process's output in files whose names begin with prefix.
func startProcess(ctx context.Context, b *sandboxContainer, spec guest.Exec, prefix string) (*process, error) {
	conn, err := b.dial(ctx, guest.Request{Exec: &spec})
	if err != nil {
		return nil, err
	}
	p := &process{
		conn: conn, stdin: newInputQueue(), stdout: newOutputLog(prefix + ".stdout"), stderr: newOutputLog(prefix + ".stderr"),
		window: make(chan struct{}, guest.StdinWindow), done: make(chan struct{}), ended: make(chan struct{}),
	}
	reader := bufio.NewReaderSize(conn, 64<<10)
	kind, data, err := guest.ReadFrame(reader)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if kind == guest.Exited { // it did not start
		p.finish(data)
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

// readFrames handles the guest's frames about the process, until the process and its streams have ended. If the
// connection ends before that, the container is gone.
func (p *process) readFrames(reader io.Reader) {
	defer p.closeStreams()
	for {
		kind, data, err := guest.ReadFrame(reader)
		if err != nil {
			return
		}
		switch kind {
		case guest.Stdout:
			err = p.stdout.receive(data)
		case guest.Stderr:
			err = p.stderr.receive(data)
		case guest.StdinRead:
			<-p.window
		case guest.Exited:
			p.finish(data)
		}
		if err != nil { // the data folder is full or gone
			p.kill()
			return
		}
	}
}

// finish sets p.exit from the data of an Exited frame.
func (p *process) finish(data []byte) {
	if err := json.Unmarshal(data, &p.exit); err != nil {
		p.exit = guest.Exit{Code: 1, Error: err.Error()}
	}
	close(p.done)
	p.stdin.discard()
}

// closeStreams ends the streams of the process. If no Exited frame has arrived, the container is gone, and closeStreams
// sets p.exit to signal 9.
func (p *process) closeStreams() {
	select {
	case <-p.done:
	default:
		p.exit = guest.Exit{Signal: 9}
		close(p.done)
	}
	_ = p.conn.Close() // the guest has nothing more to say
	p.stdout.end()
	p.stderr.end()
	p.stdin.discard()
	close(p.ended)
}

// kill requests that the guest kill the process group.
func (p *process) kill() { _ = p.send(guest.Kill, nil) }

// killAfter kills the process if it has not ended within d.
func (p *process) killAfter(d time.Duration) {
	timer := time.NewTimer(d)
	defer timer.Stop()
	select {
	case <-p.done:
	case <-timer.C:
		p.kill()
	}
}

// send writes a frame to the guest.
func (p *process) send(kind guest.Kind, data []byte) error {
	p.sending.Lock()
	defer p.sending.Unlock()
	return guest.WriteFrame(p.conn, kind, data)
}

// writeInput sends the input to the guest until its end.
func (p *process) writeInput() {
	for {
		data, more := p.stdin.take()
		select {
		case p.window <- struct{}{}:
		case <-p.ended:
			return
		}
		if err := p.send(guest.Stdin, data); err != nil || !more {
			return
		}
	}
}

// inputLimit is the number of bytes of input that are accepted before the process reads
// them.
const (
	inputLimit = 1 << 20
	inputFrame = 64 << 10
)

// inputQueue holds input for the standard input of a process. A writer states the offset at which its data begins, so
// that a repeated write has no effect.
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

// notify wakes the callers that wait for a change of the queue. The caller must hold mu.
func (q *inputQueue) notify() {
	close(q.changed)
	q.changed = make(chan struct{})
}

// write accepts data that begins at an offset. It blocks while the process does
// not read.
func (q *inputQueue) write(ctx context.Context, offset uint64, data []byte, eof bool) error {
	for {
		wait, err := q.accept(offset, data, eof)
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

// accept appends as much of the data as the queue has room for. If some is left, it returns a channel that is closed
// when the queue changes; the caller then tries again.
func (q *inputQueue) accept(offset uint64, data []byte, eof bool) (<-chan struct{}, error) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if offset > q.accepted {
		return nil, status.Errorf(codes.InvalidArgument, "offset beyond received bytes: %d of %d", offset, q.accepted)
	}
	rest := data[min(q.accepted-offset, uint64(len(data))):]
	if len(rest) > 0 && (q.closed || q.gone) {
		return nil, status.Error(codes.FailedPrecondition, "stdin is closed")
	}
	if room := min(inputLimit-len(q.pending), len(rest)); room > 0 {
		q.pending = append(q.pending, rest[:room]...)
		q.accepted += uint64(room)
		rest = rest[room:]
		q.notify()
	}
	if len(rest) > 0 {
		return q.changed, nil
	}
	if eof && !q.closed {
		q.closed = true
		q.notify()
	}
	return nil, nil
}

// take blocks until the queue has input, and removes and returns a part of it. At the end of the input it returns
// false.
func (q *inputQueue) take() ([]byte, bool) {
	for {
		q.mu.Lock()
		if n := min(len(q.pending), inputFrame); n > 0 && !q.gone {
			data := q.pending[:n:n]
			q.pending = q.pending[n:]
			q.notify()
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

// discard drops all input. It is called when the process no longer reads.
func (q *inputQueue) discard() {
	q.mu.Lock()
	defer q.mu.Unlock()
	q.gone, q.pending = true, nil
	q.notify()
}

// state returns the number of bytes of input that were accepted, and reports whether the input has ended.
func (q *inputQueue) state() (uint64, bool) {
	q.mu.Lock()
	defer q.mu.Unlock()
	return q.accepted, q.closed
}

// takeOver ends the stream that writes to the queue, if there is one. If cancel is not nil, a new stream takes its
// place, which the next call of takeOver ends by cancel.
func (q *inputQueue) takeOver(cancel context.CancelFunc) {
	q.mu.Lock()
	defer q.mu.Unlock()
	if q.stream != nil {
		q.stream()
	}
	q.stream = cancel
}

// outputLog stores everything that a process writes to one of its streams in a file, which is created with the first
// byte.
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

// receive appends data; without data it ends the stream.
func (l *outputLog) receive(data []byte) error {
	if len(data) == 0 {
		l.end()
		return nil
	}
	return l.append(data)
}

// append adds data to the file and wakes readers.
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

// end ends the stream. It may be called more than once.
func (l *outputLog) end() {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.ended {
		return
	}
	l.ended = true
	if l.file != nil {
		_ = l.file.Close() // what was written is what readers get
	}
	close(l.changed)
}

// outputChunk is the maximum number of bytes of output in one message to a client.
const outputChunk = 256 << 10

// read calls send for all output from an offset on, until the stream ends.
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
		data := make([]byte, min(size-offset, outputChunk))
		if _, err := file.ReadAt(data, int64(offset)); err != nil {
			return status.Errorf(codes.Internal, "read the output: %v", err)
		}
		if err := send(offset, data); err != nil {
			return err
		}
		offset += uint64(len(data))
	}
}
