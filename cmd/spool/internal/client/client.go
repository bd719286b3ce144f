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
	// defaultTimeout is the time limit of a request unless Config.Timeout is set.
	defaultTimeout = 30 * time.Second
	// defaultReconnectLimit is the time for which Follow tries to reconnect unless Config.GiveUp is set.
	defaultReconnectLimit = time.Minute
	// maxRetries is the maximum number of times that the client repeats a failed request.
	maxRetries = 3
	// maxRetryWait is the maximum wait before a request is repeated, even if the server's Retry-After is longer.
	maxRetryWait = 5 * time.Second
	// maxResponseBytes is the maximum size of a response in bytes. A page of events ends at 2 MiB, but one event may be
	// larger.
	maxResponseBytes = 64 << 20
)

// Config configures a client. Only URL is required.
type Config struct {
	URL     string        // URL of the gateway: http://host:port or https://host:port
	Key     string        // API key; "" for a server without keys
	CAFile  string        // PEM file of the authorities that verify an https server; "" means the system's
	Timeout time.Duration // time limit of one request; 0 means 30 s
	GiveUp  time.Duration // maximum time for which Follow tries to reconnect; 0 means 1 min
	HTTP    *http.Client  // HTTP client for all requests; nil means a new one
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
	SignIn       spoolv1.SignInClient
	Limits       spoolv1.LimitsClient
	Budgets      spoolv1.BudgetsClient
	DeadLetters  spoolv1.DeadLettersClient
	Audit        spoolv1.AuditClient
	Events       spoolv1.EventsClient

	base *url.URL
	cfg  Config
}

// New returns a client of the gateway at cfg.URL. It sends no request. It returns an error if cfg is invalid.
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
		cfg.GiveUp = defaultReconnectLimit
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
	c.Approvals = spoolv1.NewApprovalsClient(restConn{c})
	c.Sessions, c.Executions, c.Events = spoolv1.NewSessionsClient(restConn{c}), spoolv1.NewExecutionsClient(restConn{c}), spoolv1.NewEventsClient(restConn{c})
	c.Environments, c.Skills, c.Keys = spoolv1.NewEnvironmentsClient(restConn{c}), spoolv1.NewSkillsClient(restConn{c}), spoolv1.NewKeysClient(restConn{c})
	c.SignIn = spoolv1.NewSignInClient(restConn{c})
	c.Limits, c.Budgets = spoolv1.NewLimitsClient(restConn{c}), spoolv1.NewBudgetsClient(restConn{c})
	c.DeadLetters, c.Audit = spoolv1.NewDeadLettersClient(restConn{c}), spoolv1.NewAuditClient(restConn{c})
	return c, nil
}

// URL returns the URL of the gateway.
func (c *Client) URL() string { return c.base.String() }

// Close closes the idle connections to the gateway.
func (c *Client) Close() { c.cfg.HTTP.CloseIdleConnections() }

// PathPrefix returns the path below which the gateway's page is served, such as /spool, or "" for none.
func (c *Client) PathPrefix(ctx context.Context) (string, error) {
	raw, err := c.sendWithRetries(ctx, apiCall{method: http.MethodGet, path: []string{"api", "openapi.json"}, repeatable: true})
	if err != nil {
		return "", err
	}
	var doc struct {
		Servers []struct {
			URL string `json:"url"`
		} `json:"servers"`
	}
	if err := json.Unmarshal(raw, &doc); err != nil {
		return "", fmt.Errorf("the OpenAPI document of %s: %w", c.URL(), err)
	}
	if len(doc.Servers) == 0 {
		return "", nil
	}
	return strings.TrimRight(doc.Servers[0].URL, "/"), nil
}

// Ping returns an error unless the gateway responds. A gateway that responds and is not ready is no error. Ping
// requests /health, which is not a method of spool.v1.
func (c *Client) Ping(ctx context.Context) error {
	_, err := c.sendWithRetries(ctx, apiCall{method: http.MethodGet, path: []string{"health"}, repeatable: true})
	return err
}

// Readiness is the gateway's response to /readyz, which is not a method of spool.v1.
type Readiness struct {
	Ready  bool              `json:"ready"`
	Checks map[string]string `json:"checks"` // the state of each part of the gateway by its name: ok, or an error
}

// GetReadiness returns whether the gateway and its parts are ready. A gateway that responds and is not ready is no
// error.
func (c *Client) GetReadiness(ctx context.Context) (Readiness, error) {
	var r Readiness
	resp, err := c.sendOnce(ctx, apiCall{method: http.MethodGet, path: []string{"readyz"}})
	if err != nil {
		return r, err
	}
	if json.Unmarshal(resp.body, &r) != nil || r.Checks == nil {
		return r, c.responseError(resp.Response, resp.body)
	}
	return r, nil
}

// apiCall describes one HTTP request to a gateway, which sendWithRetries may send several times.
type apiCall struct {
	method     string
	path       []string // segments below the base, not yet escaped
	query      url.Values
	body       []byte        // JSON; nil for none
	key        string        // Idempotency-Key; "" for none
	repeatable bool          // may be sent again if its outcome is unknown
	wait       time.Duration // time for which the server may wait before it responds, in addition to Config.Timeout
}

