package server_test

import (
	"bufio"
	"context"
	"encoding/json"
	"io"
	"net/http"
	"net/http/httptest"
	"strings"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/mockllm/server"
)

func TestMain(m *testing.M) { goleak.VerifyTestMain(m) }

// start serves a script, or the built-in one, until the test ends.
func start(t *testing.T, script string) (*server.Server, string) {
	t.Helper()
	c := server.Config{Now: func() time.Time { return time.Unix(1_700_000_000, 0) }}
	if script != "" {
		s, err := server.ParseScript("test.yaml", []byte(script))
		if err != nil {
			t.Fatalf("load: %v", err)
		}
		c.Script = s
	}
	s, err := server.New(c)
	if err != nil {
		t.Fatalf("new: %v", err)
	}
	h := httptest.NewServer(s)
	t.Cleanup(func() {
		h.Close()
		http.DefaultClient.CloseIdleConnections()
	})
	return s, h.URL
}

// post sends a body and returns the open response.
func post(t *testing.T, url, body string) *http.Response {
	t.Helper()
	req, err := http.NewRequestWithContext(t.Context(), http.MethodPost, url, strings.NewReader(body))
	if err != nil {
		t.Fatal(err)
	}
	res, err := http.DefaultClient.Do(req)
	if err != nil {
		t.Fatalf("post %s: %v", url, err)
	}
	t.Cleanup(func() { _ = res.Body.Close() })
	return res
}

func read(t *testing.T, res *http.Response) string {
	t.Helper()
	b, err := io.ReadAll(res.Body)
	if err != nil {
		t.Fatalf("read: %v", err)
	}
	return string(b)
}

// say returns an Anthropic request with the texts of a user, one a turn, and an assistant that answered "ok" in
// between.
func say(stream bool, texts ...string) string {
	var messages []map[string]any
	for i, text := range texts {
		if i > 0 {
			messages = append(messages, map[string]any{"role": "assistant", "content": "ok"})
		}
		messages = append(messages, map[string]any{"role": "user", "content": text})
	}
	return anthropicRequest(stream, messages)
}

func anthropicRequest(stream bool, messages []map[string]any, tools ...string) string {
	list := []map[string]any{}
	for _, name := range tools {
		list = append(list, map[string]any{"name": name, "input_schema": map[string]any{"type": "object"}})
	}
	b, err := json.Marshal(map[string]any{"model": "m", "max_tokens": 100, "stream": stream, "messages": messages, "tools": list})
	if err != nil {
		panic(err)
	}
	return string(b)
}

// answerText returns the text of an Anthropic answer that was not streamed.
func answerText(t *testing.T, url, body string) string {
	t.Helper()
	res := post(t, url+"/v1/messages", body)
	raw := read(t, res)
	if res.StatusCode != http.StatusOK {
		t.Fatalf("status %d: %s", res.StatusCode, raw)
	}
	var m struct{ Content []struct{ Text string } }
	if err := json.Unmarshal([]byte(raw), &m); err != nil {
		t.Fatal(err)
	}
	var all strings.Builder
	for _, c := range m.Content {
		all.WriteString(c.Text)
	}
	return all.String()
}

