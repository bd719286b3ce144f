// Package opencode is the adapter of the architecture opencode: the OpenCode CLI, driven over `opencode acp`, the Agent
// Client Protocol on stdin and stdout (package acp). One process runs all turns; the next process resumes its session,
// which is stored in a database below the state folder.
//
// The CLI asks about every call of the agent itself. It passes on no request of a sub-agent: plugin.js reports those, if the
// permission policy could decide otherwise than that of an agent without permissions, and takes the answers. When one of
// several calls that wait is rejected, the CLI rejects all of them. An answer has no field for a reason: the comment of a
// person goes with the next query.
//
// The recordings are from version 1.18.33 of the CLI, see testdata/README.md.
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

// Architecture is the name of the architecture.
const Architecture = architecture.OpenCode

// Tested is the version of the CLI that the recordings are from. Other versions are used as well, with a warning in the
// log.
const Tested = "1.18.33"

// program is the CLI's name on the PATH.
const program = "opencode"

// Adapter drives the OpenCode CLI.
type Adapter struct {
	Now func() time.Time // measures tools; nil for time.Now
}

// Command returns the command that starts `opencode` from the agent's PATH with its files in the state folder. It also
// creates the few files that the CLI needs there. They are named after their content, so that the command depends on
// the launch only.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	path, err := acp.Find(l, program)
	if err != nil {
		return agent.Command{}, missingCLIError(err)
	}
	name := model(l)
	if name == "" {
		return agent.Command{}, &runner.CommandError{
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
		"XDG_DATA_HOME": home(l.Folders, "data"), "XDG_CONFIG_HOME": home(l.Folders, "config"),
		"XDG_CACHE_HOME": home(l.Folders, "cache"), "XDG_STATE_HOME": home(l.Folders, "state"),
		"OPENCODE_CONFIG_CONTENT": config,
		// Settings of the workspace must not override the policy or start programs.
		"OPENCODE_DISABLE_PROJECT_CONFIG":  "1",
		"OPENCODE_DISABLE_CLAUDE_CODE":     "1",
		"OPENCODE_DISABLE_EXTERNAL_SKILLS": "1",
		// There is no network except for the model API.
		"OPENCODE_DISABLE_MODELS_FETCH":    "1",
		"OPENCODE_DISABLE_AUTOUPDATE":      "1",
		"OPENCODE_DISABLE_LSP_DOWNLOAD":    "1",
		"OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
		"OPENCODE_DISABLE_SHARE":           "1",
	}
	if l.HasPolicy() {
		set[asksVariable] = "1"
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
	return importCommand(l, command)
}

// forkVariable is the environment variable that makes plugin.js fork a session when the CLI starts.
const forkVariable = "SPOOL_AGENT_FORK"

// missingCLIError returns the error for a missing CLI, with the remedy.
func missingCLIError(err error) error {
	var refusal *runner.CommandError
	if errors.As(err, &refusal) && refusal.Code == "AGENT_NOT_FOUND" {
		return &runner.CommandError{
			Code:    refusal.Code,
			Message: "OpenCode is not installed: no program `" + program + "` on the sandbox's PATH; install it with `npm i -g opencode-ai`",
		}
	}
	return err
}

// Open returns the session of a process that was started, and sends the handshake.
func (a Adapter) Open(l agent.Launch, in agent.Stdin) agent.Session {
	return acp.Open(dialect(l, a.Now), l, in)
}

// sessionName matches the CLI's session ids.
var sessionName = regexp.MustCompile(`^ses_[A-Za-z0-9]{1,64}$`)

// Transcript always fails: OpenCode has no file for a single session.
func (Adapter) Transcript(p agent.Folders, agentSession string) (string, error) {
	if !sessionName.MatchString(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want ses_ and letters and digits", agentSession)
	}
	return "", fmt.Errorf("OpenCode keeps all its sessions in one database, %s: it has no transcript of one", database(p))
}

// database returns the path of the database with the CLI's sessions.
func database(p agent.Folders) string {
	return filepath.Join(home(p, "data"), "opencode", "opencode.db")
}

// home returns one of the folders that the CLI uses, by kind.
func home(p agent.Folders, kind string) string { return filepath.Join(p.State, "opencode", kind) }

// model returns the name of the model for the model API.
func model(l agent.Launch) string { return cmp.Or(l.Model, acp.Variable(l, "OPENAI_MODEL")) }
