// Package agenttest replays an agent's recorded lines into a Session and gives
// what the runner would journal, with fixed times and block ids: for goldens.
package agenttest

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// Journal keeps lines in memory; it is never full.
type Journal struct {
	mu     sync.Mutex
	lines  []runner.Line
	blocks int
}

// Append numbers and keeps the line.
func (j *Journal) Append(_ context.Context, l runner.Line) {
	j.mu.Lock()
	defer j.mu.Unlock()
	l.N = uint64(len(j.lines) + 1)
	j.lines = append(j.lines, l)
}

// NewBlockID is b1, b2, …
func (j *Journal) NewBlockID() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.blocks++
	return fmt.Sprintf("b%d", j.blocks)
}

// Lines so far.
func (j *Journal) Lines() []runner.Line {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]runner.Line(nil), j.lines...)
}

// Stdin records what a Session sends, one JSON value each.
type Stdin struct {
	mu   sync.Mutex
	sent []json.RawMessage
}

// Send records v.
func (s *Stdin) Send(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.sent = append(s.sent, raw)
	return nil
}

// Sent so far.
func (s *Stdin) Sent() []json.RawMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]json.RawMessage(nil), s.sent...)
}

// NewTurn begins a turn whose text is coalesced until another line follows, and
// whose clock stands still at 2026-01-02T03:04:05Z.
func NewTurn(t testing.TB, j *Journal, execution string) *agent.Turn {
	t.Helper()
	at := time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC)
	return agent.NewTurn(t.Context(), agent.TurnConfig{
		Journal: j, ExecutionID: execution, Coalesce: time.Hour, Now: func() time.Time { return at },
	})
}

// Replay opens a session, begins the query and feeds it the lines of a recorded
// stdout; it gives the journal, and what was sent to stdin.
func Replay(t testing.TB, a agent.Adapter, l agent.Launch, q runner.Query, stdout []string) ([]runner.Line, []json.RawMessage) {
	t.Helper()
	var stdin Stdin
	var journal Journal
	s := a.Open(l, &stdin)
	turn := NewTurn(t, &journal, q.ExecutionID)
	turn.Start(runner.Started{Attempt: q.Attempt, PID: 1, Policy: q.Policy})
	if err := s.Begin(q, turn); err != nil {
		t.Fatalf("begin: %v", err)
	}
	for i, line := range stdout {
		if err := s.Line([]byte(line), turn); err != nil {
			t.Errorf("line %d: %v", i+1, err)
		}
	}
	if turn.Ended() == nil {
		t.Error("the recorded lines do not end the turn")
	}
	return journal.Lines(), stdin.Sent()
}

// Anchors checks the anchors of a journal: only blocks of the agent's own conversation that are stated whole have
// one, no two have the same, and each complete block of the given kinds in that conversation has one.
func Anchors(t testing.TB, journal []runner.Line, kinds ...events.BlockKind) {
	t.Helper()
	seen := map[string]string{}
	for _, l := range journal {
		var d struct{ Block events.Block }
		if err := json.Unmarshal(l.Data, &d); err != nil {
			t.Fatal(err)
		}
		b := d.Block
		switch {
		case b.Anchor == "":
			if b.ConversationID == events.MainConversation && b.Status == events.StatusComplete && slices.Contains(kinds, b.Kind) {
				t.Errorf("line %d: block %s, %s, has no anchor", l.N, b.ID, b.Kind)
			}
		case b.Status == events.StatusPending, b.ConversationID != events.MainConversation:
			t.Errorf("line %d: block %s, %s in %s, has the anchor %q", l.N, b.ID, b.Status, b.ConversationID, b.Anchor)
		case seen[b.Anchor] != "":
			t.Errorf("line %d: block %s has the anchor %q of block %s", l.N, b.ID, b.Anchor, seen[b.Anchor])
		default:
			seen[b.Anchor] = b.ID
		}
	}
}

// Pinned checks that the version that an adapter knows is the one that the tests drive.
func Pinned(t testing.TB, npm, tested string) {
	t.Helper()
	raw, err := os.ReadFile("../../../../scripts/agents/package.json")
	if err != nil {
		t.Fatal(err)
	}
	var pinned struct {
		Dependencies map[string]string `json:"dependencies"`
	}
	if err := json.Unmarshal(raw, &pinned); err != nil {
		t.Fatal(err)
	}
	if got := pinned.Dependencies[npm]; got != tested {
		t.Errorf("scripts/agents pins %s %q, the adapter is tested with %q", npm, got, tested)
	}
}
