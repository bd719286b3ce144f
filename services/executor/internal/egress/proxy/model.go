package proxy

import (
	"cmp"
	"compress/gzip"
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httputil"
	"strings"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/meter"
	"github.com/spoolhq/spool/services/executor/internal/egress/registry"
)

// serveRoute serves a request whose path begins with the name of a route, for example of a model provider.
func (s *Server) serveRoute(w http.ResponseWriter, r *http.Request, sb *registry.Sandbox) {
	name, rest := splitRouteName(r.URL.Path)
	rt := s.routes[name]
	if rt == nil {
		s.deny(w, sb, http.StatusNotFound, events.EgressDenied{Host: r.Host, Method: r.Method, Code: CodeNotAllowed, Message: "there is no route " + name + " to a model"})
		return
	}
	d := events.EgressDenied{Host: rt.Base.Host, Method: r.Method}
	switch {
	case !sb.AllowsRoute(name):
		d.Code, d.Message = CodeNotAllowed, "this sandbox may not use the route "+name
	case r.Method == http.MethodTrace || r.Method == http.MethodConnect: // TRACE would return the credential
		d.Code, d.Message = CodeMethodNotAllowed, r.Method+" is not allowed on a route"
	case r.Header.Get("Upgrade") != "":
		d.Code, d.Message = CodeMethodNotAllowed, "a route does not upgrade the protocol: use plain requests and server-sent events"
	case hasDotElement(rest):
		d.Code, d.Message = CodeBadHost, "the path has a dot-dot element"
	case !rt.allowsRequest(r.Method, rest):
		d.Code, d.Message = CodeNotAllowed, r.Method+" "+rest+" is not a model call, and the route "+rt.Name+" serves nothing else"
	}
	if d.Code != "" {
		s.deny(w, sb, http.StatusForbidden, d)
		return
	}
	if rt.Unset != "" {
		failure{http.StatusUnauthorized, codeNoCredential, rt.Unset}.write(w)
		return
	}
	if sb.Journal.IsFull() {
		failure{http.StatusServiceUnavailable, codeJournalFull, "the executor has not read the usage of this sandbox for too long: no model call is started"}.write(w)
		return
	}
	c := &routedRequest{s: s, sb: sb, rt: rt, began: time.Now(), execution: sb.Execution(), charges: sb.ChargedBudgets(), dialect: rt.answerDialect(r.Method, rest)}
	if c.execution == "" && rt.Kind != KindPlain && r.Method != http.MethodGet && r.Method != http.MethodHead { // a CLI in the warm pool may test the connection
		d.Code, d.Message = CodeNoExecution, "no execution of the session runs: models can be called only in an execution"
		s.deny(w, sb, http.StatusForbidden, d)
		return
	}
	if c.dialect != meter.DialectNone {
		end, reason, err := c.charges.ReserveTurns(r.Context())
		switch {
		case err != nil:
			return // the sandbox closed the connection
		case reason != "":
			d.Code, d.Message = CodeBudgetExhausted, reason
			s.deny(w, sb, http.StatusPaymentRequired, d)
			return
		}
		defer end()
	}
	if rt.checksBody(r.Method, rest) {
		if c.body = s.checkModelRequest(w, r, c, d); c.body == nil {
			return
		}
		defer c.body.Close() //nolint:errcheck // it never fails
	}
	c.serveRequest(w, r)
}

// routedRequest is a request that a sandbox sends through a route, with its answer and its metered usage.
type routedRequest struct {
	s         *Server
	sb        *registry.Sandbox
	rt        *Route
	dialect   meter.Dialect
	began     time.Time
	execution string
	charges   registry.ChargedBudgets

	body  *bufferedBody // of a request that is checked; nil for one that is streamed
	model string        // that the body names

	progress  func()
	answer    *meter.ResponseMeter // nil before the answer's head
	status    int
	firstByte time.Time
	complete  bool // the answer was read to its end
	charged   bool // the usage is charged
	failed    error
}