func TestMatching_FirstRuleAnswers(t *testing.T) {
	t.Parallel()
	const script = `
rules:
  - {match: {user: "only in turn two", turns: 2}, steps: [{text: "second"}]}
  - {match: {user: "late", turns: {min: 3}}, steps: [{text: "late"}]}
  - {match: {model: {regex: "^opus"}}, steps: [{text: "model {{model}}"}]}
  - {match: {system: "pirate"}, steps: [{text: "arr"}]}
  - {match: {tools: [Write, Bash]}, steps: [{text: "tools {{tools}}"}]}
  - {match: {user: {regex: "(?i)number (\\d+) and (\\d+)"}}, steps: [{text: "{{match 2}}-{{match 1}}{{match 9}}"}]}
  - {match: {user: "recall"}, steps: [{text: "{{with recall \"number (\\\\d+)\"}}{{.}}{{else}}none{{end}}"}]}
  - {match: {api: [chat, responses]}, steps: [{text: "openai"}]}
  - {match: {user: "where"}, steps: [{text: "{{context \"cwd=(\\\\S+)\"}}"}]}
  - {steps: [{text: "turn {{turn}}: {{user}}"}]}
`
	_, url := start(t, script)
	user := func(content any) map[string]any { return map[string]any{"role": "user", "content": content} }
	text := func(s string) map[string]any { return map[string]any{"type": "text", "text": s} }
	cases := []struct{ name, body, want string }{
		{"catch-all", say(false, "hello"), "turn 1: hello"},
		{"substring in any case", say(false, "x", "ONLY in turn two!"), "second"},
		{"turn does not match", say(false, "only in turn two"), "turn 1: only in turn two"},
		{"least turn", say(false, "a", "b", "c", "late"), "late"},
		{"captures, a missing one is empty", say(false, "the number 4 and 7"), "7-4"},
		{"history", say(false, "my number 12", "recall it"), "12"},
		{"newest history", say(false, "number 12", "number 13", "recall it"), "13"},
		{"no history", say(false, "recall it"), "none"},
		{"model", strings.Replace(say(false, "x"), `"m"`, `"opus-9"`, 1), "model opus-9"},
		{"system", strings.Replace(say(false, "x"), `"model"`, `"system":[{"type":"text","text":"be a Pirate"}],"model"`, 1), "arr"},
		{"tools", anthropicRequest(false, []map[string]any{user("x")}, "Bash", "Write"), "tools [Bash Write]"},
		{"one tool is missing", anthropicRequest(false, []map[string]any{user("x")}, "Bash"), "turn 1: x"},
		{"reminders are not the user's words", anthropicRequest(false, []map[string]any{user([]any{
			text("<system-reminder>\nlate number 1 and 2\n</system-reminder>"), text("hi"), text("<system-reminder>x</system-reminder>")})}), "turn 1: hi"},
		{"but they are context", anthropicRequest(false, []map[string]any{user([]any{
			text("<system-reminder>cwd=/tmp/w </system-reminder>"), text("where")})}), "/tmp/w"},
		{"an interrupt ends a turn", anthropicRequest(false, []map[string]any{user([]any{
			text("number 1 and 2"), text("[Request interrupted by user]"), text("hi")})}), "turn 2: hi"},
		{"a text that failed does not answer for the next", anthropicRequest(false, []map[string]any{user([]any{
			text("number 1 and 2"), text("hi")})}), "turn 1: hi"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			if got := answerText(t, url, c.body); got != c.want {
				t.Errorf("got %q, want %q", got, c.want)
			}
		})
	}
}

func TestStepsFollowTheToolResults(t *testing.T) {
	t.Parallel()
	const script = `
rules:
  - match: {tool_result: {regex: "(?i)denied"}}
    steps: [{text: "refused"}]
  - match: {user: go}
    steps:
      - text: first
      - tools: [{name: A, input: {n: 1}}, {name: B}]
      - tool: {name: C, input: {deep: {list: ["{{result}}", 2, true, null]}}}
      - text: "{{range results}}<{{.}}>{{end}}"
`
	_, url := start(t, script)
	call := func(id, name string) map[string]any {
		return map[string]any{"type": "tool_use", "id": id, "name": name, "input": map[string]any{}}
	}
	result := func(id, text string) map[string]any {
		return map[string]any{"type": "tool_result", "tool_use_id": id, "content": []any{map[string]any{"type": "text", "text": text}}}
	}
	m := func(role string, content ...any) map[string]any {
		return map[string]any{"role": role, "content": content}
	}
	history := []map[string]any{
		{"role": "user", "content": "go"},
		m("assistant", call("t1", "A"), call("t2", "B")),
		m("user", result("t1", "one"), result("t2", "two"), map[string]any{"type": "text", "text": "<system-reminder>go</system-reminder>"}),
		m("assistant", call("t3", "C")),
		m("user", result("t3", "three")),
	}
	for want, n := range map[string]int{
		`first|A {"n":1}|B {}`:                    1,
		`C {"deep":{"list":["two",2,true,null]}}`: 3,
		`<one><two><three>`:                       5,
	} {
		res := post(t, url+"/v1/messages", anthropicRequest(false, history[:n]))
		var got struct {
			Content []struct {
				Text, Name string
				Input      json.RawMessage
			}
			StopReason string `json:"stop_reason"`
		}
		if err := json.Unmarshal([]byte(read(t, res)), &got); err != nil {
			t.Fatal(err)
		}
		var all []string
		for _, c := range got.Content {
			if c.Name != "" {
				c.Text = c.Name + " " + string(c.Input)
			}
			all = append(all, c.Text)
		}
		if strings.Join(all, "|") != want {
			t.Errorf("%d messages: got %q, want %q", n, all, want)
		}
		if wantStop := map[bool]string{true: "end_turn", false: "tool_use"}[n == 5]; got.StopReason != wantStop {
			t.Errorf("%d messages: stop_reason %q, want %q", n, got.StopReason, wantStop)
		}
	}
	denied := append(history[:4:4], m("user", result("t3", "Denied by policy")))
	if got := answerText(t, url, anthropicRequest(false, denied)); got != "refused" {
		t.Errorf("a rule on the tool result: got %q", got)
	}
	over := append(history[:5:5], m("assistant", call("t4", "C")), m("user", result("t4", "more")))
	if got := answerText(t, url, anthropicRequest(false, over)); got != "<one><two><three><more>" {
		t.Errorf("more results than the rule asked for: got %q", got)
	}
}

