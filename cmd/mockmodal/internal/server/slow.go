package server

import (
	"bytes"
	"net"
	"sync"
	"time"
)

// slowConn is a connection that delays reads and writes by the latency of its port. It keeps the order of the data and
// does not limit the throughput.
type slowConn struct {
	net.Conn
	port     *switchablePort
	incoming *delayLine
	outgoing *delayLine
	reading  bytes.Reader // the rest of the data that Read has taken from incoming

	once sync.Once
	err  error // the error of closing the connection
}

// newSlowConn returns a connection that delays the reads and writes of raw by the latency of the port p.
func newSlowConn(raw net.Conn, p *switchablePort) *slowConn {
	c := &slowConn{Conn: raw, port: p, incoming: newDelayLine(), outgoing: newDelayLine()}
	go c.receiveLoop()
	go c.transmitLoop()
	return c
}

// receiveLoop reads from the network into c.incoming, from which Read takes the data after the latency.
func (c *slowConn) receiveLoop() {
	for {
		buffer := make([]byte, 32<<10)
		n, err := c.Conn.Read(buffer) // never both data and an error, for a TCP connection
		if err == nil {
			err = c.incoming.put(buffer[:n], c.port.latency())
		}
		if err != nil {
			c.incoming.closeWithError(err)
			return
		}
	}
}

// transmitLoop writes the data in c.outgoing to the network after the latency.
func (c *slowConn) transmitLoop() {
	for {
		data, err := c.outgoing.take()
		if err != nil {
			return
		}
		if _, err := c.Conn.Write(data); err != nil {
			c.outgoing.closeWithError(err)
			return
		}
	}
}

// Read implements net.Conn. It is called by one goroutine at a time.
func (c *slowConn) Read(p []byte) (int, error) {
	if c.reading.Len() == 0 {
		data, err := c.incoming.take()
		if err != nil {
			return 0, err
		}
		c.reading.Reset(data)
	}
	return c.reading.Read(p)
}

// Write implements net.Conn.
func (c *slowConn) Write(p []byte) (int, error) {
	return len(p), c.outgoing.put(bytes.Clone(p), c.port.latency())
}

// Close implements net.Conn.
func (c *slowConn) Close() error {
	c.once.Do(func() {
		c.port.forgetConn(c)
		c.incoming.closeWithError(net.ErrClosed)
		c.outgoing.closeWithError(net.ErrClosed)
		c.err = c.Conn.Close()
	})
	return c.err
}

// delayLine is a queue of data that can be taken after a delay. Its size is limited, so that a slow peer blocks the
// writer.
type delayLine struct {
	mu      sync.Mutex
	cond    *sync.Cond
	entries []delayedData
	size    int
	err     error
}

// delayedData is an entry of a delayLine: data, and the time from which it may be taken.
type delayedData struct {
	due  time.Time
	data []byte
}

// delayLineCapacity is the number of bytes in a delayLine from which put blocks.
const delayLineCapacity = 8 << 20

func newDelayLine() *delayLine {
	l := &delayLine{}
	l.cond = sync.NewCond(&l.mu)
	return l
}

// put appends data that can be taken after a delay. It blocks while the queue is full.
func (l *delayLine) put(data []byte, delay time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.size > delayLineCapacity && l.err == nil {
		l.cond.Wait()
	}
	if l.err != nil {
		return l.err
	}
	l.entries = append(l.entries, delayedData{time.Now().Add(delay), data})
	l.size += len(data)
	l.cond.Broadcast()
	return nil
}

// take blocks until the delay of the first entry has passed, and returns the entry. After closeWithError it returns the
// remaining entries and then the error.
func (l *delayLine) take() ([]byte, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	for len(l.entries) == 0 {
		if l.err != nil {
			return nil, l.err
		}
		l.cond.Wait()
	}
	first := l.entries[0]
	if wait := time.Until(first.due); wait > 0 {
		l.mu.Unlock()
		time.Sleep(wait)
		l.mu.Lock()
	}
	l.entries = l.entries[1:]
	l.size -= len(first.data)
	l.cond.Broadcast()
	return first.data, nil
}

// closeWithError closes the queue. After that put returns err, and take returns err when no entry is left.
func (l *delayLine) closeWithError(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
	l.cond.Broadcast()
}