func (c *routedRequest) serveRequest(w http.ResponseWriter, r *http.Request) {
	done, counted := c.sb.BeginRequest(true), c.s.cfg.Metrics.BeginRequest(c.rt.Name)
	sandbox := r.Context()
	ctx, progress, stop := withIdleTimeout(sandbox, c.s.cfg.ModelIdle)
	c.progress = progress
	defer func() { // a broken answer ends the handler with a panic
		gone := sandbox.Err() != nil
		stop()
		c.recordEnd(ctx, r, gone)
		counted(c.status)
		done()
	}()
	p := &httputil.ReverseProxy{
		Rewrite: func(pr *httputil.ProxyRequest) {
			out := pr.Out
			out.URL, out.Host = c.rt.targetURL(pr.In.URL), ""
			c.rt.replaceCredentials(out.Header, out.URL)
			out.Header.Set("Accept-Encoding", "identity")
			if c.body != nil { // the provider must decode the body as the check did, whatever charset the client names
				out.Header.Set("Content-Type", "application/json")
			}
		},
		Transport: c.s.models, FlushInterval: -1, ModifyResponse: c.handleAnswerHeader, ErrorHandler: c.answerModelUnreachable,
		ErrorLog: slog.NewLogLogger(c.s.cfg.Logger.Handler(), slog.LevelDebug),
	}
	r = r.WithContext(ctx)
	switch {
	case c.body != nil:
		r.Body, r.ContentLength, r.TransferEncoding, r.Trailer = http.NoBody, int64(c.body.size), nil, nil
		if c.body.size > 0 {
			c.body.progress = progress
			r.Body = c.body
		}
	case r.Body != nil && r.Body != http.NoBody:
		r.Body = &progressReader{ReadCloser: &stickyEOF{ReadCloser: r.Body}, progress: progress}
	}
	p.ServeHTTP(w, r)
}

// handleAnswerHeader handles the header of the upstream's answer, and replaces the body by one that meters the usage.
func (c *routedRequest) handleAnswerHeader(res *http.Response) error {
	c.status = res.StatusCode
	c.progress()
	res.Header.Del("Set-Cookie") // it belongs to the operator's account
	for name, values := range res.Header {
		for i, v := range values {
			res.Header[name][i] = redactText(v, c.rt.Secret)
		}
	}
	var body io.Reader = res.Body
	switch encoding := res.Header.Get("Content-Encoding"); {
	case encoding == "" || encoding == "identity" || res.Body == http.NoBody || res.Request.Method == http.MethodHead:
	case encoding == "gzip":
		body = &gunzipReader{r: res.Body}
		res.Header.Del("Content-Encoding")
		res.Header.Del("Content-Length")
		res.ContentLength = -1
	default:
		return fmt.Errorf("the endpoint used content encoding %q although the request forbids it", truncateText(encoding))
	}
	c.answer = meter.NewResponseMeter()
	res.Body = &answerBody{Reader: newRedactor(body, c.rt.Secret), Closer: res.Body, c: c}
	return nil
}

// gunzipReader decompresses the body of an answer that the upstream compressed although the request did not ask for that.
type gunzipReader struct {
	r  io.Reader
	zr *gzip.Reader
}

func (g *gunzipReader) Read(p []byte) (int, error) {
	if g.zr == nil { // NewReader blocks until the first bytes
		zr, err := gzip.NewReader(g.r)
		if err != nil {
			return 0, err
		}
		g.zr = zr
	}
	return g.zr.Read(p)
}

// answerBody is the body of an answer to a routed request. It meters the usage while the body is copied to the sandbox.
type answerBody struct {
	io.Reader
	io.Closer
	c *routedRequest
}

func (b *answerBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	c := b.c
	c.progress()
	if n > 0 && c.firstByte.IsZero() {
		c.firstByte = time.Now()
	}
	if c.dialect != meter.DialectNone {
		c.answer.Write(p[:n]) //nolint:errcheck // it never fails
	}
	switch {
	case errors.Is(err, io.EOF):
		c.complete = true
		c.chargeUsage() // before the sandbox sees the end and sends its next request
	case err != nil:
		c.failed = err
	}
	return n, err
}

// answerModelUnreachable answers a request with the error that the model provider does not respond.
func (c *routedRequest) answerModelUnreachable(w http.ResponseWriter, r *http.Request, err error) {
	c.failed = err
	switch cause := context.Cause(r.Context()); {
	case errors.Is(cause, errIdleTimeout):
		c.status = http.StatusGatewayTimeout
		failure{c.status, codeTimeout, fmt.Sprintf("the model sent nothing for %s", c.s.cfg.ModelIdle)}.write(w)
	case r.Context().Err() != nil: // the sandbox closed the connection
	default:
		c.status = http.StatusBadGateway
		failure{c.status, codeUpstream, "the model cannot be reached: " + redactText(err.Error(), c.rt.Secret)}.write(w)
	}
}

