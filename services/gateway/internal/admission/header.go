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
	// headerFree is the number of header bytes that each connection may send without counting against headerBytes.
	headerFree = 32 << 10
	// headerBytes is the number of header bytes beyond headerFree that all connections of a listener together may
	// send. These bytes are held while a header is incomplete, before the client is known.
	headerBytes = 16 << 20
)

// errHeaders is returned to the HTTP server when the bytes for headers are used up. It is a timeout error, so that
// the server closes the connection without an answer of its own.
var errHeaders = errors.Join(errors.New("the headers of all connections are too large"), os.ErrDeadlineExceeded)

// headers counts, for all connections of a listener together, the header bytes beyond headerFree of requests whose
// header is incomplete.
type headers struct {
	mu   sync.Mutex
	held int
}

// take counts n bytes, or returns false if they exceed headerBytes.
func (h *headers) take(n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held+n > headerBytes {
		return false
	}
	h.held += n
	return true
}

// release subtracts n bytes from the count.
func (h *headers) release(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held -= n
}

// connKey is the key under which the context of a request holds its limitedConn.
type connKey struct{}

// ConnContext is a value for http.Server.ConnContext. It makes the connection available to HeaderRead.
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

// HeaderRead must be called when the header of a request is complete. Further bytes of the connection count as body.
func HeaderRead(ctx context.Context) {
	if c, ok := ctx.Value(connKey{}).(*limitedConn); ok {
		c.headerRead()
	}
}

// expectHeader makes the next bytes of the connection count as header.
func (c *limitedConn) expectHeader() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inHeader, c.read = true, 0
}

// headerRead ends the header, so that its bytes no longer count.
func (c *limitedConn) headerRead() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inHeader = false
	c.headers.release(c.held)
	c.held = 0
}

// Read implements net.Conn. It counts header bytes beyond headerFree against headerBytes.
func (c *limitedConn) Read(p []byte) (int, error) {
	n, err := c.Conn.Read(p)
	c.mu.Lock()
	defer c.mu.Unlock()
	if !c.inHeader {
		return n, err
	}
	c.read += n
	if more := c.read - headerFree - c.held; more > 0 {
		if !c.headers.take(more) {
			_ = c.SetWriteDeadline(time.Now().Add(answerTime))
			_, _ = c.Write(c.answer) // the connection is closed in any case
			return 0, errHeaders
		}
		c.held += more
	}
	return n, err
}
