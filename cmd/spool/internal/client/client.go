// Package client is the client of a gateway. It calls the methods of the API over REST with the generated messages of
// spool.v1, transfers files, and follows and replays the events of sessions with exact resume.
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

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/certificate"
	"github.com/spoolhq/spool/pkg/retry"
)

const (
	defaultTimeout = 30 * time.Second
	defaultGiveUp  = time.Minute
	// retries is the maximum number of times that a repeatable request is sent again.
	retries = 3
	// maxWait is the maximum wait between two attempts, whatever the server's Retry-After requests.
	maxWait = 5 * time.Second
	// maxResponse is the maximum size of a response in bytes. A page of events ends at 2 MiB, but one event may be larger.
	maxResponse = 64 << 20
)

// Config configures a client. Only URL is required.
type Config struct {
	URL     string        // of the gateway: http://host:port or https://host:port
	Key     string        // API key; "" for a server without keys
	CAFile  string        // PEM file of the authorities that verify an https server; "" means the system's
	Timeout time.Duration // time limit of one request; 0 means 30 s
	GiveUp  time.Duration // maximum time for which Follow tries to reconnect; 0 means 1 min
	HTTP    *http.Client  // nil means a client of its own
}

// Client is the client of one gateway. The fields are the generated clients of the services; Call and List call their
// methods. A Client is safe for concurrent use.
type Client struct {
	Sessions     spoolv1.SessionsClient
	Executions   spoolv1.ExecutionsClient
	Approvals    spoolv1.ApprovalsClient
	Environments spoolv1.EnvironmentsClient
	Skills       spoolv1.SkillsClient
	Keys         spoolv1.KeysClient
	Limits       spoolv1.LimitsClient
	Budgets      spoolv1.BudgetsClient
	DeadLetters  spoolv1.DeadLettersClient
	Audit        spoolv1.AuditClient
	events       spoolv1.EventsClient

	base *url.URL
	cfg  Config
}

// New returns a client. It sends nothing; the error is that of an invalid Config.
func New(cfg Config) (*Client, error) {
	base, err := url.Parse(strings.TrimRight(cfg.URL, "/"))
	if err != nil || base.Scheme != "http" && base.Scheme != "https" || base.Host == "" {
		return nil, fmt.Errorf("url: %q is not an address such as http://127.0.0.1:7700", cfg.URL)
	}
	if strings.ContainsFunc(cfg.Key, func(r rune) bool { return r <= ' ' || r > '~' }) {
		return nil, errors.New("key: the API key contains characters other than printable ASCII: check SPOOL_API_KEY or --key")
	}
	if cfg.Timeout == 0 {
		cfg.Timeout = defaultTimeout
	}
	if cfg.GiveUp == 0 {
		cfg.GiveUp = defaultGiveUp
	}
	transport := http.DefaultTransport.(*http.Transport).Clone()
	if cfg.CAFile != "" {
		pool, err := certificate.ReadCertPool(cfg.CAFile)
		if err != nil {
			return nil, fmt.Errorf("ca-file: %w", err)
		}
		transport.TLSClientConfig = &tls.Config{MinVersion: tls.VersionTLS12, RootCAs: pool}
	}
	if cfg.HTTP == nil {
		cfg.HTTP = &http.Client{Transport: transport}
	}
	c := &Client{base: base, cfg: cfg}
	c.Approvals = spoolv1.NewApprovalsClient(rest{c})
	c.Sessions, c.Executions, c.events = spoolv1.NewSessionsClient(rest{c}), spoolv1.NewExecutionsClient(rest{c}), spoolv1.NewEventsClient(rest{c})
	c.Environments, c.Skills, c.Keys = spoolv1.NewEnvironmentsClient(rest{c}), spoolv1.NewSkillsClient(rest{c}), spoolv1.NewKeysClient(rest{c})
	c.Limits, c.Budgets = spoolv1.NewLimitsClient(rest{c}), spoolv1.NewBudgetsClient(rest{c})
	c.DeadLetters, c.Audit = spoolv1.NewDeadLettersClient(rest{c}), spoolv1.NewAuditClient(rest{c})
	return c, nil
}

// URL returns the address of the gateway.
func (c *Client) URL() string { return c.base.String() }

// Close closes idle connections.
func (c *Client) Close() { c.cfg.HTTP.CloseIdleConnections() }

// Alive returns an error unless a gateway responds, ready or not. /health is not a method of spool.v1.
func (c *Client) Alive(ctx context.Context) error {
	_, err := c.do(ctx, call{method: http.MethodGet, path: []string{"health"}, repeatable: true})
	return err
}

// Readiness is the response of /readyz, which is not a method of spool.v1.
type Readiness struct {
	Ready  bool              `json:"ready"`
	Checks map[string]string `json:"checks"` // by the name of a part: ok, or its error
}

// Ready returns the readiness of the gateway. The error is nil for a gateway that responds and is not ready.
func (c *Client) Ready(ctx context.Context) (Readiness, error) {
	var r Readiness
	resp, err := c.send(ctx, call{method: http.MethodGet, path: []string{"readyz"}})
	if err != nil {
		return r, err
	}
	if json.Unmarshal(resp.body, &r) != nil || r.Checks == nil {
		return r, c.responseError(resp.Response, resp.body)
	}
	return r, nil
}

