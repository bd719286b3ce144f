//go:build record

package codex

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

// asked is what the real CLI is asked. An interrupt comes at once ("early"),
// after the second piece of an answer ("text") or when the file `started` is
// there ("tool").
type asking struct {
	text      string
	parts     []events.Part
	interrupt string
}

// scenario is a conversation. The model decides which tools the CLI offers: code
// mode is what its own default has.
type scenario struct {
	model string // "" for the CLI's default
	turns []asking
}

// classic is a model that is offered the tools themselves, unknown one that the CLI does not know.
const (
	classic = "gpt-5.5"
	unknown = "mock-model"
)

var scenarios = map[string]scenario{
	"two-turns":          {"", []asking{{text: "Remember the number 4711 please"}, {text: "which number was it?"}}},
	"thinking":           {"", []asking{{text: "think first please"}}},
	"write-then-edit":    {classic, []asking{{text: "write a file please"}, {text: "edit the file please"}}},
	"code-mode-files":    {"", []asking{{text: "write a file please"}, {text: "edit the file please"}}},
	"move-and-delete":    {classic, []asking{{text: "move and delete please"}}},
	"write-outside":      {classic, []asking{{text: "write outside please"}}},
	"move-outside":       {classic, []asking{{text: "move outside please"}}},
	"code-mode-outside":  {"", []asking{{text: "write outside please"}}},
	"patch-by-shell":     {classic, []asking{{text: "patch by shell please"}}},
	"bad-patch":          {classic, []asking{{text: "bad patch please"}}},
	"read-outside":       {classic, []asking{{text: "read outside please"}}},
	"bash":               {classic, []asking{{text: "run a command please"}}},
	"code-mode-bash":     {"", []asking{{text: "run a command please"}}},
	"bash-parallel":      {classic, []asking{{text: "two at once please"}}},
	"code-mode-parallel": {"", []asking{{text: "two at once please"}}},
	"bash-stdin":         {"", []asking{{text: "run a server please"}}},
	"bash-background":    {classic, []asking{{text: "leave a server please"}, {text: "stop the server please"}}},
	"slow-output":        {classic, []asking{{text: "slow output please"}}},
	"long-output":        {classic, []asking{{text: "long output please"}}},
	"plan":               {classic, []asking{{text: "make a plan please"}}},
	"subagent":           {"", []asking{{text: "delegate this please"}}},
	"subagent-left":      {unknown, []asking{{text: "delegate and leave please"}, {text: "hello after that"}}},
	"subagent-old":       {unknown, []asking{{text: "delegate this please"}}},
	"interrupt-text":     {classic, []asking{{text: "talk for ever", interrupt: "text"}, {text: "hello after the interrupt"}}},
	"interrupt-tool":     {classic, []asking{{text: "sleep long", interrupt: "tool"}, {text: "hello after the interrupt"}}},
	"interrupt-late":     {classic, []asking{{text: "sleep long", interrupt: "output"}, {text: "hello after the interrupt"}}},
	"interrupt-early":    {classic, []asking{{text: "talk for ever", interrupt: "early"}, {text: "hello after the interrupt"}}},
	"error-400":          {classic, []asking{{text: "bad request please"}, {text: "hello after the error"}}},
	"error-401":          {classic, []asking{{text: "wrong key please"}}},
	"error-403":          {classic, []asking{{text: "forbidden please"}}},
	"error-404":          {classic, []asking{{text: "wrong model please"}}},
	"error-429":          {classic, []asking{{text: "always limited"}}},
	"error-529":          {classic, []asking{{text: "always overloaded"}}},
	"stream-breaks":      {classic, []asking{{text: "break once please"}}},
	"stream-breaks-late": {classic, []asking{{text: "break later please"}}},
	"stream-breaks-ever": {classic, []asking{{text: "break always please"}}},
	"error-after-block":  {classic, []asking{{text: "error between blocks please"}, {text: "hello after the error"}}},
	"length":             {classic, []asking{{text: "cut by length"}}},
	"image": {classic, []asking{{parts: []events.Part{{Type: "text", Text: "what is this?"}, {
		Type: "image", MediaType: "image/png",
		Data: "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==",
	}}}}},
}

