package agenttest

import (
	"bytes"
	"encoding/json"
	"flag"
	"maps"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// updateGoldens is the flag -update of the tests.
var updateGoldens = flag.Bool("update", false, "write the golden files from what the adapter does now")

// Goldens describe the recordings of an agent's CLI: the folders testdata/NAME, one for each scenario, with
//   - recording.jsonl: the queries and interrupts that the CLI was given, and every line that it printed,
//   - journal.jsonl: the journal that the adapter writes when it replays the recording,
//   - sent.jsonl: what the adapter writes to the CLI's stdin meanwhile.
type Goldens struct {
	Scenarios map[string]Scenario // by the name of the folder
	// Adapter replays the recordings. Its clock has to be FixedTime.
	Adapter agent.Adapter
	Model   string // the model of a scenario that has none
	// Anchored are the kinds of blocks that all have an anchor.
	Anchored []events.BlockKind
	// Placeholders returns texts that stand for a path in golden files and recordings, in addition to {{workspace}} and
	// {{state}}: placeholder, text, placeholder, text. May be nil.
	Placeholders func(agent.Folders) []string
	Recording    RecordingFormat
}

// RecordingStep is a line of a recording: an input of the CLI, or a line that the CLI printed.
type RecordingStep struct {
	Query     *runner.Query     `json:"query,omitempty"`
	Interrupt bool              `json:"interrupt,omitempty"`
	Decide    *RecordedDecision `json:"decide,omitempty"`
	Line      json.RawMessage   `json:"line,omitempty"`
}

// RecordedDecision is a decision in a recording on one of the approval requests of its turn.
type RecordedDecision struct {
	Request  int                    `json:"request"` // which of the turn's requests, from 0 on
	Decision events.ApprovalDecided `json:"decision"`
}

// applyTo passes the decision to turn, whose lines are in j.
func (c RecordedDecision) applyTo(t testing.TB, j *Journal, turn *agent.Turn) {
	t.Helper()
	requests := lastTurnRequests(t, j)
	if c.Request >= len(requests) {
		t.Fatalf("a decision on request %d of %d", c.Request, len(requests))
	}
	lines := j.Lines()
	c.Decision.ApprovalID = runner.ApprovalID(lines[len(lines)-1].ExecutionID, j.Name(), requests[c.Request].ApprovalID)
	turn.ApplyVerdict(runner.ApprovalDecision{ApprovalDecided: c.Decision})
}

// lastTurnRequests returns the approval requests of the last turn in the journal j.
func lastTurnRequests(t testing.TB, j *Journal) []events.ApprovalRequested {
	t.Helper()
	lines := j.Lines()
	for i, l := range slices.Backward(lines) {
		if l.ExecutionID != lines[len(lines)-1].ExecutionID {
			lines = lines[i+1:]
			break
		}
	}
	return Turn{t: t, Lines: lines}.ApprovalRequests()
}

// firstQuery returns the first query of a recording.
func firstQuery(steps []RecordingStep) runner.Query {
	for _, s := range steps {
		if s.Query != nil {
			return *s.Query
		}
	}
	return runner.Query{}
}

// checkGoldens replays every recording and compares the journal and the input of the CLI with the golden files. With
// -record it makes the recordings first.
func checkGoldens(t *testing.T, s AgentUnderTest, g Goldens) {
	paths := recordingPaths(t)
	if !*recordFlag {
		var folders []string
		for _, path := range paths {
			folders = append(folders, filepath.Base(filepath.Dir(path)))
		}
		slices.Sort(folders)
		if names := slices.Sorted(maps.Keys(g.Scenarios)); !slices.Equal(names, folders) {
			t.Errorf("recordings in testdata %q, scenarios %q", folders, names)
		}
	}
	for name, scenario := range g.Scenarios {
		t.Run(name, func(t *testing.T) {
			dir := filepath.Join("testdata", name)
			if *recordFlag {
				recordScenario(t, s, g, dir, scenario)
			} else {
				t.Parallel()
			}
			place := agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}
			journal, sent := g.replayRecording(t, place, g.loadRecording(t, filepath.Join(dir, "recording.jsonl"), place))
			CheckAnchors(t, journal, g.Anchored...)
			CompareGolden(t, filepath.Join(dir, "journal.jsonl"), g.insertPlaceholders(encodeLines(t, journal), place))
			CompareGolden(t, filepath.Join(dir, "sent.jsonl"), g.insertPlaceholders(encodeLines(t, sent), place))
		})
	}
}

// recordingPaths returns the paths of all recordings in testdata.
func recordingPaths(t testing.TB) []string {
	t.Helper()
	paths, err := filepath.Glob("testdata/*/recording.jsonl")
	if err != nil || len(paths) == 0 && !*recordFlag {
		t.Fatalf("no recordings: %v", err)
	}
	slices.Sort(paths)
	return paths
}

