package egress

import (
	"bytes"
	"context"
	"encoding/json"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/url"
	"strconv"
	"time"

	"github.com/spoolhq/spool/services/executor/internal/egress/admin"
	"github.com/spoolhq/spool/services/executor/internal/egress/journal"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// What a holder says and is told; see the packages for each field.
type (
	Registration = registry.Registration
	// Budget is what somebody may take of models.
	Budget = registry.Budget
	// Upstream is an MCP server of a sandbox.
	Upstream = registry.Upstream
	State    = registry.State
	Line     = journal.Line
	Error    = registry.Error // a refusal; its Code is one of those below
)

// Codes of an Error.
const (
	CodeInvalid    = registry.CodeInvalid    // a field of the request; Error.Field names it
	CodeNotFound   = registry.CodeNotFound   // the sandbox is not registered, or forgotten
	CodeFenced     = registry.CodeFenced     // a higher epoch holds the sandbox
	CodeTokenTaken = registry.CodeTokenTaken // another sandbox has the token
)

// Dial opens a connection to a proxy's admin socket.
type Dial func(ctx context.Context) (net.Conn, error)

// DialSocket dials a socket of this machine.
func DialSocket(path string) Dial {
	return func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "unix", path) }
}

// Client is a holder's end of the admin API. It is safe for concurrent use; Close ends its idle connections.
type Client struct {
	http *http.Client
	idle func()
}

// maxIdle is how many connections are kept for the next requests. Some ways to
// the socket are slow to open, and there are requests of all executions.
const maxIdle = 16

// NewClient makes a Client over whatever leads to the admin socket.
func NewClient(dial Dial) *Client {
	t := &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DisableCompression: true, IdleConnTimeout: 30 * time.Second,
		MaxIdleConnsPerHost: maxIdle,
	}
	return &Client{http: &http.Client{Transport: t}, idle: t.CloseIdleConnections}
}

// Close ends idle connections.
func (c *Client) Close() { c.idle() }

// Register registers a sandbox, or changes what is registered: a new holder's
// epoch, the execution that lines are about, the allowlist. Without a token the
// registered one stays. It is on disk when Register returns. Refusals are *Error.
func (c *Client) Register(ctx context.Context, sandbox string, g Registration) (State, error) {
	return c.state(ctx, http.MethodPut, sandbox, "", g)
}

// Release voids the token, cuts the sandbox's connections, and gives the number
// of its journal's last line in State.Last. The journal can be read until it
// is acknowledged that far; then the sandbox is forgotten.
func (c *Client) Release(ctx context.Context, sandbox string) (State, error) {
	return c.state(ctx, http.MethodDelete, sandbox, "?epoch="+strconv.FormatUint(admin.AnyEpoch, 10), nil)
}

// State tells what is known of a sandbox, its open model requests for one.
func (c *Client) State(ctx context.Context, sandbox string) (State, error) {
	return c.state(ctx, http.MethodGet, sandbox, "", nil)
}

// Ack says that a journal's lines up to a number are stored elsewhere, and may be forgotten.
func (c *Client) Ack(ctx context.Context, sandbox, name string, line uint64) error {
	_, err := c.state(ctx, http.MethodPost, sandbox, "/journal/ack", admin.Ack{Journal: name, Line: line, Epoch: admin.AnyEpoch})
	return err
}

// Health is nil while the proxy does what it should.
func (c *Client) Health(ctx context.Context) error {
	res, err := c.do(ctx, http.MethodGet, "/healthz", nil)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// maxLine bounds a journal line, and a refusal's body, in bytes.
const maxLine = 1 << 20

func (c *Client) state(ctx context.Context, method, sandbox, rest string, body any) (State, error) {
	res, err := c.do(ctx, method, "/v1/sandboxes/"+url.PathEscape(sandbox)+rest, body)
	if err != nil {
		return State{}, err
	}
	defer res.Body.Close() //nolint:errcheck // it is read
	var s State
	if err := json.NewDecoder(res.Body).Decode(&s); err != nil {
		return State{}, fmt.Errorf("egress proxy: %w", err)
	}
	return s, nil
}

// do asks; an answer of 400 or above is an error, an *Error where it has a code.
func (c *Client) do(ctx context.Context, method, path string, body any) (*http.Response, error) {
	var in io.Reader
	if body != nil {
		raw, err := json.Marshal(body)
		if err != nil {
			return nil, fmt.Errorf("egress proxy: %w", err)
		}
		in = bytes.NewReader(raw)
	}
	req, err := http.NewRequestWithContext(ctx, method, "http://egress"+path, in)
	if err != nil {
		return nil, fmt.Errorf("egress proxy: %w", err)
	}
	res, err := c.http.Do(req)
	if err != nil {
		return nil, fmt.Errorf("egress proxy: %w", err)
	}
	if res.StatusCode < http.StatusBadRequest {
		return res, nil
	}
	defer res.Body.Close() //nolint:errcheck // it is read
	var p admin.Problem
	if err := json.NewDecoder(io.LimitReader(res.Body, maxLine)).Decode(&p); err != nil || p.Code == "" {
		return nil, fmt.Errorf("egress proxy: %s %s: %s", method, path, res.Status)
	}
	if res.StatusCode >= http.StatusInternalServerError {
		return nil, fmt.Errorf("egress proxy: %s: %s", p.Code, p.Detail)
	}
	return nil, &Error{Code: p.Code, Detail: p.Detail, Field: p.Field}
}
