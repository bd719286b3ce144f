package guest

import (
	"io"
	"sync"
)

// Pipe is an in-memory stream. It blocks a writer that is ahead of its reader by more than a limit.
type Pipe struct {
	mu     sync.Mutex
	change sync.Cond
	buf    []byte
	limit  int
	ended  bool
	err    error // after what is in buf; nil for io.EOF
	gone   bool  // the reader
}

// NewPipe makes a pipe that holds so many bytes.
func NewPipe(limit int) *Pipe {
	p := &Pipe{limit: limit}
	p.change.L = &p.mu
	return p
}

// Write blocks while the pipe is full.
func (p *Pipe) Write(b []byte) (n int, err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(b) > 0 {
		for len(p.buf) >= p.limit && !p.gone {
			p.change.Wait()
		}
		if p.gone {
			return n, io.ErrClosedPipe
		}
		k := min(len(b), p.limit-len(p.buf))
		p.buf = append(p.buf, b[:k]...)
		n, b = n+k, b[k:]
		p.change.Broadcast()
	}
	return n, nil
}

// Read blocks until there is something to read.
func (p *Pipe) Read(b []byte) (int, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	for len(p.buf) == 0 && !p.ended && !p.gone {
		p.change.Wait()
	}
	switch {
	case p.gone:
		return 0, io.ErrClosedPipe
	case len(p.buf) == 0 && p.err != nil:
		return 0, p.err
	case len(p.buf) == 0:
		return 0, io.EOF
	}
	n := copy(b, p.buf)
	p.buf = p.buf[n:]
	if len(p.buf) == 0 {
		p.buf = nil
	}
	p.change.Broadcast()
	return n, nil
}

// End is the writer's: the reader gets err after what was written, io.EOF if it is nil.
func (p *Pipe) End(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended, p.err = true, err
	p.change.Broadcast()
}

// Abandon is the reader's: writes and reads fail with io.ErrClosedPipe from now on.
func (p *Pipe) Abandon() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone, p.buf = true, nil
	p.change.Broadcast()
}
