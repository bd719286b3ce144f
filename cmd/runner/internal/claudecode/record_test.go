//go:build record

package claudecode

import (
	"bufio"
	"bytes"
	"encoding/json"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// A scenario is what the real CLI is asked. An interrupt comes at once ("early"),
// after the second piece of an answer ("text") or when the file `started` is
// there ("tool").
type asked struct {
	text      string
	parts     []events.Part
	interrupt string
}

var scenarios = map[string][]asked{
	"two-turns":          {{text: "Remember the number 4711 please"}, {text: "which number was it?"}},
	"thinking":           {{text: "think first please"}},
	"write-then-edit":    {{text: "write a file please"}, {text: "edit the file please"}},
	"write-outside":      {{text: "write outside please"}},
	"read-outside":       {{text: "read outside please"}},
	"network":            {{text: "fetch a page please"}},
	"bash":               {{text: "run a command please"}},
	"bash-parallel":      {{text: "two at once please"}},
	"subagent":           {{text: "delegate this please"}},
	"tasks":              {{text: "make a plan please"}},
	"interrupt-text":     {{text: "talk for ever", interrupt: "text"}, {text: "hello after the interrupt"}},
	"interrupt-tool":     {{text: "sleep long", interrupt: "tool"}, {text: "hello after the interrupt"}},
	"interrupt-early":    {{text: "talk for ever", interrupt: "early"}, {text: "hello after the interrupt"}},
	"error-400":          {{text: "bad request please"}, {text: "hello after the error"}},
	"error-401":          {{text: "wrong key please"}},
	"error-404":          {{text: "wrong model please"}},
	"error-429":          {{text: "always limited"}},
	"error-529":          {{text: "always overloaded"}},
	"rate-limited":       {{text: "rate limited please"}},
	"stream-breaks":      {{text: "break once please"}},
	"stream-breaks-late": {{text: "break later please"}},
	"error-after-block":  {{text: "error between blocks please"}, {text: "hello after the error"}},
	"length":             {{text: "cut by length"}},
	"command":            {{text: "/nonsense"}},
	"image": {{parts: []events.Part{{Type: "text", Text: "what is this?"}, {
		Type: "image", MediaType: "image/png",
		Data: "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==",
	}}}},
}

// TestRecord makes testdata/*/recording.jsonl anew with the `claude` on the PATH:
//
//	go test -tags record -run TestRecord ./runner/internal/claudecode
func TestRecord(t *testing.T) {
	for name, turns := range scenarios {
		t.Run(name, func(t *testing.T) { record(t, name, turns) })
	}
}

// recorder drives the CLI through the adapter itself.
type recorder struct {
	mu    sync.Mutex
	out   bytes.Buffer
	stdin io.Writer
}

func (r *recorder) Send(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = r.stdin.Write(append(raw, '\n'))
	return err
}

func (r *recorder) step(t *testing.T, s step) {
	r.mu.Lock()
	defer r.mu.Unlock()
	enc := json.NewEncoder(&r.out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		t.Error(err)
	}
}

func record(t *testing.T, name string, turns []asked) {
	script, err := server.LoadFile("testdata/script.yaml")
	if err != nil {
		t.Fatal(err)
	}
	mock, err := server.New(server.Config{Script: script})
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(mock)
	defer web.Close()
	place := agent.Place{Workspace: t.TempDir(), State: t.TempDir()}
	launch := agent.Launch{
		Place:   place,
		Environ: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()},
		Env:     map[string]string{"ANTHROPIC_BASE_URL": web.URL, "ANTHROPIC_API_KEY": "test", "CLAUDE_CODE_MAX_RETRIES": "1"},
	}
	command, err := Adapter{}.Command(launch)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), command.Path, command.Args...)
	cmd.Dir, cmd.Env, cmd.Stderr = place.Workspace, command.Env, os.Stderr
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	r := &recorder{stdin: stdin}
	s := Adapter{}.Open(launch, r)
	printed := bufio.NewReaderSize(stdout, 1<<20)
	for i, ask := range turns {
		r.turn(t, s, printed, i, ask, place)
	}
	if err := stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Logf("the CLI ended: %v", err) // with 1 after a failed turn
	}
	dir := filepath.Join("testdata", name)
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(dir, "recording.jsonl"), normalise(neutral(r.out.Bytes(), place)), 0o644); err != nil {
		t.Fatal(err)
	}
}

