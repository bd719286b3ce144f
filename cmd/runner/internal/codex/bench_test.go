package codex_test

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
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/codex"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// key is looked for wherever it must not be.
const key = "sk-a-key-that-nobody-may-write-down"

// classic is a model that is offered the tools themselves.
const classic = "gpt-5.5"

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
	model      string
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
	if _, err := exec.LookPath("codex"); err != nil {
		t.Skip("codex is not on the PATH: npm i -g @openai/codex, or make install")
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
		env: map[string]string{"OPENAI_BASE_URL": web.URL + "/v1", "OPENAI_API_KEY": key},
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
		Adapters:   map[string]agent.Adapter{codex.Architecture: codex.Adapter{}},
		Place:      b.place, Journal: b.journal, Nursery: process.NewNursery(log), Log: log,
		Environ: []string{"PATH=" + path, "HOME=" + t.TempDir(), "CODEX_SANDBOX=seatbelt"},
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
		SessionID: "ses_1", ExecutionID: fmt.Sprintf("exe_%d", b.executions), Attempt: 1, Architecture: codex.Architecture,
		Content: content, Model: b.model, Env: b.env, Policy: runner.PolicyWorkspace,
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
