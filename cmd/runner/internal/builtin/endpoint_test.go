package builtin_test

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"go.uber.org/goleak"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/cmd/runner/internal/mcptest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

func TestMain(m *testing.M) {
	mcptest.ServeIfRequested()
	goleak.VerifyTestMain(m)
}

// patience bounds every wait.
const patience = 60 * time.Second

// message is a message that the endpoint received.
type message struct {
	Role       string `json:"role"`
	Content    any    `json:"content"`
	ToolCallID string `json:"tool_call_id"`
	ToolCalls  []struct {
		ID       string
		Function struct{ Name, Arguments string }
	} `json:"tool_calls"`
}

type request struct {
	Model    string
	Messages []message
	Tools    []struct {
		Function struct {
			Name       string
			Parameters map[string]any
		}
	}
}

// endpoint is a model server that answers one request after the other.
type endpoint struct {
	*httptest.Server
	mu       sync.Mutex
	answers  []http.HandlerFunc
	requests []request
}

func newEndpoint(t *testing.T, answers ...http.HandlerFunc) *endpoint {
	t.Helper()
	e := &endpoint{answers: answers}
	e.Server = httptest.NewServer(e)
	t.Cleanup(e.Close)
	return e
}

func (e *endpoint) ServeHTTP(w http.ResponseWriter, r *http.Request) {
	var req request
	if err := json.NewDecoder(r.Body).Decode(&req); err != nil || r.URL.Path != "/v1/chat/completions" {
		http.Error(w, "bad request", http.StatusBadRequest)
		return
	}
	e.mu.Lock()
	n := len(e.requests)
	e.requests = append(e.requests, req)
	answer := e.answers[min(n, len(e.answers)-1)]
	e.mu.Unlock()
	answer(w, r)
}

func (e *endpoint) seen() []request {
	e.mu.Lock()
	defer e.mu.Unlock()
	return append([]request(nil), e.requests...)
}

// chunk returns one piece of an answer; delta is JSON.
func chunk(delta, finish string) string {
	if finish == "" {
		finish = "null"
	} else {
		finish = fmt.Sprintf("%q", finish)
	}
	return fmt.Sprintf(`{"id":"c1","object":"chat.completion.chunk","created":1,"model":"test-model-1","choices":[{"index":0,"delta":%s,"finish_reason":%s}]}`, delta, finish)
}

const usage = `{"id":"c1","object":"chat.completion.chunk","created":1,"model":"test-model-1","choices":[],"usage":{"prompt_tokens":10,"completion_tokens":5,"total_tokens":15,"prompt_tokens_details":{"cached_tokens":4}}}`

func send(w http.ResponseWriter, chunks ...string) {
	w.Header().Set("Content-Type", "text/event-stream")
	for _, c := range chunks {
		fmt.Fprintf(w, "data: %s\n\n", c)
	}
	w.(http.Flusher).Flush()
}

// says answers with text.
func says(text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		raw, _ := json.Marshal(text)
		send(w, chunk(`{"role":"assistant","content":""}`, ""), chunk(`{"content":`+string(raw)+`}`, ""), chunk(`{}`, "stop"), usage, "[DONE]")
	}
}

// calls answers with one tool call, its arguments in two pieces.
func calls(id, name, arguments string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		half := len(arguments) / 2
		one, _ := json.Marshal(arguments[:half])
		two, _ := json.Marshal(arguments[half:])
		send(w,
			chunk(fmt.Sprintf(`{"role":"assistant","content":null,"tool_calls":[{"index":0,"id":%q,"type":"function","function":{"name":%q,"arguments":""}}]}`, id, name), ""),
			chunk(fmt.Sprintf(`{"tool_calls":[{"index":0,"function":{"arguments":%s}}]}`, one), ""),
			chunk(fmt.Sprintf(`{"tool_calls":[{"index":0,"function":{"arguments":%s}}]}`, two), ""),
			chunk(`{}`, "tool_calls"), usage, "[DONE]")
	}
}

// fails answers with an error; retryMs is when the client may come back.
func fails(status int, code, text string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "application/json")
		w.Header().Set("Retry-After-Ms", "1")
		w.WriteHeader(status)
		fmt.Fprintf(w, `{"error":{"message":%q,"type":"x","code":%q,"param":null}}`, text, code)
	}
}

// stalls sends the chunks and then nothing more until the client has gone.
func stalls(chunks ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, r *http.Request) {
		send(w, chunks...)
		<-r.Context().Done()
	}
}

// breaks sends the chunks and cuts the connection.
func breaks(chunks ...string) http.HandlerFunc {
	return func(w http.ResponseWriter, _ *http.Request) {
		send(w, chunks...)
		panic(http.ErrAbortHandler)
	}
}

