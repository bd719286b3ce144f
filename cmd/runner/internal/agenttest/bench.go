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

// waitTimeout is the time limit of each wait for an agent, which may need seconds to start on a busy machine.
const waitTimeout = 3 * time.Minute

// Bench runs the agent under a real supervisor, with a workspace and a state folder of its own. Its methods fail the
// test on an error.
type Bench struct {
	Folders    agent.Folders
	Supervisor *supervisor.Supervisor
	Query      runner.Query   // the fields that all queries have
	Model      *server.Server // the scripted model; nil if the agent needs none

	t          testing.TB
	journal    *journal.Journal
	executions int
	read       uint64
}

// NewBench starts a supervisor that ends with the test. The model follows testdata/script.yaml. The test is skipped if
// the agent's CLI is not installed.
func NewBench(t testing.TB, s Subject) *Bench {
	t.Helper()
	return NewBenchWith(t, s, nil)
}

// NewBenchWith is NewBench with another script for the model.
func NewBenchWith(t testing.TB, s Subject, script *server.Script) *Bench {
	t.Helper()
	if s.Program != "" {
		if _, err := exec.LookPath(s.Program); err != nil {
			t.Skipf("%s is not on the PATH: %s, or make install", s.Program, s.Install)
		}
	}
	return newBenchOn(t, s, os.Getenv("PATH"), script)
}

