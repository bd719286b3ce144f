package egress_test

import (
	"bytes"
	"compress/gzip"
	"context"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

const startEvent = "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-opus-4-5\",\"usage\":{\"input_tokens\":40,\"output_tokens\":1}}}\n\n"

func request(t *testing.T, ctx context.Context, path, body string) *http.Request {
	t.Helper()
	req, err := http.NewRequestWithContext(ctx, http.MethodPost, runner.EgressURL+path, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	return req
}

// The client disconnects within a stream: the call to the model is canceled, and the usage so far is metered.
func TestCanceledRequest_CancelsTheModelCall(t *testing.T) {
	t.Parallel()
	gone := make(chan struct{})
	w := newWorld(t, models(t, func(w http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body) // the server detects a closed connection only after it has read the body
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, startEvent)
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		close(gone)
	}))
	b := w.box()
	ctx, cancel := context.WithCancel(t.Context())
	defer cancel()
	res, err := b.http.Do(request(t, ctx, "/anthropic/v1/messages", `{"model":"claude-opus-4-5"}`))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := io.ReadFull(res.Body, make([]byte, len(startEvent))); err != nil {
		t.Fatal(err)
	}
	cancel()
	res.Body.Close()
	select {
	case <-gone:
	case <-time.After(within):
		t.Fatal("the model still answers")
	}
	m := b.called(b.lines(0, 1)[0])
	if m.Usage != (events.Usage{InputTokens: 40, OutputTokens: 1}) || m.Status != 200 || !strings.Contains(m.Error, "went away") || m.CostUSD == 0 {
		t.Errorf("%+v", m)
	}
}

// If the model's answer breaks off, the sandbox's answer breaks off as well, and does not end normally.
func TestBrokenAnswer_BreaksTheSandboxsAnswer(t *testing.T) {
	t.Parallel()
	w := newWorld(t, models(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		_, _ = io.WriteString(w, startEvent)
		w.(http.Flusher).Flush()
		panic(http.ErrAbortHandler)
	}))
	b := w.box()
	res, err := b.http.Do(request(t, t.Context(), "/anthropic/v1/messages", `{}`))
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if raw, err := io.ReadAll(res.Body); err == nil || string(raw) != startEvent {
		t.Errorf("%q, %v", raw, err)
	}
	if m := b.called(b.lines(0, 1)[0]); m.Usage.InputTokens != 40 || !strings.Contains(m.Error, "broke off") {
		t.Errorf("%+v", m)
	}
}

func TestSilentModel_RequestTimesOut(t *testing.T) {
	t.Parallel()
	release := make(chan struct{})
	defer close(release)
	change := models(t, func(_ http.ResponseWriter, r *http.Request) {
		_, _ = io.Copy(io.Discard, r.Body)
		select {
		case <-r.Context().Done():
		case <-release:
		}
	})
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.ModelIdle = 100 * time.Millisecond
	})
	b := w.box()
	status, header, body := b.post("/openai/responses", `{"model":"gpt-5"}`)
	if status != http.StatusGatewayTimeout || header.Get("Spool-Egress") != "TIMEOUT" || !strings.Contains(body, "100ms") {
		t.Errorf("%d %v %s", status, header, body)
	}
	if m := b.called(b.lines(0, 1)[0]); m.Status != http.StatusGatewayTimeout || m.Model != "gpt-5" || !strings.Contains(m.Error, "sent nothing") {
		t.Errorf("%+v", m)
	}
}

func TestModelDown_IsAnsweredAndJournaled(t *testing.T) {
	t.Parallel()
	srv := httptest.NewServer(nil)
	srv.Close()
	w := newWorld(t, func(c *egress.Config, _ *egress.Deps) { c.AnthropicBaseURL, c.AnthropicKey = srv.URL, anthropicKey })
	b := w.box()
	status, header, body := b.post("/anthropic/v1/messages", `{"model":"m"}`)
	if status != http.StatusBadGateway || header.Get("Spool-Egress") != "UPSTREAM" || !strings.Contains(body, `"type":"error"`) {
		t.Errorf("%d %v %s", status, header, body)
	}
	if m := b.called(b.lines(0, 1)[0]); m.Status != http.StatusBadGateway || m.Error == "" {
		t.Errorf("%+v", m)
	}
}

