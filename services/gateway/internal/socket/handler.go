// Package socket is the WebSocket of the API: one connection that joins any
// number of sessions and is sent their events. An idle connection costs two
// goroutines, and a third for each session it has joined.
package socket

import (
	"context"
	"errors"
	"log/slog"
	"net/http"
	"sync"
	"time"

	"github.com/coder/websocket"

	"github.com/spoolhq/spool/services/gateway/internal/auth"
	"github.com/spoolhq/spool/services/gateway/internal/live"
	"github.com/spoolhq/spool/services/gateway/internal/problem"
	"github.com/spoolhq/spool/services/gateway/internal/reads"
)

// MaxFrame bounds what a client may send in one message, in bytes.
const MaxFrame = 64 << 10

// Config of a Handler. Zero numbers mean the defaults; the rest is required.
type Config struct {
	Live         *live.Hub
	Reads        *reads.Store
	Watch        *auth.Watch
	Logger       *slog.Logger
	Ping         time.Duration // between pings; 0 means 30 s
	WriteTimeout time.Duration // how long a client may take for one message; 0 means 10 s
	MaxSessions  int           // that one connection may join; 0 means 256
	Opened       func() (done func())
	Sent         func(bytes int)
	Cut          func(code string)
}

// Handler answers GET /api/ws.
type Handler struct {
	cfg  Config
	stop chan struct{} // closed by Close

	mu     sync.Mutex
	closed bool
	work   sync.WaitGroup // connections
}

// New makes a Handler.
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
	return &Handler{cfg: cfg, stop: make(chan struct{})}
}

// Close makes every connection end, with a code that says so.
func (h *Handler) Close() {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.closed = true
		close(h.stop)
	}
}

// Wait returns when every connection has ended.
func (h *Handler) Wait() { h.work.Wait() }

func (h *Handler) open() bool {
	h.mu.Lock()
	defer h.mu.Unlock()
	if !h.closed {
		h.work.Add(1)
	}
	return !h.closed
}

// Serve upgrades and serves until the connection ends. The caller has checked
// the origin. What is wrong before the upgrade is returned, for problem+json.
func (h *Handler) Serve(w http.ResponseWriter, r *http.Request) error {
	p, err := auth.From(r.Context())
	if err != nil {
		return err
	}
	if r.Header.Get("Upgrade") == "" {
		return problem.Invalid("Upgrade", "this route is a WebSocket: send Upgrade: websocket")
	}
	if !h.open() {
		return problem.New(problem.Unavailable, "", "this gateway is stopping; connect to another")
	}
	defer h.work.Done()
	ws, err := websocket.Accept(w, r, &websocket.AcceptOptions{
		InsecureSkipVerify: true, // the origin was checked, with a list that can be set
		CompressionMode:    websocket.CompressionDisabled,
	})
	if err != nil {
		return nil // Accept has answered
	}
	ws.SetReadLimit(MaxFrame)
	// The request's context ends with the handler; nothing of the request is needed any more.
	ctx, release := h.cfg.Watch.Add(context.WithoutCancel(r.Context()), p)
	defer release()
	defer h.cfg.Opened()()
	c := &conn{handler: h, ws: ws, tenant: p.Tenant, joined: map[string]context.CancelCauseFunc{}}
	c.serve(ctx)
	return nil
}

// conn is one connection.
type conn struct {
	handler *Handler
	ws      *websocket.Conn
	tenant  string

	mu     sync.Mutex
	joined map[string]context.CancelCauseFunc // by session
	work   sync.WaitGroup                     // a goroutine for each join
	end    sync.Once
	ended  chan struct{}
}

func (c *conn) serve(ctx context.Context) {
	ctx, cancel := context.WithCancelCause(ctx)
	c.ended = make(chan struct{})
	c.work.Go(func() { c.guard(ctx) })
	c.read(ctx)
	c.finish(websocket.StatusNormalClosure, "")
	cancel(errClosed)
	c.work.Wait()
}

var errClosed = errors.New("the connection is closed")

// guard ends the connection when its key is revoked, when the gateway stops, or when the client does not answer a ping.
func (c *conn) guard(ctx context.Context) {
	tick := time.NewTicker(c.handler.cfg.Ping)
	defer tick.Stop()
	for {
		select {
		case <-c.ended:
			return
		case <-c.handler.stop:
			c.finish(websocket.StatusGoingAway, "the gateway is stopping; connect again with your cursors")
			return
		case <-ctx.Done():
			var p *problem.Error
			if errors.As(context.Cause(ctx), &p) {
				c.cut(websocket.StatusPolicyViolation, p, request{})
			}
			return
		case <-tick.C:
			c.ping(ctx)
		}
	}
}

func (c *conn) ping(ctx context.Context) {
	wait, cancel := context.WithTimeout(ctx, c.handler.cfg.WriteTimeout)
	defer cancel()
	if err := c.ws.Ping(wait); err != nil && ctx.Err() == nil {
		_ = c.ws.CloseNow() // a client that is gone cannot be told
	}
}

// cut tells why and closes.
func (c *conn) cut(code websocket.StatusCode, p *problem.Error, about request) {
	c.handler.cfg.Cut(string(p.Code))
	_ = c.send(errorMessage(p, about))
	c.finish(code, string(p.Code)+": "+p.Detail)
}

// maxReason is what a close frame has room for.
const maxReason = 123

// finish closes once, with a code.
func (c *conn) finish(code websocket.StatusCode, reason string) {
	c.end.Do(func() {
		close(c.ended)
		if len(reason) > maxReason {
			reason = reason[:maxReason-3] + "..."
		}
		_ = c.ws.Close(code, reason) // the client may be gone already
	})
}

// send writes one message. It takes up to twice the time a client has: one that reads again before that is told that it was too slow.
func (c *conn) send(b []byte) error {
	ctx, cancel := context.WithTimeout(context.Background(), 2*c.handler.cfg.WriteTimeout)
	defer cancel()
	began := time.Now()
	err := c.ws.Write(ctx, websocket.MessageText, b)
	if time.Since(began) < c.handler.cfg.WriteTimeout {
		return err
	}
	if err == nil {
		return errSlow
	}
	c.handler.cfg.Cut(string(problem.SlowClient))
	return err
}

var errSlow = errors.New("the client is too slow")
