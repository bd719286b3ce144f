// Package acptest runs real agent processes under the real supervisor, for the
// tests of the adapters that speak ACP.
package acptest

import (
	"context"
	"crypto/rand"
	"encoding/json"
	"fmt"
	"log/slog"
	"os"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/journal"
	"github.com/spoolhq/spool/cmd/runner/internal/process"
	"github.com/spoolhq/spool/cmd/runner/internal/supervisor"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// patience bounds every wait for an agent, which may need seconds to start on a busy machine.
const patience = 3 * time.Minute

// Bench is a supervisor with one architecture.
type Bench struct {
	Place      agent.Place
	Supervisor *supervisor.Supervisor
	Query      runner.Query // what every query has

	t          testing.TB
	journal    *journal.Journal
	executions int
	read       uint64
}

// New starts a supervisor that ends with the test. The agent inherits environ.
func New(t testing.TB, architecture string, a agent.Adapter, environ []string) *Bench {
	t.Helper()
	log := slog.New(slog.NewTextHandler(t.Output(), nil))
	b := &Bench{
		t: t, Place: agent.Place{Workspace: t.TempDir(), State: t.TempDir()},
		Query: runner.Query{SessionID: "ses_1", Attempt: 1, Architecture: architecture, Policy: runner.PolicyWorkspace},
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
		Adapters:   map[string]agent.Adapter{architecture: a}, Place: b.Place, Journal: b.journal,
		Nursery: process.NewNursery(log), Log: log, Environ: environ,
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

// Start gives a query to the agent; change may be nil.
func (b *Bench) Start(content string, change func(*runner.Query)) *runner.Error {
	b.executions++
	q := b.Query
	q.ExecutionID, q.Content = fmt.Sprintf("exe_%d", b.executions), content
	if change != nil {
		change(&q)
	}
	return b.Supervisor.Start(q)
}

// Begun is Start for a query that must be taken.
func (b *Bench) Begun(content string) Turn {
	b.t.Helper()
	if refusal := b.Start(content, nil); refusal != nil {
		b.t.Fatal(refusal)
	}
	return Turn{t: b.t}
}

// Until reads on until a line that is wanted.
func (b *Bench) Until(what string, wanted func(runner.Line) bool, so Turn) Turn {
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
		so.Lines = append(so.Lines, l)
		if wanted(l) {
			return so
		}
	}
}

// End reads to the turn's end.
func (b *Bench) End(so Turn) Turn {
	b.t.Helper()
	return b.Until("end", func(l runner.Line) bool { return l.Type == runner.TurnEnded }, so)
}

// Ask runs a query to its end.
func (b *Bench) Ask(content string, change func(*runner.Query)) Turn {
	b.t.Helper()
	if refusal := b.Start(content, change); refusal != nil {
		b.t.Fatal(refusal)
	}
	return b.End(Turn{t: b.t})
}

// Completed asks and wants an answer that has a text in it.
func (b *Bench) Completed(content, want string, change func(*runner.Query)) Turn {
	b.t.Helper()
	x := b.Ask(content, change)
	if e := x.Ended(); e.Outcome != runner.Completed || !strings.Contains(e.Result, want) {
		b.t.Fatalf("%s: ended %+v, want a result with %q\n%s", content, e, want, x)
	}
	x.Whole()
	return x
}

// Turn is what was journaled of one execution so far.
type Turn struct {
	Lines []runner.Line
	t     testing.TB
}

func (x Turn) String() string {
	var s strings.Builder
	for _, l := range x.Lines {
		fmt.Fprintf(&s, "\n%d %s %s", l.N, l.Type, l.Data)
	}
	return s.String()
}

// All gives the data of all lines of one type.
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

// Ended is the turn's end.
func (x Turn) Ended() runner.Ended {
	x.t.Helper()
	all := All[runner.Ended](x, runner.TurnEnded)
	if len(all) != 1 {
		x.t.Fatalf("%d ends%s", len(all), x)
	}
	return all[0]
}

// Started is the turn's beginning.
func (x Turn) Started() runner.Started {
	x.t.Helper()
	all := All[runner.Started](x, runner.AgentStarted)
	if len(all) != 1 {
		x.t.Fatalf("%d starts%s", len(all), x)
	}
	return all[0]
}

// Decisions are the answers to permission requests.
func (x Turn) Decisions() []events.PermissionDecided {
	x.t.Helper()
	return All[events.PermissionDecided](x, "permission_decided")
}

// Blocks gives the finished blocks of a kind, in the order of their ends.
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

// Whole checks that the text in flight is the text of the blocks, byte by byte.
func (x Turn) Whole() {
	x.t.Helper()
	flown := map[string]string{}
	for _, d := range All[runner.Delta](x, events.TextDelta) {
		if int(d.Offset) != len(flown[d.BlockID]) {
			x.t.Errorf("block %s: offset %d after %d bytes", d.BlockID, d.Offset, len(flown[d.BlockID]))
		}
		flown[d.BlockID] += d.Delta
	}
	for _, b := range x.Blocks(events.KindAssistantText) {
		if text, ok := flown[b.ID]; ok && text != b.Content {
			x.t.Errorf("block %s: flown %q, is %q", b.ID, text, b.Content)
		}
	}
}
