package cli_test

import (
	"encoding/json"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/runner"
)

// nowhere fails the test if a line has the text.
func nowhere(t *testing.T, lines []runner.JournalLine, text string) {
	t.Helper()
	for _, l := range lines {
		raw, err := json.Marshal(l)
		if err != nil {
			t.Fatal(err)
		}
		if strings.Contains(string(raw), text) {
			t.Errorf("journaled: %s", raw)
		}
	}
}

func hides(values ...string) func(*runner.Query) {
	return func(q *runner.Query) { q.Redact = values }
}

func TestRedact_SecretsAreNotJournaled(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.attach(1, 0)
	const key = "hunter-2"
	lines := c.run("exe_1", strings.Join([]string{
		"say it is " + key, "open " + key, "stderr " + key, `raw "plain ` + key + `\n"`, "shell echo " + key + " >" + key + ".txt; cat " + key + ".txt",
		`raw "{\"say\":7,\"x\":\"` + strings.Repeat("x", 242) + key + `\"}\n"`, // quoted in an error that is cut in the middle of the key
	}, "\n"), hides(key))
	nowhere(t, lines, "hunter")
	if raw, err := os.ReadFile(filepath.Join(s.workspace, key+".txt")); err != nil || string(raw) != key+"\n" {
		t.Errorf("the agent itself works without it: %q, %v", raw, err)
	}
	if got := files(t, lines); len(got) != 1 || got[0] != "exe_1 file_created [redacted].txt" {
		t.Errorf("files %q", got)
	}
	// A warm process still has the secrets of earlier queries.
	nowhere(t, c.run("exe_2", "say "+key+" and otter-3", hides("otter-3")), "hunter")
	nowhere(t, c.run("exe_3", "say otter-3"), "otter")
	nowhere(t, c.run("exe_4", "exit 3", hides(key)), "hunter")
}

// A key in the last output of a process, and in its files after its end, is redacted.
func TestRedact_LastsUntilTheProcessIsGone(t *testing.T) {
	t.Parallel()
	s := serveRunner(t)
	c := s.attach(1, 0)
	const key = "hunter-2"
	lines := c.run("exe_1", "stderr the key is "+key+"\nsay x\nexit 3", hides(key))
	nowhere(t, lines, "hunter")
	if e := ended(t, lines); e.Code != "AGENT_EXITED" || !strings.Contains(e.Message, "the key is [redacted]") {
		t.Errorf("ended %+v", e)
	}
	if err := os.WriteFile(filepath.Join(s.workspace, key), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	if l := c.until("file_created"); strings.Contains(string(l.Data), "hunter") {
		t.Errorf("journaled %s", l.Data)
	}
	// Another process never had it.
	if got := c.run("exe_2", "say "+key); !strings.Contains(string(got[1].Data), key) {
		t.Errorf("redacted without reason: %s", got[1].Data)
	}
}

// The output of a warmed process, and a refusal, are redacted.
func TestRedact_BeginsWithTheFirstLine(t *testing.T) {
	t.Parallel()
	c := serveRunner(t).attach(1, 0)
	if r := c.warm(hides("hunter-2")); r.Error != nil {
		t.Fatal(r.Error)
	}
	nowhere(t, c.run("exe_1", "say hunter-2"), "hunter")
	r := c.start("exe_2", "say x", func(q *runner.Query) { q.Architecture, q.Redact = "hunter-2", []string{"hunter-2"} })
	if r.Error == nil || strings.Contains(r.Error.Message, "hunter") {
		t.Errorf("refused with %+v", r.Error)
	}
}
