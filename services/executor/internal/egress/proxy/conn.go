package proxy

import (
	"net"
	"net/url"
	"strings"
	"sync"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// maxLine is how much of a request's first line is remembered.
const maxLine = 2 << 10

// conn is a sandbox's connection, after its first line. It gives each write a
// deadline, and remembers the first line of a request that the server refused
// before anyone could look at it.
type conn struct {
	net.Conn
	sandbox *registry.Sandbox
	hosts   bool // reaches hosts of the allowlist alone
	stall   time.Duration
	left    func() // called once, when it is closed
	once    sync.Once
	inside  *inside // of a tunnel whose requests are judged; nil for a connection that is no tunnel

	mu      sync.Mutex
	line    []byte
	whole   bool // line is a whole one
	handled bool // the request got to a handler
	told    bool // something was written since the last request
}

func (c *conn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handled || c.whole || len(c.line) >= maxLine {
		return n, err
	}
	seen := p[:n]
	for i, b := range seen {
		if b == '\n' {
			seen, c.whole = seen[:i], true
			break
		}
	}
	c.line = append(c.line, seen[:min(len(seen), maxLine-len(c.line))]...)
	return n, err
}

func (c *conn) Write(p []byte) (int, error) {
	c.mu.Lock()
	c.told = true
	c.mu.Unlock()
	if err := c.SetWriteDeadline(time.Now().Add(c.stall)); err != nil {
		return 0, err
	}
	return c.Conn.Write(p)
}

// CloseWrite says that nothing more comes.
func (c *conn) CloseWrite() error { return closeWrite(c.Conn) }

func (c *conn) Close() error {
	c.once.Do(c.left)
	return c.Conn.Close()
}

// idle says that the next request's first line is to be remembered.
func (c *conn) idle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.line, c.whole, c.handled, c.told = nil, false, false, false
}

func (c *conn) handle() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.handled = true
}

// unhandled gives method and target of a request whose first line is no HTTP;
// false if there was none.
func (c *conn) unhandled() (method, target string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.handled || !c.whole {
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
		return "", "", false // something else was wrong with it
	}
	return method, target, true
}

// refused tells whether the server answered a request without a handler, and what it began with.
func (c *conn) refused() (method string, ok bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	method, _, _ = strings.Cut(strings.TrimSuffix(string(c.line), "\r"), " ")
	return method, c.told && !c.handled
}

// closeWrite ends one direction of a connection, both where it cannot.
func closeWrite(c net.Conn) error {
	if half, ok := c.(interface{ CloseWrite() error }); ok {
		return half.CloseWrite()
	}
	return c.Close()
}
