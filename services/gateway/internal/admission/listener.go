package admission

import (
	"io"
	"net"
	"sync"
	"time"
)

const (
	// maxPendingRefusals is the largest number of refused connections that are being answered at the same time; further ones are closed
	// without an answer.
	maxPendingRefusals = 64
	// refusalTimeout bounds how long a connection that was refused stays open so that its client can read the answer.
	refusalTimeout = time.Second
)

// Listener limits the number of accepted connections, in total and for each remote address. Connections above a limit
// are closed immediately, so that they do not block others in the accept queue.
type Listener struct {
	net.Listener
	total, each int
	answer      []byte
	answering   chan struct{} // one slot for each connection that is being answered
	work        sync.WaitGroup
	headers     headerCounter

	mu    sync.Mutex
	open  int
	hosts map[string]int
}

// NewListener returns a Listener that accepts connections of l: at most maxTotal at the same time, and at most
// maxPerAddress from one remote address. It sends answer on a refused connection before it closes the connection;
// with a nil answer it sends nothing.
func NewListener(l net.Listener, maxTotal, maxPerAddress int, answer []byte) *Listener {
	return &Listener{Listener: l, total: maxTotal, each: maxPerAddress, answer: answer, answering: make(chan struct{}, maxPendingRefusals), hosts: map[string]int{}}
}

// Accept returns the next connection that is within the limits.
func (l *Listener) Accept() (net.Conn, error) {
	for {
		c, err := l.Listener.Accept()
		if err != nil {
			return nil, err
		}
		host := remoteHost(c)
		if l.countConn(host) {
			return &limitedConn{Conn: c, leave: sync.OnceFunc(func() { l.uncountConn(host) }), headers: &l.headers, answer: l.answer}, nil
		}
		l.refuse(c)
	}
}

// Close closes the listener and waits until refused connections are closed.
func (l *Listener) Close() error {
	defer l.work.Wait()
	return l.Listener.Close()
}

// refuse answers a connection and closes it, without blocking Accept.
func (l *Listener) refuse(c net.Conn) {
	select {
	case l.answering <- struct{}{}:
	default:
		_ = c.Close() // no request was read from it
		return
	}
	l.work.Go(func() {
		defer func() { <-l.answering }()
		defer c.Close() //nolint:errcheck // the connection is not used any more
		_ = c.SetDeadline(time.Now().Add(refusalTimeout))
		if _, err := c.Write(l.answer); err != nil {
			return
		}
		// Closing a connection with unread data resets it, and the client may lose the answer.
		if half, ok := c.(interface{ CloseWrite() error }); ok && len(l.answer) > 0 && half.CloseWrite() == nil {
			_, _ = io.Copy(io.Discard, c)
		}
	})
}

// countConn counts a connection from a host, or returns false if a limit of connections is reached.
func (l *Listener) countConn(host string) bool {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.open >= l.total || l.hosts[host] >= l.each {
		return false
	}
	l.open++
	l.hosts[host]++
	return true
}

// uncountConn subtracts a closed connection of a host from the counts of connections.
func (l *Listener) uncountConn(host string) {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.open--
	if l.hosts[host]--; l.hosts[host] == 0 {
		delete(l.hosts, host)
	}
}

// remoteHost returns the remote address without its port.
func remoteHost(c net.Conn) string {
	host, _, err := net.SplitHostPort(c.RemoteAddr().String())
	if err != nil {
		return c.RemoteAddr().String()
	}
	return host
}

// limitedConn is an accepted connection. It counts against the limits of its Listener until it is closed.
type limitedConn struct {
	net.Conn
	leave   func()
	headers *headerCounter
	answer  []byte // sent if the header is refused

	mu       sync.Mutex
	inHeader bool
	read     int // bytes of the present header
	held     int // part of read that is counted in headers
}

// Close closes the connection and subtracts it from the counts of its Listener.
func (c *limitedConn) Close() error {
	defer c.leave()
	defer c.endHeader()
	return c.Conn.Close()
}
