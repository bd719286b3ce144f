package guest

import (
	"io"
	"sync"
)

// Pipe is an in-memory byte stream between goroutines. A write blocks while more than a limit of bytes is
// unread.
type Pipe struct {
	mu     sync.Mutex
	change sync.Cond
	buf    []byte
	limit  int
	ended  bool
	err    error // returned by Read after buf; nil for io.EOF
	gone   bool  // set by Abandon
}

// NewPipe returns a Pipe that holds up to limit unread bytes.
func NewPipe(limit int) *Pipe {
	p := &Pipe{limit: limit}
	p.change.L = &p.mu
	return p
}

// Write blocks while the pipe is full. It returns io.ErrClosedPipe after Abandon.
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

// Read blocks until there is data, or the stream has ended.
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

// End ends the stream on the writer's side. After everything that was written, Read returns err, or io.EOF if
// err is nil.
func (p *Pipe) End(err error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended, p.err = true, err
	p.change.Broadcast()
}

// Abandon ends the stream on the reader's side. From then on, writes and reads return io.ErrClosedPipe.
func (p *Pipe) Abandon() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.gone, p.buf = true, nil
	p.change.Broadcast()
}
