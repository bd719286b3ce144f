//go:build record

package opencode

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

// A scenario is what the real CLI is question. An interrupt comes at once ("early"),
// after the second piece of an answer ("text") or when the file `started` is
// there ("tool").
type question struct {
	text      string
	parts     []events.Part
	interrupt string
}

var scenarios = map[string][]question{
	"two-turns":        {{text: "Remember the number 4711 please"}, {text: "which number was it?"}},
	"thinking":         {{text: "think first please"}},
	"write-then-edit":  {{text: "write a file please"}, {text: "edit the file please"}},
	"write-outside":    {{text: "write outside please"}},
	"read-outside":     {{text: "read outside please"}},
	"search":           {{text: "search for it please"}},
	"network":          {{text: "fetch a page please"}},
	"bash":             {{text: "run something please"}},
	"bash-fails":       {{text: "run a command please"}},
	"bash-outside":     {{text: "look outside please"}},
	"parallel":         {{text: "two at once please"}},
	"subagent":         {{text: "delegate this please"}},
	"subagent-outside": {{text: "send somebody outside please"}},
	"todo":             {{text: "make a plan please"}},
	"interrupt-text":   {{text: "talk for ever", interrupt: "text"}, {text: "hello after the interrupt"}},
	"interrupt-tool":   {{text: "sleep long", interrupt: "tool"}, {text: "hello after the interrupt"}},
	"interrupt-start":  {{text: "talk for ever", interrupt: "early"}, {text: "hello after the interrupt"}},
	"interrupt-early":  {{text: "hello"}, {text: "talk for ever", interrupt: "early"}, {text: "hello after the interrupt"}},
	"error-400":        {{text: "bad request please"}, {text: "hello after the error"}},
	"error-401":        {{text: "wrong key please"}},
	"error-404":        {{text: "wrong model please"}},
	"error-429":        {{text: "always limited"}},
	"error-503":        {{text: "always overloaded"}},
	"rate-limited":     {{text: "rate limited please"}},
	"stream-breaks":    {{text: "break once please"}},
	"length":           {{text: "cut by length"}},
	"image": {{parts: []events.Part{{Type: "text", Text: "what is this?"}, {
		Type: "image", MediaType: "image/png",
		Data: "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==",
	}}}},
}

// TestRecord makes testdata/*/recording.jsonl anew with the `opencode` on the PATH:
//
//	go test -tags record -run TestRecord ./runner/internal/opencode
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

func record(t *testing.T, name string, turns []question) {
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
		Model:   "scripted",
		Env:     map[string]string{"OPENAI_BASE_URL": web.URL + "/v1", "OPENAI_API_KEY": "test-key"},
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
func (r *recorder) turn(t *testing.T, s agent.Session, printed *bufio.Reader, i int, ask question, place agent.Place) {
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
		if bytes.Contains(raw, []byte(`"agent_message_chunk"`)) {
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

// trim leaves out the long lists that nothing here reads.
func trim(t *testing.T, raw []byte) json.RawMessage {
	if !bytes.Contains(raw, []byte(`"available_commands_update"`)) {
		return bytes.Clone(raw)
	}
	list := regexp.MustCompile(`"availableCommands":\[.*\]`)
	short := list.ReplaceAll(raw, []byte(`"availableCommands":[]`))
	if !json.Valid(short) {
		t.Fatalf("not to be shortened: %s", raw)
	}
	return short
}

var (
	ids   = regexp.MustCompile(`\b(ses|msg|prt)_[0-9a-f]{12}[0-9A-Za-z]{14}`)
	calls = regexp.MustCompile(`\bcall_[0-9a-f]{24}`)
	ports = regexp.MustCompile(`127\.0\.0\.1:[0-9]{4,5}`)
)

// normalise numbers what is different in every recording.
func normalise(raw []byte) []byte {
	raw = ports.ReplaceAll(raw, []byte("127.0.0.1:7799"))
	raw = number(raw, ids, func(id []byte, n int) string {
		kind, _, _ := bytes.Cut(id, []byte("_"))
		return fmt.Sprintf("%s_%d", kind, n)
	})
	return number(raw, calls, func(_ []byte, n int) string { return fmt.Sprintf("call_%d", n) })
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