// An error of the model is forwarded unchanged, and journaled.
func TestModelError_IsForwarded(t *testing.T) {
	t.Parallel()
	const overloaded = `{"type":"error","error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"req_1"}`
	w := newWorld(t, models(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After", "7")
		w.Header().Set("Set-Cookie", "account=operator")
		w.WriteHeader(529)
		_, _ = io.WriteString(w, overloaded)
	}))
	b := w.box()
	status, header, body := b.post("/anthropic/v1/messages", `{"model":"m"}`)
	if status != 529 || header.Get("Retry-After") != "7" || body != overloaded || header.Get("Set-Cookie") != "" {
		t.Errorf("%d %v %s", status, header, body)
	}
	if m := b.called(b.lines(0, 1)[0]); m.Status != 529 || m.Error != "overloaded_error: Overloaded" || m.Model != "m" {
		t.Errorf("%+v", m)
	}
}

func TestMissingKey_IsAnswered(t *testing.T) {
	t.Parallel()
	w := newWorld(t, nil)
	b := w.box()
	for path, setting := range map[string]string{"/anthropic/v1/messages": "ANTHROPIC_API_KEY", "/openai/responses": "OPENAI_API_KEY", "/nvidia/chat/completions": "NVIDIA_API_KEY"} {
		status, _, body := b.post(path, `{}`)
		if status != http.StatusUnauthorized || !strings.Contains(body, setting) || !strings.Contains(body, `"authentication_error"`) {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
}

// An endpoint that the operator configured without a key gets requests without one.
func TestMissingKey_CustomEndpointIsCalledWithoutOne(t *testing.T) {
	t.Parallel()
	got := make(chan http.Header, 1)
	srv := httptest.NewServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) { got <- r.Header.Clone() }))
	t.Cleanup(srv.Close)
	w := newWorld(t, func(c *egress.Config, _ *egress.Deps) { c.AnthropicBaseURL = srv.URL })
	req := request(t, t.Context(), "/anthropic/v1/messages", `{}`)
	req.Header.Set("X-Api-Key", "sandbox")
	if status, _, _ := w.box().do(req); status != http.StatusOK {
		t.Fatal(status)
	}
	if h := <-got; h.Get("X-Api-Key") != "" {
		t.Errorf("%v", h)
	}
}

// A key gives access to more than models. Requests to other paths are refused.
func TestOnlyModelsAreServed(t *testing.T) {
	t.Parallel()
	reached := make(chan string, 100)
	change := models(t, func(_ http.ResponseWriter, r *http.Request) { reached <- r.Method + " " + r.URL.EscapedPath() })
	w := newWorld(t, change)
	open := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.AllPaths = true
	})
	for _, line := range []string{
		"GET /anthropic/v1/files", "POST /anthropic/v1/messages/batches", "GET /openai/files", "GET /openai/responses/resp_1", "POST /openai/fine_tuning/jobs", "DELETE /openai/models/m",
	} {
		b := w.box()
		res := b.raw(line + " HTTP/1.1\r\nHost: x\r\n\r\n")
		if d := b.denied(b.lines(0, 1)[0]); res.StatusCode != http.StatusForbidden || d.Code != "NOT_ALLOWED" {
			t.Errorf("%s: %s %+v", line, res.Status, d)
		}
		if res := open.box().raw(line + " HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != http.StatusOK {
			t.Errorf("%s, with all-paths: %s", line, res.Status)
		}
		<-reached
	}
	for _, path := range []string{"/anthropic/v1/models/../files", "/anthropic/v1/models/%2e%2e/files", "/anthropic/v1/models%2f..%2ffiles", "/openai/../anthropic", "/openai/models/..;/files", `/openai/models/..%5cfiles`} {
		for _, w := range []*world{w, open} {
			if res := w.box().raw("GET " + path + " HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != http.StatusForbidden && res.StatusCode != http.StatusNotFound {
				t.Errorf("%s: %s", path, res.Status)
			}
		}
	}
	select {
	case got := <-reached:
		t.Errorf("%s got through", got)
	default:
	}
	for line, want := range map[string]string{
		"HEAD /anthropic": "HEAD ", "HEAD /anthropic/": "HEAD /", "GET /anthropic/v1/models?limit=1": "GET /v1/models", "POST /anthropic/v1/messages/count_tokens": "POST /v1/messages/count_tokens",
		"GET /openai/models/a%2Fb": "GET /v1/models/a%2Fb", "POST /openai/responses/compact": "POST /v1/responses/compact",
	} {
		if res := w.box().raw(line + " HTTP/1.1\r\nHost: x\r\n\r\n"); res.StatusCode != http.StatusOK {
			t.Errorf("%s: %s", line, res.Status)
		} else if got := <-reached; got != want && got != want+"/" {
			t.Errorf("%s arrived as %s", line, got)
		}
	}
}

