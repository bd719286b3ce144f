package cli_test

import (
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// The built-in agent runs as the runner starts it, on the scripted model server.
func TestSpoolWritesAProgramRunsItAndRemembers(t *testing.T) {
	t.Parallel()
	script, err := server.DefaultScript()
	if err != nil {
		t.Fatal(err)
	}
	model, err := server.New(server.Config{Script: script})
	if err != nil {
		t.Fatal(err)
	}
	endpoint := httptest.NewServer(model)
	t.Cleanup(endpoint.Close)
	s := serveRunner(t)
	c := s.attach(1, 0)
	spool := func(q *runner.Query) {
		q.Architecture = "spool"
		q.Env = map[string]string{"OPENAI_BASE_URL": endpoint.URL + "/v1", "OPENAI_API_KEY": "sk-secret", "RUNNER_TEST_AS": "runner"}
	}
	lines := c.run("exe_1", "Write a program that prints primes and run it", spool)
	if e := ended(t, lines); e.Outcome != runner.OutcomeCompleted || !strings.Contains(e.Result, "sum 129") || e.Usage.InputTokens == 0 {
		t.Fatalf("end %+v", e)
	}
	if _, err := os.Stat(filepath.Join(s.workspace, "primes.sh")); err != nil {
		t.Error(err)
	}
	if p := find[events.PermissionDecided](t, lines); p.Decision != "allow" || p.ToolName != "write_file" {
		t.Errorf("permission %+v", p)
	}
	c.run("exe_2", "Remember that the word is plum", spool)
	lines = c.run("exe_3", "What did I ask you to remember?", spool)
	if first, e := decode[runner.TurnStart](t, lines[0]), ended(t, lines); !first.Warm || !strings.Contains(e.Result, "plum") {
		t.Errorf("warm %v, %+v", first.Warm, e)
	}
	// After the loss of the process the next one knows the conversation.
	if r := c.ask(runner.Command{Op: runner.OpKill}); r.Error != nil {
		t.Fatal(r.Error)
	}
	lines = c.run("exe_4", "What did I ask you to remember?", spool)
	if first, e := decode[runner.TurnStart](t, lines[0]), ended(t, lines); first.Warm || !strings.Contains(e.Result, "plum") {
		t.Errorf("warm %v, %+v", first.Warm, e)
	}
	for _, l := range lines {
		if strings.Contains(string(l.Data), "sk-secret") {
			t.Errorf("the key is in line %d", l.N)
		}
	}
}

// A fork that was killed in its first turn starts at the same anchor again, and its own session has the same
// conversation.
func TestSpoolForksAgainAfterAKill(t *testing.T) {
	t.Parallel()
	script, err := server.ParseScript("script.yaml", []byte(`
rules:
  - match: {user: {regex: 'Remember the number (\d+)'}}
    steps: [{text: 'I will remember {{match 1}}.'}]
  - match: {user: which number}
    steps: [{text: 'You asked me to remember {{recall "Remember the number (\\d+)"}}.'}]
  - match: {user: talk for ever}
    steps: [{endless: {text: "and on and on ", delay: 20ms}}]
`))
	if err != nil {
		t.Fatal(err)
	}
	model, err := server.New(server.Config{Script: script})
	if err != nil {
		t.Fatal(err)
	}
	endpoint := httptest.NewServer(model)
	t.Cleanup(endpoint.Close)
	c := serveRunner(t).attach(1, 0)
	spool := func(q *runner.Query) {
		q.Architecture = "spool"
		q.Env = map[string]string{"OPENAI_BASE_URL": endpoint.URL + "/v1", "OPENAI_API_KEY": "sk-secret", "RUNNER_TEST_AS": "runner"}
	}
	lines := c.run("exe_1", "Remember the number 11 please", spool)
	session, anchor := find[events.TranscriptWritten](t, lines).AgentSessionID, find[events.BlockComplete](t, lines).Block.Anchor
	c.run("exe_2", "Remember the number 22 please", spool)

	fork := func(q *runner.Query) {
		q.SessionID, q.Resume, q.Fork = "ses_fork", session, &runner.Fork{Anchor: anchor}
	}
	if r := c.start("exe_3", "talk for ever", spool, fork); r.Error != nil {
		t.Fatal(r.Error)
	}
	own := decode[events.TranscriptWritten](t, c.until("transcript_written")).AgentSessionID
	c.until(events.TextDelta)
	status := c.ask(runner.Command{Op: runner.OpStatus})
	if err := syscall.Kill(status.Status.AgentPID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	c.until(runner.TurnEnded)
	for name, change := range map[string]func(*runner.Query){
		"the fork again":         fork,
		"the fork's own session": func(q *runner.Query) { q.SessionID, q.Resume = "ses_fork", own },
	} {
		lines := c.run("exe_"+name, "which number was it?", spool, change)
		if e := ended(t, lines); e.Outcome != runner.OutcomeCompleted || !strings.Contains(e.Result, "remember 11.") {
			t.Errorf("%s: %+v", name, e)
		}
		if got := find[events.TranscriptWritten](t, lines).AgentSessionID; got != own || got == session {
			t.Errorf("%s: session %s, want %s", name, got, own)
		}
	}
}
