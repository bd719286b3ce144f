package server

import (
	"bytes"
	"net"
	"sync"
	"time"
)

// slowConn delays what is read from and written to a connection by the port's
// latency, in order, without limiting the throughput.
type slowConn struct {
	net.Conn
	port     *port
	incoming *delayLine
	outgoing *delayLine
	reading  bytes.Reader // of the chunk that Read returns from

	once sync.Once
	err  error // of closing
}

// newSlowConn returns a connection over raw with the latency of the port.
func newSlowConn(raw net.Conn, p *port) *slowConn {
	c := &slowConn{Conn: raw, port: p, incoming: newDelayLine(), outgoing: newDelayLine()}
	go c.receive()
	go c.transmit()
	return c
}

// receive reads from the network and puts the bytes into c.incoming, from which Read takes them after the latency.
func (c *slowConn) receive() {
	for {
		buffer := make([]byte, 32<<10)
		n, err := c.Conn.Read(buffer) // never both data and an error, for a TCP connection
		if err == nil {
			err = c.incoming.put(buffer[:n], c.port.latency())
		}
		if err != nil {
			c.incoming.end(err)
			return
		}
	}
}

// transmit writes the outgoing bytes to the network when they are due.
func (c *slowConn) transmit() {
	for {
		data, err := c.outgoing.take()
		if err != nil {
			return
		}
		if _, err := c.Conn.Write(data); err != nil {
			c.outgoing.end(err)
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
		c.port.forget(c)
		c.incoming.end(net.ErrClosed)
		c.outgoing.end(net.ErrClosed)
		c.err = c.Conn.Close()
	})
	return c.err
}

// delayLine is a queue whose entries can be taken when they are due. It is
// bounded, so that a slow peer slows down the writer.
type delayLine struct {
	mu      sync.Mutex
	cond    *sync.Cond
	entries []delayed
	size    int
	err     error
}

// delayed is an entry of a delayLine: data, and the time from which it may be taken.
type delayed struct {
	due  time.Time
	data []byte
}

// delayLimit is the number of bytes in a delayLine from which put blocks.
const delayLimit = 8 << 20

func newDelayLine() *delayLine {
	l := &delayLine{}
	l.cond = sync.NewCond(&l.mu)
	return l
}

// put adds data that can be taken after a delay. It blocks while the line is full.
func (l *delayLine) put(data []byte, delay time.Duration) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	for l.size > delayLimit && l.err == nil {
		l.cond.Wait()
	}
	if l.err != nil {
		return l.err
	}
	l.entries = append(l.entries, delayed{time.Now().Add(delay), data})
	l.size += len(data)
	l.cond.Broadcast()
	return nil
}

// take blocks until the first entry is due and returns it. Entries that were
// put before the end are returned before the end's error.
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

// end ends the line: put then returns err at once, and take returns err after all entries were taken.
func (l *delayLine) end(err error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.err == nil {
		l.err = err
	}
	l.cond.Broadcast()
}
