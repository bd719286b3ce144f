// Package claudecode is the adapter of architecture claude-code: the Claude Code CLI with its two-way protocol of JSON
// lines on stdin and stdout. One process does all turns; when it has ended, the next process resumes its session.
//
// # Permissions
//
// By itself the CLI asks only about some calls: it reads files of the workspace, runs commands that it considers harmless
// (ls, cat, git status), keeps its lists and starts sub-agents without asking. That is enough for the policy of an agent
// without permissions, which allows these calls anyway. With any other policy the PreToolUse hook of the handshake answers
// "ask" for every call, so that the CLI asks about all of them. With version TestedVersion:
//   - The hook runs for every tool of the CLI and of MCP servers, of sub-agents too, and in plan mode, in which the CLI
//     otherwise runs commands without asking. What settings, hooks and sub-agents of the workspace say (allow rules, modes,
//     disableAllHooks, a hook that allows, permissionMode of a sub-agent) does not change that.
//   - A hook that does not answer in time denies the call. A hook with an empty or unknown answer does not count, so there
//     is one answer only.
//   - In the CLI's simple mode (CLAUDE_CODE_SIMPLE) no hook runs. Ask rules in the settings of the command line hold there too.
//   - Settings of the workspace name commands that the CLI runs unasked (hooks, apiKeyHelper), and an agent that may change
//     files can write them. So they are not read, and neither are the workspace's skills, sub-agents and commands, which can
//     have hooks too. Its CLAUDE.md is read.
//
// # Sub-agents
//
// On stdout the CLI prints the calls of the main agent's own sub-agents, but not their texts, and nothing of the sub-agents
// that these start. With --session-mirror it also prints what it writes to the transcripts, and a sub-agent of any depth has a
// transcript of its own. So the conversations of all sub-agents are journaled from these lines (subagents.go). The CLI writes
// transcripts at most a tenth of a second late, and completely before it ends a turn. The hook's answer to a call of a
// sub-agent waits for the call's line, so that a call runs only after it was journaled: if the CLI cannot write a transcript,
// the sub-agent does nothing, and the turn ends as one in which the agent does not go on.
//
// The CLI sends suggestions of rules with its requests; they are never accepted, because they would change the settings of
// the workspace and the CLI would no longer ask.
//
// The recordings are of version TestedVersion of the CLI, see testdata/README.md.
package claudecode

import (
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// Architecture is the name of the architecture that runs Claude Code.
const Architecture = architecture.ClaudeCode

// TestedVersion is the version of Claude Code's CLI that the adapter was tested with. Another version works too; the adapter then journals a
// warning.
const TestedVersion = "2.1.197"

// programName is the name of Claude Code's CLI on the PATH.
const programName = "claude"

// defaultMaxRetries is the maximum number of times that the CLI repeats a request to the model, unless CLAUDE_CODE_MAX_RETRIES is set. Four retries
// wait 7.5 s in total. With the CLI's own default of ten, a turn without a model takes minutes.
const defaultMaxRetries = "4"

// mcpStartTimeout is the maximum time in milliseconds for which the first turn waits for MCP servers. It is limited because a warm process has to
// print something before the supervisor considers it hung.
const mcpStartTimeout = "20000"

// promptDigestVariable is an environment variable that holds a digest of the prompts in the handshake. The CLI does not read the variable: its
// value makes the command differ when the prompts have changed, so that the supervisor starts another process.
const promptDigestVariable = "SPOOL_AGENT_PROMPT_SHA256"

// excludedTools are the tools of the CLI that an agent never has: they leave the workspace, or begin turns without a query, whose events would not
// be journaled.
var excludedTools = []string{
	"EnterWorktree", "ExitWorktree",
	"CronCreate", "CronDelete", "CronList", "ScheduleWakeup",
}

// parentVariables are the environment variables by which a process of Claude Code recognises that another one has started it.
var parentVariables = []string{"CLAUDECODE", "CLAUDE_CODE_ENTRYPOINT", "CLAUDE_CODE_SSE_PORT", "CLAUDE_CODE_SESSION", "CLAUDE_CODE_CHILD"}

// Adapter implements agent.Adapter for Claude Code.
type Adapter struct {
	Now func() time.Time // the clock for tool durations; nil for time.Now
}

// Command returns the command that starts `claude` from the agent's PATH, with the files that it reads in the state folder.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	path, err := findCLI(l)
	if err != nil {
		return agent.Command{}, err
	}
	if err := checkToolNames(l); err != nil {
		return agent.Command{}, err
	}
	files, err := definitionFiles(l)
	if err != nil {
		return agent.Command{}, err
	}
	args := append([]string{
		"-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose",
		"--include-partial-messages", "--replay-user-messages", "--session-mirror",
		"--permission-prompt-tool", "stdio", "--permission-mode", "default",
	}, definitionArguments(l)...)
	if l.Model != "" {
		args = append(args, "--model", l.Model)
	}
	// There is no --session-id: the CLI refuses an id that it has used, so a process that ended early would block its
	// session. The session learns the id from the output.
	resume, err := resumeArgs(l)
	if err != nil {
		return agent.Command{}, err
	}
	args = append(args, resume...)
	set := map[string]string{
		"CLAUDE_CONFIG_DIR":                        configDir(l.Folders),
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
		// Background work that goes on after the end of a turn would begin turns without a query.
		"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
		"CLAUDE_CODE_DISABLE_CRON":             "1",
	}
	if asksAboutEachCall(l) {
		set["CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD"] = "1"
	}
	if !hasVariable(l, "CLAUDE_CODE_MAX_RETRIES") {
		set["CLAUDE_CODE_MAX_RETRIES"] = defaultMaxRetries
	}
	if shake := newHandshakeContent(l); shake.hasContent() {
		sum := sha256.Sum256(shake.encode())
		set[promptDigestVariable] = hex.EncodeToString(sum[:])
	}
	if len(l.MCPServers) > 0 {
		_, variables := mcpServers(l)
		maps.Copy(set, variables)
		// By default a turn begins without a server that takes longer than five seconds to start.
		set["MCP_CONNECTION_NONBLOCKING"], set["MCP_CONNECT_TIMEOUT_MS"] = "0", mcpStartTimeout
	}
	return agent.Command{Path: path, Args: args, Env: l.Environment(set, parentVariables...), Files: files}, nil
}