// checkDisorderedReplay passes the lines of recordings to the adapter in a wrong order, twice or not at all. The
// adapter may refuse lines, but the journal that it writes must be valid.
func checkDisorderedReplay(t *testing.T, s AgentUnderTest, g Goldens) {
	paths := recordingPaths(t)
	random := rand.New(rand.NewPCG(1, 2)) //nolint:gosec // reproducible on purpose
	play := func(path string, times func() int, reorder func([]RecordingStep)) {
		place := agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}
		steps := g.loadRecording(t, path, place)
		reorder(steps)
		var journal Journal
		permissions := firstQuery(steps).Permissions
		session := g.Adapter.OpenSession(agent.Launch{Folders: place, Model: g.Model, Permissions: permissions}, &Stdin{})
		q := runner.Query{ExecutionID: "exe_1", Attempt: 1, Content: "hello", Permissions: permissions}
		turn := newQueryTurn(t, &journal, q, place)
		if err := session.BeginTurn(q, turn); err != nil {
			t.Fatal(err)
		}
		for _, step := range steps {
			for range times() {
				if step.Line != nil && turn.Ended() == nil {
					_ = session.HandleLine(step.Line, turn) //nolint:errcheck // a line may be refused
				}
			}
		}
		turn.End(runner.TurnEnd{Outcome: runner.OutcomeKilled})
		CheckJournal(t, journal.Lines())
		if t.Failed() {
			t.Fatalf("with %s", path)
		}
	}
	for range 200 {
		play(paths[random.IntN(len(paths))], func() int { return []int{1, 1, 1, 1, 1, 0, 2}[random.IntN(7)] }, func(steps []RecordingStep) {
			for i := range steps {
				if random.IntN(5) == 0 {
					j := min(len(steps)-1, i+random.IntN(4))
					steps[i], steps[j] = steps[j], steps[i]
				}
			}
		})
	}
	for _, path := range paths {
		play(path, func() int { return 1 }, func(steps []RecordingStep) {
			random.Shuffle(len(steps), func(a, b int) { steps[a], steps[b] = steps[b], steps[a] })
		})
	}
}

// loadRecording reads the recording at path, and replaces its placeholders by the paths of the folders place.
func (g Goldens) loadRecording(t testing.TB, path string, place agent.Folders) []RecordingStep {
	t.Helper()
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	raw = []byte(strings.NewReplacer(g.placeholderPairs(place)...).Replace(string(raw)))
	var steps []RecordingStep
	for _, l := range bytes.Split(bytes.TrimSpace(raw), []byte("\n")) {
		var s RecordingStep
		if err := json.Unmarshal(l, &s); err != nil {
			t.Fatalf("%s: %v", path, err)
		}
		steps = append(steps, s)
	}
	return steps
}

// replayRecording performs the steps of a recording on a new session of the adapter. It returns the journal, and the
// values that the session sent to the CLI's stdin.
func (g Goldens) replayRecording(t testing.TB, place agent.Folders, steps []RecordingStep) ([]runner.JournalLine, []json.RawMessage) {
	t.Helper()
	var journal Journal
	var stdin Stdin
	first := firstQuery(steps)
	session := g.Adapter.OpenSession(agent.Launch{Folders: place, Model: g.Model, Permissions: first.Permissions, Skills: first.Skills}, &stdin)
	turn := agent.NewTurn(t.Context(), agent.TurnConfig{})
	for i, step := range steps {
		var err error
		switch {
		case step.Query != nil:
			turn.RunAlarm() // the agent is quiet
			turn = newQueryTurn(t, &journal, *step.Query, place)
			err = session.BeginTurn(*step.Query, turn)
		case step.Decide != nil:
			step.Decide.applyTo(t, &journal, turn)
		case step.Interrupt:
			err = session.Interrupt()
		default:
			err = session.HandleLine(step.Line, turn)
		}
		if err != nil {
			t.Errorf("step %d: %v", i+1, err)
		}
	}
	turn.RunAlarm()
	if turn.Ended() == nil {
		t.Error("the recording does not end the last turn")
	}
	return journal.Lines(), stdin.SentValues()
}

// placeholderPairs returns all placeholders, each followed by the text that it stands for.
func (g Goldens) placeholderPairs(place agent.Folders) []string {
	pairs := []string{"{{workspace}}", place.Workspace, "{{state}}", place.State}
	if g.Placeholders != nil {
		pairs = append(pairs, g.Placeholders(place)...)
	}
	return pairs
}

// insertPlaceholders replaces the paths of the folders place in raw by placeholders, so that golden files do not depend
// on the machine.
func (g Goldens) insertPlaceholders(raw []byte, place agent.Folders) []byte {
	pairs := g.placeholderPairs(place)
	for i := 0; i < len(pairs); i += 2 {
		pairs[i], pairs[i+1] = pairs[i+1], pairs[i]
	}
	return []byte(strings.NewReplacer(pairs...).Replace(string(raw)))
}

// encodeLines returns the values as JSON, one value on each line.
func encodeLines[T any](t testing.TB, values []T) []byte {
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

// CompareJournal compares a journal with a golden file. stable returns the text of the journal with fixed values in
// place of values that differ in every run.
func CompareJournal(t testing.TB, path string, journal []runner.JournalLine, stable func(text []byte) []byte) {
	t.Helper()
	CompareGolden(t, path, stable(encodeLines(t, journal)))
}

// CompareGolden compares got with the golden file at path line by line. With -update it writes the file instead.
func CompareGolden(t testing.TB, path string, got []byte) {
	t.Helper()
	if *updateGoldens {
		if err := os.WriteFile(path, got, 0o644); err != nil { //nolint:gosec // a golden file
			t.Fatal(err)
		}
		return
	}
	want, err := os.ReadFile(path)
	if err != nil {
		t.Fatalf("%v: create it with -update", err)
	}
	line := func(lines []string, i int) string {
		if i < len(lines) {
			return lines[i]
		}
		return "(nothing)"
	}
	gotLines, wantLines := strings.Split(string(got), "\n"), strings.Split(string(want), "\n")
	for i := range max(len(gotLines), len(wantLines)) {
		if g, w := line(gotLines, i), line(wantLines, i); g != w {
			t.Fatalf("%s, line %d\n got %s\nwant %s", path, i+1, g, w)
		}
	}
}
