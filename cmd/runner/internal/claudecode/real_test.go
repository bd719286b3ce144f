package claudecode_test

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/claudecode"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/profile"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// patience bounds every wait for the CLI, which needs seconds to start on a busy machine.
const patience = 90 * time.Second

// bench is the real CLI under the real supervisor, against the scripted model.
type bench struct {
	t          *testing.T
	place      agent.Place
	mock       *server.Server
	supervisor *supervisor.Supervisor
	journal    *journal.Journal
	env        map[string]string
	executions int
	read       uint64
}

func newBench(t *testing.T) *bench {
	t.Helper()
	return benchWith(t, recorded(t))
}

// recorded is the script of the recordings.
func recorded(t *testing.T) *server.Script {
	t.Helper()
	script, err := server.LoadFile("testdata/script.yaml")
	if err != nil {
		t.Fatal(err)
	}
	return script
}

func benchWith(t *testing.T, script *server.Script) *bench {
	t.Helper()
	if _, err := exec.LookPath("claude"); err != nil {
		t.Skip("claude is not on the PATH: npm i -g @anthropic-ai/claude-code, or make install")
	}
	return benchOn(t, os.Getenv("PATH"), script)
}

func benchOn(t *testing.T, path string, script *server.Script) *bench {
	t.Helper()
	mock, err := server.New(server.Config{Script: script})
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(mock)
	t.Cleanup(web.Close)
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	b := &bench{
		t: t, mock: mock, place: agent.Place{Workspace: t.TempDir(), State: t.TempDir()},
		env: map[string]string{"ANTHROPIC_BASE_URL": web.URL, "ANTHROPIC_API_KEY": "test", "CLAUDE_CODE_MAX_RETRIES": "1"},
	}
	if b.journal, err = journal.New(time.Now(), rand.Reader, 0); err != nil {
		t.Fatal(err)
	}
	exe, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	b.supervisor, err = supervisor.New(supervisor.Config{
		Executable: exe,
		Adapters:   map[string]agent.Adapter{claudecode.Architecture: claudecode.Adapter{}},
		Place:      b.place, Journal: b.journal, Nursery: process.NewNursery(log), Log: log,
		Environ: []string{"PATH=" + path, "HOME=" + t.TempDir(), "CLAUDECODE=1"},
	})
	if err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(context.Background())
	done := make(chan error, 1)
	go func() { done <- b.supervisor.Run(ctx) }()
	t.Cleanup(func() {
		cancel()
		if err := <-done; err != nil {
			t.Error(err)
		}
	})
	return b
}

// start gives a query to the agent; change may be nil.
func (b *bench) start(content string, change func(*runner.Query)) *runner.Error {
	b.executions++
	q := runner.Query{
		SessionID: "ses_1", ExecutionID: fmt.Sprintf("exe_%d", b.executions), Attempt: 1, Architecture: claudecode.Architecture,
		Content: content, Env: b.env, Policy: runner.PolicyWorkspace,
	}
	if change != nil {
		change(&q)
	}
	return b.supervisor.Start(q)
}

// turn is what was journaled of one execution so far.
type turn struct {
	t     *testing.T
	lines []runner.Line
}

// until reads on until a line that is wanted.
func (b *bench) until(what string, wanted func(runner.Line) bool, so turn) turn {
	b.t.Helper()
	timeout := time.After(patience)
	for {
		raw, changed := b.journal.After(b.read, 1)
		if len(raw) == 0 {
			select {
			case <-changed:
			case <-timeout:
				b.t.Fatalf("no %s within %s; so far %s", what, patience, so)
			}
			continue
		}
		var l runner.Line
		if err := json.Unmarshal(raw[0], &l); err != nil {
			b.t.Fatal(err)
		}
		b.read = l.N
		so.lines = append(so.lines, l)
		if wanted(l) {
			return so
		}
	}
}

func (b *bench) end(so turn) turn {
	b.t.Helper()
	return b.until("end", func(l runner.Line) bool { return l.Type == runner.TurnEnded }, so)
}

