package opencode

import (
	"encoding/json"
	"errors"
	"os"
	"path/filepath"
	"reflect"
	"slices"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/agenttest"
	"github.com/spoolhq/spool/pkg/runner"
)

// launch returns a launch with a program named opencode.
func launch(t *testing.T) agent.Launch {
	t.Helper()
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "opencode"), []byte("#!/bin/sh\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	return agent.Launch{
		Folders: agent.Folders{Workspace: t.TempDir(), State: t.TempDir()}, Model: "vendor/model", SystemPrompt: "PROMPT", MemoryFile: "MEMORY",
		Environ: []string{"PATH=" + bin, "HOME=/home/agent", "OPENCODE_PERMISSION={\"*\":\"allow\"}", "XDG_DATA_HOME=/elsewhere"},
		Env:     map[string]string{"OPENAI_API_KEY": "sk-secret", "OPENAI_BASE_URL": "http://127.0.0.1:7070/openai"},
	}
}

func command(t *testing.T, l agent.Launch) (agent.Command, map[string]string) {
	t.Helper()
	c, err := Adapter{}.Command(l)
	if err != nil {
		t.Fatal(err)
	}
	env := map[string]string{}
	for _, kv := range c.Env {
		key, value, _ := strings.Cut(kv, "=")
		env[key] = value
	}
	return c, env
}

func TestCommand(t *testing.T) {
	t.Parallel()
	l := launch(t)
	c, env := command(t, l)
	if !slices.Equal(c.Args, []string{"acp"}) {
		t.Errorf("args %q", c.Args)
	}
	if _, inherited := env["OPENCODE_PERMISSION"]; inherited {
		t.Error("a setting of another OpenCode was inherited")
	}
	for _, name := range []string{"XDG_DATA_HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "XDG_STATE_HOME"} {
		if !strings.HasPrefix(env[name], l.State+"/") {
			t.Errorf("%s is %q, outside of the state folder", name, env[name])
		}
	}
	var config struct {
		Model        string
		Instructions []string
		Plugin       []string
		Provider     map[string]struct {
			Options struct{ BaseURL, APIKey string }
			Models  map[string]any
		}
		Permission map[string]any
		Snapshot   *bool
	}
	if err := json.Unmarshal([]byte(env["OPENCODE_CONFIG_CONTENT"]), &config); err != nil {
		t.Fatal(err)
	}
	if config.Snapshot == nil || *config.Snapshot {
		t.Error("OpenCode takes snapshots of its own")
	}
	p := config.Provider["spool"]
	if config.Model != "spool/vendor/model" || p.Models["vendor/model"] == nil || p.Options.BaseURL != "{env:OPENAI_BASE_URL}" || p.Options.APIKey != "{env:OPENAI_API_KEY}" {
		t.Errorf("config %+v", config)
	}
	if config.Permission["*"] != "ask" {
		t.Errorf("permission %+v", config.Permission)
	}
	said, err := os.ReadFile(config.Instructions[len(config.Instructions)-1])
	if err != nil || !strings.Contains(string(said), "PROMPT") || !strings.Contains(string(said), "MEMORY") {
		t.Errorf("instructions %q, %v", said, err)
	}
	if raw, err := os.ReadFile(strings.TrimPrefix(config.Plugin[0], "file://")); err != nil || string(raw) != string(pluginSource) {
		t.Errorf("plugin %v", err)
	}
}