// spool is a running agent, driven by its adapter as the supervisor would.
type spool struct {
	t       *testing.T
	place   agent.Folders
	session agent.Session
	orders  io.WriteCloser // stdin of the process
	reports *bufio.Reader
	close   func()
	turns   int
	journal agenttest.Journal
	query   runner.Query // what every turn's query has beside its content
}

func startSpool(t *testing.T, e *endpoint, place agent.Folders, resume string, env map[string]string) *spool {
	t.Helper()
	return startLaunch(t, e, agent.Launch{Folders: place, Resume: resume}, env)
}

func startLaunch(t *testing.T, e *endpoint, l agent.Launch, env map[string]string) *spool {
	t.Helper()
	c, err := builtin.Adapter{}.Command(l)
	if err != nil {
		t.Fatal(err)
	}
	place, resume := l.Folders, ""
	if i := slices.Index(c.Args, "--resume"); i >= 0 {
		resume = c.Args[i+1]
	}
	all := map[string]string{"OPENAI_BASE_URL": e.URL + "/v1", "OPENAI_API_KEY": "sk-secret"}
	for k, v := range env {
		all[k] = v
	}
	in, orders := io.Pipe()
	reports, out := io.Pipe()
	done := make(chan error, 1)
	p := builtin.AgentProcess{
		Workspace: place.Workspace, State: place.State, Resume: resume,
		Getenv: func(k string) string { return all[k] }, Environ: append(os.Environ(), "OPENAI_API_KEY=sk-secret", "MY_TOKEN=t0p"),
		Log: slog.New(slog.DiscardHandler),
	}
	go func() {
		err := p.Run(context.WithoutCancel(t.Context()), in, out)
		out.Close()
		done <- err
	}()
	s := &spool{t: t, place: place, orders: orders, reports: bufio.NewReader(reports)}
	closed := false
	s.close = func() {
		if closed {
			return
		}
		closed = true
		orders.Close()
		go func() { _, _ = io.Copy(io.Discard, s.reports) }()
		if err := <-done; err != nil {
			t.Errorf("the agent's process ended with %v", err)
		}
	}
	t.Cleanup(s.close)
	s.session = builtin.Adapter{}.OpenSession(l, pipeStdin{orders})
	return s
}

type pipeStdin struct{ w io.Writer }

func (p pipeStdin) Send(v any) error { return json.NewEncoder(p.w).Encode(v) }

func newPlace(t *testing.T) agent.Folders {
	t.Helper()
	return agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}
}

// turn runs one query to its end; watch sees every report of the agent first.
func (s *spool) turn(content string, watch func(report string)) []runner.JournalLine {
	s.t.Helper()
	s.turns++
	before := len(s.journal.Lines())
	q := s.query
	q.SessionID, q.ExecutionID, q.Attempt = "ses_1", fmt.Sprintf("exe_%d", s.turns), 1
	q.Architecture, q.Content = builtin.Architecture, content
	policy, err := permission.New(q.Permissions, q.ExecutionPermissions)
	if err != nil {
		s.t.Fatal(err)
	}
	t := agent.NewTurn(s.t.Context(), agent.TurnConfig{
		Journal: &s.journal, ExecutionID: q.ExecutionID, Coalesce: time.Hour, Now: agenttest.FixedTime, Policy: policy,
	})
	t.Start(runner.TurnStart{Attempt: 1, PID: 1, Policy: q.PolicyName()})
	if err := s.session.BeginTurn(q, t); err != nil {
		s.t.Fatal(err)
	}
	for t.Ended() == nil {
		raw, err := s.reports.ReadBytes('\n')
		if err != nil {
			s.t.Fatalf("the agent's process ended: %v", errors.Unwrap(err))
		}
		if err := s.session.HandleLine(raw, t); err != nil {
			s.t.Errorf("%v: %s", err, raw)
		}
		if watch != nil {
			watch(string(raw))
		}
	}
	return s.journal.Lines()[before:]
}

func decode[T any](t *testing.T, l runner.JournalLine) T {
	t.Helper()
	var v T
	if err := json.Unmarshal(l.Data, &v); err != nil {
		t.Fatalf("line %d %s: %v", l.N, l.Type, err)
	}
	return v
}

func ended(t *testing.T, lines []runner.JournalLine) runner.TurnEnd {
	t.Helper()
	return decode[runner.TurnEnd](t, lines[len(lines)-1])
}

// completed returns the finished blocks of a kind.
func completed(t *testing.T, lines []runner.JournalLine, kind events.BlockKind) (blocks []events.Block) {
	t.Helper()
	for _, l := range lines {
		if l.Type == "block_complete" {
			if b := decode[events.BlockComplete](t, l).Block; b.Kind == kind {
				blocks = append(blocks, b)
			}
		}
	}
	return blocks
}
