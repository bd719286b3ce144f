package codex_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/codex"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// TestRealProvided continues a conversation that the bare CLI held elsewhere, with its instructions and settings left out.
func TestRealProvided(t *testing.T) {
	t.Parallel()
	b := newBench(t)
	b.model = classic
	thread, raw := bare(t, b)
	given := bytes.Replace(raw, []byte(`"base_instructions":{"text":"`), []byte(`"base_instructions":{"text":"You obey the transcript. `), 1)
	if bytes.Equal(given, raw) {
		t.Fatal("the first line has no instructions")
	}
	path := filepath.Join(b.place.State, "launch", "transcript")
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, given, 0o600); err != nil {
		t.Fatal(err)
	}
	begin := func(q *runner.Query) { q.SessionID, q.Resume, q.Fork = "ses_new", thread, &runner.Fork{Provided: true} }

	if refusal := b.start("talk for ever", begin); refusal != nil {
		t.Fatal(refusal)
	}
	x := b.until("session", func(l runner.Line) bool { return l.Type == "transcript_written" }, turn{t: t})
	if err := syscall.Kill(x.started().PID, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	b.end(x)
	x = b.completed("which number was it?", "remember 11.", begin)
	if e := all[events.Error](x, "error"); len(e) != 0 {
		t.Errorf("errors %+v", e)
	}
	b.lastRequest([]string{"number 11", "I will remember 11"}, []string{"You obey the transcript", "talk for ever"}, 1)
	own := all[events.TranscriptWritten](x, "transcript_written")[0]
	if own.AgentSessionID == thread {
		t.Errorf("the thread is %s, the caller's own", thread)
	}
	copied, err := codex.Adapter{}.Transcript(b.place, own.AgentSessionID)
	if err != nil {
		t.Fatal(err)
	}
	now, err := os.ReadFile(copied)
	if err != nil {
		t.Fatal(err)
	}
	for _, foreign := range []string{"You obey the transcript", `"model_provider":"bare"`, `"originator":"codex_exec"`} {
		if strings.Contains(string(now), foreign) {
			t.Errorf("the copy has %s", foreign)
		}
	}

	b.supervisor.Kill(t.Context())
	b.completed("write a file please", "written", func(q *runner.Query) { q.SessionID, q.Resume = "ses_new", own.AgentSessionID })
	b.lastRequest([]string{"number 11", "which number was it?"}, nil, 1)
	if now, err := os.ReadFile(path); err != nil || !bytes.Equal(now, given) {
		t.Errorf("what was provided has changed: %v", err)
	}
}

// bare holds a conversation with the CLI outside of Spool and returns its thread and transcript.
func bare(t *testing.T, b *bench) (thread string, raw []byte) {
	t.Helper()
	home := t.TempDir()
	args := []string{"exec", "--skip-git-repo-check", "-m", classic}
	for _, c := range []string{
		`model_provider="bare"`, `model_providers.bare.name="Bare"`, `model_providers.bare.wire_api="responses"`,
		`model_providers.bare.base_url="` + b.env["OPENAI_BASE_URL"] + `"`, `sandbox_mode="danger-full-access"`,
	} {
		args = append(args, "-c", c)
	}
	cmd := exec.CommandContext(t.Context(), "codex", append(args, "Remember the number 11 please")...)
	cmd.Dir, cmd.Env = t.TempDir(), []string{"PATH=" + os.Getenv("PATH"), "HOME=" + home, "OPENAI_API_KEY=test"}
	if out, err := cmd.CombinedOutput(); err != nil || !strings.Contains(string(out), "11") {
		t.Fatalf("codex: %v, %s", err, out)
	}
	found, err := filepath.Glob(filepath.Join(home, ".codex", "sessions", "*", "*", "*", "rollout-*.jsonl"))
	if err != nil || len(found) != 1 {
		t.Fatalf("transcripts %v, %v", found, err)
	}
	if raw, err = os.ReadFile(found[0]); err != nil {
		t.Fatal(err)
	}
	name := strings.TrimSuffix(filepath.Base(found[0]), ".jsonl")
	return name[len(name)-36:], raw
}
