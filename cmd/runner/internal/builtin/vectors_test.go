package builtin_test

import (
	"bytes"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/modelstreamtest"
	"github.com/spoolhq/spool/pkg/runner"
)

// TestVectors_HaveTheirRightValues replays each variant of what model servers send, then sends another message, and another one to a new process
// that resumes the conversation. The server refuses requests that are not valid.
func TestVectors_HaveTheirRightValues(t *testing.T) {
	t.Parallel()
	vectors, err := modelstreamtest.Load()
	if err != nil {
		t.Fatal(err)
	}
	for _, v := range vectors {
		t.Run(v.Name, func(t *testing.T) {
			t.Parallel()
			server := modelstreamtest.StartServer(t, v.Answers...)
			place, resume := newPlace(t), ""
			if v.Transcript != "" {
				resume = "agt-1"
				writeTranscript(t, place, resume, v.Transcript)
			}
			s := startSpool(t, &endpoint{Server: server.Server}, place, resume, nil)
			lines := s.turn("go", nil)
			checkVector(t, v, lines, len(server.Requests()))
			if end := ended(t, s.turn("again", nil)); end.Outcome != runner.OutcomeCompleted || end.Result != modelstreamtest.OK {
				t.Errorf("the next turn ended %+v", end)
			}
			s.close()
			s = startSpool(t, &endpoint{Server: server.Server}, place, agentSession(t, lines), nil)
			if end := ended(t, s.turn("and again", nil)); end.Outcome != runner.OutcomeCompleted {
				t.Errorf("the next turn of another process ended %+v", end)
			}
			for _, err := range server.Refused() {
				t.Errorf("the server refused a request: %v", err)
			}
			if raw := readTranscript(t, place, agentSession(t, lines)); !bytes.HasPrefix(raw, []byte(v.Transcript)) {
				t.Errorf("the stored history was changed:\n%s", raw)
			}
		})
	}
}

func writeTranscript(t *testing.T, place agent.Folders, id, text string) {
	t.Helper()
	path, err := builtin.Adapter{}.TranscriptPath(place, id)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(path), 0o755)
	}
	if err == nil {
		err = os.WriteFile(path, []byte(text), 0o600)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func readTranscript(t *testing.T, place agent.Folders, id string) []byte {
	t.Helper()
	path, err := builtin.Adapter{}.TranscriptPath(place, id)
	if err != nil {
		t.Fatal(err)
	}
	raw, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return raw
}

// agentSession returns the id of the agent's session that the lines of a turn name.
func agentSession(t *testing.T, lines []runner.JournalLine) string {
	t.Helper()
	i := slices.IndexFunc(lines, func(l runner.JournalLine) bool { return l.Type == "transcript_written" })
	if i < 0 {
		t.Fatal("the turn names no transcript")
	}
	return decode[events.TranscriptWritten](t, lines[i]).AgentSessionID
}

// checkVector compares the turn that the vector's answers belong to with the vector's right values.
func checkVector(t *testing.T, v modelstreamtest.Vector, lines []runner.JournalLine, requests int) {
	t.Helper()
	want := v.Want
	if want.Requests == 0 {
		want.Requests = len(v.Answers) + 1
	}
	if want.Result == "" && want.Outcome == "completed" {
		want.Result = modelstreamtest.OK
	}
	if want.Result == modelstreamtest.OK {
		want.Text = append(want.Text, modelstreamtest.OK)
	}
	end := ended(t, lines)
	if string(end.Outcome) != want.Outcome || end.Code != want.Code || !strings.Contains(end.Message, want.Message) || end.Result != want.Result {
		t.Errorf("the turn ended %+v, want %+v", end, want)
	}
	if requests != want.Requests {
		t.Errorf("%d requests, want %d", requests, want.Requests)
	}
	for kind, wanted := range map[events.BlockKind][]string{events.KindThinking: want.Thinking, events.KindAssistantText: want.Text} {
		var got []string
		for _, b := range completed(t, lines, kind) {
			got = append(got, b.Content)
		}
		if !slices.Equal(got, wanted) {
			t.Errorf("blocks of kind %s: %q, want %q", kind, got, wanted)
		}
	}
	checkCalls(t, want.Calls, completed(t, lines, events.KindToolUse), completed(t, lines, events.KindToolResult))
	var input, output uint32
	for _, a := range v.Answers {
		input, output = input+a.Usage[0], output+a.Usage[1]
	}
	if end.Usage.InputTokens != input || end.Usage.OutputTokens != output {
		t.Errorf("usage %+v, want %d and %d", end.Usage, input, output)
	}
}

// checkCalls compares the blocks of tool calls and their results with the right values. A wanted result "none" means that the call has no block of
// a result.
func checkCalls(t *testing.T, want []modelstreamtest.Call, uses, results []events.Block) {
	t.Helper()
	var wanted, got []string
	ids := map[string]bool{}
	for _, c := range want {
		wanted = append(wanted, c.Name+" "+c.Input)
	}
	for _, b := range uses {
		got = append(got, b.ToolName+" "+string(b.Input))
		ids[b.ToolUseID] = true
	}
	if !slices.Equal(got, wanted) || len(ids) != len(got) || ids[""] {
		t.Errorf("calls %q with the ids %v, want %q", got, ids, wanted)
		return
	}
	want = slices.DeleteFunc(slices.Clone(want), func(c modelstreamtest.Call) bool { return c.Result == "none" })
	if len(results) != len(want) {
		t.Fatalf("results %+v, want %+v", results, want)
	}
	for i, c := range want {
		if b := results[i]; b.ToolUseID != uses[i].ToolUseID || b.IsError != c.Failed || !strings.Contains(b.Output, c.Result) {
			t.Errorf("result %s, want %+v", fmt.Sprintf("%+v", b), c)
		}
	}
}