// TestRecord makes testdata/*/recording.jsonl anew with the `codex` on the PATH:
//
//	go test -tags record -run TestRecord ./runner/internal/codex
func TestRecord(t *testing.T) {
	for name, sc := range scenarios {
		t.Run(name, func(t *testing.T) { record(t, name, sc) })
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

func record(t *testing.T, name string, sc scenario) {
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
		Model:   sc.model,
		Environ: []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()},
		Env:     map[string]string{"OPENAI_BASE_URL": web.URL + "/v1", "OPENAI_API_KEY": "test"},
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
	for i, ask := range sc.turns {
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
func (r *recorder) turn(t *testing.T, s agent.Session, printed *bufio.Reader, i int, ask asking, place agent.Place) {
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
		if bytes.Contains(raw, []byte(`"item/agentMessage/delta"`)) {
			if pieces++; pieces == 2 && ask.interrupt == "text" {
				interrupt()
			}
		}
		if bytes.Contains(raw, []byte(`"item/commandExecution/outputDelta"`)) && ask.interrupt == "output" {
			interrupt()
		}
	}
}

func exists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// trim leaves out what nothing here reads and every machine has its own of.
func trim(t *testing.T, raw []byte) json.RawMessage {
	var l map[string]any
	if err := json.Unmarshal(raw, &l); err != nil {
		t.Fatalf("%v: %s", err, raw)
	}
	prune(l)
	var short bytes.Buffer
	enc := json.NewEncoder(&short)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(l); err != nil {
		t.Fatal(err)
	}
	return bytes.TrimSpace(short.Bytes())
}

func prune(l map[string]any) {
	for k, v := range l {
		switch k {
		case "emittedAtMs", "serverName", "installationId", "rateLimits", "environments", "createdAt", "updatedAt", "recencyAt", "startedAt", "completedAt":
			delete(l, k)
			continue
		case "startedAtMs", "completedAtMs":
			if v != nil {
				l[k] = 1
			}
		case "durationMs":
			if v != nil {
				l[k] = 0
			}
		case "inputTokens", "totalTokens":
			// Prompts have dates and folders in them.
			if n, ok := v.(float64); ok {
				l[k] = int(n) / 1000 * 1000
			}
		}
		switch v := v.(type) {
		case map[string]any:
			prune(v)
		case []any:
			for _, e := range v {
				if m, ok := e.(map[string]any); ok {
					prune(m)
				}
			}
		}
	}
}

var (
	uuids  = regexp.MustCompile(`[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}`)
	ids    = regexp.MustCompile(`\b(msg|call|rs|fc|ctc)_[0-9a-f]{24}`)
	ports  = regexp.MustCompile(`127\.0\.0\.1:[0-9]{4,5}`)
	days   = regexp.MustCompile(`sessions/[0-9]{4}/[0-9]{2}/[0-9]{2}/rollout-[0-9T-]{19}`)
	chunks = regexp.MustCompile(`(Chunk ID: |\\"chunk_id\\":\\")[0-9a-f]{6}`)
	walls  = regexp.MustCompile(`([Ww]all time:? |\\"wall_time_seconds\\":)[0-9.e-]+`)
	pids   = regexp.MustCompile(`("processId":"|session ID )[0-9]+`)
	agents = regexp.MustCompile(`("userAgent":"spool/[0-9.]+ )[^"]*`)
	nicks  = regexp.MustCompile(`("agentNickname":"|\\"nickname\\":\\")[A-Za-z ]+`)
)

// normalise numbers what is different in every recording.
func normalise(raw []byte) []byte {
	raw = ports.ReplaceAll(raw, []byte("127.0.0.1:7799"))
	raw = days.ReplaceAll(raw, []byte("sessions/2026/01/02/rollout-2026-01-02T03-04-05"))
	raw = chunks.ReplaceAll(raw, []byte("${1}c0ffee"))
	raw = walls.ReplaceAll(raw, []byte("${1}0.1"))
	raw = pids.ReplaceAll(raw, []byte("${1}1"))
	raw = agents.ReplaceAll(raw, []byte("${1}(Linux)"))
	raw = nicks.ReplaceAll(raw, []byte("${1}Ada"))
	raw = number(raw, uuids, func(_ []byte, n int) string { return fmt.Sprintf("00000000-0000-4000-8000-%012d", n) })
	return number(raw, ids, func(id []byte, n int) string {
		prefix, _, _ := bytes.Cut(id, []byte("_"))
		return fmt.Sprintf("%s_%d", prefix, n)
	})
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