// turn asks once and records until the turn has ended.
func (r *recorder) turn(t *testing.T, s agent.Session, printed *bufio.Reader, i int, ask asked, place agent.Place) {
	q := runner.Query{ExecutionID: fmt.Sprintf("exe_%d", i+1), Attempt: 1, Content: ask.text, Parts: ask.parts, Policy: runner.PolicyWorkspace}
	turn := agenttest.NewTurn(t, &agenttest.Journal{}, q.ExecutionID)
	r.step(t, step{Query: &q})
	if err := s.Begin(q, turn); err != nil {
		t.Fatal(err)
	}
	interrupt := sync.OnceFunc(func() {
		r.step(t, step{Interrupt: true})
		if err := s.Interrupt(); err != nil {
			t.Error(err)
		}
	})
	switch ask.interrupt {
	case "early":
		interrupt()
	case "tool":
		go func() {
			for !exists(filepath.Join(place.Workspace, "started")) && t.Context().Err() == nil {
				time.Sleep(20 * time.Millisecond)
			}
			interrupt()
		}()
	}
	for pieces := 0; turn.Ended() == nil; {
		raw, err := printed.ReadBytes('\n')
		if err != nil {
			t.Fatalf("the CLI ended in the middle of turn %d: %v", i+1, err)
		}
		raw = bytes.TrimSpace(raw)
		r.step(t, step{Line: trim(t, raw)})
		if err := s.Line(raw, turn); err != nil {
			t.Errorf("%v: %s", err, raw)
		}
		if bytes.Contains(raw, []byte(`"content_block_delta"`)) {
			if pieces++; pieces == 2 && ask.interrupt == "text" {
				interrupt()
			}
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// trim leaves out the long lists that the CLI begins with, and that nothing here reads.
func trim(t *testing.T, raw []byte) json.RawMessage {
	var l map[string]json.RawMessage
	if err := json.Unmarshal(raw, &l); err != nil {
		t.Fatalf("%v: %s", err, raw)
	}
	switch {
	case string(l["subtype"]) == `"init"`:
		for _, key := range []string{"slash_commands", "skills", "agents", "plugins", "memory_paths", "mcp_servers"} {
			delete(l, key)
		}
	case bytes.Contains(l["response"], []byte(`"commands"`)):
		var a map[string]json.RawMessage
		if err := json.Unmarshal(l["response"], &a); err != nil {
			t.Fatal(err)
		}
		a["response"] = json.RawMessage(`{}`)
		short, err := json.Marshal(a)
		if err != nil {
			t.Fatal(err)
		}
		l["response"] = short
	default:
		return bytes.Clone(raw)
	}
	short, err := json.Marshal(l)
	if err != nil {
		t.Fatal(err)
	}
	return short
}

var (
	uuids     = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	ids       = regexp.MustCompile(`\b(msg|toolu|req)_[0-9a-f]{24}`)
	agents    = regexp.MustCompile(`\ba[0-9a-f]{16}\b`)
	durations = regexp.MustCompile(`("(?:duration_ms|duration_api_ms|ttft_ms|ttft_stream_ms|time_to_request_ms|totalDurationMs|end_time|retry_delay_ms)":|duration_ms: )[0-9.]+`)
	ports     = regexp.MustCompile(`127\.0\.0\.1:[0-9]{4,5}`)
	times     = regexp.MustCompile(`"timestamp":"[^"]*"`)
)

// normalise numbers what is different in every recording.
func normalise(raw []byte) []byte {
	raw = durations.ReplaceAll(raw, []byte("${1}1"))
	raw = ports.ReplaceAll(raw, []byte("127.0.0.1:7799"))
	raw = times.ReplaceAll(raw, []byte(`"timestamp":"2026-01-02T03:04:05Z"`))
	raw = number(raw, uuids, func(_ []byte, n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) })
	raw = number(raw, ids, func(id []byte, n int) string {
		prefix, _, _ := bytes.Cut(id, []byte("_"))
		return fmt.Sprintf("%s_%d", prefix, n)
	})
	return number(raw, agents, func(_ []byte, n int) string { return fmt.Sprintf("agent%d", n) })
}

func number(raw []byte, what *regexp.Regexp, name func(found []byte, n int) string) []byte {
	known := map[string]string{}
	return what.ReplaceAllFunc(raw, func(found []byte) []byte {
		to, ok := known[string(found)]
		if !ok {
			to = name(found, len(known)+1)
			known[string(found)] = to
		}
		return []byte(to)
	})
}
