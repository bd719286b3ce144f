// Package opencode is the architecture opencode: the OpenCode CLI, driven over
// `opencode acp`, the Agent Client Protocol on its stdin and stdout (package
// acp). One process takes turn after turn; when it is gone the next one goes on
// with its session, which lies in a database below the state folder.
//
// What the CLI prints was recorded with version 1.18.33, see testdata/README.md.
package opencode

import (
	"cmp"
	"encoding/json"
	"errors"
	"fmt"
	"path/filepath"
	"regexp"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// Architecture is its name.
const Architecture = architecture.OpenCode

// Tested is the version of the CLI that the recordings are of. Another one is
// used all the same, and said.
const Tested = "1.18.33"

// program is the CLI's name on the PATH.
const program = "opencode"

// Adapter drives OpenCode.
type Adapter struct {
	Now func() time.Time // measures tools; nil for time.Now
}

// Command starts the `opencode` of the agent's PATH with its files in the state
// folder. The few files that it has to find there are made here: they are named
// after their content, so that the command stays a function of the launch.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	path, err := acp.Find(l, program)
	if err != nil {
		return agent.Command{}, missing(err)
	}
	name := model(l)
	if name == "" {
		return agent.Command{}, &runner.Error{
			Code: "INVALID_COMMAND", Message: "query.model is empty: OpenCode needs the name of a model, there or in OPENAI_MODEL",
		}
	}
	if err := checkTools(l); err != nil {
		return agent.Command{}, err
	}
	files, err := writeFiles(l)
	if err != nil {
		return agent.Command{}, fmt.Errorf("state folder of OpenCode: %w", err)
	}
	config, err := configuration(l, name, files)
	if err != nil {
		return agent.Command{}, err
	}
	set := map[string]string{
		"XDG_DATA_HOME": home(l.Place, "data"), "XDG_CONFIG_HOME": home(l.Place, "config"),
		"XDG_CACHE_HOME": home(l.Place, "cache"), "XDG_STATE_HOME": home(l.Place, "state"),
		"OPENCODE_CONFIG_CONTENT": config,
		// What a workspace brings as its settings must not answer for the policy, nor start programs.
		"OPENCODE_DISABLE_PROJECT_CONFIG":  "1",
		"OPENCODE_DISABLE_CLAUDE_CODE":     "1",
		"OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
		// Nothing is fetched but from the model: there is no network.
		"OPENCODE_DISABLE_MODELS_FETCH":    "1",
		"OPENCODE_DISABLE_AUTOUPDATE":      "1",
		"OPENCODE_DISABLE_LSP_DOWNLOAD":    "1",
		"OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
		"OPENCODE_DISABLE_SHARE":           "1",
	}
	if l.Fork != nil {
		raw, err := json.Marshal(object{"session": l.Resume, "anchor": l.Fork.Anchor})
		if err != nil {
			return agent.Command{}, fmt.Errorf("fork: %w", err)
		}
		set[forkVariable] = string(raw)
	}
	more, err := definitionFiles(l, set)
	if err != nil {
		return agent.Command{}, fmt.Errorf("configuration of OpenCode: %w", err)
	}
	command := agent.Command{Path: path, Args: []string{"acp"}, Env: l.Environment(set, "OPENCODE", "XDG_"), Files: more}
	if l.Fork == nil || !l.Fork.Provided {
		return command, nil
	}
	return importing(l, command)
}

// forkVariable names the variable by which plugin.js is asked for a fork.
const forkVariable = "SPOOL_AGENT_FORK"

// missing names the remedy.
func missing(err error) error {
	var refusal *runner.Error
	if errors.As(err, &refusal) && refusal.Code == "AGENT_NOT_FOUND" {
		return &runner.Error{
			Code:    refusal.Code,
			Message: "OpenCode is not installed: no program `" + program + "` on the sandbox's PATH; install it with `npm i -g opencode-ai`",
		}
	}
	return err
}

// Open begins the handshake.
func (a Adapter) Open(l agent.Launch, in agent.Stdin) agent.Session {
	return acp.Open(dialect(l, a.Now), l, in)
}

// sessionName is the form of the CLI's session ids.
var sessionName = regexp.MustCompile(`^ses_[A-Za-z0-9]{1,64}$`)

// Transcript fails: OpenCode has no file of one session.
func (Adapter) Transcript(p agent.Place, agentSession string) (string, error) {
	if !sessionName.MatchString(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want ses_ and letters and digits", agentSession)
	}
	return "", fmt.Errorf("OpenCode keeps all its sessions in one database, %s: it has no transcript of one", database(p))
}

// database is where the CLI keeps its sessions.
func database(p agent.Place) string { return filepath.Join(home(p, "data"), "opencode", "opencode.db") }

// home is one of the folders that the CLI is given.
func home(p agent.Place, kind string) string { return filepath.Join(p.State, "opencode", kind) }

// model is the name that the model's API knows.
func model(l agent.Launch) string { return cmp.Or(l.Model, acp.Variable(l, "OPENAI_MODEL")) }
