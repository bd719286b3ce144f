// Package socket implements the WebSocket of the API: one connection that joins any number of sessions and receives
// their events. A connection uses one goroutine, and one more for each joined
// session and for each decision that is not answered yet.
package socket

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/truncate"
	"github.com/spoolhq/spool/services/gateway/internal/admission"
	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/changes"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
	"github.com/spoolhq/spool/services/gateway/internal/replay"
)

// MaxMessageBytes is the largest message that a client may send, in bytes.
const MaxMessageBytes = 64 << 10

// Config configures a Handler. Zero numbers mean the defaults; all other fields are required.
type Config struct {
	Admission *admission.Admission
	Live      *live.Hub
	Changes   *changes.Hub
	Player    *replay.Player
	Reads     *reads.Store
	Watch     *auth.KeyWatch
	// Decide stores a decision on an approval request, which must belong to the session unless session is "", and returns the position of the
	// decision.
	Decide       func(ctx context.Context, p auth.Principal, session string, r *spoolv1.DecideApprovalRequest) (position string, err error)
	Logger       *slog.Logger
	ReadTimeout  time.Duration        // maximum time that a message may take to arrive
	Ping         time.Duration        // interval of pings; 0 means 30 s
	WriteTimeout time.Duration        // maximum time that a client may take for one message; 0 means 10 s
	MaxSessions  int                  // sessions that one connection may join; 0 means 256
	Opened       func() (done func()) // called when a connection opens; done is called when it ends
	Sent         func(bytes int)      // called for each frame, with its size
	Cut          func(code string)    // called with the error code when the server ends a connection or a join
}

// Handler serves GET /api/ws.
type Handler struct {
	cfg Config

	mu     sync.Mutex
	closed bool
	conns  map[*conn]struct{}
	work   sync.WaitGroup // counts the goroutines of connections
}

// New returns a Handler.
func New(cfg Config) *Handler {
	if cfg.Ping == 0 {
		cfg.Ping = 30 * time.Second
	}
	if cfg.WriteTimeout == 0 {
		cfg.WriteTimeout = 10 * time.Second
	}
	if cfg.MaxSessions == 0 {
		cfg.MaxSessions = 256
	}
	return &Handler{cfg: cfg, conns: map[*conn]struct{}{}}
}

// Close ends every connection with a close code, and blocks until all have ended.
func (h *Handler) Close() {
	h.mu.Lock()
	h.closed = true
	for c := range h.conns {
		h.work.Go(func() {
			c.closeOnce(websocket.StatusGoingAway, "the gateway is stopping; connect again with your cursors")
		})
	}
	h.mu.Unlock()
	h.work.Wait()
}

// Serve upgrades the connection and returns; the connection continues until the client, its key or the Handler ends
// it. The caller must have checked the origin. Errors before the upgrade are returned, for problem+json.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request) error {
	p, err := auth.From(r.Context())
	if err != nil {
		return err
	}
	if r.Header.Get("Upgrade") == "" {
		return problem.Invalid("Upgrade", "this route is a WebSocket: send Upgrade: websocket")
	}
	end, err := h.cfg.Admission.BeginStream(p.Tenant)
	if err != nil {
		return err
	}
	hijacked := &hijacker{ResponseWriter: w, timeout: 2 * h.cfg.WriteTimeout}
	ws, err := websocket.Accept(hijacked, r, &websocket.AcceptOptions{
		InsecureSkipVerify: true, // the caller has checked the origin against a configurable list
		CompressionMode:    websocket.CompressionDisabled,
	})
	if err != nil {
		end()
		return nil // Accept has sent the response
	}
	ws.SetReadLimit(MaxMessageBytes)
	c := &conn{handler: h, ws: ws, net: hijacked.conn, principal: p, joined: map[string]context.CancelCauseFunc{}, decisions: make(chan struct{}, maxPendingDecisions)}
	h.mu.Lock()
	defer h.mu.Unlock()
	if h.closed {
		end()
		return ws.CloseNow()
	}
	h.conns[c] = struct{}{}
	// The request's own goroutine would keep the request and its buffers in memory, so the connection gets a new one.
	h.work.Go(func() {
		defer end()
		c.serve(p)
	})
	return nil
}

// removeConn removes a connection that has ended from the connections that Close ends.
func (h *Handler) removeConn(c *conn) {
	h.mu.Lock()
	defer h.mu.Unlock()
	delete(h.conns, c)
}

