package agenttest

import (
	"bufio"
	"bytes"
	"encoding/json"
	"flag"
	"fmt"
	"io"
	"net/http/httptest"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"sync"
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// recordFlag is the flag -record of the tests.
var recordFlag = flag.Bool("record", false, "record the agent's CLI again before the recordings are replayed")

// Scenario is a list of queries that the suite sends to the agent's real CLI to make a recording.
type Scenario struct {
	Model       string // "" for Goldens.Model
	Permissions events.Permissions
	Files       map[string]string // content by the path in the workspace; a replay has no files
	Skills      []runner.Skill    // with paths in the workspace
	Asks        []ScenarioQuery
}

// QueryScenario returns a Scenario with one query for each text, none of which is interrupted.
func QueryScenario(texts ...string) Scenario {
	var s Scenario
	for _, text := range texts {
		s.Asks = append(s.Asks, ScenarioQuery{Text: text})
	}
	return s
}

// ImageScenario returns a Scenario of one query that has a text and an image of one pixel.
func ImageScenario(text string) Scenario {
	return Scenario{Asks: []ScenarioQuery{{Parts: []events.Part{{Type: "text", Text: text}, {
		Type: "image", MediaType: "image/png",
		Data: "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9awAAAABJRU5ErkJggg==",
	}}}}}
}

// WithModel returns the scenario with another model.
func (s Scenario) WithModel(model string) Scenario {
	s.Model = model
	return s
}

// ScenarioQuery is one query of a Scenario, with the interrupt and the decisions that follow it.
type ScenarioQuery struct {
	Text      string
	Parts     []events.Part
	Interrupt InterruptMoment // when the turn is interrupted; "" for never
	// SubagentDepth is the number of levels of sub-agents that the query allows; 0 for no limit.
	SubagentDepth uint32
	// Decide are the decisions on the approval requests of the turn, in their order, each given as soon as the request
	// is recorded. Further requests stay open.
	Decide []events.ApprovalDecided
}

// InterruptMoment is the moment of a turn at which the suite interrupts the turn.
type InterruptMoment string

// The moments of a turn.
const (
	AtStart  InterruptMoment = "start"  // as soon as the turn has begun
	OnText   InterruptMoment = "text"   // when text of the answer arrives; of a recording, at the second piece
	OnTool   InterruptMoment = "tool"   // when the command that the model asked for runs
	OnOutput InterruptMoment = "output" // when the command's first output arrives
	// OnRequest is the moment when an approval request is journaled that ScenarioQuery.Decide does not decide.
	OnRequest InterruptMoment = "request"
)

// RecordingFormat describes the output of an agent's CLI, so that the output can be recorded and compared.
type RecordingFormat struct {
	Text   string // occurs in every line that holds a piece of the answer's text
	Output string // occurs in every line that holds a piece of a command's output; "" if the CLI prints none
	// Trim returns a line without the parts that differ on every machine or are long and not read, or nil for a line that is not read. May
	// be nil.
	Trim func(line []byte) ([]byte, error)
	// Normalize returns the recording with fixed values in place of ids, times and ports. See NumberMatches.
	Normalize func(recording []byte) []byte
}

// recorder runs an agent's CLI through its adapter and records the queries, the interrupts and the lines that the CLI
// prints.
type recorder struct {
	t         *testing.T
	recording RecordingFormat
	place     agent.Folders
	session   agent.Session
	stdout    *bufio.Reader

	mu    sync.Mutex
	out   bytes.Buffer
	stdin io.Writer
}

// Send writes v to the CLI's stdin.
func (r *recorder) Send(v any) error {
	raw, err := json.Marshal(v)
	if err != nil {
		return err
	}
	_, err = r.stdin.Write(append(raw, '\n'))
	return err
}

// writeStep appends one step to the recording.
func (r *recorder) writeStep(s RecordingStep) {
	r.mu.Lock()
	defer r.mu.Unlock()
	enc := json.NewEncoder(&r.out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(s); err != nil {
		r.t.Error(err)
	}
}

// recordScenario runs the agent's CLI on a scenario and writes dir/recording.jsonl.
func recordScenario(t *testing.T, s AgentUnderTest, g Goldens, dir string, scenario Scenario) {
	mock, err := server.New(server.Config{Script: DefaultScript(t)})
	if err != nil {
		t.Fatal(err)
	}
	web := httptest.NewServer(mock)
	defer web.Close()
	place := agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}
	launch := agent.Launch{
		Folders:     place,
		Model:       scenario.Model,
		Permissions: scenario.Permissions,
		Skills:      slices.Clone(scenario.Skills),
		Environ:     []string{"PATH=" + os.Getenv("PATH"), "HOME=" + t.TempDir()},
		Env:         s.Env(web.URL),
	}
	if launch.Model == "" {
		launch.Model = g.Model
	}
	for path, content := range scenario.Files {
		writePath(t, filepath.Join(place.Workspace, path), content)
	}
	for i := range launch.Skills {
		launch.Skills[i].Dir = filepath.Join(place.Workspace, launch.Skills[i].Dir)
	}
	command, err := s.Adapter.Command(launch)
	if err != nil {
		t.Fatal(err)
	}
	cmd := exec.CommandContext(t.Context(), command.Path, command.Args...)
	cmd.Dir, cmd.Env, cmd.Stderr = place.Workspace, command.Env, t.Output()
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
	r := &recorder{t: t, recording: g.Recording, place: place, stdin: stdin, stdout: bufio.NewReaderSize(stdout, 1<<20)}
	r.session = s.Adapter.OpenSession(launch, r)
	for i, ask := range scenario.Asks {
		r.recordTurn(i, launch, ask)
	}
	if err := stdin.Close(); err != nil {
		t.Error(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Logf("the CLI ended: %v", err) // with status 1 after a failed turn
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	raw := g.Recording.Normalize(g.insertPlaceholders(r.out.Bytes(), place))
	if err := os.WriteFile(filepath.Join(dir, "recording.jsonl"), raw, 0o644); err != nil { //nolint:gosec // a golden file
		t.Fatal(err)
	}
}

// recordTurn sends the query number i of the scenario, counted from 0, to the process of the launch l, and records steps until its turn has ended.
func (r *recorder) recordTurn(i int, l agent.Launch, ask ScenarioQuery) {
	t := r.t
	q := runner.Query{
		ExecutionID: fmt.Sprintf("exe_%d", i+1), Attempt: 1, Content: ask.Text, Parts: ask.Parts, Permissions: l.Permissions, Skills: l.Skills,
		SubagentDepth: ask.SubagentDepth,
	}
	var journal Journal
	turn := newQueryTurn(t, &journal, q, r.place)
	r.writeStep(RecordingStep{Query: &q})
	if err := r.session.BeginTurn(q, turn); err != nil {
		t.Fatal(err)
	}
	interrupt := sync.OnceFunc(func() {
		r.writeStep(RecordingStep{Interrupt: true})
		if err := r.session.Interrupt(); err != nil {
			t.Error(err)
		}
	})
	switch ask.Interrupt {
	case AtStart:
		interrupt()
	case OnTool: // the command creates the file "started"
		go func() {
			for !fileExists(filepath.Join(r.place.Workspace, "started")) && t.Context().Err() == nil {
				time.Sleep(20 * time.Millisecond)
			}
			interrupt()
		}()
	}
	for pieces, requests := 0, 0; turn.Ended() == nil; {
		raw, err := r.stdout.ReadBytes('\n')
		if err != nil {
			t.Fatalf("the CLI ended in the middle of turn %d: %v", i+1, err)
		}
		raw = bytes.TrimSpace(raw)
		line := bytes.Clone(raw)
		if r.recording.Trim != nil {
			if line, err = r.recording.Trim(line); err != nil {
				t.Fatalf("%v: %s", err, raw)
			}
		}
		if line != nil {
			r.writeStep(RecordingStep{Line: line})
		}
		if err := r.session.HandleLine(raw, turn); err != nil {
			t.Errorf("%v: %s", err, raw)
		}
		if bytes.Contains(raw, []byte(r.recording.Text)) {
			if pieces++; pieces == 2 && ask.Interrupt == OnText {
				interrupt()
			}
		}
		for ; requests < len(lastTurnRequests(t, &journal)); requests++ {
			switch {
			case requests < len(ask.Decide):
				c := RecordedDecision{Request: requests, Decision: ask.Decide[requests]}
				r.writeStep(RecordingStep{Decide: &c})
				c.applyTo(t, &journal, turn)
			case ask.Interrupt == OnRequest:
				interrupt()
			}
		}
		if ask.Interrupt == OnOutput && bytes.Contains(raw, []byte(r.recording.Output)) {
			interrupt()
		}
		turn.RunAlarm() // the query was answered
	}
}

// fileExists reports whether a file exists.
func fileExists(path string) bool {
	_, err := os.Stat(path)
	return err == nil
}

// NumberMatches replaces every match of the pattern in raw by name(match, n), where n numbers the different matches
// from 1 on. Equal matches have the same n.
func NumberMatches(raw []byte, pattern *regexp.Regexp, name func(match []byte, n int) string) []byte {
	names := map[string]string{}
	return pattern.ReplaceAllFunc(raw, func(match []byte) []byte {
		to, ok := names[string(match)]
		if !ok {
			to = name(match, len(names)+1)
			names[string(match)] = to
		}
		return []byte(to)
	})
}
