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

// Architecture is the name of the architecture that runs OpenCode.
const Architecture = architecture.OpenCode

// TestedVersion is the version of OpenCode's CLI that the adapter was tested with. Another version works too; the
// adapter then journals a warning.
const TestedVersion = "1.18.33"

// programName is the name of OpenCode's CLI on the PATH.
const programName = "opencode"

// Adapter implements agent.Adapter for OpenCode.
type Adapter struct {
	Now func() time.Time // measures tools; nil for time.Now
}

// Command returns the command that starts `opencode` from the agent's PATH with its files in the state folder. It also
// creates the few files that the CLI needs there. Their names depend on their content, so that equal launches have
// equal commands.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	path, err := acp.FindProgram(l, programName)
	if err != nil {
		return agent.Command{}, missingCLIError(err)
	}
	name := modelName(l)
	if name == "" {
		return agent.Command{}, &runner.CommandError{
			Code: "INVALID_COMMAND", Message: "query.model is empty: OpenCode needs the name of a model, there or in OPENAI_MODEL",
		}
	}
	if err := checkToolNames(l); err != nil {
		return agent.Command{}, err
	}
	files, err := writeConfigFiles(l)
	if err != nil {
		return agent.Command{}, fmt.Errorf("state folder of OpenCode: %w", err)
	}
	config, err := encodeConfig(l, name, files)
	if err != nil {
		return agent.Command{}, err
	}
	set := map[string]string{
		"XDG_DATA_HOME": homeDir(l.Folders, "data"), "XDG_CONFIG_HOME": homeDir(l.Folders, "config"),
		"XDG_CACHE_HOME": homeDir(l.Folders, "cache"), "XDG_STATE_HOME": homeDir(l.Folders, "state"),
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
		set[reportAsksVariable] = "1"
	}
	if l.Fork != nil {
		raw, err := json.Marshal(jsonObject{"session": l.Resume, "anchor": l.Fork.Anchor})
		if err != nil {
			return agent.Command{}, fmt.Errorf("fork: %w", err)
		}
		set[forkSessionVariable] = string(raw)
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

// forkSessionVariable is the environment variable that makes plugin.js, the adapter's plugin in the CLI, fork a session
// when the CLI starts.
const forkSessionVariable = "SPOOL_AGENT_FORK"

// missingCLIError returns the error AGENT_NOT_FOUND for a missing CLI, which says how to install the CLI.
func missingCLIError(err error) error {
	var refusal *runner.CommandError
	if errors.As(err, &refusal) && refusal.Code == "AGENT_NOT_FOUND" {
		return &runner.CommandError{
			Code:    refusal.Code,
			Message: "OpenCode is not installed: no program `" + programName + "` on the sandbox's PATH; install it with `npm i -g opencode-ai`",
		}
	}
	return err
}

// OpenSession returns the session of a process that was just started, and sends the handshake.
func (a Adapter) OpenSession(l agent.Launch, in agent.Stdin) agent.Session {
	return acp.OpenSession(newDialect(l, a.Now), l, in)
}

// sessionIDPattern matches the ids of the CLI's sessions.
var sessionIDPattern = regexp.MustCompile(`^ses_[A-Za-z0-9]{1,64}$`)

// TranscriptPath always returns an error, because OpenCode has no file for a single session.
func (Adapter) TranscriptPath(p agent.Folders, agentSession string) (string, error) {
	if !sessionIDPattern.MatchString(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want ses_ and letters and digits", agentSession)
	}
	return "", fmt.Errorf("OpenCode keeps all its sessions in one database, %s: it has no transcript of one", databasePath(p))
}

// databasePath returns the path of the SQLite database in which the CLI stores its sessions.
func databasePath(p agent.Folders) string {
	return filepath.Join(homeDir(p, "data"), "opencode", "opencode.db")
}

// homeDir returns the path of one of the CLI's own folders, such as data or config, by kind.
func homeDir(p agent.Folders, kind string) string { return filepath.Join(p.State, "opencode", kind) }

// modelName returns the name of the model of a launch in the form that the model API accepts.
func modelName(l agent.Launch) string { return cmp.Or(l.Model, acp.LaunchVariable(l, "OPENAI_MODEL")) }