// The key is only in its variable, not in a file.
func TestNoKeyInFiles(t *testing.T) {
	t.Parallel()
	l := launch(t)
	_, env := command(t, l)
	if strings.Contains(env["OPENCODE_CONFIG_CONTENT"], "sk-secret") {
		t.Error("the key is in the configuration")
	}
	err := filepath.WalkDir(l.State, func(path string, d os.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return err
		}
		raw, err := os.ReadFile(path) //nolint:gosec // below the state folder
		if strings.Contains(string(raw), "sk-secret") {
			t.Errorf("the key is in %s", path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
}

// A warm process takes a query as long as the command is the same.
func TestCommandChangesWithTheLaunch(t *testing.T) {
	t.Parallel()
	l := launch(t)
	same, _ := command(t, l)
	if again, _ := command(t, l); !reflect.DeepEqual(same, again) {
		t.Error("the same launch gave another command")
	}
	resumed := l
	resumed.Resume = "ses_1"
	if again, _ := command(t, resumed); !reflect.DeepEqual(same, again) {
		t.Error("the session is gone on with over the protocol, not by the command")
	}
	for name, change := range map[string]func(*agent.Launch){
		"model":  func(l *agent.Launch) { l.Model = "other" },
		"prompt": func(l *agent.Launch) { l.SystemPrompt = "OTHER" },
		"memory": func(l *agent.Launch) { l.MemoryFile = "" },
		"key":    func(l *agent.Launch) { l.Env = map[string]string{"OPENAI_API_KEY": "sk-other"} },
	} {
		other := l
		change(&other)
		if c, _ := command(t, other); reflect.DeepEqual(same, c) {
			t.Errorf("another %s gave the same command", name)
		}
	}
}

func TestModelIsNeeded(t *testing.T) {
	t.Parallel()
	l := launch(t)
	l.Model = ""
	_, err := Adapter{}.Command(l)
	var refusal *runner.CommandError
	if !errors.As(err, &refusal) || refusal.Code != "INVALID_COMMAND" || !strings.Contains(refusal.Message, "query.model") {
		t.Errorf("refused with %v", err)
	}
	l.Env = map[string]string{"OPENAI_MODEL": "from-env"}
	if _, env := command(t, l); !strings.Contains(env["OPENCODE_CONFIG_CONTENT"], `"model":"spool/from-env"`) {
		t.Errorf("config %s", env["OPENCODE_CONFIG_CONTENT"])
	}
}

func TestTranscript(t *testing.T) {
	t.Parallel()
	for id, want := range map[string]string{"ses_1ffde8c4b001BRKK1YAvxhC2qx": "database", "../../etc": "want ses_", "": "want ses_"} {
		if _, err := (Adapter{}).TranscriptPath(agent.Folders{State: "/state"}, id); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%q: %v", id, err)
		}
	}
}

func TestTestedVersionIsThePinnedOne(t *testing.T) {
	t.Parallel()
	agenttest.CheckPinnedVersion(t, "opencode-ai", TestedVersion)
}

// The CLI's own tool offers the agent's skills if it can list their files, and no skills of sub-agents.
func TestNativeSkills(t *testing.T) {
	t.Parallel()
	l := launch(t)
	l.Skills = []runner.Skill{{Name: "mine", Dir: "/bin/skills/1"}, {Name: "theirs", Dir: "/bin/skills/2", Unlisted: true}}
	l.Tools.Allow = []string{"read"}
	configured := func() (paths []string, asked any) {
		var config struct {
			Skills     struct{ Paths []string }
			Permission map[string]any
		}
		_, env := command(t, l)
		if err := json.Unmarshal([]byte(env["OPENCODE_CONFIG_CONTENT"]), &config); err != nil {
			t.Fatal(err)
		}
		return config.Skills.Paths, config.Permission["skill"]
	}
	if paths, asked := configured(); len(paths) != 0 || asked != nil {
		t.Errorf("without rg: %v, %v", paths, asked)
	}
	bin := t.TempDir()
	if err := os.WriteFile(filepath.Join(bin, "rg"), []byte("#!/bin/sh\n"), 0o755); err != nil { //nolint:gosec // a program
		t.Fatal(err)
	}
	l.Environ = append(l.Environ, "PATH="+acp.LaunchVariable(l, "PATH")+":"+bin)
	if paths, asked := configured(); !slices.Equal(paths, []string{"/bin/skills/1"}) || asked != "ask" {
		t.Errorf("with rg: %v, %v", paths, asked)
	}
}

// A fork needs another process, which gets the session and the anchor.
func TestCommandForks(t *testing.T) {
	t.Parallel()
	l := launch(t)
	plain, err := Adapter{}.Command(l)
	if err != nil {
		t.Fatal(err)
	}
	l.Resume, l.Fork = "ses_1", &runner.Fork{Anchor: "msg_1"}
	c, err := Adapter{}.Command(l)
	if err != nil {
		t.Fatal(err)
	}
	const want = forkSessionVariable + `={"anchor":"msg_1","session":"ses_1"}`
	if !slices.Contains(c.Env, want) || slices.Contains(plain.Env, want) {
		t.Errorf("environment %v, without a fork %v", c.Env, plain.Env)
	}
}

// A report of the plugin about a fork becomes a notice.
func TestForkedNotice(t *testing.T) {
	t.Parallel()
	for params, want := range map[string]acp.ForkResult{
		`{"kind":"forked","session":"ses_2"}`: {Session: "ses_2"},
		`{"kind":"forked","message":"no"}`:    {Error: "no"},
		`{"kind":"forked"}`:                   {Error: "OpenCode made no copy of it"},
	} {
		if n := decodeNotice("_spool/event", []byte(params)); n == nil || n.Forked == nil || *n.Forked != want {
			t.Errorf("%s: %+v, want %+v", params, n, want)
		}
	}
}

// A report of the plugin about text becomes a notice.
func TestTextNotice(t *testing.T) {
	t.Parallel()
	for params, want := range map[string]acp.EarlyTextPiece{
		`{"kind":"text","session":"ses_1","id":"msg_1","thought":false,"text":"a"}`: {Message: "msg_1", Piece: "a"},
		`{"kind":"text","session":"ses_1","id":"prt_1","thought":true,"text":"hm"}`: {Message: "prt_1", Thought: true, Piece: "hm"},
	} {
		if n := decodeNotice("_spool/event", []byte(params)); n == nil || n.Session != "ses_1" || n.Text == nil || *n.Text != want {
			t.Errorf("%s: %+v, want %+v", params, n, want)
		}
	}
}
