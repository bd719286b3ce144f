package modal

import (
	"fmt"
	"io"
	"sync"

	"github.com/spoolhq/spool/services/executor/internal/guest"
)

// inputBuffer is the size in bytes of the buffer for stdin that was not sent yet. While the buffer is full, writes
// block.
const inputBuffer = 1 << 20

// input is a command's stdin. Each write to the SDK's stdin takes a round trip. A write to input returns when the bytes are buffered,
// and a goroutine sends everything that is buffered in one piece, in order. The SDK sends each piece with its offset and repeats it until
// Modal has accepted it, which it does once.
type input struct {
	to io.WriteCloser

	mu     sync.Mutex
	change sync.Cond
	buf    []byte
	closed bool  // by Close or abandon
	err    error // set by end: nothing more is sent
}

func newInput(to io.WriteCloser) *input {
	i := &input{to: to}
	i.change.L = &i.mu
	go i.send()
	return i
}

// Write blocks while the buffer is full. It returns an error that wraps guest.ErrStdin after Close, and after the command's end.
func (i *input) Write(b []byte) (n int, err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	for len(b) > 0 {
		for len(i.buf) >= inputBuffer && i.err == nil && !i.closed {
			i.change.Wait()
		}
		switch {
		case i.err != nil:
			return n, fmt.Errorf("%w: %w", guest.ErrStdin, i.err)
		case i.closed:
			return n, fmt.Errorf("%w: %w", guest.ErrStdin, io.ErrClosedPipe)
		}
		k := min(len(b), inputBuffer-len(i.buf))
		i.buf = append(i.buf, b[:k]...)
		n, b = n+k, b[k:]
		i.change.Broadcast()
	}
	return n, nil
}

// Close ends the stream after everything that was written. It does not wait until that is sent.
func (i *input) Close() error {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.closed = true
	i.change.Broadcast()
	return nil
}

// abandon discards input that was not sent yet, and ends the stream.
func (i *input) abandon() {
	i.mu.Lock()
	defer i.mu.Unlock()
	i.buf, i.closed = nil, true
	i.change.Broadcast()
}

// end stops sending, because the command no longer reads. Writes return err from then on.
func (i *input) end(err error) {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.err == nil {
		i.err = err
	}
	i.buf = nil
	i.change.Broadcast()
}

// send sends the buffer, again and again, until the stream has ended.
func (i *input) send() {
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
			i.end(err)
			return
		}
	}
}
