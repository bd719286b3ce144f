package meter_test

import (
	"encoding/json"
	"io"
	"math"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/services/executor/internal/egress/meter"
)

// TestResponse reads each answer at once, in single bytes and in halves. The result must not depend on the size of
// reads.
func TestResponse(t *testing.T) {
	t.Parallel()
	for _, c := range []struct {
		name, body string // body is the text, or @ and the file in testdata
		want       meter.Result
	}{
		{"messages", `{"id":"msg_1","type":"message","role":"assistant","model":"claude-sonnet-4-5","content":[{"type":"text","text":"\"usage\":{\"input_tokens\":99}"}],"usage":{"input_tokens":10,"cache_creation_input_tokens":4,"cache_read_input_tokens":5,"output_tokens":6,"cache_creation":{"ephemeral_5m_input_tokens":1,"ephemeral_1h_input_tokens":3}}}`,
			meter.Result{Model: "claude-sonnet-4-5", Usage: events.Usage{InputTokens: 10, OutputTokens: 6, CacheReadTokens: 5, CacheWriteTokens: 4}, Hour: 3, Seen: true}},
		{"messages, streamed", "@messages.sse", meter.Result{Model: "claude-sonnet-4-5-20250929", Usage: events.Usage{InputTokens: 12, OutputTokens: 87, CacheReadTokens: 1500, CacheWriteTokens: 210}, Seen: true}},
		{"messages, streamed with CR LF", strings.ReplaceAll("data: {\"type\":\"message_start\",\"message\":{\"model\":\"m\",\"usage\":{\"input_tokens\":1}}}\n\ndata: {\"type\":\"message_delta\",\"usage\":{\"output_tokens\":2}}\n\n", "\n", "\r\n"),
			meter.Result{Model: "m", Usage: events.Usage{InputTokens: 1, OutputTokens: 2}, Seen: true}},
		{"messages, broken off after the start", "event: message_start\ndata: {\"type\":\"message_start\",\"message\":{\"model\":\"m\",\"usage\":{\"input_tokens\":11,\"output_tokens\":1}}}\n\nevent: content_bl",
			meter.Result{Model: "m", Usage: events.Usage{InputTokens: 11, OutputTokens: 1}, Seen: true}},
		{"messages, null keeps what was told", "data: {\"message\":{\"model\":\"m\",\"usage\":{\"input_tokens\":11,\"cache_read_input_tokens\":7}}}\n\ndata: {\"usage\":{\"cache_read_input_tokens\":null,\"output_tokens\":3}}\n\n",
			meter.Result{Model: "m", Usage: events.Usage{InputTokens: 11, CacheReadTokens: 7, OutputTokens: 3}, Seen: true}},
		{"messages, an error in the stream", "event: error\ndata: {\"type\":\"error\",\"error\":{\"type\":\"overloaded_error\",\"message\":\"Overloaded\"}}\n\n", meter.Result{Error: "overloaded_error: Overloaded"}},
		{"messages, an error", `{"type":"error","error":{"type":"invalid_request_error","message":"max_tokens: too large"},"request_id":"req_1"}`, meter.Result{Error: "invalid_request_error: max_tokens: too large"}},
		{"chat", `{"id":"c","model":"gpt-5-2025-08-07","choices":[{"message":{"content":"x","usage":{"prompt_tokens":1}}}],"usage":{"prompt_tokens":100,"completion_tokens":20,"total_tokens":120,"prompt_tokens_details":{"cached_tokens":64,"audio_tokens":0},"completion_tokens_details":{"reasoning_tokens":10}}}`,
			meter.Result{Model: "gpt-5-2025-08-07", Usage: events.Usage{InputTokens: 36, OutputTokens: 20, CacheReadTokens: 64}, Seen: true}},
		{"chat, streamed", "@chat.sse", meter.Result{Model: "gpt-5-mini-2025-08-07", Usage: events.Usage{InputTokens: 25, OutputTokens: 9}, Seen: true}},
		{"chat, streamed without usage", "data: {\"model\":\"m\",\"choices\":[{\"delta\":{\"content\":\"hi\"}}],\"usage\":null}\n\ndata: [DONE]\n\n", meter.Result{Model: "m"}},
		{"chat, an error with a code", `{"error":{"message":"You exceeded your quota","type":null,"param":null,"code":"insufficient_quota"}}`, meter.Result{Error: "insufficient_quota: You exceeded your quota"}},
		{"chat, an error as a text", `{"error":"no such model"}`, meter.Result{Error: "no such model"}},
		{"responses", `{"id":"resp_1","object":"response","error":null,"model":"gpt-5.2","output":[],"usage":{"input_tokens":75,"input_tokens_details":{"cached_tokens":32},"output_tokens":50,"output_tokens_details":{"reasoning_tokens":20},"total_tokens":125}}`,
			meter.Result{Model: "gpt-5.2", Usage: events.Usage{InputTokens: 43, OutputTokens: 50, CacheReadTokens: 32}, Seen: true}},
		{"responses, streamed", "@responses.sse", meter.Result{Model: "gpt-5.3-codex", Usage: events.Usage{InputTokens: 1000, OutputTokens: 64, CacheReadTokens: 3000}, Seen: true}},
		{"responses, failed", "event: response.failed\ndata: {\"type\":\"response.failed\",\"response\":{\"model\":\"m\",\"error\":{\"code\":\"server_error\",\"message\":\"It broke\"},\"usage\":null}}\n\n", meter.Result{Model: "m", Error: "server_error: It broke"}},
		{"responses, an error event", "event: error\ndata: {\"type\":\"error\",\"code\":\"rate_limit_exceeded\",\"message\":\"Slow down\",\"param\":null}\n\n", meter.Result{Error: "rate_limit_exceeded: Slow down"}},
		{"data over several lines", "data: {\"model\":\"m\",\ndata: \"usage\":{\"input_tokens\":3}}\n\n", meter.Result{Model: "m", Usage: events.Usage{InputTokens: 3}, Seen: true}},
		{"no blank line at the end", "data: {\"model\":\"m\",\"usage\":{\"input_tokens\":3}}", meter.Result{Model: "m", Usage: events.Usage{InputTokens: 3}, Seen: true}},
		{"a comment, and a field that begins like data", ": hello\ndatum: {\"usage\":{\"input_tokens\":9}}\ndata: {\"usage\":{\"input_tokens\":3}}\n\n", meter.Result{Usage: events.Usage{InputTokens: 3}, Seen: true}},
		{"no JSON", "<html>\"usage\":{\"input_tokens\":5}</html>", meter.Result{}},
		{"numbers that are none", `{"usage":{"input_tokens":-5,"output_tokens":1e30,"cache_read_input_tokens":2}}`, meter.Result{Usage: events.Usage{CacheReadTokens: 2}, Seen: true}},
		{"a text for a number", `{"usage":{"input_tokens":"many"}}`, meter.Result{}},
		{"more cached than there was", `{"usage":{"prompt_tokens":5,"completion_tokens":1,"prompt_tokens_details":{"cached_tokens":9}}}`, meter.Result{Usage: events.Usage{OutputTokens: 1, CacheReadTokens: 9}, Seen: true}},
		{"an enormous value", `{"model":"` + strings.Repeat("m", 1<<20) + `","usage":{"input_tokens":5}}`, meter.Result{Usage: events.Usage{InputTokens: 5}, Seen: true}},
		{"deep", strings.Repeat(`{"usage":`, 100_000), meter.Result{}},
		{"empty", "", meter.Result{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if file, ok := strings.CutPrefix(c.body, "@"); ok {
				raw, err := os.ReadFile(filepath.Join("testdata", file))
				if err != nil {
					t.Fatal(err)
				}
				c.body = string(raw)
			}
			for _, size := range []int{len(c.body) + 1, 1, len(c.body)/2 + 1, 7} {
				r := meter.NewResponseMeter()
				for rest := c.body; rest != ""; rest = rest[min(size, len(rest)):] {
					if _, err := io.WriteString(r, rest[:min(size, len(rest))]); err != nil {
						t.Fatal(err)
					}
				}
				if got := r.Result(); got != c.want {
					t.Fatalf("in pieces of %d: %+v, want %+v", size, got, c.want)
				}
			}
		})
	}
}

