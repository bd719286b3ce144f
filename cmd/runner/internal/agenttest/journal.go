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
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// Journal implements agent.Journal in memory. It is never full.
type Journal struct {
	mu     sync.Mutex
	lines  []runner.JournalLine
	blocks int
}

// Append numbers a line and stores it.
func (j *Journal) Append(_ context.Context, l runner.JournalLine) {
	j.mu.Lock()
	defer j.mu.Unlock()
	l.N = uint64(len(j.lines) + 1)
	j.lines = append(j.lines, l)
}

// Name returns the name of the journal.
func (j *Journal) Name() string { return "jnl_test" }

// NewBlockID returns b1, b2, and so on.
func (j *Journal) NewBlockID() string {
	j.mu.Lock()
	defer j.mu.Unlock()
	j.blocks++
	return fmt.Sprintf("b%d", j.blocks)
}

// Lines returns all lines that were appended so far.
func (j *Journal) Lines() []runner.JournalLine {
	j.mu.Lock()
	defer j.mu.Unlock()
	return append([]runner.JournalLine(nil), j.lines...)
}

// Stdin implements agent.Stdin for tests: it stores the values that a Session sends to the agent's process.
type Stdin struct {
	mu   sync.Mutex
	sent []json.RawMessage
}

// Send stores v as JSON.
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

// SentValues returns the values that the session has sent so far.
func (s *Stdin) SentValues() []json.RawMessage {
	s.mu.Lock()
	defer s.mu.Unlock()
	return append([]json.RawMessage(nil), s.sent...)
}

// FixedTime returns the fixed time of the journals in golden files, 2026-01-02T03:04:05Z.
func FixedTime() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

// NewJournalTurn begins a turn that writes to the journal j. Text is coalesced until another line follows, and the
// clock is FixedTime.
func NewJournalTurn(t testing.TB, j *Journal, execution string) *agent.Turn {
	t.Helper()
	return newQueryTurn(t, j, runner.Query{ExecutionID: execution}, agent.Folders{})
}

// newQueryTurn begins a turn that writes to the journal j, with the execution and the permission policy of a query, of an
// agent that works in the folders place.
func newQueryTurn(t testing.TB, j *Journal, q runner.Query, place agent.Folders) *agent.Turn {
	t.Helper()
	policy, err := permission.New(q.Permissions, q.ExecutionPermissions)
	if err != nil {
		t.Fatal(err)
	}
	return agent.NewTurn(t.Context(), agent.TurnConfig{
		Journal: j, ExecutionID: q.ExecutionID, Coalesce: time.Hour, Now: FixedTime, Policy: policy, Approved: q.Approved,
		Workspace: place.Workspace,
	})
}

// ReplayLines opens a session of the adapter a, begins the query q and passes recorded lines of the agent's stdout to
// the session. It returns the journal, and the values that the session sent to the agent's stdin.
func ReplayLines(t testing.TB, a agent.Adapter, l agent.Launch, q runner.Query, stdout []string) ([]runner.JournalLine, []json.RawMessage) {
	t.Helper()
	var stdin Stdin
	var journal Journal
	s := a.OpenSession(l, &stdin)
	turn := newQueryTurn(t, &journal, q, l.Folders)
	turn.Start(runner.TurnStart{Attempt: q.Attempt, PID: 1, Policy: q.PolicyName()})
	if err := s.BeginTurn(q, turn); err != nil {
		t.Fatalf("begin: %v", err)
	}
	for i, line := range stdout {
		if err := s.HandleLine([]byte(line), turn); err != nil {
			t.Errorf("line %d: %v", i+1, err)
		}
	}
	turn.RunAlarm()
	if turn.Ended() == nil {
		t.Error("the recorded lines do not end the turn")
	}
	return journal.Lines(), stdin.SentValues()
}

// CheckAnchors checks the anchors in a journal: only finished blocks of the main conversation have one, no two blocks
// have the same one, and every complete block of the given kinds in the main conversation has one.
func CheckAnchors(t testing.TB, journal []runner.JournalLine, kinds ...events.BlockKind) {
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

// CheckJournal checks the journal of one turn: every block is opened once and finished once, the offsets of its text
// deltas have no gap, nothing follows the end of the turn, and no line is an error.
func CheckJournal(t testing.TB, journal []runner.JournalLine) {
	t.Helper()
	open, done, sent := map[string]bool{}, map[string]bool{}, map[string]int{}
	for i, l := range journal {
		var d struct {
			Block events.Block
			runner.TextDelta
		}
		if err := json.Unmarshal(l.Data, &d); err != nil {
			t.Fatal(err)
		}
		id := d.Block.ID
		switch l.Type {
		case "block_start":
			if open[id] || done[id] {
				t.Errorf("block %s is opened twice", id)
			}
			open[id], done[id] = d.Block.Status == events.StatusPending, d.Block.Status != events.StatusPending
		case "block_complete":
			if !open[id] {
				t.Errorf("block %s is finished but not open", id)
			}
			open[id], done[id] = false, true
		case events.TextDelta:
			if !open[d.BlockID] || int(d.Offset) != sent[d.BlockID] {
				t.Errorf("delta of block %s at offset %d, want %d; open: %v", d.BlockID, d.Offset, sent[d.BlockID], open[d.BlockID])
			}
			sent[d.BlockID] += len(d.TextDelta.Delta)
		case runner.TurnEnded:
			if i != len(journal)-1 {
				t.Error("lines follow the end of the turn")
			}
		case "error":
			t.Errorf("error %s", l.Data)
		}
	}
	for id, isOpen := range open {
		if isOpen {
			t.Errorf("block %s is still open", id)
		}
	}
}

// CheckPinnedVersion checks that scripts/agents installs the version of the npm package that the adapter was tested with.
func CheckPinnedVersion(t testing.TB, npm, tested string) {
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
