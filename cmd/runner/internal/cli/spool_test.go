package cli_test

import (
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// The built-in agent, as the runner really starts it, on the scripted model server.
func TestSpoolWritesAProgramRunsItAndRemembers(t *testing.T) {
	t.Parallel()
	script, err := server.Default()
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
	if e := ended(t, lines); e.Outcome != runner.Completed || !strings.Contains(e.Result, "sum 129") || e.Usage.InputTokens == 0 {
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
	if first, e := decode[runner.Started](t, lines[0]), ended(t, lines); !first.Warm || !strings.Contains(e.Result, "plum") {
		t.Errorf("warm %v, %+v", first.Warm, e)
	}
	// The process is lost, the conversation is not.
	if r := c.ask(runner.Command{Op: runner.OpKill}); r.Error != nil {
		t.Fatal(r.Error)
	}
	lines = c.run("exe_4", "What did I ask you to remember?", spool)
	if first, e := decode[runner.Started](t, lines[0]), ended(t, lines); first.Warm || !strings.Contains(e.Result, "plum") {
		t.Errorf("warm %v, %+v", first.Warm, e)
	}
	for _, l := range lines {
		if strings.Contains(string(l.Data), "sk-secret") {
			t.Errorf("the key is in line %d", l.N)
		}
	}
}