func TestDialectOf(t *testing.T) {
	t.Parallel()
	for path, want := range map[string]meter.Dialect{
		"/v1/messages": meter.DialectMessages, "/v1/messages/count_tokens": meter.DialectNone, "/chat/completions": meter.DialectChat, "/completions": meter.DialectChat,
		"/embeddings": meter.DialectChat, "/responses": meter.DialectResponses, "/responses/compact": meter.DialectResponses, "/models": meter.DialectNone, "": meter.DialectNone,
	} {
		if got := meter.DialectOf(path); got != want {
			t.Errorf("%s: %q", path, got)
		}
	}
}

// FuzzResponse compares the result of a document with that of encoding/json.
func FuzzResponse(f *testing.F) {
	f.Add(`{"model":"m","usage":{"input_tokens":3}}`, 3)
	f.Add(`{"a":[{"model":"x"}],"model":"m","response":{"model":"r"}}`, 1)
	f.Add(`{"message":{"model":"\u0041","usage":{"output_tokens":3}}}`, 5)
	f.Fuzz(func(t *testing.T, body string, size int) {
		size = max(1, size&0xff)
		r := meter.NewResponseMeter()
		for rest := body; rest != ""; rest = rest[min(size, len(rest)):] {
			_, _ = io.WriteString(r, rest[:min(size, len(rest))])
		}
		got := r.Result()
		var keys map[string]json.RawMessage
		if json.Unmarshal([]byte(body), &keys) != nil || len(body) > 8<<10 || strings.Count(body, `"model"`) != 1 || strings.Contains(body, `\`) {
			return
		}
		var model string
		if json.Unmarshal(keys["model"], &model) == nil && keys["model"] != nil && len(model) < 100 && got.Model != strings.ToValidUTF8(model, "�") {
			t.Fatalf("%q: %q, want %q", body, got.Model, model)
		}
	})
}

func TestDefaultPrices(t *testing.T) {
	t.Parallel()
	p, err := meter.DefaultPrices()
	if err != nil {
		t.Fatal(err)
	}
	one := meter.Result{Usage: events.Usage{InputTokens: 1e6, OutputTokens: 1e6, CacheReadTokens: 1e6, CacheWriteTokens: 1e6}, Hour: 5e5}
	for _, c := range []struct {
		provider, model string
		cost            float64
	}{
		{"anthropic", "claude-opus-4-5-20251101", 5 + 25 + 0.5 + 6.25/2 + 10.0/2},
		{"anthropic", "claude-opus-5-5", 4 + 20 + 0.2 + 5.0/2 + 8.0/2},
		{"anthropic", "claude-haiku-5-5", 0.5 + 2.5 + 0.05 + 0.625/2 + 1.0/2}, // a long prompt
		{"openai", "gpt-5.3-codex", 1.75 + 14 + 0.175 + 1.75},                 // no price for writes
		{"openai", "gpt-5-2025-08-07", 1.25 + 10 + 0.125 + 1.25},
	} {
		got, version := p.Cost(c.provider, c.model, one)
		if math.Abs(got-c.cost) > 1e-9 || version == "" {
			t.Errorf("%s: %v by %q, want %v", c.model, got, version, c.cost)
		}
	}
	short := meter.Result{Usage: events.Usage{InputTokens: 1000}}
	if got, _ := p.Cost("anthropic", "claude-haiku-5-5", short); math.Abs(got-0.0001) > 1e-12 {
		t.Errorf("a short prompt: %v", got)
	}
	for _, c := range [][2]string{{"anthropic", "claude-opus-9"}, {"anthropic", "claude-opus-5-9"}, {"openai", "gpt-5-pro"}, {"openai", "claude-opus-5"}, {"nvidia", "meta/llama-3.3-70b-instruct"}, {"openai", ""}} {
		if got, version := p.Cost(c[0], c[1], one); got != 0 || version != "" {
			t.Errorf("%v has a price: %v by %q", c, got, version)
		}
	}
}

func TestParsePrices(t *testing.T) {
	t.Parallel()
	p, err := meter.ParsePrices("p.yaml", []byte(`{"version":"mine","models":[{"provider":"nvidia","model":"meta/*","input":1,"output":2},{"provider":"nvidia","model":"meta/llama","input":3,"output":4}]}`))
	if err != nil {
		t.Fatal(err)
	}
	r := meter.Result{Usage: events.Usage{InputTokens: 1e6}}
	if got, version := p.Cost("nvidia", "meta/other", r); got != 1 || version != "mine" {
		t.Errorf("%v by %q", got, version)
	}
	if got, _ := p.Cost("nvidia", "meta/llama", r); got != 3 {
		t.Errorf("the longest match: %v", got)
	}
	for text, want := range map[string]string{
		"":                     "version",
		"models: []":           "version",
		"version: x\nmodel: 1": "model",
		"version: x\nmodels: [{provider: a, input: 1, output: 1}]":                                                        "models[0] (): model",
		"version: x\nmodels: [{model: m, input: 1, output: 1}]":                                                           "models[0] (m): provider",
		"version: x\nmodels: [{provider: a, model: m, output: 1}]":                                                        "models[0] (m): input",
		"version: x\nmodels: [{provider: a, model: m, input: 1}]":                                                         "models[0] (m): output",
		"version: x\nmodels: [{provider: a, model: m, input: 1, output: -1}]":                                             "models[0] (m): output",
		"version: x\nmodels: [{provider: a, model: m, input: 1, output: .nan}]":                                           "models[0] (m): output",
		"version: x\nmodels: [{provider: a, model: m, input: 1, output: 1, long: {input: 1, output: 1}}]":                 "long.over",
		"version: x\nmodels: [{provider: a, model: m, input: 1, output: 1, long: {over: 5, output: 1}}]":                  "long.input",
		"version: x\nmodels: [{provider: a, model: m, input: 1, output: 1},{provider: a, model: m, input: 1, output: 1}]": "models[1] (m): there is an entry",
		"version: x\nmodels: [{provider: a, model: m, input: many, output: 1}]":                                           "many",
	} {
		if _, err := meter.ParsePrices("p.yaml", []byte(text)); err == nil || !strings.Contains(err.Error(), want) || !strings.HasPrefix(err.Error(), "p.yaml: ") {
			t.Errorf("%q: %v does not name %q", text, err, want)
		}
	}
}
