package modal

import (
	"fmt"
	"io"
	"sync"

	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// stdinBufferBytes is the maximum number of bytes of stdin that a stdinBuffer holds. Writes block while the buffer is full.
const stdinBufferBytes = 1 << 20

// stdinBuffer is the stdin of a command at Modal. Each write to the SDK's stdin takes a round trip, so a write to stdinBuffer returns when
// the bytes are in the buffer, and a goroutine sends the whole buffer as one piece, in order. The SDK repeats a piece, with its offset,
// until Modal has accepted it exactly once.
type stdinBuffer struct {
	to io.WriteCloser

	mu     sync.Mutex
	change sync.Cond
	buf    []byte
	closed bool  // by Close or abandon
	err    error // set by end: nothing more is sent
}

// newStdinBuffer returns a stdinBuffer that sends to the SDK's stdin to.
func newStdinBuffer(to io.WriteCloser) *stdinBuffer {
	i := &stdinBuffer{to: to}
	i.change.L = &i.mu
	go i.sendBuffer()
	return i
}

// Write blocks while the buffer is full. It returns an error that wraps guest.ErrStdin after Close, and after the command's end.
func (i *stdinBuffer) Write(b []byte) (n int, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for len(b) > 0 {
		for len(i.buf) >= stdinBufferBytes && i.err == nil && !i.closed {
			i.change.Wait()
		}
		switch {
		case i.err != nil:
			return n, fmt.Errorf("%w: %w", guest.ErrStdin, i.err)
		case i.closed:
			return n, fmt.Errorf("%w: %w", guest.ErrStdin, io.ErrClosedPipe)
		}
		k := min(len(b), stdinBufferBytes-len(i.buf))
		i.buf = append(i.buf, b[:k]...)
		n, b = n+k, b[k:]
		i.change.Broadcast()
	}
	return n, nil
}

// Close ends the stream after everything that was written. It does not wait until the bytes are sent.
func (i *stdinBuffer) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.closed = true
	i.change.Broadcast()
	return nil
}

// abandon discards the bytes that were not sent yet, and ends the stream.
func (i *stdinBuffer) abandon() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.buf, i.closed = nil, true
	i.change.Broadcast()
}

// stopSending discards the buffer because the command no longer reads its stdin. Later writes return err.
func (i *stdinBuffer) stopSending(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.err == nil {
		i.err = err
	}
	i.buf = nil
	i.change.Broadcast()
}

// sendBuffer sends the content of the buffer whenever there is some, until the stream has ended.
func (i *stdinBuffer) sendBuffer() {
	for {
		i.mu.Lock()
		for len(i.buf) == 0 && !i.closed && i.err == nil {
			i.change.Wait()
		}
		piece, over := i.buf, i.err != nil
		i.buf = nil
		i.change.Broadcast()
		i.mu.Unlock()
		var err error
		switch {
		case over:
			return
		case len(piece) > 0:
			_, err = i.to.Write(piece)
		default:
			_ = i.to.Close() // fails when the command has ended already
			return
		}
		if err != nil {
			i.stopSending(err)
			return
		}
	}
}
