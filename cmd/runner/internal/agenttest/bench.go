package agenttest

import (
	"bytes"
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"maps"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// agentWaitTimeout is the time limit of each wait for an agent. It is long, because an agent may need seconds to start on a
// busy machine.
const agentWaitTimeout = 3 * time.Minute

// Harness runs the agent under a real supervisor, with a workspace and a state folder of its own. Its methods fail the
// test on an error.
type Harness struct {
	Folders    agent.Folders
	Supervisor *supervisor.Supervisor
	Query      runner.Query   // the fields that all queries have
	Model      *server.Server // the scripted model; nil if the agent needs none

	t          testing.TB
	journal    *journal.Journal
	executions int
	read       uint64
}

// NewHarness starts a supervisor that ends with the test. The scripted model uses testdata/script.yaml. The test is
// skipped if the agent's CLI is not installed.
func NewHarness(t testing.TB, s AgentUnderTest) *Harness {
	t.Helper()
	return NewHarnessWithScript(t, s, nil)
}

// NewHarnessWithScript is NewHarness with another script for the scripted model.
func NewHarnessWithScript(t testing.TB, s AgentUnderTest, script *server.Script) *Harness {
	t.Helper()
	if s.Program != "" {
		if _, err := exec.LookPath(s.Program); err != nil {
			t.Skipf("%s is not on the PATH: %s, or make install", s.Program, s.Install)
		}
	}
	return newHarnessWithPath(t, s, os.Getenv("PATH"), script)
}

// newHarnessWithPath is NewHarnessWithScript for an agent whose environment variable PATH is path.
func newHarnessWithPath(t testing.TB, s AgentUnderTest, path string, script *server.Script) *Harness {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	b := &Harness{
		t: t, Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()},
		Query: runner.Query{
			SessionID: "ses_1", Attempt: 1, Architecture: s.Architecture, Command: s.Command, Model: s.Model,
		},
	}
	url := ""
	if !s.NoModel {
		if script == nil {
			script = DefaultScript(t)
		}
		var err error
		if b.Model, err = server.New(server.Config{Script: script}); err != nil {
			t.Fatal(err)
		}
		web := httptest.NewServer(b.Model)
		t.Cleanup(web.Close)
		url = web.URL
	}
	if s.Env != nil {
		b.Query.Env = s.Env(url)
	}
	var err error
	if b.journal, err = journal.New(time.Now(), rand.Reader, 0); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b.Supervisor, err = supervisor.New(supervisor.Config{
		Executable: exe,
		Adapters:   map[string]agent.Adapter{s.Architecture: s.Adapter}, Folders: b.Folders, Journal: b.journal,
		ProcessGroup: process.NewGroup(log), Log: log, Environ: append([]string{"PATH=" + path, "HOME=" + t.TempDir()}, s.Environ...),
		Limits: supervisor.Limits{MuteKill: s.MuteKill},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.Supervisor.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return b
}

// DefaultScript parses testdata/script.yaml, the script of the scripted model.
func DefaultScript(t testing.TB) *server.Script {
	t.Helper()
	script, err := server.LoadScript("testdata/script.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return script
}

// ScriptOfRules returns a script for the scripted model with the given rules in YAML. If no rule matches a query, the
// model repeats the query.
func ScriptOfRules(t testing.TB, rules ...string) *server.Script {
	t.Helper()
	s, err := server.ParseScript(t.Name(), []byte("rules:\n"+strings.Join(rules, "")+"  - steps: [{text: 'You said: {{user}}'}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// ScriptToolCall is a tool call that a rule of the scripted model makes.
type ScriptToolCall struct {
	Name  string `json:"name"`
	Input any    `json:"input"`
}

// ScriptRule returns a rule for ScriptOfRules. When a query contains text, the scripted model calls the tools one after
// the other and then answers with the last result.
func ScriptRule(text string, tools ...ScriptToolCall) string {
	steps := []any{}
	for _, tool := range tools {
		steps = append(steps, map[string]any{"tool": tool})
	}
	raw, err := json.Marshal(map[string]any{
		"match": map[string]any{"user": text}, "steps": append(steps, map[string]any{"text": "The tool said: {{result}}"}),
	})
	if err != nil {
		panic(err) // the inputs are maps of strings and numbers
	}
	return "  - " + string(raw) + "\n"
}

// StartTurn sends a query with the given content to the supervisor, and returns the supervisor's refusal or nil.
// change, which may be nil, modifies the query first.
func (b *Harness) StartTurn(content string, change func(*runner.Query)) *runner.CommandError {
	b.executions++
	q := b.Query
	q.ExecutionID, q.Content = fmt.Sprintf("exe_%d", b.executions), content
	if change != nil {
		change(&q)
	}
	return b.Supervisor.Start(q)
}

// MustStartTurn is StartTurn for a query that the supervisor must accept. It returns the turn, which has no lines yet.
func (b *Harness) MustStartTurn(content string, change func(*runner.Query)) Turn {
	b.t.Helper()
	if refusal := b.StartTurn(content, change); refusal != nil {
		b.t.Fatal(refusal)
	}
	return Turn{t: b.t}
}

// ReadUntil reads the journal up to the first line for which wanted returns true. so is the turn as read so far; the
// result is the turn with the lines that were read added. It fails the test if no such line comes; what describes the
// line in the message.
func (b *Harness) ReadUntil(what string, wanted func(runner.JournalLine) bool, so Turn) Turn {
	b.t.Helper()
	timeout := time.After(agentWaitTimeout)
	for {
		raw, changed := b.journal.LinesAfter(b.read, 1)
		if len(raw) == 0 {
			select {
			case <-changed:
			case <-timeout:
				b.t.Fatalf("no %s within %s; so far %s", what, agentWaitTimeout, so)
			}
			continue
		}
		var l runner.JournalLine
		if err := json.Unmarshal(raw[0], &l); err != nil {
			b.t.Fatal(err)
		}
		b.read = l.N
		so.Lines = append(so.Lines, l)
		if wanted(l) {
			return so
		}
	}
}

// ReadToEnd reads the journal up to the end of the turn. so is the turn as read so far; the result is the turn with the
// lines that were read added.
func (b *Harness) ReadToEnd(so Turn) Turn {
	b.t.Helper()
	return b.ReadUntil("end", func(l runner.JournalLine) bool { return l.Type == runner.TurnEnded }, so)
}

// RunTurn sends a query, reads the journal to the end of its turn, and returns the turn.
func (b *Harness) RunTurn(content string, change func(*runner.Query)) Turn {
	b.t.Helper()
	return b.ReadToEnd(b.MustStartTurn(content, change))
}

// RunTurnOK is RunTurn for a turn that must complete with a result that contains want.
func (b *Harness) RunTurnOK(content, want string, change func(*runner.Query)) Turn {
	b.t.Helper()
	x := b.RunTurn(content, change)
	if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || !strings.Contains(e.Result, want) {
		b.t.Fatalf("%s: ended %+v, want a result with %q\n%s", content, e, want, x)
	}
	x.CheckTextDeltas()
	return x
}

// Turn holds the journal lines of one execution that the test has read so far.
type Turn struct {
	Lines []runner.JournalLine
	t     testing.TB
}

func (x Turn) String() string {
	var s strings.Builder
	for _, l := range x.Lines {
		fmt.Fprintf(&s, "\n%d %s %s", l.N, l.Type, l.Data)
	}
	return s.String()
}

// DataOfType returns the decoded data of all lines of a turn that have the event type typ.
func DataOfType[T any](x Turn, typ events.Type) []T {
	x.t.Helper()
	var out []T
	for _, l := range x.Lines {
		if l.Type != typ {
			continue
		}
		var v T
		if err := json.Unmarshal(l.Data, &v); err != nil {
			x.t.Fatalf("line %d: %v", l.N, err)
		}
		out = append(out, v)
	}
	return out
}

// Ended returns the data of the line that ends the turn. It fails the test unless the turn has exactly one such line.
func (x Turn) Ended() runner.TurnEnd {
	x.t.Helper()
	all := DataOfType[runner.TurnEnd](x, runner.TurnEnded)
	if len(all) != 1 {
		x.t.Fatalf("%d ends%s", len(all), x)
	}
	return all[0]
}

// Started returns the data of the line that starts the turn. It fails the test unless the turn has exactly one such
// line.
func (x Turn) Started() runner.TurnStart {
	x.t.Helper()
	all := DataOfType[runner.TurnStart](x, runner.AgentStarted)
	if len(all) != 1 {
		x.t.Fatalf("%d starts%s", len(all), x)
	}
	return all[0]
}

// PermissionDecisions returns the decisions about permission requests in the turn.
func (x Turn) PermissionDecisions() []events.PermissionDecided {
	x.t.Helper()
	return DataOfType[events.PermissionDecided](x, "permission_decided")
}

// FinishedBlocks returns the finished blocks of a kind, in the order in which they were finished.
func (x Turn) FinishedBlocks(kind events.BlockKind) []events.Block {
	x.t.Helper()
	var out []events.Block
	for _, l := range x.Lines {
		var b struct {
			Block events.Block `json:"block"`
		}
		if l.Type != "block_start" && l.Type != "block_complete" {
			continue
		}
		if err := json.Unmarshal(l.Data, &b); err != nil {
			x.t.Fatal(err)
		}
		if b.Block.Kind == kind && b.Block.Status != events.StatusPending {
			out = append(out, b.Block)
		}
	}
	return out
}

// CheckTextDeltas checks that the text deltas of every block, joined, are the text of the block, byte by byte.
func (x Turn) CheckTextDeltas() {
	x.t.Helper()
	streamed := map[string]string{}
	for _, d := range DataOfType[runner.TextDelta](x, events.TextDelta) {
		if int(d.Offset) != len(streamed[d.BlockID]) {
			x.t.Errorf("block %s: offset %d after %d bytes", d.BlockID, d.Offset, len(streamed[d.BlockID]))
		}
		streamed[d.BlockID] += d.Delta
	}
	for _, b := range x.FinishedBlocks(events.KindAssistantText) {
		if text, ok := streamed[b.ID]; ok && text != b.Content {
			x.t.Errorf("block %s: deltas %q, content %q", b.ID, text, b.Content)
		}
	}
}

// TranscriptWritten returns the data of the first event transcript_written of the turn.
func (x Turn) TranscriptWritten() events.TranscriptWritten {
	x.t.Helper()
	all := DataOfType[events.TranscriptWritten](x, "transcript_written")
	if len(all) == 0 {
		x.t.Fatalf("no transcript_written%s", x)
	}
	return all[0]
}

// CheckErrorCodes checks that the turn's events of type error have exactly the given codes, in order, and returns the
// data of these events.
func (x Turn) CheckErrorCodes(codes ...string) []events.Error {
	x.t.Helper()
	all := DataOfType[events.Error](x, "error")
	var got []string
	for _, e := range all {
		got = append(got, e.Code)
	}
	if !slices.Equal(got, codes) {
		x.t.Errorf("errors %+v, want %q", all, codes)
	}
	return all
}

// ReadFile returns the content of a file in the agent's workspace.
func (b *Harness) ReadFile(name string) string {
	b.t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.Folders.Workspace, name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(raw)
}

// HasFile reports whether the agent's workspace contains a file.
func (b *Harness) HasFile(name string) bool {
	return fileExists(filepath.Join(b.Folders.Workspace, name))
}

// WriteFile writes a file into the agent's workspace.
func (b *Harness) WriteFile(name, content string) {
	b.t.Helper()
	writePath(b.t, filepath.Join(b.Folders.Workspace, name), content)
}

// writePath writes a file at an absolute path, and creates the folders above it.
func writePath(t testing.TB, path, content string) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		t.Fatal(err)
	}
}

// ModelRequests returns the requests to the scripted model whose body contains text. It fails the test if there is
// none.
func (b *Harness) ModelRequests(text string) []server.RecordedRequest {
	b.t.Helper()
	found := slices.DeleteFunc(b.Model.Requests(), func(r server.RecordedRequest) bool { return !bytes.Contains(r.Body, []byte(text)) })
	if len(found) == 0 {
		b.t.Fatalf("no request to the model contains %q", text)
	}
	return found
}

// CheckLastModelRequest checks the last request to the scripted model: its body must contain every text of present, no
// text of absent, and the question "which number was it?" exactly questions times.
func (b *Harness) CheckLastModelRequest(present, absent []string, questions int) {
	b.t.Helper()
	requests := b.Model.Requests()
	body := string(requests[len(requests)-1].Body)
	for _, text := range present {
		if !strings.Contains(body, text) {
			b.t.Errorf("the last request to the model does not contain %q", text)
		}
	}
	for _, text := range absent {
		if strings.Contains(body, text) {
			b.t.Errorf("the last request to the model contains %q", text)
		}
	}
	if n := strings.Count(body, whichNumberQuery); n != questions {
		b.t.Errorf("the last request to the model contains the question %d times, want %d", n, questions)
	}
}

// EnvWith returns the environment of every query of the harness, with one more variable.
func (b *Harness) EnvWith(key, value string) map[string]string {
	env := maps.Clone(b.Query.Env)
	env[key] = value
	return env
}
