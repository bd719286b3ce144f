package api

import (
	"bufio"
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
)

// DialFunc is a function that opens a connection to the admin socket of an egress proxy.
type DialFunc func(ctx context.Context) (net.Conn, error)

// DialSocket returns a DialFunc that connects to a Unix socket on this machine.
func DialSocket(path string) DialFunc {
	return func(ctx context.Context) (net.Conn, error) { return (&net.Dialer{}).DialContext(ctx, "unix", path) }
}

// Client is a client of an egress proxy's admin API. It is safe for concurrent use.
type Client struct {
	http *http.Client
	idle func()
}

// maxIdleConnections is the number of connections that are kept for later requests. A connection through a container's
// command is slow to open, and all executions of an executor share the client.
const maxIdleConnections = 16

// maxLineBytes is the maximum number of bytes of a journal line, and of the body of a refusal.
const maxLineBytes = 1 << 20

// NewClient returns a Client that opens its connections with dial. The caller must call Close, which closes idle
// connections.
func NewClient(dial DialFunc) *Client {
	t := &http.Transport{
		DialContext:        func(ctx context.Context, _, _ string) (net.Conn, error) { return dial(ctx) },
		DisableCompression: true, IdleConnTimeout: 30 * time.Second,
		MaxIdleConnsPerHost: maxIdleConnections,
	}
	return &Client{http: &http.Client{Transport: t}, idle: t.CloseIdleConnections}
}

// Close closes idle connections.
func (c *Client) Close() { c.idle() }

// Register registers a sandbox, or replaces its registration. The registration is on disk when Register returns. A refusal
// is an *Error.
func (c *Client) Register(ctx context.Context, sandbox string, r Registration) (SandboxState, error) {
	if r.Allow == nil {
		r.Allow = []string{} // the proxy reads null as well, but the API has a list
	}
	return c.requestState(ctx, http.MethodPut, sandbox, "", r)
}

// Release ends a sandbox's registration: the proxy voids the sandbox's token and closes its connections. State.Last of the
// result is the number of the journal's last line. The proxy forgets the sandbox when that line is acknowledged.
func (c *Client) Release(ctx context.Context, sandbox string) (SandboxState, error) {
	return c.requestState(ctx, http.MethodDelete, sandbox, "?epoch="+anyEpoch, nil)
}

// State returns the registration of a sandbox and the numbers of its journal lines.
func (c *Client) State(ctx context.Context, sandbox string) (SandboxState, error) {
	return c.requestState(ctx, http.MethodGet, sandbox, "", nil)
}

// AckLines allows the proxy to remove the lines of a sandbox's journal up to and including a line number.
func (c *Client) AckLines(ctx context.Context, sandbox, journal string, line uint64) error {
	_, err := c.requestState(ctx, http.MethodPost, sandbox, "/journal/ack", AckRequest{Journal: journal, Line: line, Epoch: AnyEpoch})
	return err
}

// Health returns nil if the proxy is healthy.
func (c *Client) Health(ctx context.Context) error {
	res, err := c.sendRequest(ctx, http.MethodGet, "/healthz", nil)
	if err != nil {
		return err
	}
	return res.Body.Close()
}

// JournalLines returns the lines of a sandbox's journal after a line number, without waiting for later lines. journal is the name
// of the journal to which the number belongs, "" for none: if the sandbox has another journal now, JournalLines returns all lines
// of that one. If settled is true, the proxy first waits up to 200 ms for model requests that are about to end.
func (c *Client) JournalLines(ctx context.Context, sandbox, journal string, after uint64, settled bool) ([]JournalLine, error) {
	q := url.Values{"journal": {journal}, "after": {strconv.FormatUint(after, 10)}, "epoch": {anyEpoch}}
	if settled {
		q.Set("settle", "1")
	}
	res, err := c.sendRequest(ctx, http.MethodGet, "/v1/sandboxes/"+url.PathEscape(sandbox)+"/journal?"+q.Encode(), nil)
	if err != nil {
		return nil, err
	}
	defer res.Body.Close() //nolint:errcheck // it is read
	in := bufio.NewScanner(res.Body)
	in.Buffer(nil, maxLineBytes)
	var out []JournalLine
	for in.Scan() {
		var l struct {
			JournalLine
			End string `json:"end"` // not a journal line: proxies of earlier releases send it after the lines of a released sandbox
		}
		if err := json.Unmarshal(in.Bytes(), &l); err != nil {
			return out, fmt.Errorf("journal of %s: %w", sandbox, err)
		}
		if l.End != "" {
			break
		}
		out = append(out, l.JournalLine)
	}
	if err := in.Err(); err != nil {
		return out, fmt.Errorf("journal of %s: %w", sandbox, err)
	}
	return out, nil
}

// anyEpoch is AnyEpoch as text, for the query of a request.
var anyEpoch = strconv.FormatUint(AnyEpoch, 10)

// requestState sends a request about a sandbox, whose path ends with rest, and returns the state in the answer.
func (c *Client) requestState(ctx context.Context, method, sandbox, rest string, body any) (SandboxState, error) {
	res, err := c.sendRequest(ctx, method, "/v1/sandboxes/"+url.PathEscape(sandbox)+rest, body)
	if err != nil {
		return SandboxState{}, err
	}
	defer res.Body.Close() //nolint:errcheck // it is read
	var s SandboxState
	if err := json.NewDecoder(res.Body).Decode(&s); err != nil {
		return SandboxState{}, fmt.Errorf("egress proxy: %w", err)
	}
	return s, nil
}

// sendRequest sends a request to the admin API. It returns an error for an answer with a status of 400 or above: an *Error
// if the answer has a code.
func (c *Client) sendRequest(ctx context.Context, method, path string, body any) (*http.Response, error) {
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
	var p Problem
	if err := json.NewDecoder(io.LimitReader(res.Body, maxLineBytes)).Decode(&p); err != nil || p.Code == "" {
		return nil, fmt.Errorf("egress proxy: %s %s: %s", method, path, res.Status)
	}
	if res.StatusCode >= http.StatusInternalServerError {
		return nil, fmt.Errorf("egress proxy: %s: %s", p.Code, p.Detail)
	}
	return nil, &Error{Code: p.Code, Detail: p.Detail, Field: p.Field}
}