// ask runs a query to its end.
func (b *bench) ask(content string, change func(*runner.Query)) turn {
	b.t.Helper()
	if refusal := b.start(content, change); refusal != nil {
		b.t.Fatal(refusal)
	}
	return b.end(turn{t: b.t})
}

// completed asks and wants an answer that has a text in it.
func (b *bench) completed(content, want string, change func(*runner.Query)) turn {
	b.t.Helper()
	x := b.ask(content, change)
	if e := x.ended(); e.Outcome != runner.Completed || !strings.Contains(e.Result, want) {
		b.t.Fatalf("%s: ended %+v, want a result with %q\n%s", content, e, want, x)
	}
	x.whole()
	return x
}

func (x turn) String() string {
	var s strings.Builder
	for _, l := range x.lines {
		fmt.Fprintf(&s, "\n%d %s %s", l.N, l.Type, l.Data)
	}
	return s.String()
}

func data[T any](x turn, l runner.Line) T {
	x.t.Helper()
	var v T
	if err := json.Unmarshal(l.Data, &v); err != nil {
		x.t.Fatalf("line %d: %v", l.N, err)
	}
	return v
}

// all gives the data of one type.
func all[T any](x turn, typ events.Type) []T {
	x.t.Helper()
	var out []T
	for _, l := range x.lines {
		if l.Type == typ {
			out = append(out, data[T](x, l))
		}
	}
	return out
}

func (x turn) ended() runner.Ended     { return all[runner.Ended](x, runner.TurnEnded)[0] }
func (x turn) started() runner.Started { return all[runner.Started](x, runner.AgentStarted)[0] }

func (x turn) decisions() []events.PermissionDecided {
	return all[events.PermissionDecided](x, "permission_decided")
}

// whole checks that the text in flight is the text of the blocks, byte by byte.
func (x turn) whole() {
	x.t.Helper()
	flown := map[string]string{}
	for _, d := range all[runner.Delta](x, events.TextDelta) {
		if int(d.Offset) != len(flown[d.BlockID]) {
			x.t.Errorf("block %s: offset %d after %d bytes", d.BlockID, d.Offset, len(flown[d.BlockID]))
		}
		flown[d.BlockID] += d.Delta
	}
	for _, c := range all[events.BlockComplete](x, "block_complete") {
		if text, ok := flown[c.Block.ID]; ok && c.Block.Kind == events.KindAssistantText && text != c.Block.Content {
			x.t.Errorf("block %s: flown %q, is %q", c.Block.ID, text, c.Block.Content)
		}
	}
}

// blocks gives the finished blocks of a kind.
func (x turn) blocks(kind events.BlockKind) []events.Block {
	var out []events.Block
	for _, c := range all[events.BlockComplete](x, "block_complete") {
		if c.Block.Kind == kind {
			out = append(out, c.Block)
		}
	}
	for _, c := range all[events.BlockStart](x, "block_start") {
		if c.Block.Kind == kind && c.Block.Status != events.StatusPending {
			out = append(out, c.Block)
		}
	}
	return out
}

func (b *bench) file(name string) string {
	b.t.Helper()
	raw, err := os.ReadFile(filepath.Join(b.place.Workspace, name))
	if err != nil {
		b.t.Fatal(err)
	}
	return string(raw)
}

func isDelta(l runner.Line) bool { return l.Type == events.TextDelta }