func TestUnknownRoute(t *testing.T) {
	t.Parallel()
	b := newWorld(t, nil).box()
	for _, path := range []string{"/", "/v1/messages", "/anthropicx/v1", "/Anthropic/v1/messages"} {
		if status, _, body := b.post(path, ""); status != http.StatusNotFound {
			t.Errorf("%s: %d %s", path, status, body)
		}
	}
}

// An answer that an endpoint compresses although the request forbids it is metered as well.
func TestCompressedAnswer_IsDecompressed(t *testing.T) {
	t.Parallel()
	for _, encoding := range []string{"gzip", "br"} {
		w := newWorld(t, models(t, func(w http.ResponseWriter, r *http.Request) {
			if got := r.Header.Get("Accept-Encoding"); got != "identity" {
				t.Errorf("asked for %q", got)
			}
			w.Header().Set("Content-Encoding", encoding)
			zw := gzip.NewWriter(w)
			defer zw.Close()
			_, _ = io.WriteString(zw, `{"model":"m","usage":{"input_tokens":5},"echo":"`+anthropicKey+`"}`)
		}))
		b := w.box()
		req := request(t, t.Context(), "/anthropic/v1/messages", `{}`)
		req.Header.Set("Accept-Encoding", "br, gzip")
		status, header, body := b.do(req)
		m := b.called(b.lines(0, 1)[0])
		if encoding == "gzip" {
			if status != 200 || header.Get("Content-Encoding") != "" || !strings.HasPrefix(body, `{"model":"m"`) || m.Usage.InputTokens != 5 || strings.Contains(body, anthropicKey) {
				t.Errorf("gzip: %d %v %q %+v", status, header, body, m)
			}
		} else if status != http.StatusBadGateway || !strings.Contains(m.Error, "encoding") {
			t.Errorf("%s: %d %q %+v", encoding, status, body, m)
		}
	}
}