// call is one HTTP request to a gateway, which do may send several times.
type call struct {
	method     string
	path       []string // segments below the base, not yet escaped
	query      url.Values
	body       []byte        // JSON; nil for none
	key        string        // Idempotency-Key; "" for none
	repeatable bool          // may be sent again if its outcome is unknown
	wait       time.Duration // time for which the server may wait before it responds, in addition to Config.Timeout
}

// do sends a call and returns the JSON of the response. It repeats a repeatable call after errors that may pass. The
// error is an *Error, an *UnreachableError or that of ctx.
func (c *Client) do(ctx context.Context, r call) (json.RawMessage, error) {
	again := newAttempts()
	for {
		raw, err := c.once(ctx, r)
		if err == nil || !r.repeatable {
			return raw, err
		}
		if err := again.wait(ctx, err); err != nil {
			return nil, err
		}
	}
}

// attempts are the repeated attempts of one request.
type attempts struct {
	left   int
	pauses *retry.Pauses
}

func newAttempts() *attempts { return &attempts{retries, retry.NewDoubling(firstWait, maxWait)} }

// wait blocks until the attempt after err, at least for as long as the server's Retry-After, up to maxWait. It returns err if
// there is no further attempt, and the error of ctx if ctx ends first.
func (a *attempts) wait(ctx context.Context, err error) error {
	var problem *Error
	var unreachable *UnreachableError
	var broken *brokenError
	var least time.Duration
	switch {
	case errors.As(err, &problem) && problem.temporary():
		least = min(problem.RetryAfter, maxWait)
	case errors.As(err, &unreachable) && !IsRefused(err) && !isUntrusted(err):
		// A refused connection means that no server runs, and an untrusted certificate does not change. A server that
		// closed the connection may respond to the next attempt.
	case errors.As(err, &broken):
	default:
		return err
	}
	if a.left == 0 {
		return err
	}
	a.left--
	if retry.Pause(ctx, max(least, a.pauses.NextBackOff())) != nil {
		return ctx.Err()
	}
	return nil
}

// response is an HTTP response with its whole body.
type response struct {
	*http.Response
	body []byte
}

// request returns the HTTP request of a call.
func (c *Client) request(ctx context.Context, r call, body io.Reader) (*http.Request, error) {
	u := c.base.JoinPath(escapeSegments(r.path)...)
	u.RawQuery = r.query.Encode()
	req, err := http.NewRequestWithContext(ctx, r.method, u.String(), body)
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	req.Header = c.header()
	return req, nil
}

// send sends a call once and returns the response, whatever its status is.
func (c *Client) send(ctx context.Context, r call) (response, error) {
	limited, cancel := context.WithTimeout(ctx, c.cfg.Timeout+max(0, r.wait))
	defer cancel()
	req, err := c.request(limited, r, bytes.NewReader(r.body))
	if err != nil {
		return response{}, err
	}
	if r.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.key != "" {
		req.Header.Set("Idempotency-Key", r.key)
	}
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return response{}, c.unreachableError(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }() // the body was read to its end, or its error is returned
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponse+1))
	if err != nil {
		return response{}, c.unreachableError(ctx, err)
	}
	if len(body) > maxResponse {
		return response{}, fmt.Errorf("%s: the response is larger than %d MiB", c.base, maxResponse>>20)
	}
	return response{resp, body}, nil
}

// once sends a call once and returns the JSON of the response.
func (c *Client) once(ctx context.Context, r call) (json.RawMessage, error) {
	resp, err := c.send(ctx, r)
	if err != nil {
		return nil, err
	}
	if resp.StatusCode >= 300 {
		return nil, c.responseError(resp.Response, resp.body)
	}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || media != "application/json" {
		return nil, &Error{Status: resp.StatusCode, Detail: fmt.Sprintf("%s is not a Spool server (Content-Type of the response: %q): pass --url", c.base, resp.Header.Get("Content-Type"))}
	}
	var raw json.RawMessage
	return raw, c.decodeError(json.Unmarshal(resp.body, &raw))
}

// decodeError adds the server to the error of decoding a response; nil stays nil.
func (c *Client) decodeError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("decode the response of %s: %w", c.base, err)
}

// escapeSegments escapes path segments, so that an id cannot leave its segment.
func escapeSegments(segments []string) []string {
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

// unreachableError returns the error of a request without a response. ctx is the caller's.
func (c *Client) unreachableError(ctx context.Context, err error) error {
	if ctx.Err() != nil {
		return ctx.Err()
	}
	var wrapped *url.Error
	if errors.As(err, &wrapped) {
		err = wrapped.Err
	}
	return &UnreachableError{URL: c.base.String(), Err: err}
}

// responseError returns the error of a response that is not a success.
func (c *Client) responseError(resp *http.Response, body []byte) error {
	e := &Error{}
	if media, _, err := mime.ParseMediaType(resp.Header.Get("Content-Type")); err != nil || media != "application/problem+json" || json.Unmarshal(body, e) != nil {
		e = &Error{Detail: fmt.Sprintf("%s responded %q, but not as a Spool server does: pass --url", c.base, resp.Status)}
	}
	e.Status = resp.StatusCode
	if s, err := strconv.Atoi(resp.Header.Get("Retry-After")); err == nil && s > 0 {
		e.RetryAfter = time.Duration(s) * time.Second
	}
	return e
}

// filter returns a query with one parameter, or with none if the value is "".
func filter(name, value string) url.Values {
	if value == "" {
		return url.Values{}
	}
	return url.Values{name: {value}}
}

// encode returns the JSON of v without HTML escapes.
func encode(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