// One process takes all the turns of a session.
func TestRealOneProcess(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	first := b.completed("Remember the number 4711 please", "Ça va, 世界", nil)
	pid := first.started().PID
	if first.started().Warm || pid == 0 {
		t.Errorf("first start %+v", first.started())
	}
	same := func(x turn) turn {
		t.Helper()
		if s := x.started(); s.PID != pid || !s.Warm {
			t.Errorf("start %+v, want the warm process %d", s, pid)
		}
		return x
	}
	second := same(b.completed("which number was it?", "4711", nil))
	if f, s := first.ended(), second.ended(); s.CostUSD > 1.5*f.CostUSD || s.Usage.InputTokens > 2*f.Usage.InputTokens || s.CostUSD == 0 {
		t.Errorf("the second turn is charged with the first: %+v after %+v", s, f)
	}
	same(b.completed("write a file please", "written", nil))
	edit := same(b.completed("edit the file please", "edited", nil))
	if got := b.file("hello.txt"); got != "hello, spool\n" {
		t.Errorf("hello.txt: %q", got)
	}
	if d := edit.decisions(); len(d) != 1 || d[0].Decision != "allow" || d[0].Rule != "workspace-path" || d[0].ToolName != "Edit" {
		t.Errorf("decisions %+v", d)
	}
	same(b.completed("run a command please", "Exit code 3", nil))
	if got := b.file("answer.txt"); got != "42\n" {
		t.Errorf("answer.txt: %q", got)
	}
	sub := same(b.completed("delegate this please", "reported", nil))
	if got := b.file("sub.txt"); got != "sub-agent-ran\n" || len(sub.blocks(events.KindSubagent)) != 1 {
		t.Errorf("sub.txt %q, blocks %+v", got, sub.blocks(events.KindSubagent))
	}
	b.denied(same)
	b.interrupted(same)
	failed := same(b.ask("bad request please", nil))
	if e := failed.ended(); e.Outcome != runner.Failed || e.Code != "MODEL_ERROR" || !strings.Contains(e.Message, "scripted refusal") {
		t.Errorf("ended %+v", e)
	}
	same(b.completed("which number was it?", "4711", nil))
	b.remembered(second)
}

// denied wants that nothing is written outside of the workspace, and that the agent is told why.
func (b *bench) denied(same func(turn) turn) {
	b.t.Helper()
	outside := b.t.TempDir()
	if err := os.Symlink(outside, filepath.Join(b.place.Workspace, "link")); err != nil {
		b.t.Fatal(err)
	}
	for _, content := range []string{"write outside please", "write through the link", "read outside please"} {
		x := same(b.completed(content, "outside of the workspace", nil))
		if d := x.decisions(); len(d) != 1 || d[0].Decision != "deny" || d[0].Rule != "outside-workspace" {
			b.t.Errorf("%s: decisions %+v", content, d)
		}
	}
	for _, path := range []string{"/etc/spool-test", filepath.Join(outside, "file.txt")} {
		if _, err := os.Stat(path); err == nil {
			b.t.Errorf("%s was written", path)
		}
	}
	if d := same(b.completed("fetch a page please", "network", nil)).decisions(); len(d) != 1 || d[0].Rule != "network" {
		b.t.Errorf("decisions %+v", d)
	}
}

// interrupted stops an answer in the middle, and a command.
func (b *bench) interrupted(same func(turn) turn) {
	b.t.Helper()
	for content, ready := range map[string]func(runner.Line) bool{
		"talk for ever": isDelta,
		"sleep long":    func(l runner.Line) bool { return l.Type == "permission_decided" },
	} {
		if refusal := b.start(content, nil); refusal != nil {
			b.t.Fatal(refusal)
		}
		x := b.until("sign of work", ready, turn{t: b.t})
		b.supervisor.Interrupt()
		x = same(b.end(x))
		if e := x.ended(); e.Outcome != runner.Interrupted {
			b.t.Fatalf("%s: ended %+v\n%s", content, e, x)
		}
		x.whole()
	}
}

// remembered wants the CLI's record where the journal says it is.
func (b *bench) remembered(x turn) {
	b.t.Helper()
	w := all[events.TranscriptWritten](x, "transcript_written")
	if len(w) == 0 {
		b.t.Fatalf("no transcript_written\n%s", x)
	}
	raw, err := os.ReadFile(w[0].Path)
	if err != nil || !strings.Contains(string(raw), "4711") {
		b.t.Errorf("transcript %+v: %v", w[0], err)
	}
}