// sendWithRetries sends a request and returns the JSON of the response. It repeats a repeatable request after errors
// that may be temporary. The error is an *Error, an *UnreachableError or that of ctx.
func (c *Client) sendWithRetries(ctx context.Context, r apiCall) (json.RawMessage, error) {
	again := newRetryState()
	for {
		raw, err := c.callOnce(ctx, r)
		if err == nil || !r.repeatable {
			return raw, err
		}
		if err := again.waitForRetry(ctx, err); err != nil {
			return nil, err
		}
	}
}

// retryState counts the retries of one request and the waits between them.
type retryState struct {
	left   int
	pauses *retry.Pauses
}

func newRetryState() *retryState {
	return &retryState{maxRetries, retry.NewDoubling(firstRetryWait, maxRetryWait)}
}

// waitForRetry blocks until a request that failed with err may be repeated: for at least the server's Retry-After, up
// to maxRetryWait. It returns err if the request must not be repeated, and the error of ctx if ctx ends first.
func (a *retryState) waitForRetry(ctx context.Context, err error) error {
	var problem *Error
	var unreachable *UnreachableError
	var broken *connectionLostError
	var least time.Duration
	switch {
	case errors.As(err, &problem) && problem.isTemporary():
		least = min(problem.RetryAfter, maxRetryWait)
	case errors.As(err, &unreachable) && !IsDialError(err) && !isCertificateError(err):
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

// fullResponse is an HTTP response whose body has been read completely.
type fullResponse struct {
	*http.Response
	body []byte
}

// newRequest returns the HTTP request for an apiCall, with the API key.
func (c *Client) newRequest(ctx context.Context, r apiCall, body io.Reader) (*http.Request, error) {
	u := c.base.JoinPath(escapeSegments(r.path)...)
	u.RawQuery = r.query.Encode()
	req, err := http.NewRequestWithContext(ctx, r.method, u.String(), body)
	if err != nil {
		return nil, fmt.Errorf("request: %w", err)
	}
	req.Header = c.requestHeader()
	return req, nil
}

// sendOnce sends a request once and returns the response, whatever its status is.
func (c *Client) sendOnce(ctx context.Context, r apiCall) (fullResponse, error) {
	limited, cancel := context.WithTimeout(ctx, c.cfg.Timeout+max(0, r.wait))
	defer cancel()
	req, err := c.newRequest(limited, r, bytes.NewReader(r.body))
	if err != nil {
		return fullResponse{}, err
	}
	if r.body != nil {
		req.Header.Set("Content-Type", "application/json")
	}
	if r.key != "" {
		req.Header.Set("Idempotency-Key", r.key)
	}
	resp, err := c.cfg.HTTP.Do(req)
	if err != nil {
		return fullResponse{}, c.unreachableError(ctx, err)
	}
	defer func() { _ = resp.Body.Close() }() // the body was read to its end, or its error is returned
	body, err := io.ReadAll(io.LimitReader(resp.Body, maxResponseBytes+1))
	if err != nil {
		return fullResponse{}, c.unreachableError(ctx, err)
	}
	if len(body) > maxResponseBytes {
		return fullResponse{}, fmt.Errorf("%s: the response is larger than %d MiB", c.base, maxResponseBytes>>20)
	}
	return fullResponse{resp, body}, nil
}

// callOnce sends a request once and returns the JSON of the response, or an error if the response is not a success.
func (c *Client) callOnce(ctx context.Context, r apiCall) (json.RawMessage, error) {
	resp, err := c.sendOnce(ctx, r)
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
	return raw, c.wrapDecodeError(json.Unmarshal(resp.body, &raw))
}

// wrapDecodeError adds the URL of the server to an error of decoding a response. It returns nil if err is nil.
func (c *Client) wrapDecodeError(err error) error {
	if err == nil {
		return nil
	}
	return fmt.Errorf("decode the response of %s: %w", c.base, err)
}

// escapeSegments escapes the segments of a URL path, so that an id with a slash or dots cannot change the path.
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

// requestHeader returns the HTTP headers of every request, which contain the API key.
func (c *Client) requestHeader() http.Header {
	h := http.Header{"Accept": {"application/json"}, "User-Agent": {"spool-cli"}}
	if c.cfg.Key != "" {
		h.Set("Authorization", "Bearer "+c.cfg.Key)
	}
	return h
}

// unreachableError returns the error for a request that got no response because of err. If ctx, the caller's context,
// has ended, it returns the error of ctx.
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

// responseError returns the *Error for an HTTP response whose status is not a success.
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

// optionalParameter returns a URL query with one parameter, or an empty query if value is "".
func optionalParameter(name, value string) url.Values {
	if value == "" {
		return url.Values{}
	}
	return url.Values{name: {value}}
}

// encodeJSON returns the JSON of v, in which <, > and & are not escaped.
func encodeJSON(v any) ([]byte, error) {
	var b bytes.Buffer
	enc := json.NewEncoder(&b)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(v); err != nil {
		return nil, fmt.Errorf("encode the request: %w", err)
	}
	return bytes.TrimSuffix(b.Bytes(), []byte("\n")), nil
}
