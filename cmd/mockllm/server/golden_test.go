package server_test

import (
	"flag"
	"net/http"
	"os"
	"path/filepath"
	"testing"
)

var update = flag.Bool("update", false, "write the golden files anew")

const goldenScript = `
stream: {piece: 12}
rules:
  - match: {user: full}
    steps:
      - thinking: Six times seven.
      - text: Grüße, it is 42.
      - tools: [{name: Write, input: {path: a.txt, content: "x\n"}}, {name: patch}]
      - text: "It said {{result}}"
  - match: {user: fault}
    steps: [{text: It begins}, {error: {status: 529, message: Overloaded}}]
  - match: {user: length}
    steps: [{text: cut}, {stop: length}]
`

// The answers of each dialect are compared byte by byte. Other tests show that real clients and the real CLIs can read
// them.
func TestGolden(t *testing.T) {
	t.Parallel()
	messages := func(stream bool, text string) string {
		return anthropicRequest(stream, []map[string]any{{"role": "user", "content": text}}, "Write")
	}
	cases := []struct{ name, path, body string }{
		{"anthropic-stream.sse", "/v1/messages?beta=true", messages(true, "full")},
		{"anthropic.json", "/v1/messages", messages(false, "full")},
		{"anthropic-fault.sse", "/v1/messages", messages(true, "fault")},
		{"anthropic-length.sse", "/v1/messages", messages(true, "length")},
		{"anthropic-count.json", "/v1/messages/count_tokens", `{"model":"m","messages":[{"role":"user","content":"12345"}]}`},
		{"chat-stream.sse", "/v1/chat/completions", `{"model":"m","stream":true,"stream_options":{"include_usage":true},"messages":[{"role":"user","content":"full"}]}`},
		{"chat-no-usage.sse", "/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"length"}]}`},
		{"chat.json", "/v1/chat/completions", `{"model":"m","messages":[{"role":"user","content":"full"}]}`},
		{"chat-fault.sse", "/v1/chat/completions", `{"model":"m","stream":true,"messages":[{"role":"user","content":"fault"}]}`},
		{"responses-stream.sse", "/v1/responses", `{"model":"m","stream":true,"input":"full"}`},
		{"responses.json", "/v1/responses", `{"model":"m","input":"full"}`},
		{"responses-fault.sse", "/v1/responses", `{"model":"m","stream":true,"input":"fault"}`},
		{"responses-length.sse", "/v1/responses", `{"model":"m","stream":true,"input":"length"}`},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, url := start(t, goldenScript) // its own server: ids count equal requests
			res := post(t, url+c.path, c.body)
			got := read(t, res)
			if res.StatusCode != http.StatusOK {
				t.Fatalf("status %d: %s", res.StatusCode, got)
			}
			file := filepath.Join("testdata", c.name)
			if *update {
				if err := os.WriteFile(file, []byte(got), 0o644); err != nil {
					t.Fatal(err)
				}
			}
			want, err := os.ReadFile(file)
			if err != nil {
				t.Fatal(err)
			}
			if got != string(want) {
				t.Errorf("differs from %s (-update writes it anew):\n%s", file, got)
			}
		})
	}
}