// A process that is gone, or that has to go, is followed by one that remembers.
func TestRealResume(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	first := b.completed("Remember the number 31 please", "31", nil)
	b.supervisor.Kill(t.Context())

	second := b.completed("which number was it?", "31", nil)
	if second.started().PID == first.started().PID || second.started().Warm {
		t.Errorf("start %+v after the process %d was killed", second.started(), first.started().PID)
	}

	// Dies in the middle of a turn.
	if refusal := b.start("talk for ever", nil); refusal != nil {
		t.Fatal(refusal)
	}
	x := b.until("text", isDelta, turn{t: t})
	if err := syscall.Kill(second.started().PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	x = b.end(x)
	if e := x.ended(); e.Outcome != runner.Failed || e.Code != "AGENT_EXITED" {
		t.Errorf("ended %+v", e)
	}
	if cut := x.blocks(events.KindAssistantText); len(cut) != 1 || cut[0].Status != events.StatusError || cut[0].Content == "" {
		t.Errorf("blocks %+v", cut)
	}

	// Another model and prompt need another process; the memory goes with them.
	if err := profile.Save(b.place.State, profile.Profile{MemoryFile: "MEMORY-OF-THE-PROJECT"}); err != nil {
		t.Fatal(err)
	}
	third := b.completed("which number was it?", "31", func(q *runner.Query) {
		q.Model, q.SystemPrompt = "claude-test-model", "PROMPT-OF-THE-AGENT"
	})
	requests := b.mock.Requests()
	last := requests[len(requests)-1]
	if last.Model != "claude-test-model" || !strings.Contains(string(last.Body), "PROMPT-OF-THE-AGENT") || !strings.Contains(string(last.Body), "MEMORY-OF-THE-PROJECT") {
		t.Errorf("the model was asked as %s, with the prompt: %v, with the memory: %v", last.Model,
			strings.Contains(string(last.Body), "PROMPT-OF-THE-AGENT"), strings.Contains(string(last.Body), "MEMORY-OF-THE-PROJECT"))
	}
	if m := all[events.MetadataUpdate](third, "metadata_update"); len(m) == 0 || m[0].Model != "claude-test-model" {
		t.Errorf("metadata %+v", m)
	}

	// A session that is not known here is said to be lost, and the query is answered all the same.
	lost := b.completed("hello", "You said: hello", func(q *runner.Query) {
		q.SessionID, q.Resume = "ses_2", "11111111-2222-4333-8444-555555555555"
	})
	if e := all[events.Error](lost, "error"); len(e) != 1 || e[0].Code != "TRANSCRIPT_LOST" {
		t.Errorf("errors %+v", e)
	}
}

// An interrupt that comes before the process has even started counts too.
func TestRealInterruptAtOnce(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	if refusal := b.start("talk for ever", nil); refusal != nil {
		t.Fatal(refusal)
	}
	b.supervisor.Interrupt()
	if e := b.end(turn{t: t}).ended(); e.Outcome != runner.Interrupted {
		t.Fatalf("ended %+v", e)
	}
	b.completed("hello after the interrupt", "hello after the interrupt", nil)
}

func TestMissing(t *testing.T) {
	t.Parallel()
	refusal := benchOn(t, t.TempDir(), recorded(t)).start("hello", nil)
	if refusal == nil || refusal.Code != "AGENT_NOT_FOUND" || !strings.Contains(refusal.Message, "npm i -g @anthropic-ai/claude-code") {
		t.Fatalf("refused with %v", refusal)
	}
}

// What a workspace brings as its settings cannot answer for the policy.
func TestRealWorkspaceSettings(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	settings := `{"permissions":{"defaultMode":"bypassPermissions","allow":["WebFetch","WebSearch","Write(//**)","Edit(//**)","Write","Edit"],"additionalDirectories":["/etc"]}}`
	for _, name := range []string{"settings.json", "settings.local.json"} {
		if err := os.MkdirAll(filepath.Join(b.place.Workspace, ".claude"), 0o755); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(b.place.Workspace, ".claude", name), []byte(settings), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	b.denied(func(x turn) turn { return x })
}
