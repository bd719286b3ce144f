package admission

import (
	"context"
	"errors"
	"net"
	"net/http"
	"os"
	"sync"
	"time"
)

const (
	// freeHeaderBytes is the number of header bytes that each connection may send without counting against maxHeaderBytes.
	freeHeaderBytes = 32 << 10
	// maxHeaderBytes is the number of header bytes beyond freeHeaderBytes that all connections of a listener together may
	// send. These bytes are held while a header is incomplete, before the client is known.
	maxHeaderBytes = 16 << 20
)

// errHeaderBytesUsedUp is returned to the HTTP server when the bytes for headers are used up. It is a timeout error, so that
// the server closes the connection without an answer of its own.
var errHeaderBytesUsedUp = errors.Join(errors.New("the headers of all connections are too large"), os.ErrDeadlineExceeded)

// headerCounter counts the header bytes that all connections of a listener hold together. It counts only requests
// whose header is incomplete, and only the bytes of each beyond freeHeaderBytes.
type headerCounter struct {
	mu   sync.Mutex
	held int
}

// take adds n bytes to the count, or returns false if the sum would exceed maxHeaderBytes.
func (h *headerCounter) take(n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held+n > maxHeaderBytes {
		return false
	}
	h.held += n
	return true
}

// release subtracts n bytes from the count.
func (h *headerCounter) release(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held -= n
}

// connKey is the key under which the context of a request holds its limitedConn.
type connKey struct{}

// ConnContext is a value for http.Server.ConnContext. It makes the connection available to EndHeader.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*limitedConn); ok {
		c.expectHeader()
		return context.WithValue(ctx, connKey{}, c)
	}
	return ctx
}

// ConnState is a value for http.Server.ConnState. An idle connection expects the header of its next request.
func ConnState(c net.Conn, state http.ConnState) {
	if c, ok := c.(*limitedConn); ok && state == http.StateIdle {
		c.expectHeader()
	}
}

// EndHeader must be called when the header of a request is complete. Further bytes of the connection count as body.
func EndHeader(ctx context.Context) {
	if c, ok := ctx.Value(connKey{}).(*limitedConn); ok {
		c.endHeader()
	}
}

// expectHeader makes the next bytes of the connection count as header.
func (c *limitedConn) expectHeader() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inHeader, c.read = true, 0
}

// endHeader must be called when the header of a request is complete. It subtracts the header's bytes from the
// headerCounter.
func (c *limitedConn) endHeader() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inHeader = false
	c.headers.release(c.held)
	c.held = 0
}

// Read implements net.Conn. It counts header bytes beyond freeHeaderBytes against maxHeaderBytes.
func (c *limitedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.inHeader {
		return n, err
	}
	c.read += n
	if more := c.read - freeHeaderBytes - c.held; more > 0 {
		if !c.headers.take(more) {
			_ = c.SetWriteDeadline(time.Now().Add(refusalTimeout))
			_, _ = c.Write(c.answer) // the connection is closed in any case
			return 0, errHeaderBytesUsedUp
		}
		c.held += more
	}
	return n, err
}
