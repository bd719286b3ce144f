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
	// headerFree is how many bytes of a header every connection may send.
	headerFree = 32 << 10
	// headerBytes is how many bytes of headers all connections of a listener together may send beyond headerFree. They are held while
	// a header is incomplete, before anything is known about its sender.
	headerBytes = 16 << 20
)

// errHeaders is returned to the HTTP server by a connection whose header does not fit any more. It is a timeout for the server, which
// then closes the connection without an answer of its own.
var errHeaders = errors.Join(errors.New("the headers of all connections are too large"), os.ErrDeadlineExceeded)

// headers counts the bytes of incomplete headers beyond headerFree.
type headers struct {
	mu   sync.Mutex
	held int
}

func (h *headers) take(n int) bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.held+n > headerBytes {
		return false
	}
	h.held += n
	return true
}

func (h *headers) giveBack(n int) {
	h.mu.Lock()
	defer h.mu.Unlock()
	h.held -= n
}

type connKey struct{}

// ConnContext is for http.Server.ConnContext: it makes the connection known to HeaderRead.
func ConnContext(ctx context.Context, c net.Conn) context.Context {
	if c, ok := c.(*limitedConn); ok {
		c.expectHeader()
		return context.WithValue(ctx, connKey{}, c)
	}
	return ctx
}

// ConnState is for http.Server.ConnState: a connection that is idle expects the header of its next request.
func ConnState(c net.Conn, state http.ConnState) {
	if c, ok := c.(*limitedConn); ok && state == http.StateIdle {
		c.expectHeader()
	}
}

// HeaderRead is called when the header of a request is complete. What the connection reads from then on is a body.
func HeaderRead(ctx context.Context) {
	if c, ok := ctx.Value(connKey{}).(*limitedConn); ok {
		c.headerRead()
	}
}

func (c *limitedConn) expectHeader() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inHeader, c.read = true, 0
}

func (c *limitedConn) headerRead() {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.inHeader = false
	c.headers.giveBack(c.held)
	c.held = 0
}

// Read reads from the connection. What it reads of a header beyond headerFree is taken from what all connections share.
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
			_, _ = c.Write(c.answer) // the connection is closed either way
			return 0, errHeaders
		}
		c.held += more
	}
	return n, err
}
