package egress

import (
	"bufio"
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"iter"
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
// of its journal's last line in State.Last. The journal can be followed until it
// is acknowledged that far; then the sandbox is forgotten.
func (c *Client) Release(ctx context.Context, sandbox string, epoch uint64) (State, error) {
	return c.state(ctx, http.MethodDelete, sandbox, "?epoch="+strconv.FormatUint(epoch, 10), nil)
}

// State tells what is known of a sandbox, its open model requests for one.
func (c *Client) State(ctx context.Context, sandbox string) (State, error) {
	return c.state(ctx, http.MethodGet, sandbox, "", nil)
}

// Ack says that a journal's lines up to a number are stored elsewhere, and may be forgotten.
func (c *Client) Ack(ctx context.Context, sandbox, name string, line, epoch uint64) error {
	_, err := c.state(ctx, http.MethodPost, sandbox, "/journal/ack", admin.Ack{Journal: name, Line: line, Epoch: epoch})
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

// pauses between tries to reach a proxy that went away.
const (
	firstPause = 50 * time.Millisecond
	lastPause  = 2 * time.Second
)

// Follow gives a sandbox's journal lines after a number, then those to come, in
// order and each once. When the connection is lost it dials again, until ctx
// ends. name is the journal that the number is of, "" if none was seen yet: of
// another journal the lines come from its first one on. It ends without an
// error when the sandbox is released and all lines were given, and with an
// *Error of CodeFenced or CodeNotFound, or ctx's error.
func (c *Client) Follow(ctx context.Context, sandbox, name string, after, epoch uint64) iter.Seq2[Line, error] {
	return func(yield func(Line, error) bool) {
		for pause := firstPause; ; {
			f := follow{name: name, after: after}
			over, err := f.run(ctx, c, sandbox, epoch, yield)
			if f.after != after || f.name != name {
				pause = firstPause
			}
			name, after = f.name, f.after
			if over {
				return
			}
			var refused *Error
			if errors.As(err, &refused) || ctx.Err() != nil {
				if ctx.Err() != nil {
					err = ctx.Err()
				}
				yield(Line{}, err)
				return
			}
			select {
			case <-ctx.Done():
			case <-time.After(pause):
			}
			pause = min(2*pause, lastPause)
		}
	}
}

// follow is one connection's part of Follow.
type follow struct {
	name  string
	after uint64
}

// maxLine bounds a journal line in bytes.
const maxLine = 1 << 20

// run gives lines until the stream ends; over when there is nothing more to do.
func (f *follow) run(ctx context.Context, c *Client, sandbox string, epoch uint64, yield func(Line, error) bool) (over bool, err error) {
	q := url.Values{"follow": {"1"}, "journal": {f.name}, "after": {strconv.FormatUint(f.after, 10)}, "epoch": {strconv.FormatUint(epoch, 10)}}
	res, err := c.do(ctx, http.MethodGet, "/v1/sandboxes/"+url.PathEscape(sandbox)+"/journal?"+q.Encode(), nil)
	if err != nil {
		return false, err
	}
	defer res.Body.Close() //nolint:errcheck // it is over
	lines := bufio.NewScanner(res.Body)
	lines.Buffer(nil, maxLine)
	for lines.Scan() {
		if len(lines.Bytes()) == 0 {
			continue
		}
		var l struct {
			Line
			admin.End
		}
		if err := json.Unmarshal(lines.Bytes(), &l); err != nil {
			return false, fmt.Errorf("journal of %s: %w", sandbox, err)
		}
		switch l.End.End {
		case admin.EndReleased:
			return true, nil
		case admin.EndFenced:
			return false, &Error{Code: CodeFenced, Field: "epoch", Detail: "a higher epoch holds the sandbox"}
		}
		var of struct {
			Journal string `json:"journal"`
		}
		if err := json.Unmarshal(l.Data, &of); err != nil {
			return false, fmt.Errorf("journal of %s: line %d: %w", sandbox, l.N, err)
		}
		f.name, f.after = of.Journal, l.N
		if !yield(l.Line, nil) {
			return true, nil
		}
	}
	return false, lines.Err()
}

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