// newBenchOn is NewBenchWith for an agent that has the given PATH.
func newBenchOn(t testing.TB, s Subject, path string, script *server.Script) *Bench {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	b := &Bench{
		t: t, Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()},
		Query: runner.Query{
			SessionID: "ses_1", Attempt: 1, Architecture: s.Architecture, Command: s.Command, Model: s.Model, Policy: runner.PolicyWorkspace,
		},
	}
	url := ""
	if !s.NoModel {
		if script == nil {
			script = Script(t)
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

// Script returns the script of the model in testdata/script.yaml.
func Script(t testing.TB) *server.Script {
	t.Helper()
	script, err := server.LoadFile("testdata/script.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return script
}

// Rules returns a script with the given rules in YAML. Without a rule for the query the model repeats it.
func Rules(t testing.TB, rules ...string) *server.Script {
	t.Helper()
	s, err := server.Load(t.Name(), []byte("rules:\n"+strings.Join(rules, "")+"  - steps: [{text: 'You said: {{user}}'}]\n"))
	if err != nil {
		t.Fatal(err)
	}
	return s
}

// Tool is a tool call that a rule of the scripted model makes.
type Tool struct {
	Name  string `json:"name"`
	Input any    `json:"input"`
}

// Rule returns a rule for Rules. When a query contains text, the model calls the tools one after the other and then
// answers with the last result.
func Rule(text string, tools ...Tool) string {
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

// Start sends a query with the given content to the supervisor, and returns the supervisor's refusal or nil. change,
// which may be nil, modifies the query first.
func (b *Bench) Start(content string, change func(*runner.Query)) *runner.CommandError {
	b.executions++
	q := b.Query
	q.ExecutionID, q.Content = fmt.Sprintf("exe_%d", b.executions), content
	if change != nil {
		change(&q)
	}
	return b.Supervisor.Start(q)
}

// MustStart is Start for a query that the supervisor must accept. It returns the turn, which has no lines yet.
func (b *Bench) MustStart(content string, change func(*runner.Query)) Turn {
	b.t.Helper()
	if refusal := b.Start(content, change); refusal != nil {
		b.t.Fatal(refusal)
	}
	return Turn{t: b.t}
}

// Until reads the journal up to the first line for which wanted returns true, and returns the turn so with the lines
// that it has read added. It fails the test if no such line comes; what describes the line in the message.
func (b *Bench) Until(what string, wanted func(runner.JournalLine) bool, so Turn) Turn {
	b.t.Helper()
	timeout := time.After(waitTimeout)
	for {
		raw, changed := b.journal.After(b.read, 1)
		if len(raw) == 0 {
			select {
			case <-changed:
			case <-timeout:
				b.t.Fatalf("no %s within %s; so far %s", what, waitTimeout, so)
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

// End reads the journal up to the end of the turn, and returns the turn so with the lines that it has read added.
func (b *Bench) End(so Turn) Turn {
	b.t.Helper()
	return b.Until("end", func(l runner.JournalLine) bool { return l.Type == runner.TurnEnded }, so)
}

// Ask sends a query, reads the journal to the end of its turn, and returns the turn.
func (b *Bench) Ask(content string, change func(*runner.Query)) Turn {
	b.t.Helper()
	return b.End(b.MustStart(content, change))
}

// AskOK is Ask for a turn that must complete with a result that contains want.
func (b *Bench) AskOK(content, want string, change func(*runner.Query)) Turn {
	b.t.Helper()
	x := b.Ask(content, change)
	if e := x.Ended(); e.Outcome != runner.OutcomeCompleted || !strings.Contains(e.Result, want) {
		b.t.Fatalf("%s: ended %+v, want a result with %q\n%s", content, e, want, x)
	}
	x.CheckText()
	return x
}

// Turn holds the journal lines of one execution that were read so far.
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

// All returns the data of all lines of a turn that have the type typ.
func All[T any](x Turn, typ events.Type) []T {
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

// Ended returns the data of the line that ends the turn. It fails the test unless there is exactly one.
func (x Turn) Ended() runner.TurnEnd {
	x.t.Helper()
	all := All[runner.TurnEnd](x, runner.TurnEnded)
	if len(all) != 1 {
		x.t.Fatalf("%d ends%s", len(all), x)
	}
	return all[0]
}

// Started returns the data of the line that starts the turn. It fails the test unless there is exactly one.
func (x Turn) Started() runner.TurnStart {
	x.t.Helper()
	all := All[runner.TurnStart](x, runner.AgentStarted)
	if len(all) != 1 {
		x.t.Fatalf("%d starts%s", len(all), x)
	}
	return all[0]
}

// Decisions returns the decisions about permission requests in the turn.
func (x Turn) Decisions() []events.PermissionDecided {
	x.t.Helper()
	return All[events.PermissionDecided](x, "permission_decided")
}

// Blocks returns the finished blocks of a kind, in the order in which they were finished.
func (x Turn) Blocks(kind events.BlockKind) []events.Block {
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

// CheckText checks that the text deltas of every block join to the text of the block, byte by byte.
func (x Turn) CheckText() {
	x.t.Helper()
	streamed := map[string]string{}
	for _, d := range All[runner.TextDelta](x, events.TextDelta) {
		if int(d.Offset) != len(streamed[d.BlockID]) {
			x.t.Errorf("block %s: offset %d after %d bytes", d.BlockID, d.Offset, len(streamed[d.BlockID]))
		}
		streamed[d.BlockID] += d.Delta
	}
	for _, b := range x.Blocks(events.KindAssistantText) {
		if text, ok := streamed[b.ID]; ok && text != b.Content {
			x.t.Errorf("block %s: deltas %q, content %q", b.ID, text, b.Content)
		}
	}
}

// Written returns the first transcript_written of the turn.
func (x Turn) Written() events.TranscriptWritten {
	x.t.Helper()
	all := All[events.TranscriptWritten](x, "transcript_written")
	if len(all) == 0 {
		x.t.Fatalf("no transcript_written%s", x)
	}
	return all[0]
}

// CheckErrors checks that the turn's events of type error have exactly the given codes, in order, and returns their
// data.
func (x Turn) CheckErrors(codes ...string) []events.Error {
	x.t.Helper()
	all := All[events.Error](x, "error")
	var got []string
	for _, e := range all {
		got = append(got, e.Code)
	}
	if !slices.Equal(got, codes) {
		x.t.Errorf("errors %+v, want %q", all, codes)
	}
	return all
}

// File returns the content of a file in the workspace.
func (b *Bench) File(name string) string {
	b.t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.Folders.Workspace, name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(raw)
}

// HasFile reports whether the workspace has a file.
func (b *Bench) HasFile(name string) bool { return exists(filepath.Join(b.Folders.Workspace, name)) }

// Put writes a file into the workspace.
func (b *Bench) Put(name, content string) {
	b.t.Helper()
	b.put(filepath.Join(b.Folders.Workspace, name), content)
}

// put writes a file, and creates its folders.
func (b *Bench) put(path, content string) {
	b.t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		b.t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), 0o600); err != nil {
		b.t.Fatal(err)
	}
}

// Requests returns the requests that the scripted model has received whose body contains text. It fails the test if
// there is none.
func (b *Bench) Requests(text string) []server.Request {
	b.t.Helper()
	found := slices.DeleteFunc(b.Model.Requests(), func(r server.Request) bool { return !bytes.Contains(r.Body, []byte(text)) })
	if len(found) == 0 {
		b.t.Fatalf("no request to the model contains %q", text)
	}
	return found
}

// CheckLastRequest checks the last request that the scripted model has received: its body must contain every text of
// present, no text of absent, and the question "which number was it?" exactly questions times.
func (b *Bench) CheckLastRequest(present, absent []string, questions int) {
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
	if n := strings.Count(body, whichNumber); n != questions {
		b.t.Errorf("the last request to the model contains the question %d times, want %d", n, questions)
	}
}

// WithEnv returns the environment that every query has, with one more variable.
func (b *Bench) WithEnv(key, value string) map[string]string {
	env := maps.Clone(b.Query.Env)
	env[key] = value
	return env
}
