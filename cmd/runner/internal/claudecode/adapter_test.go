package claudecode

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// installed returns a launch with a program `claude` on the PATH.
func installed(t *testing.T) agent.Launch {
	t.Helper()
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, programName), []byte("#!/bin/sh\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	return agent.Launch{
		Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}, SessionID: "ses_1",
		Environ: []string{"PATH=" + bin, "HOME=/home/agent", "CLAUDECODE=1", "CLAUDE_CODE_ENTRYPOINT=cli", "SPOOL_RUNNER_STATE=/s"},
		Env:     map[string]string{"ANTHROPIC_API_KEY": "k"},
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

func TestCommandEnvironment(t *testing.T) {
	t.Parallel()
	l := installed(t)
	env := command(t, l).Env
	for _, want := range []string{
		"HOME=/home/agent", "ANTHROPIC_API_KEY=k", "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "CLAUDE_CODE_MAX_RETRIES=4",
		"CLAUDE_CONFIG_DIR=" + l.State + "/claude",
	} {
		if !slices.Contains(env, want) {
			t.Errorf("no %s in %v", want, env)
		}
	}
	for _, kv := range env {
		if strings.HasPrefix(kv, "CLAUDECODE") || strings.HasPrefix(kv, "CLAUDE_CODE_ENTRYPOINT") || strings.HasPrefix(kv, "SPOOL_RUNNER_") {
			t.Errorf("%s reaches the agent", kv)
		}
	}
	l.Env["CLAUDE_CODE_MAX_RETRIES"] = "9"
	if env := command(t, l).Env; !slices.Contains(env, "CLAUDE_CODE_MAX_RETRIES=9") || slices.Contains(env, "CLAUDE_CODE_MAX_RETRIES=4") {
		t.Errorf("retries cannot be set: %v", env)
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
		"env":    func(l *agent.Launch) { l.Env = map[string]string{"ANTHROPIC_API_KEY": "other"} },
		"allow":  func(l *agent.Launch) { l.Tools.Allow = []string{"Read"} },
		"deny":   func(l *agent.Launch) { l.Tools.Deny = []string{"Read"} },
		"agents": func(l *agent.Launch) { l.Subagents = []events.SubagentSpec{{Name: "a"}} },
		"slash":  func(l *agent.Launch) { l.Commands = []events.CommandSpec{{Name: "a"}} },
		"mcp":    func(l *agent.Launch) { l.MCPServers = []runner.MCPServer{{Name: "a", Type: "http", URL: "http://a"}} },
		"skills": func(l *agent.Launch) { l.Skills = []runner.Skill{{Name: "a", Dir: "/a"}} },
		"turns":  func(l *agent.Launch) { l.MaxTurns = 3 },
	} {
		other := l
		change(&other)
		if reflect.DeepEqual(base, command(t, other)) {
			t.Errorf("another %s gives the same command", name)
		}
	}
}

func TestCommandPromptNeedsNoArgument(t *testing.T) {
	t.Parallel()
	l := installed(t)
	l.SystemPrompt, l.MemoryFile = strings.Repeat("long ", 200_000), "remember this"
	c := command(t, l)
	for _, arg := range c.Args {
		if len(arg) > 1000 {
			t.Fatalf("an argument of %d bytes", len(arg))
		}
	}
	if want := (agent.LaunchFile{Path: "claude/CLAUDE.md", Content: "remember this"}); !slices.Contains(c.Files, want) {
		t.Errorf("files %.200v, want %v", c.Files, want)
	}
	var in agenttest.Stdin
	Adapter{}.OpenSession(l, &in)
	var sent struct {
		Request struct{ Subtype, AppendSystemPrompt string }
	}
	if err := json.Unmarshal(in.SentValues()[0], &sent); err != nil {
		t.Fatal(err)
	}
	if p := sent.Request.AppendSystemPrompt; sent.Request.Subtype != "initialize" || p != l.SystemPrompt {
		t.Errorf("sent %.100s", in.SentValues()[0])
	}
}

func TestCommandResumesWhatIsThere(t *testing.T) {
	t.Parallel()
	const id = "11111111-2222-4333-8444-555555555555"
	l := installed(t)
	l.Resume = id
	if args := command(t, l).Args; slices.Contains(args, "--resume") {
		t.Errorf("a session without a transcript is resumed: %v", args)
	}
	path, err := Adapter{}.TranscriptPath(l.Folders, id)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.MkdirAll(filepath.Dir(path), 0o755); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(path, []byte("{}\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	if args := command(t, l).Args; !slices.Equal(args[len(args)-2:], []string{"--resume", id}) {
		t.Errorf("arguments %v", args)
	}
}

func TestCommandWithoutTheCLI(t *testing.T) {
	t.Parallel()
	l := installed(t)
	dir := t.TempDir()
	if err := os.WriteFile(filepath.Join(dir, programName), []byte("not executable"), 0o600); err != nil {
		t.Fatal(err)
	}
	l.Environ = []string{"PATH=.:" + dir + ":/no/such/folder"}
	_, err := Adapter{}.Command(l)
	var refusal *runner.CommandError
	if !errors.As(err, &refusal) || refusal.Code != "AGENT_NOT_FOUND" || !strings.Contains(refusal.Message, "npm i -g @anthropic-ai/claude-code") {
		t.Fatalf("got %v", err)
	}
}

func TestTranscriptPath(t *testing.T) {
	t.Parallel()
	p := agent.Folders{Workspace: t.TempDir(), State: "/state"}
	for _, bad := range []string{"", "../../etc/passwd", "11111111-2222-4333-8444-55555555555", "11111111-2222-4333-8444-55555555555G", "11111111/2222-4333-8444-555555555555"} {
		if path, err := (Adapter{}).TranscriptPath(p, bad); err == nil {
			t.Errorf("%q became %s", bad, path)
		}
	}
	link := filepath.Join(t.TempDir(), "link")
	if err := os.Symlink(p.Workspace, link); err != nil {
		t.Fatal(err)
	}
	const id = "11111111-2222-4333-8444-555555555555"
	direct, err := Adapter{}.TranscriptPath(p, id)
	if err != nil {
		t.Fatal(err)
	}
	through, err := Adapter{}.TranscriptPath(agent.Folders{Workspace: link, State: "/state"}, id)
	if err != nil || through != direct {
		t.Errorf("%s through a link, %s directly, %v", through, direct, err)
	}
}

// The names are those that the CLI was observed to create.
func TestFolder_IsNamedAsTheCLINamesIt(t *testing.T) {
	t.Parallel()
	long := "/tmp/claude-adapter/ln/" + strings.Repeat("x", 120) + "/" + strings.Repeat("y", 120)
	for dir, want := range map[string]string{
		"/tmp/cg-ws_1.a": "-tmp-cg-ws-1-a",
		"/home/é/😀":      "-home-----",
		long:             strings.NewReplacer("/", "-").Replace(long)[:200] + "-ivdkwm",
	} {
		if got := transcript.FolderName(dir); got != want {
			t.Errorf("folder(%q) = %q, want %q", dir, got, want)
		}
	}
}