// conn is one WebSocket connection of a client. A client can join several sessions on one connection.
type conn struct {
	handler   *Handler
	ws        *websocket.Conn
	net       *batchConn
	principal auth.Principal // of the key that opened it

	mu        sync.Mutex
	joined    map[string]context.CancelCauseFunc // by session; "" for the changes of all sessions
	work      sync.WaitGroup                     // counts the goroutines of joins and decisions
	decisions chan struct{}                      // has an element for each decision that is not answered yet
	closing   sync.Once
}

// errConnectionClosed is the cause with which the joins of a connection are cancelled after the connection has ended.
var errConnectionClosed = errors.New("the connection is closed")

// serve handles the connection until it ends.
func (c *conn) serve(p auth.Principal) {
	defer c.handler.cfg.Opened()()
	defer c.handler.removeConn(c)
	ctx, release := c.handler.cfg.Watch.AddStream(context.Background(), p)
	defer release()
	ctx, cancel := context.WithCancelCause(ctx)
	revoked := context.AfterFunc(ctx, func() {
		var p *problem.Error
		if errors.As(context.Cause(ctx), &p) {
			c.closeWithError(websocket.StatusPolicyViolation, p, clientRequest{})
		}
	})
	pings := c.startPings(ctx)
	c.readRequests(ctx)
	revoked()
	pings()
	c.closeOnce(websocket.StatusNormalClosure, "")
	cancel(errConnectionClosed)
	c.work.Wait()
}

// startPings sends pings periodically until stop is called, and closes the connection when one is not answered.
func (c *conn) startPings(ctx context.Context) (stop func()) {
	var mu sync.Mutex
	stopped := false
	var timer *time.Timer
	mu.Lock()
	defer mu.Unlock()
	timer = time.AfterFunc(c.handler.cfg.Ping, func() {
		wait, cancel := context.WithTimeout(ctx, c.handler.cfg.WriteTimeout)
		defer cancel()
		if err := c.ws.Ping(wait); err != nil && ctx.Err() == nil {
			_ = c.ws.CloseNow() // the client is gone, so no close frame is sent
		}
		mu.Lock()
		defer mu.Unlock()
		if !stopped {
			timer.Reset(c.handler.cfg.Ping)
		}
	})
	return func() {
		mu.Lock()
		defer mu.Unlock()
		stopped = true
		timer.Stop()
	}
}

// closeWithError sends the error p and closes the connection with a code. about is the request to which the error
// belongs, or the zero request.
func (c *conn) closeWithError(code websocket.StatusCode, p *problem.Error, about clientRequest) {
	c.handler.cfg.Cut(string(p.Code))
	_ = c.sendMessage(errorMessage(p, about))
	c.closeOnce(code, string(p.Code)+": "+p.Detail)
}

// maxCloseReasonBytes is the largest size of the reason in a close frame.
const maxCloseReasonBytes = 123

// closeOnce closes the connection with a code. Only the first call has an effect.
func (c *conn) closeOnce(code websocket.StatusCode, reason string) {
	c.closing.Do(func() {
		_ = c.ws.Close(code, truncate.Text(reason, maxCloseReasonBytes-len("…"))) // the client may be gone already
	})
}

// sendMessage writes one message to the client. It waits up to twice the write timeout: a client that reads again
// before that still receives the reason why it is disconnected.
func (c *conn) sendMessage(b []byte) error {
	return c.timedWrite(func() error { return c.writeMessage(b) })
}

// writeMessage writes one message without measuring how long the client takes. The limit is that of batchConn: a context with
// a deadline would cost a timer for each message.
func (c *conn) writeMessage(b []byte) error {
	return c.ws.Write(context.Background(), websocket.MessageText, b)
}

// timedWrite returns the error of a write, or errSlowClient if the write succeeded after the write timeout.
func (c *conn) timedWrite(write func() error) error {
	began := time.Now()
	err := write()
	if time.Since(began) < c.handler.cfg.WriteTimeout {
		return err
	}
	if err == nil {
		return errSlowClient
	}
	c.handler.cfg.Cut(string(problem.SlowClient))
	return err
}

// errSlowClient is returned for a write that succeeded only after the write timeout.
var errSlowClient = errors.New("the client is too slow")
