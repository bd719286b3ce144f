package claudecode

import (
	"bytes"
	"encoding/json"
	"flag"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

var update = flag.Bool("update", false, "write the expected journals anew")

// step is a line of a recording: what was done to the CLI, or what it printed.
type step struct {
	Query     *runner.Query   `json:"query,omitempty"`
	Interrupt bool            `json:"interrupt,omitempty"`
	Line      json.RawMessage `json:"line,omitempty"`
}

// fixedNow makes every tool take no time.
func fixedNow() time.Time { return time.Date(2026, 1, 2, 3, 4, 5, 0, time.UTC) }

// TestGoldens replays what the real CLI printed, and compares what is journaled
// and what is sent to the CLI.
func TestGoldens(t *testing.T) {
	t.Parallel()
	recordings, err := filepath.Glob("testdata/*/recording.jsonl")
	if err != nil || len(recordings) == 0 {
		t.Fatalf("no recordings: %v", err)
	}
	for _, path := range recordings {
		t.Run(filepath.Base(filepath.Dir(path)), func(t *testing.T) {
			t.Parallel()
			place := agent.Place{Workspace: t.TempDir(), State: t.TempDir()}
			journal, sent := replay(t, place, load(t, path, place))
			agenttest.Anchors(t, journal, events.KindAssistantText, events.KindToolUse, events.KindToolResult, events.KindSubagent)
			compare(t, filepath.Join(filepath.Dir(path), "journal.jsonl"), neutral(lines(t, journal), place))
			compare(t, filepath.Join(filepath.Dir(path), "sent.jsonl"), neutral(lines(t, sent), place))
		})
	}
}

// load reads a recording for a place.
func load(t testing.TB, path string, place agent.Place) []step {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw = bytes.ReplaceAll(raw, []byte("{{workspace}}"), []byte(place.Workspace))
	var steps []step
	for _, l := range bytes.Split(bytes.TrimSpace(raw), []byte("\n")) {
		var s step
		if err := json.Unmarshal(l, &s); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		steps = append(steps, s)
	}
	return steps
}

// replay takes a session through the steps of a recording.
func replay(t testing.TB, place agent.Place, steps []step) ([]runner.Line, []json.RawMessage) {
	t.Helper()
	var journal agenttest.Journal
	var stdin agenttest.Stdin
	s := Adapter{Now: fixedNow}.Open(agent.Launch{Place: place}, &stdin)
	turn := agent.NewTurn(t.Context(), agent.TurnConfig{})
	for i, step := range steps {
		var err error
		switch {
		case step.Query != nil:
			turn = agenttest.NewTurn(t, &journal, step.Query.ExecutionID)
			err = s.Begin(*step.Query, turn)
		case step.Interrupt:
			err = s.Interrupt()
		default:
			err = s.Line(step.Line, turn)
		}
		if err != nil {
			t.Errorf("step %d: %v", i+1, err)
		}
	}
	if turn.Ended() == nil {
		t.Error("the recording does not end the last turn")
	}
	return journal.Lines(), stdin.Sent()
}

// lines encodes values one a line.
func lines[T any](t testing.TB, values []T) []byte {
	t.Helper()
	var buf bytes.Buffer
	enc := json.NewEncoder(&buf)
	enc.SetEscapeHTML(false)
	for _, v := range values {
		if err := enc.Encode(v); err != nil {
			t.Fatal(err)
		}
	}
	return buf.Bytes()
}

// neutral takes out what the place brings in.
func neutral(raw []byte, place agent.Place) []byte {
	return []byte(strings.NewReplacer(
		place.Workspace, "{{workspace}}", place.State, "{{state}}", folder(place.Workspace), "{{folder}}",
	).Replace(string(raw)))
}

func compare(t *testing.T, path string, got []byte) {
	t.Helper()
	if *update {
		if err := os.WriteFile(path, got, 0o644); err != nil { //nolint:gosec // a golden
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v: make it with -update", err)
	}
	gotLines, wantLines := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i := range max(len(gotLines), len(wantLines)) {
		g, w := at(gotLines, i), at(wantLines, i)
		if g != w {
			t.Fatalf("%s, line %d\n got %s\nwant %s", path, i+1, g, w)
		}
	}
}

func at(lines []string, i int) string {
	if i < len(lines) {
		return lines[i]
	}
	return "(nothing)"
}