// OpenSession returns the session of a process that was just started, and sends the handshake. The process answers the handshake before any query,
// which shows that it has started.
func (a Adapter) OpenSession(l agent.Launch, in agent.Stdin) agent.Session {
	if a.Now == nil {
		a.Now = time.Now
	}
	s := newSession(l.Folders, in, a.Now)
	s.launch, s.scope = l, newPolicyScope(l)
	s.lost = whyNotResumable(l)
	s.sendInitialize(newHandshakeContent(l))
	return s
}

// TranscriptPath returns the path of the transcript that the CLI writes for a session.
func (Adapter) TranscriptPath(p agent.Folders, agentSession string) (string, error) {
	if !isUUID(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want a UUID in lower case", agentSession)
	}
	// The CLI names the folder after the working directory with symbolic links resolved.
	dir, err := filepath.EvalSymlinks(p.Workspace)
	if err != nil {
		return "", fmt.Errorf("workspace: %w", err)
	}
	return filepath.Join(configDir(p), "projects", transcript.FolderName(dir), agentSession+".jsonl"), nil
}

// configDirName is the name of the CLI's configuration folder in the state folder.
const configDirName = "claude"

// configDir returns the path of the CLI's configuration folder.
func configDir(p agent.Folders) string { return filepath.Join(p.State, configDirName) }

// hasTranscript reports whether the transcript of a session exists. Without it, "claude --resume" exits at once.
func hasTranscript(p agent.Folders, agentSession string) bool {
	path, err := Adapter{}.TranscriptPath(p, agentSession)
	if err != nil {
		return false
	}
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Size() > 0
}

// hasVariable reports whether the launch, or else the runner, sets an environment variable.
func hasVariable(l agent.Launch, name string) bool {
	_, ok := l.Env[name]
	return ok || slices.ContainsFunc(l.Environ, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
}

// environmentVariable returns the value of an environment variable of the agent, "" if it is not set.
func environmentVariable(l agent.Launch, name string) string {
	if v, ok := l.Env[name]; ok {
		return v
	}
	value := ""
	for _, kv := range l.Environ {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			value = v
		}
	}
	return value
}

// findCLI returns the path of Claude Code's CLI on the PATH that the agent will have. The error says how to install the CLI.
func findCLI(l agent.Launch) (string, error) {
	path := l.Env["PATH"]
	for _, kv := range l.Environ {
		if v, ok := strings.CutPrefix(kv, "PATH="); ok {
			path = cmp.Or(path, v)
		}
	}
	for _, dir := range filepath.SplitList(path) {
		if !filepath.IsAbs(dir) {
			continue // never the workspace's own "claude"
		}
		at := filepath.Join(dir, programName)
		if info, err := os.Stat(at); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return at, nil
		}
	}
	return "", &runner.CommandError{
		Code:    "AGENT_NOT_FOUND",
		Message: "Claude Code is not installed: no program `" + programName + "` on the sandbox's PATH; install it with `npm i -g @anthropic-ai/claude-code`",
	}
}

// isUUID reports whether s is a UUID in the canonical form, which can be the name of a file.
func isUUID(s string) bool {
	if len(s) != 36 {
		return false
	}
	for i, c := range []byte(s) {
		dash := i == 8 || i == 13 || i == 18 || i == 23
		if dash != (c == '-') || !dash && !strings.ContainsRune("0123456789abcdef", rune(c)) {
			return false
		}
	}
	return true
}
