// Package acp is the adapter of architecture acp: any agent that speaks version 1 of the Agent Client Protocol on
// stdin and stdout. The query's command starts it. One process does all turns; when it has ended, the next process
// resumes its session by session/resume or session/load.
//
// A Dialect describes where an agent differs from the protocol; package opencode has one.
package acp

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// Architecture is the name of the architecture whose agents speak the Agent Client Protocol.
const Architecture = architecture.ACP

// setupDigestVariable is an environment variable of the agent's process that holds a digest of the model, the instructions and the MCP servers.
// They are sent over the protocol; the digest makes the command differ when they change, so that the supervisor starts another process.
const setupDigestVariable = "SPOOL_AGENT_SETUP_SHA256"

// Adapter implements agent.Adapter for any agent that speaks the Agent Client Protocol.
type Adapter struct {
	Now func() time.Time // the clock for tool durations; nil for time.Now
}

// Command returns the process to start: the command that the launch names, with the agent's environment.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	if len(l.Command) == 0 || l.Command[0] == "" {
		return agent.Command{}, &runner.CommandError{
			Code:    "INVALID_COMMAND",
			Message: "query.command is empty: architecture acp needs the agent's program and its arguments, such as [\"gemini\", \"--acp\"]",
		}
	}
	path, err := FindProgram(l, l.Command[0])
	if err != nil {
		return agent.Command{}, err
	}
	set, err := createHome(l)
	if err != nil {
		return agent.Command{}, err
	}
	if l.Resume != "" {
		if err := relocateRecords(l); err != nil && !l.ContinueAfterLoss {
			return agent.Command{}, agent.LossRefusal(err.Error())
		}
	}
	if say := Instructions(l); say != "" || l.Model != "" || len(l.MCPServers) > 0 {
		servers, err := json.Marshal(l.MCPServers)
		if err != nil {
			return agent.Command{}, fmt.Errorf("MCP servers: %w", err)
		}
		sum := sha256.Sum256([]byte(l.Model + "\x00" + say + "\x00" + string(servers)))
		set[setupDigestVariable] = hex.EncodeToString(sum[:])
	}
	return agent.Command{Path: path, Args: slices.Clone(l.Command[1:]), Env: l.Environment(set, "XDG_")}, nil
}

// createHome creates the agent's home folder and returns the variables HOME and XDG_CACHE_HOME for the agent. The home is in the state folder,
// because an agent keeps its sessions somewhere below its home, and the state folder moves with the session into its next sandbox. Caches do not
// move.
func createHome(l agent.Launch) (map[string]string, error) {
	home := homeDir(l)
	if err := os.MkdirAll(home, 0o700); err != nil {
		return nil, fmt.Errorf("make the agent's home: %w", err)
	}
	return map[string]string{"HOME": home, "XDG_CACHE_HOME": filepath.Join(os.TempDir(), "acp-cache")}, nil
}

// homeDir returns the path of the agent's home folder.
func homeDir(l agent.Launch) string { return filepath.Join(l.State, "acp", "home") }

// OpenSession returns the session of an agent process that was just started, and sends the handshake.
func (a Adapter) OpenSession(l agent.Launch, in agent.Stdin) agent.Session {
	return OpenSession(Dialect{
		Now: a.Now, Model: l.Model, ModelSet: l.ModelSet, Instructions: Instructions(l), MCPServers: l.MCPServers, Skills: SkillFolders(l), Tool: classifyServerTools(l),
	}, l, in)
}

// TranscriptPath always returns an error: the protocol does not define where an agent keeps its sessions.
func (Adapter) TranscriptPath(agent.Folders, string) (string, error) {
	return "", fmt.Errorf("architecture %s: the agent does not tell where it keeps its sessions", Architecture)
}

// Instructions returns the system prompt and the memory file of the launch as one text, or "" if it has neither.
func Instructions(l agent.Launch) string {
	parts := []string{l.SystemPrompt}
	if l.MemoryFile != "" {
		parts = append(parts, "# Memory file (AGENTS.md)\n"+l.MemoryFile)
	}
	return strings.Join(slices.DeleteFunc(parts, func(p string) bool { return p == "" }), "\n\n")
}

// SkillFolders returns the paths of the folders of the agent's skills.
func SkillFolders(l agent.Launch) []string {
	var dirs []string
	for _, s := range l.Skills {
		dirs = append(dirs, s.Dir)
	}
	return dirs
}

// FindProgram returns the absolute path of an agent's program. program is an absolute path or a name on the PATH that the agent will have. A path
// relative to the workspace is refused: a file that an agent wrote must not be started.
func FindProgram(l agent.Launch, program string) (string, error) {
	missing := func(why string) error {
		return &runner.CommandError{Code: "AGENT_NOT_FOUND", Message: fmt.Sprintf("the agent's program %q %s", program, why)}
	}
	if filepath.IsAbs(program) {
		if !isExecutable(program) {
			return "", missing("is not an executable file in the sandbox")
		}
		return program, nil
	}
	if strings.ContainsRune(program, filepath.Separator) {
		return "", missing("is a relative path: set an absolute path, or a name on the PATH")
	}
	for _, dir := range filepath.SplitList(LaunchVariable(l, "PATH")) {
		if at := filepath.Join(dir, program); filepath.IsAbs(dir) && isExecutable(at) {
			return at, nil
		}
	}
	return "", missing("is not on the sandbox's PATH: install it, or set its absolute path")
}

// LaunchVariable returns the value of an environment variable that the agent's process will have: the query's value, else the runner's.
func LaunchVariable(l agent.Launch, name string) string {
	if v, ok := l.Env[name]; ok {
		return v
	}
	for _, kv := range slices.Backward(l.Environ) {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v
		}
	}
	return ""
}

// isExecutable reports whether path is a regular file with an execute bit.
func isExecutable(path string) bool {
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0
}