// recordEnd adds a model call that has ended to the journal and the metrics. It does nothing for other requests. gone is true if the
// sandbox has closed the connection.
func (c *routedRequest) recordEnd(ctx context.Context, r *http.Request, gone bool) {
	log := c.sb.WithSandbox(c.s.cfg.Logger)
	if c.dialect == meter.DialectNone {
		log.Debug("request to a route", "route", c.rt.Name, "method", r.Method, "status", c.status, "ms", sinceMs(c.began))
		return
	}
	var got meter.Result
	if c.answer != nil {
		got = c.answer.Result()
	}
	m := events.ModelCalled{
		Provider: c.rt.Name, Model: redactText(cmp.Or(got.Model, c.model), c.rt.Secret), Status: uint32(max(c.status, 0)), //nolint:gosec // not negative
		Usage: got.Usage, DurationMs: sinceMs(c.began), Error: truncateText(redactText(c.failureMessage(ctx, gone, got), c.rt.Secret)),
		Betas: betaFeatures(r.Header),
	}
	m.FirstByteMs = m.DurationMs
	if !c.firstByte.IsZero() {
		m.FirstByteMs = uint32(min(max(c.firstByte.Sub(c.began).Milliseconds(), 0), 1<<32-1)) //nolint:gosec // within bounds
	}
	m.CostUSD, m.Prices = c.s.cfg.Prices.Cost(c.rt.Name, m.Model, got)
	priced, _ := c.s.cfg.Prices.EntryName(c.rt.Name, m.Model)
	c.chargeUsage()
	metered := got.Seen || m.Status != http.StatusOK
	c.s.cfg.Metrics.CountModelCall(m, priced, metered)
	if !metered {
		log.Warn("the answer of a model reported no usage", "route", c.rt.Name, "model", m.Model)
	}
	if err := c.sb.Journal.AddModelCall(time.Now(), c.execution, m); err != nil {
		log.Error("a model call is not journaled", "error", err)
	}
	log.Info("model called", "route", c.rt.Name, "model", m.Model, "status", m.Status, "input", m.Usage.InputTokens, "output", m.Usage.OutputTokens,
		"cost_usd", m.CostUSD, "first_byte_ms", m.FirstByteMs, "ms", m.DurationMs, "failed", m.Error)
}

// betaFeatures returns the beta features of the model provider that the headers of a request name. The proxy forwards all of them, because
// new versions of CLIs use new ones.
func betaFeatures(h http.Header) []string {
	const most, longest = 32, 100
	var out []string
	for _, name := range []string{"Anthropic-Beta", "Openai-Beta"} {
		for _, line := range h.Values(name) {
			for beta := range strings.SplitSeq(line, ",") {
				if beta = strings.TrimSpace(beta); beta != "" && len(out) < most {
					out = append(out, strings.ToValidUTF8(beta[:min(len(beta), longest)], ""))
				}
			}
		}
	}
	return out
}

// chargeUsage charges the usage of the model call to its budgets. Only the first call has an effect.
func (c *routedRequest) chargeUsage() {
	if c.charged || c.dialect == meter.DialectNone || c.answer == nil {
		return
	}
	c.charged = true
	got := c.answer.Result()
	model := redactText(cmp.Or(got.Model, c.model), c.rt.Secret)
	cost, prices := c.s.cfg.Prices.Cost(c.rt.Name, model, got)
	usage := events.BudgetUsage{Tokens: got.Usage.Tokens(), CostUSD: cost}
	if c.status < http.StatusBadRequest {
		usage.Turns = 1
	}
	c.charges.ChargeUsage(model, usage, prices != "")
}

// failureMessage returns a sentence that describes why a model call failed, or "" if it did not fail.
func (c *routedRequest) failureMessage(ctx context.Context, gone bool, got meter.Result) string {
	switch {
	case errors.Is(context.Cause(ctx), errIdleTimeout):
		return fmt.Sprintf("the model sent nothing for %s", c.s.cfg.ModelIdle)
	case !c.complete && gone:
		return "the sandbox went away before the end of the answer"
	case c.answer == nil && c.failed != nil:
		return c.failed.Error()
	case !c.complete && c.failed != nil:
		return "the answer broke off: " + c.failed.Error()
	case got.Error != "":
		return got.Error
	case c.status >= http.StatusBadRequest:
		return http.StatusText(c.status)
	case !c.complete && c.answer != nil:
		return "the sandbox went away before the end of the answer"
	}
	return ""
}
