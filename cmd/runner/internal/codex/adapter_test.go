package codex

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/runner"
)

const id = "11111111-2222-4333-8444-555555555555"

// installed returns a launch with a program `codex` on the PATH.
func installed(t *testing.T) agent.Launch {
	t.Helper()
	bin := t.TempDir()
	write(t, filepath.Join(bin, programName), "#!/bin/sh\n", 0o755)
	return agent.Launch{
		Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}, SessionID: "ses_1",
		Environ: []string{"PATH=" + bin, "HOME=/home/agent", "CODEX_SANDBOX=x", "CODEX_HOME=/elsewhere", "SPOOL_RUNNER_STATE=/s"},
		Env:     map[string]string{"OPENAI_API_KEY": "sk-secret", "OPENAI_BASE_URL": "http://127.0.0.1:7070/openai"},
	}
}

func write(t *testing.T, path, content string, mode os.FileMode) {
	t.Helper()
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte(content), mode); err != nil {
		t.Fatal(err)
	}
}

func command(t *testing.T, l agent.Launch) agent.Command {
	t.Helper()
	c, err := Adapter{}.Command(l)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

func TestCommand(t *testing.T) {
	t.Parallel()
	l := installed(t)
	c := command(t, l)
	for _, want := range []string{"HOME=/home/agent", "OPENAI_API_KEY=sk-secret", "CODEX_HOME=" + l.State + "/codex"} {
		if !slices.Contains(c.Env, want) {
			t.Errorf("no %s in %v", want, c.Env)
		}
	}
	for _, kv := range c.Env {
		if strings.HasPrefix(kv, "CODEX_SANDBOX") || strings.HasPrefix(kv, "SPOOL_RUNNER_") {
			t.Errorf("%s reaches the agent", kv)
		}
	}
	args := strings.Join(c.Args, "\n")
	for _, want := range []string{`model_providers.spool.base_url="http://127.0.0.1:7070/openai"`, `model_providers.spool.env_key="OPENAI_API_KEY"`} {
		if !strings.Contains(args, want) {
			t.Errorf("no %s in %v", want, c.Args)
		}
	}
	if strings.Contains(args, "sk-secret") {
		t.Errorf("the key is an argument: %v", c.Args)
	}
	if info, err := os.Stat(l.State + "/codex"); err != nil || !info.IsDir() {
		t.Errorf("the CLI has no home: %v", err)
	}
}

// Without a key the CLI must not require one, and the address has a default.
func TestCommandWithoutKey(t *testing.T) {
	t.Parallel()
	l := installed(t)
	l.Env = map[string]string{"OPENAI_API_KEY": ""}
	args := strings.Join(command(t, l).Args, "\n")
	if strings.Contains(args, "env_key") || !strings.Contains(args, `base_url="`+openAIBaseURL+`"`) {
		t.Errorf("arguments %s", args)
	}
	l.Environ = append(l.Environ, "OPENAI_BASE_URL=http://inherited/v1")
	if args := strings.Join(command(t, l).Args, "\n"); !strings.Contains(args, `base_url="http://inherited/v1"`) {
		t.Errorf("arguments %s", args)
	}
}

// The supervisor compares commands: the same launch must return the same command, and another model or prompt another
// one.
func TestCommandTellsLaunchesApart(t *testing.T) {
	t.Parallel()
	l := installed(t)
	base := command(t, l)
	if again := command(t, l); !reflect.DeepEqual(base, again) {
		t.Errorf("%v, then %v", base, again)
	}
	for name, change := range map[string]func(*agent.Launch){
		"model":  func(l *agent.Launch) { l.Model = "m" },
		"prompt": func(l *agent.Launch) { l.SystemPrompt = "p" },
		"memory": func(l *agent.Launch) { l.MemoryFile = "m" },
		"env":    func(l *agent.Launch) { l.Env = map[string]string{"OPENAI_API_KEY": "other"} },
		"server": func(l *agent.Launch) { l.Env = map[string]string{"OPENAI_BASE_URL": "http://other"} },
	} {
		other := l
		change(&other)
		if reflect.DeepEqual(base, command(t, other)) {
			t.Errorf("another %s gives the same command", name)
		}
	}
}

func TestQuote_ReturnsTOML(t *testing.T) {
	t.Parallel()
	for in, want := range map[string]string{
		`a"b\c`:  `"a\"b\\c"`,
		"a\nb\t": `"a\nb\t"`,
		"<&>":    `"<&>"`,
		"\x7f":   `"\u007f"`,
		"\xff":   "\"\uFFFD\"",
	} {
		if got := quoteTOML(in); got != want {
			t.Errorf("quote(%q) = %s, want %s", in, got, want)
		}
	}
}

// message is a line that was sent to the CLI.
type message struct {
	ID     json.RawMessage
	Method string
	Params map[string]any
	Result map[string]any
	Error  *rpcError
}

func sentMessages(t *testing.T, in *agenttest.Stdin) []message {
	t.Helper()
	var out []message
	for _, raw := range in.SentValues() {
		var m message
		if err := json.Unmarshal(raw, &m); err != nil {
			t.Fatal(err)
		}
		out = append(out, m)
	}
	return out
}

func TestOpenSendsPromptsWithTheThread(t *testing.T) {
	t.Parallel()
	l := installed(t)
	l.Model, l.SystemPrompt, l.MemoryFile = "m", strings.Repeat("long ", 200_000), "remember this"
	for _, arg := range command(t, l).Args {
		if len(arg) > 1000 {
			t.Fatalf("an argument of %d bytes", len(arg))
		}
	}
	var in agenttest.Stdin
	Adapter{}.OpenSession(l, &in)
	got := sentMessages(t, &in)
	if len(got) != 3 || got[0].Method != "initialize" || got[1].Method != "initialized" || got[2].Method != "thread/start" {
		t.Fatalf("sent %+v", got)
	}
	p := got[2].Params
	text, _ := p["developerInstructions"].(string)
	if p["model"] != "m" || p["approvalPolicy"] != "untrusted" || p["cwd"] != l.Workspace ||
		!strings.Contains(text, l.SystemPrompt) || !strings.Contains(text, "\nremember this") {
		t.Errorf("sent %.300s", in.SentValues()[2])
	}
}

func TestOpenResumesWhatIsThere(t *testing.T) {
	t.Parallel()
	l := installed(t)
	l.Resume, l.SystemPrompt = id, "be <brief>"
	opened := func() (method string, s *session) {
		var in agenttest.Stdin
		s, ok := Adapter{}.OpenSession(l, &in).(*session)
		if !ok {
			t.Fatal("not a session")
		}
		return sentMessages(t, &in)[2].Method, s
	}
	if method, s := opened(); method != "thread/start" || !strings.Contains(s.lost, id) {
		t.Errorf("without a transcript: %s, lost %q", method, s.lost)
	}
	path := filepath.Join(l.State, "codex/sessions/2026/11/21/rollout-2026-11-21T20-49-08-"+id+".jsonl")
	line := func(prompt string) string {
		return `{"payload":{"text":` + quoteTOML(prompt) + "}}\n"
	}
	other := l
	other.SystemPrompt = "be verbose"
	for _, c := range []struct {
		name, transcript string
		instructed       bool
	}{
		{"no prompt yet", `{"payload":{}}` + "\n", false},
		{"this prompt", line(addedPrompt(l)), true},
		{"another prompt since", line(addedPrompt(l)) + line(addedPrompt(other)), false},
		{"this prompt again", line(addedPrompt(other)) + line(addedPrompt(l)), true},
	} {
		write(t, path, c.transcript, 0o600)
		if method, s := opened(); method != "thread/resume" || s.instructed != c.instructed {
			t.Errorf("%s: %s, instructed %v", c.name, method, s.instructed)
		}
	}
}

func TestCommandWithoutTheCLI(t *testing.T) {
	t.Parallel()
	l := installed(t)
	dir := t.TempDir()
	write(t, filepath.Join(dir, programName), "not executable", 0o600)
	l.Environ = []string{"PATH=.:" + dir + ":/no/such/folder"}
	_, err := Adapter{}.Command(l)
	var refusal *runner.CommandError
	if !errors.As(err, &refusal) || refusal.Code != "AGENT_NOT_FOUND" || !strings.Contains(refusal.Message, "npm i -g @openai/codex") {
		t.Fatalf("got %v", err)
	}
}

// The command runs the program itself and not npm's wrapper, if the program is found.
func TestCommandRunsTheProgramItself(t *testing.T) {
	t.Parallel()
	modules := filepath.Join(t.TempDir(), "a [strange] name", "node_modules")
	script := filepath.Join(modules, "@openai/codex/bin/codex.js")
	write(t, script, "#!/usr/bin/env node\n", 0o755)
	bin := filepath.Join(modules, ".bin")
	if err := os.MkdirAll(bin, 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.Symlink("../@openai/codex/bin/codex.js", filepath.Join(bin, programName)); err != nil {
		t.Fatal(err)
	}
	l := installed(t)
	l.Environ = []string{"PATH=" + bin}
	if got, want := command(t, l).Path, filepath.Join(bin, programName); got != want {
		t.Errorf("without the program: %s, want %s", got, want)
	}
	arch := strings.ReplaceAll(runtime.GOARCH, "amd64", "x64")
	want := filepath.Join(modules, "@openai/codex-"+runtime.GOOS+"-"+arch+"/vendor/some-triple/bin/codex")
	write(t, want, "", 0o755)
	want, err := filepath.EvalSymlinks(want)
	if err != nil {
		t.Fatal(err)
	}
	if got := command(t, l).Path; got != want {
		t.Errorf("got %s, want %s", got, want)
	}
}

func TestTranscript(t *testing.T) {
	t.Parallel()
	p := agent.Folders{Workspace: "/ws", State: filepath.Join(t.TempDir(), "with [brackets]")}
	for _, bad := range []string{"", "../../etc/passwd", "*", id[:35], id[:35] + "G", strings.ReplaceAll(id, "-", "/")} {
		if path, err := (Adapter{}).TranscriptPath(p, bad); err == nil {
			t.Errorf("%q became %s", bad, path)
		}
	}
	if _, err := (Adapter{}).TranscriptPath(p, id); !errors.Is(err, os.ErrNotExist) {
		t.Errorf("without one: %v", err)
	}
	want := filepath.Join(p.State, "codex/sessions/2026/11/21/rollout-2026-11-21T20-49-08-"+id+".jsonl")
	write(t, want, "{}\n", 0o600)
	if got, err := (Adapter{}).TranscriptPath(p, id); err != nil || got != want {
		t.Errorf("got %s, %v", got, err)
	}
}

// The version that the adapter names is the one that the tests run.
func TestTestedVersionIsThePinnedOne(t *testing.T) {
	t.Parallel()
	agenttest.CheckPinnedVersion(t, "@openai/codex", TestedVersion)
}
