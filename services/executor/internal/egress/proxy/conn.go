package proxy

import (
	"net"
	"net/http"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// maxFirstLineBytes is the maximum number of bytes of a request's first line that an identifiedConn records.
const maxFirstLineBytes = 2 << 10

// identifiedConn is a connection whose sandbox was identified by its token. It sets a deadline for each write. It also
// records the first line of each request, so that the proxy can journal a request that the HTTP server refuses without
// calling a handler.
type identifiedConn struct {
	net.Conn
	sandbox     *registry.Sandbox
	hostsOnly   bool // reaches hosts of the allowlist only
	writeWithin time.Duration
	onClose     func() // called once
	once        sync.Once
	tunnel      *inspectedTunnel // nil for a connection that is no tunnel
	memory      *memoryBudget
	owner       memoryOwner

	mu       sync.Mutex
	counted  int // memory that is counted for the request
	line     []byte
	complete bool // line has the whole first line
	handled  bool // a handler has the request
	answered bool // something was written since the last request
	closed   bool
}

func (c *identifiedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.handled && !c.closed {
		if !c.countRequest(c.counted + n*headMemoryFactor) {
			return 0, &net.OpError{Op: "read", Err: errMemoryFull} // the HTTP server closes the connection without an answer, after which clients try again
		}
	}
	if c.handled || c.complete || len(c.line) >= maxFirstLineBytes {
		return n, err
	}
	seen := p[:n]
	for i, b := range seen {
		if b == '\n' {
			seen, c.complete = seen[:i], true
			break
		}
	}
	c.line = append(c.line, seen[:min(len(seen), maxFirstLineBytes-len(c.line))]...)
	return n, err
}

func (c *identifiedConn) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.answered = true
	c.mu.Unlock()
	if err := c.SetWriteDeadline(time.Now().Add(c.writeWithin)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// CloseWrite closes the write direction.
func (c *identifiedConn) CloseWrite() error { return closeWrite(c.Conn) }

func (c *identifiedConn) Close() error {
	c.once.Do(func() {
		c.mu.Lock()
		c.closed = true
		c.countRequest(0)
		c.mu.Unlock()
		c.onClose()
	})
	return c.Conn.Close()
}

// countRequest sets the memory that is counted for the present request to n bytes. It returns false, and changes nothing, if a limit
// does not allow that. The caller holds the lock.
func (c *identifiedConn) countRequest(n int) bool {
	switch more := n - c.counted; {
	case more > 0 && !c.memory.reserve(c.owner, more):
		return false
	case more < 0:
		c.memory.release(c.owner, -more)
	}
	c.counted = n
	return true
}

// expectRequest makes the connection record the first line of the next request.
func (c *identifiedConn) expectRequest() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.line, c.complete, c.handled, c.answered = nil, false, false, false
	c.countRequest(0)
}

// setHandled records that the HTTP server has passed the request r to a handler. It returns false if there is no memory for the
// request.
func (c *identifiedConn) setHandled(r *http.Request) bool {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handled = true
	return c.closed || c.countRequest(requestMemory(r))
}

// unparsedRequest returns the method and the target of a request that the HTTP server refused because its first line is not
// valid HTTP. ok is false if there was no such request.
func (c *identifiedConn) unparsedRequest() (method, target string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handled || !c.complete {
		return "", "", false
	}
	line := strings.TrimSuffix(string(c.line), "\r")
	method, rest, _ := strings.Cut(line, " ")
	target, version := rest, ""
	if i := strings.LastIndexByte(rest, ' '); i >= 0 {
		target, version = rest[:i], rest[i+1:]
	}
	address := target
	if method == "CONNECT" && !strings.HasPrefix(target, "/") {
		address = "http://" + target
	}
	_, err := url.ParseRequestURI(address)
	if err == nil && !strings.Contains(target, " ") && strings.HasPrefix(version, "HTTP/") {
		return "", "", false // the first line is valid: something else is wrong with the request
	}
	return method, target, true
}

// refusedRequest reports whether the HTTP server has answered a request without calling a handler. method is the first word
// of the request.
func (c *identifiedConn) refusedRequest() (method string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	method, _, _ = strings.Cut(strings.TrimSuffix(string(c.line), "\r"), " ")
	return method, c.answered && !c.handled
}

// closeWrite closes the write direction of a connection. It closes the whole connection if that has no method CloseWrite.
func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}