func TestBadRequests_AreRefused(t *testing.T) {
	t.Parallel()
	_, url := start(t, "models: [m]\nrules: [{match: {user: nothing else}, steps: [{text: x}]}]")
	open := `{"model":"m","max_tokens":1,"messages":[{"role":"user","content":"a"},{"role":"assistant","content":[{"type":"tool_use","id":"t1","name":"A","input":{}}]},%s]}`
	cases := []struct {
		name, path, body string
		status           int
		want             string
	}{
		{"not JSON", "/v1/messages", `{`, 400, "not a Messages request"},
		{"no model", "/v1/messages", `{"max_tokens":1,"messages":[{"role":"user","content":"x"}]}`, 400, "model: Field required"},
		{"no max_tokens", "/v1/messages", `{"model":"m","messages":[{"role":"user","content":"x"}]}`, 400, "max_tokens: Field required"},
		{"no messages", "/v1/chat/completions", `{"model":"m"}`, 400, "at least one message"},
		{"bad role", "/v1/chat/completions", `{"model":"m","messages":[{"role":"wizard","content":"x"}]}`, 400, "messages[0]: role"},
		{"unknown model", "/v1/messages", strings.Replace(say(false, "x"), `"m"`, `"n"`, 1), 404, "model: n"},
		{"no rule", "/v1/messages", say(false, "x"), 400, `no rule of the script matches`},
		{"no rule, openai", "/v1/responses", `{"model":"m","input":"x"}`, 400, `"type":"invalid_request_error"`},
		{"unanswered call", "/v1/messages", strings.Replace(open, "%s", `{"role":"user","content":"and now?"}`, 1), 400, `tool call \"t1\" has no result`},
		{"unknown call", "/v1/messages", strings.Replace(open, "%s", `{"role":"user","content":[{"type":"tool_result","tool_use_id":"t9"}]}`, 1), 400, "not an open tool call"},
		{"stored responses", "/v1/responses", `{"model":"m","previous_response_id":"r","input":"x"}`, 400, "previous_response_id"},
		{"no route", "/v1/embeddings", `{}`, 404, "no route POST /v1/embeddings"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			res := post(t, url+c.path, c.body)
			if got := read(t, res); res.StatusCode != c.status || !strings.Contains(got, c.want) {
				t.Errorf("got %d %s, want %d with %q", res.StatusCode, got, c.status, c.want)
			}
		})
	}
}

func TestTimesAndErrors(t *testing.T) {
	t.Parallel()
	s, url := start(t, `
rules:
  - name: limited
    match: {user: limited}
    times: 2
    steps: [{error: {status: 429, message: "slow down, {{user}}", retry_after: 1500ms}}]
  - name: each
    match: {user: each}
    times: 1
    per: conversation
    steps: [{error: {status: 529}}]
  - steps: [{text: fine}]
`)
	for range 2 {
		res := post(t, url+"/v1/messages", say(true, "limited"))
		want := `{"type":"error","error":{"type":"rate_limit_error","message":"slow down, limited"}}`
		if got := read(t, res); res.StatusCode != 429 || got != want || res.Header.Get("Retry-After") != "2" || res.Header.Get("Retry-After-Ms") != "1500" {
			t.Fatalf("got %d %s %v", res.StatusCode, got, res.Header)
		}
	}
	for _, other := range []string{"limited", "limited too"} {
		if got := answerText(t, url, say(false, other)); got != "fine" {
			t.Errorf("after the limit: got %q", got)
		}
	}
	for _, conversation := range []string{"each a", "each b"} {
		if res := post(t, url+"/v1/messages", say(false, conversation)); res.StatusCode != 529 || !strings.Contains(read(t, res), "overloaded_error") {
			t.Errorf("%s: status %d", conversation, res.StatusCode)
		}
		if got := answerText(t, url, say(false, conversation)); got != "fine" {
			t.Errorf("%s again: got %q", conversation, got)
		}
	}
	var seen []string
	for _, r := range s.Requests() {
		seen = append(seen, r.Rule+" "+r.Outcome)
	}
	want := "limited error 429,limited error 429,rules[2] complete,rules[2] complete,each error 529,rules[2] complete,each error 529,rules[2] complete"
	if got := strings.Join(seen, ","); got != want {
		t.Errorf("recorded %s", got)
	}
}