// No credential reaches the sandbox, the log, the journal, the metrics or the disk, although the endpoint repeats it
// in its answers in every form.
func TestNoCredentialIsEverShown(t *testing.T) {
	t.Parallel()
	const hostKey = "custom-real-key-0123456789"
	echo := func(w http.ResponseWriter, r *http.Request) {
		all := new(bytes.Buffer)
		_ = r.Header.Write(all)
		key := strings.TrimPrefix(r.Header.Get("X-Api-Key")+r.Header.Get("Authorization")+r.Header.Get("X-Custom"), "Bearer ")
		if key == "" {
			t.Error("no credential arrived")
		}
		w.Header().Set("X-Echo", key)
		switch r.URL.Query().Get("as") {
		case "error":
			w.WriteHeader(http.StatusUnauthorized)
			_, _ = io.WriteString(w, `{"error":{"type":"authentication_error","message":"Incorrect API key provided: `+key+`"}}`)
		case "stream":
			w.Header().Set("Content-Type", "text/event-stream")
			text := "data: {\"model\":\"" + key + "\",\"delta\":\"" + all.String() + "\"}\n\n"
			for _, piece := range strings.SplitAfter(text, "") { // a byte at a time
				_, _ = io.WriteString(w, piece)
				w.(http.Flusher).Flush()
			}
		case "break":
			_, _ = io.WriteString(w, key[:len(key)-1])
			w.(http.Flusher).Flush()
			panic(http.ErrAbortHandler)
		default:
			_, _ = io.WriteString(w, all.String())
		}
	}
	change := models(t, echo)
	srv := httptest.NewServer(http.HandlerFunc(echo))
	t.Cleanup(srv.Close)
	w := newWorld(t, func(c *egress.Config, d *egress.Deps) {
		change(c, d)
		c.Hosts = file(t, "hosts.yaml", "hosts: [{name: custom, url: '"+srv.URL+"', header: X-Custom, env: CUSTOM_KEY, kind: openai}]")
		d.Getenv = func(name string) string { return map[string]string{"CUSTOM_KEY": hostKey}[name] }
	})
	b := w.box()
	var shown strings.Builder
	for _, path := range []string{"/anthropic/v1/messages", "/openai/chat/completions", "/openai/responses", "/nvidia/chat/completions", "/custom/chat/completions"} {
		for _, as := range []string{"", "error", "stream"} {
			_, header, body := b.do(request(t, t.Context(), path+"?as="+as, `{"model":"`+strings.Repeat("x", 10)+`"}`))
			_ = header.Write(&shown)
			shown.WriteString(body)
			if strings.Contains(path, "/anthropic") && as == "" && !strings.Contains(body, "X-Api-Key: ****") {
				t.Errorf("the echo is not what was looked at: %s", body)
			}
		}
	}
	for _, l := range b.lines(0, 15) {
		shown.Write(l.Data)
	}
	shown.WriteString(w.log.String())
	res, err := (&http.Client{Transport: &http.Transport{DialContext: socket(w.cfg.ListenAdmin), DisableKeepAlives: true}}).Get("http://x/metrics")
	if err != nil {
		t.Fatal(err)
	}
	_, _ = io.Copy(&shown, res.Body)
	res.Body.Close()
	err = filepath.WalkDir(w.cfg.Data, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path)
		shown.Write(raw)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, key := range []string{anthropicKey, openAIKey, nvidiaKey, hostKey, b.token} {
		if i := strings.Index(shown.String(), key); i >= 0 {
			t.Errorf("shown: …%s…", shown.String()[max(0, i-200):i+len(key)])
		}
	}
	if !strings.Contains(shown.String(), "spool_egress_requests_total") || !strings.Contains(shown.String(), "model called") {
		t.Error("the test did not look at log and metrics")
	}
}

func file(t *testing.T, name, text string) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), name)
	if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

// Large bodies pass in both directions.
func TestLargeBodies(t *testing.T) {
	t.Parallel()
	const size = 16 << 20
	w := newWorld(t, models(t, func(w http.ResponseWriter, r *http.Request) {
		n, err := io.Copy(io.Discard, r.Body)
		if err != nil || n != size {
			t.Errorf("%d bytes arrived, %v", n, err)
		}
		_, _ = io.CopyN(w, zeros{}, size)
	}))
	b := w.box()
	req := request(t, t.Context(), "/openai/responses", "")
	req.Body, req.ContentLength = io.NopCloser(strings.NewReader(`{"input":"`+strings.Repeat("x", size-len(`{"input":""}`))+`"}`)), -1
	res, err := b.http.Do(req)
	if err != nil {
		t.Fatal(err)
	}
	defer res.Body.Close()
	if n, err := io.Copy(io.Discard, res.Body); err != nil || n != size {
		t.Errorf("%d bytes came back, %v", n, err)
	}
}

type zeros struct{}

func (zeros) Read(p []byte) (int, error) {
	clear(p)
	return len(p), nil
}
