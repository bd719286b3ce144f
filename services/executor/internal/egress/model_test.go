package egress_test

import (
	"bufio"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
	"github.com/spoolhq/spool/services/executor/internal/egress"
)

const (
	anthropicKey = "sk-ant-real-key-0123456789"
	openAIKey    = "sk-openai-real-key-0123456789"
	nvidiaKey    = "nvapi-real-key-0123456789"
)

// models starts an upstream that all three providers' settings name.
func models(t *testing.T, h http.HandlerFunc) func(*egress.Config, *egress.Deps) {
	t.Helper()
	srv := httptest.NewServer(h)
	t.Cleanup(srv.Close)
	return func(c *egress.Config, _ *egress.Deps) {
		c.AnthropicBaseURL, c.AnthropicKey = srv.URL, anthropicKey
		c.OpenAIBaseURL, c.OpenAIKey = srv.URL+"/v1", openAIKey
		c.NVIDIABaseURL, c.NVIDIAKey = srv.URL+"/nv/v1", nvidiaKey
	}
}

func TestModelRoutes(t *testing.T) {
	t.Parallel()
	type seen struct {
		path, query string
		header      http.Header
		body        string
	}
	got := make(chan seen, 1)
	w := newWorld(t, models(t, func(w http.ResponseWriter, r *http.Request) {
		body, _ := io.ReadAll(r.Body)
		got <- seen{r.URL.Path, r.URL.RawQuery, r.Header.Clone(), string(body)}
		w.Header().Set("Content-Type", "application/json")
		_, _ = io.WriteString(w, `{"model":"m","usage":{"input_tokens":7,"output_tokens":3,"prompt_tokens":7,"completion_tokens":3}}`)
	}))
	for _, c := range []struct{ path, want, query, header, value, absent string }{
		{"/anthropic/v1/messages?beta=true", "/v1/messages", "beta=true", "X-Api-Key", anthropicKey, "Authorization"},
		{"/openai/responses", "/v1/responses", "", "Authorization", "Bearer " + openAIKey, "X-Api-Key"},
		{"/openai/chat/completions?api_key=sandbox-key", "/v1/chat/completions", "", "Authorization", "Bearer " + openAIKey, "X-Api-Key"},
		{"/nvidia/chat/completions", "/nv/v1/chat/completions", "", "Authorization", "Bearer " + nvidiaKey, "X-Api-Key"},
	} {
		b := w.box()
		req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, runner.EgressURL+c.path, strings.NewReader(`{"model":"m"}`))
		for _, name := range []string{"Authorization", "X-Api-Key", "Cookie", "Proxy-Authorization"} {
			req.Header.Set(name, "sandbox-key")
		}
		req.Header.Set("Anthropic-Version", "2023-06-01")
		req.Header.Set("Anthropic-Beta", "some-beta")
		if status, _, body := b.do(req); status != http.StatusOK {
			t.Fatalf("%s: %d %s", c.path, status, body)
		}
		s := <-got
		if s.path != c.want || s.query != c.query || s.body != `{"model":"m"}` {
			t.Errorf("%s: arrived as %s?%s %q", c.path, s.path, s.query, s.body)
		}
		if s.header.Get(c.header) != c.value || s.header.Get(c.absent) != "" {
			t.Errorf("%s: credentials are %v", c.path, s.header)
		}
		if s.header.Get("Anthropic-Version") != "2023-06-01" || s.header.Get("Anthropic-Beta") != "some-beta" {
			t.Errorf("%s: version and beta are lost: %v", c.path, s.header)
		}
		for name, values := range s.header {
			if strings.Contains(strings.Join(values, " "), "sandbox-key") {
				t.Errorf("%s: the sandbox's credential passed in %s", c.path, name)
			}
		}
		m := b.called(b.lines(0, 1)[0])
		if m.Usage != (events.Usage{InputTokens: 7, OutputTokens: 3}) || m.Status != 200 || m.Error != "" || m.Line != 1 {
			t.Errorf("%s: metered as %+v", c.path, m)
		}
	}
}

func TestStream_IsNotBuffered(t *testing.T) {
	t.Parallel()
	next := make(chan string)
	w := newWorld(t, models(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/event-stream")
		for event := range next {
			_, _ = io.WriteString(w, event)
			w.(http.Flusher).Flush()
		}
	}))
	b := w.box()
	req, _ := http.NewRequestWithContext(t.Context(), http.MethodPost, runner.EgressURL+"/anthropic/v1/messages", strings.NewReader(`{"model":"claude-sonnet-4-5-20250929","stream":true}`))
	answered := make(chan *http.Response, 1)
	go func() {
		res, err := b.http.Do(req)
		if err != nil {
			t.Error(err)
		}
		answered <- res
	}()
	first := "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"claude-sonnet-4-5-20250929\",\"usage\":{\"input_tokens\":1000,\"cache_read_input_tokens\":2000,\"cache_creation_input_tokens\":100,\"output_tokens\":1}}}\n\n"
	next <- first
	res := <-answered
	defer res.Body.Close()
	lines := bufio.NewReader(res.Body)
	read := func(want string) {
		t.Helper()
		buf := make([]byte, len(want))
		if _, err := io.ReadFull(lines, buf); err != nil || string(buf) != want {
			t.Fatalf("%q, %v", buf, err)
		}
	}
	read(first) // before the next is sent
	state, err := w.client.State(t.Context(), b.id)
	if err != nil || state.OpenModelRequests != 1 {
		t.Fatalf("while it streams: %+v, %v", state, err)
	}
	for _, event := range []string{
		"event: content_block_delta\ndata: {\"type\":\"content_block_delta\",\"delta\":{\"type\":\"text_delta\",\"text\":\"\\\"usage\\\": {\"}}\n\n",
		"event: message_delta\ndata: {\"type\":\"message_delta\",\"delta\":{\"stop_reason\":\"end_turn\"},\"usage\":{\"output_tokens\":500}}\n\n",
	} {
		next <- event
		read(event)
	}
	close(next)
	if _, err := io.ReadAll(lines); err != nil {
		t.Fatal(err)
	}
	l := b.lines(0, 1)[0]
	m := b.called(l)
	want := events.Usage{InputTokens: 1000, OutputTokens: 500, CacheReadTokens: 2000, CacheWriteTokens: 100}
	if m.Usage != want || m.Provider != "anthropic" || m.Model != "claude-sonnet-4-5-20250929" || m.Error != "" {
		t.Errorf("%+v", m)
	}
	if cost := (1000*3 + 500*15 + 2000*0.3 + 100*3.75) / 1e6; m.CostUSD != cost || m.Prices == "" {
		t.Errorf("cost %v by %q, want %v", m.CostUSD, m.Prices, cost)
	}
	if l.Execution != b.reg.Execution || l.N != 1 || m.Line != 1 || m.Journal != state.Journal {
		t.Errorf("line %+v of %s", l, state.Journal)
	}
}
