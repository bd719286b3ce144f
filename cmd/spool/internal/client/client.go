// Package client talks to a gateway: REST for what is asked once, and a
// WebSocket for a session's events, with exact resume.
package client

import (
	"bytes"
	"context"
	"crypto/tls"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"mime"
	"net/http"
	"net/url"
	"strconv"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/certificate"
)

const (
	defaultTimeout = 30 * time.Second
	defaultGiveUp  = time.Minute
	// retries is how often a request that changes nothing when it is repeated is sent again.
	retries = 3
	// maxWait bounds what a server may ask to wait between two tries.
	maxWait = 5 * time.Second
	// maxAnswer bounds an answer in bytes: a page of events ends at 2 MiB, but one event may be larger.
	maxAnswer = 64 << 20
)

// Config says where the gateway is. Only URL is required.
type Config struct {
	URL     string        // http://host:port
	Key     string        // API key; empty for a server without keys
	CAFile  string        // PEM file of the authorities that an https server is checked against; empty for the system's
	Timeout time.Duration // of one request; 0 means 30 s
	GiveUp  time.Duration // how long Follow goes on trying to come back; 0 means 1 min
	HTTP    *http.Client  // nil means one of its own
}

// Client talks to one gateway. It is safe for concurrent use.
type Client struct {
	base *url.URL
	cfg  Config
}

// New checks the config.
func New(cfg Config) (*Client, error) {
	base, err := url.Parse(strings.TrimRight(cfg.URL, "/"))
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, fmt.Errorf("url: %q is not an address such as http://127.0.0.1:7700", cfg.URL)
	}
	if strings.ContainsFunc(cfg.Key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("key: an API key has only printable ASCII characters: check SPOOL_API_KEY or --key")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.GiveUp == 0 {
		cfg.GiveUp = defaultGiveUp
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if cfg.CAFile != "" {
		pool, err := certificate.ReadPool(cfg.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca-file: %w", err)
		}
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	}
	if cfg.HTTP == nil {
		cfg.HTTP = &http.Client{Transport: transport}
	}
	return &Client{base: base, cfg: cfg}, nil
}

// URL is the gateway's address.
func (c *Client) URL() string { return c.base.String() }

// Close gives idle connections back.
func (c *Client) Close() { c.cfg.HTTP.CloseIdleConnections() }

// Doc is an object of the API: as it came, and decoded.
type Doc[T any] struct {
	Raw   json.RawMessage
	Value T
}

// UnmarshalJSON keeps both forms.
func (d *Doc[T]) UnmarshalJSON(b []byte) error {
	d.Raw = append(json.RawMessage(nil), b...)
	return json.Unmarshal(b, &d.Value)
}

// MarshalJSON gives back what came.
func (d Doc[T]) MarshalJSON() ([]byte, error) { return d.Raw, nil }

// call is one request.
type call struct {
	method string
	path   []string // segments below the base, not yet escaped
	query  url.Values
	body   any
	key    string // Idempotency-Key
	repeat bool   // sending it again changes nothing
}

// do sends a call and decodes its answer into out. The error
// is an *Error, an *UnreachableError or ctx's.
func (c *Client) do(ctx context.Context, r call, out any) error {
	var body []byte
	if r.body != nil {
		var err error
		if body, err = encode(r.body); err != nil {
			return fmt.Errorf("encode the request: %w", err)
		}
	}
	for try := 0; ; try++ {
		err := c.once(ctx, r, body, out)
		wait, again := retryAfter(err, try)
		if !r.repeat || try == retries || !again {
			return err
		}
		select {
		case <-ctx.Done():
			return ctx.Err()
		case <-time.After(wait):
		}
	}
}

// retryAfter tells whether an error may be gone at the next try, and when that should be.
func retryAfter(err error, try int) (time.Duration, bool) {
	wait := 100 * time.Millisecond << try
	var problem *Error
	var unreachable *UnreachableError
	switch {
	case errors.As(err, &problem) && problem.temporary():
		return min(max(problem.RetryAfter, wait), maxWait), true
	case errors.As(err, &unreachable):
		// A server that refuses connections is not up, and a refused certificate stays; one that broke off may answer again.
		return wait, !IsRefused(err) && !isUntrusted(err)
	}
	return 0, false
}

// answer is a response that was read.
type answer struct {
	*http.Response
	body []byte
}

// send sends a call once.
func (c *Client) send(ctx context.Context, r call, body []byte) (answer, error) {
	try, cancel := context.WithTimeout(ctx, c.cfg.Timeout)
	defer cancel()
	u := c.base.JoinPath(escaped(r.path)...)
	u.RawQuery = r.query.Encode()
	req, err := http.NewRequestWithContext(try, r.method, u.String(), bytes.NewReader(body))
	if err != nil {
		return answer{}, fmt.Errorf("request: %w", err)
	}
	req.Header = c.header()
	if r.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.key != "" {
		req.Header.Set("Idempotency-Key", r.key)
	}
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return answer{}, c.unreachable(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }() // it was read to its end, or the error is told
	got, err := io.ReadAll(io.LimitReader(resp.Body, maxAnswer+1))
	if err != nil {
		return answer{}, c.unreachable(ctx, err)
	}
	if len(got) > maxAnswer {
		return answer{}, fmt.Errorf("%s answered more than %d MiB", c.base, maxAnswer>>20)
	}
	return answer{resp, got}, nil
}

func (c *Client) once(ctx context.Context, r call, body []byte, out any) error {
	resp, err := c.send(ctx, r, body)
	if err != nil {
		return err
	}
	if resp.StatusCode >= 300 {
		return c.problem(resp.Response, resp.body)
	}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || media != "application/json" {
		return &Error{Status: resp.StatusCode, Detail: fmt.Sprintf("%s is not a Spool server (it answered %q): pass --url", c.base, resp.Header.Get("Content-Type"))}
	}
	if err := json.Unmarshal(resp.body, out); err != nil {
		return fmt.Errorf("%s answered what is not understood: %w", c.base, err)
	}
	return nil
}

// escaped makes path segments of ids, whatever they hold: nothing leaves its segment.
func escaped(segments []string) []string {
	out := make([]string, len(segments))
	for i, s := range segments {
		if s == "." || s == ".." {
			s = strings.ReplaceAll(s, ".", "%2E")
		} else {
			s = url.PathEscape(s)
		}
		out[i] = s
	}
	return out
}

func (c *Client) header() http.Header {
	h := http.Header{"Accept": {"application/json"}, "User-Agent": {"spool-cli"}}
	if c.cfg.Key != "" {
		h.Set("Authorization", "Bearer "+c.cfg.Key)
	}
	return h
}

// unreachable says why no answer came; ctx is the caller's.
func (c *Client) unreachable(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return &UnreachableError{URL: c.base.String(), Err: err}
}

// problem reads a refusal.
func (c *Client) problem(resp *http.Response, body []byte) error {
	e := &Error{}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || media != "application/problem+json" || json.Unmarshal(body, e) != nil {
		e = &Error{Detail: fmt.Sprintf("%s answered %q, which is not Spool's: pass --url", c.base, resp.Status)}
	}
	e.Status = resp.StatusCode
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
		e.RetryAfter = time.Duration(s) * time.Second
	}
	return e
}

// encode is JSON without HTML escapes.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	err := enc.Encode(v)
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), err
}