func TestBreakCutsTheConnection(t *testing.T) {
	t.Parallel()
	_, url := start(t, "rules: [{steps: [{text: half a}, {break: true}]}]")
	for _, path := range []string{"/v1/messages", "/v1/chat/completions", "/v1/responses"} {
		body := say(true, "x")
		if path == "/v1/responses" {
			body = `{"model":"m","stream":true,"input":"x"}`
		}
		got, err := io.ReadAll(post(t, url+path, body).Body)
		if err == nil || !strings.Contains(string(got), "half a") {
			t.Errorf("%s: error %v after %q", path, err, got)
		}
	}
}

func TestEndlessEndsWithItsClientAndItsServer(t *testing.T) {
	t.Parallel()
	script, err := server.ParseScript("test.yaml", []byte("rules: [{steps: [{endless: {text: 'on and ', piece: 4, delay: 1ms}}]}]"))
	if err != nil {
		t.Fatal(err)
	}
	s, err := server.New(server.Config{Listen: "127.0.0.1:0", Script: script})
	if err != nil {
		t.Fatal(err)
	}
	if err := s.Listen(); err != nil {
		t.Fatal(err)
	}
	ctx, stop := context.WithCancel(t.Context())
	ran := make(chan error, 1)
	go func() { ran <- s.Run(ctx) }()
	client := &http.Client{Transport: &http.Transport{}}
	defer client.CloseIdleConnections()
	open := func(ctx context.Context) *http.Response {
		req, err := http.NewRequestWithContext(ctx, http.MethodPost, s.URL()+"/v1/messages", strings.NewReader(say(true, "talk")))
		if err != nil {
			t.Fatal(err)
		}
		res, err := client.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		lines, deltas := bufio.NewScanner(res.Body), 0
		for deltas < 5 && lines.Scan() {
			if strings.HasPrefix(lines.Text(), "event: content_block_delta") {
				deltas++
			}
		}
		if deltas < 5 {
			t.Fatalf("the stream ended after %d deltas", deltas)
		}
		return res
	}
	leaving, leave := context.WithCancel(t.Context())
	res := open(leaving)
	leave()
	_ = res.Body.Close()
	deadline := time.Now().Add(time.Minute)
	for s.Requests()[0].Outcome != "interrupted" {
		if time.Now().After(deadline) {
			t.Fatalf("outcome %q after the client left", s.Requests()[0].Outcome)
		}
		_ = open(t.Context()).Body.Close() // each look costs a round trip: no busy loop
	}
	res = open(t.Context())
	stop()
	if err := <-ran; err != nil {
		t.Errorf("run: %v", err)
	}
	_, _ = io.Copy(io.Discard, res.Body)
	_ = res.Body.Close()
}

func TestRecordsAreBounded(t *testing.T) {
	t.Parallel()
	s, err := server.New(server.Config{MaxRecorded: 3, MaxRecordedB: 400, MaxBody: 1000})
	if err != nil {
		t.Fatal(err)
	}
	send := func(body string) int {
		w := httptest.NewRecorder()
		r := httptest.NewRequest(http.MethodPost, "/v1/messages?beta=true", strings.NewReader(body))
		r.Header.Set("X-Api-Key", "sk-secret")
		s.ServeHTTP(w, r)
		return w.Code
	}
	for range 5 {
		send(say(false, "x"))
	}
	all := s.Requests()
	if len(all) != 3 || all[0].N != 3 || all[2].URL != "/v1/messages?beta=true" || all[2].Header.Get("X-Api-Key") != "redacted" || len(all[2].Body) == 0 {
		t.Errorf("kept %+v", all)
	}
	send(say(false, strings.Repeat("x", 350)))
	if all := s.Requests(); len(all) != 1 || all[0].N != 6 {
		t.Errorf("%d kept beyond the size", len(all))
	}
	if code := send(say(false, strings.Repeat("x", 1000))); code != http.StatusRequestEntityTooLarge {
		t.Errorf("too large: status %d", code)
	}
}

func TestWhatIsThereAndWhatIsNotIsRecorded(t *testing.T) {
	t.Parallel()
	s, url := start(t, "")
	for path, status := range map[string]int{"/": http.StatusOK, "/v1/nothing": http.StatusNotFound, "/v1/models": http.StatusOK} {
		req, err := http.NewRequestWithContext(t.Context(), http.MethodHead, url+path, nil)
		if err != nil {
			t.Fatal(err)
		}
		res, err := http.DefaultClient.Do(req)
		if err != nil {
			t.Fatal(err)
		}
		_ = res.Body.Close()
		if res.StatusCode != status {
			t.Errorf("HEAD %s: status %d, want %d", path, res.StatusCode, status)
		}
	}
	if n := len(s.Requests()); n != 3 {
		t.Errorf("%d requests recorded", n)
	}
}
