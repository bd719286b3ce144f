// Package claudecode is the adapter of architecture claude-code: the Claude Code CLI with its two-way protocol of JSON
// lines on stdin and stdout. One process does all turns; when it has ended, the next process resumes its session.
//
// # Permissions
//
// By itself the CLI asks only about some calls: it reads files of the workspace, runs commands that it considers harmless
// (ls, cat, git status), keeps its lists and starts sub-agents without asking. That is enough for the policy of an agent
// without permissions, which allows these calls anyway. With any other policy the handshake registers a PreToolUse hook that
// answers "ask" for every call, so that the CLI asks about all of them. With version Tested:
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
// The CLI sends suggestions of rules with its requests; they are never accepted, because they would change the settings of
// the workspace and the CLI would no longer ask.
//
// The recordings are of version Tested of the CLI, see testdata/README.md.
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
	"strconv"
	"strings"
	"time"
	"unicode/utf16"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// Architecture is the name of the architecture.
const Architecture = architecture.ClaudeCode

// Tested is the version of the CLI that the adapter was tested with. With another version the adapter works too, and writes a warning to the
// session's log.
const Tested = "2.1.197"

// program is the name of the CLI on the PATH.
const program = "claude"

// maxRetries is the maximum number of times that the CLI repeats a request to the model, unless CLAUDE_CODE_MAX_RETRIES is set. Four retries
// wait 7.5 s in total. With the CLI's default of ten, a turn without a model takes minutes.
const maxRetries = "4"

// mcpPatience is the time for which the first turn waits for MCP servers, in milliseconds. It is limited because a warm process
// has to print something before it is considered hung.
const mcpPatience = "20000"

// promptDigest is an environment variable that holds a digest of the prompts in the handshake. The CLI does not read it: its value makes the
// command differ when the prompts have changed, and the supervisor then starts another process.
const promptDigest = "SPOOL_AGENT_PROMPT_SHA256"

// excludedTools are the CLI's tools that an agent never has: they leave the workspace, or begin turns without a query, whose events would not
// be recorded.
var excludedTools = []string{
	"EnterWorktree", "ExitWorktree",
	"CronCreate", "CronDelete", "CronList", "ScheduleWakeup",
}

// parentVariables are the variables by which a Claude Code recognises another one as its parent.
var parentVariables = []string{"CLAUDECODE", "CLAUDE_CODE_ENTRYPOINT", "CLAUDE_CODE_SSE_PORT", "CLAUDE_CODE_SESSION", "CLAUDE_CODE_CHILD"}

// Adapter runs Claude Code.
type Adapter struct {
	Now func() time.Time // the clock for tool durations; nil for time.Now
}

// Command returns the command that starts `claude` from the agent's PATH, with the files that it reads in the state folder.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	path, err := lookup(l)
	if err != nil {
		return agent.Command{}, err
	}
	if err := checkTools(l); err != nil {
		return agent.Command{}, err
	}
	files, err := definitionFiles(l)
	if err != nil {
		return agent.Command{}, err
	}
	args := append([]string{
		"-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose",
		"--include-partial-messages", "--replay-user-messages",
		"--permission-prompt-tool", "stdio", "--permission-mode", "default",
	}, definitionArgs(l)...)
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
		"CLAUDE_CONFIG_DIR":                        config(l.Folders),
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
		// Background work that goes on after the end of a turn would begin turns without a query.
		"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
		"CLAUDE_CODE_DISABLE_CRON":             "1",
	}
	if checkEachCall(l) {
		set["CLAUDE_CODE_ADDITIONAL_DIRECTORIES_CLAUDE_MD"] = "1"
	}
	if !hasVariable(l, "CLAUDE_CODE_MAX_RETRIES") {
		set["CLAUDE_CODE_MAX_RETRIES"] = maxRetries
	}
	if shake := newHandshake(l); shake.hasContent() {
		sum := sha256.Sum256(shake.bytes())
		set[promptDigest] = hex.EncodeToString(sum[:])
	}
	if len(l.MCPServers) > 0 {
		_, variables := mcpServers(l)
		maps.Copy(set, variables)
		// By default a turn begins without a server that takes longer than five seconds to start.
		set["MCP_CONNECTION_NONBLOCKING"], set["MCP_CONNECT_TIMEOUT_MS"] = "0", mcpPatience
	}
	return agent.Command{Path: path, Args: args, Env: l.Environment(set, parentVariables...), Files: files}, nil
}

// Open returns the session of a process that was started, and sends the handshake. The process answers the handshake before any query, which
// shows that it has started.
func (a Adapter) Open(l agent.Launch, in agent.Stdin) agent.Session {
	if a.Now == nil {
		a.Now = time.Now
	}
	s := newSession(l.Folders, in, a.Now)
	s.scope = newScope(l)
	s.lost = whyNotResumable(l)
	s.initialize(newHandshake(l), checkEachCall(l))
	return s
}

// Transcript returns the path of the record that the CLI keeps of a session.
func (Adapter) Transcript(p agent.Folders, agentSession string) (string, error) {
	if !isUUID(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want a UUID in lower case", agentSession)
	}
	// The CLI names the folder after the working directory with symbolic links resolved.
	dir, err := filepath.EvalSymlinks(p.Workspace)
	if err != nil {
		return "", fmt.Errorf("workspace: %w", err)
	}
	return filepath.Join(config(p), "projects", folder(dir), agentSession+".jsonl"), nil
}

// configName is the name of the CLI's configuration folder below the state folder.
const configName = "claude"

// config returns the CLI's configuration folder.
func config(p agent.Folders) string { return filepath.Join(p.State, configName) }

// hasTranscript reports whether the transcript of a session exists. Without it, "claude --resume" exits at once.
func hasTranscript(p agent.Folders, agentSession string) bool {
	path, err := Adapter{}.Transcript(p, agentSession)
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

// variable returns the value of an environment variable of the agent, "" if it is not set.
func variable(l agent.Launch, name string) string {
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

// lookup returns the path of the CLI on the PATH that the agent will have.
func lookup(l agent.Launch) (string, error) {
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
		at := filepath.Join(dir, program)
		if info, err := os.Stat(at); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return at, nil
		}
	}
	return "", &runner.CommandError{
		Code:    "AGENT_NOT_FOUND",
		Message: "Claude Code is not installed: no program `" + program + "` on the sandbox's PATH; install it with `npm i -g @anthropic-ai/claude-code`",
	}
}

// maxFolder is the length in UTF-16 units from which the CLI shortens the name of a folder.
const maxFolder = 200

// folder returns the name of the folder in which the CLI keeps the transcripts of a working directory.
func folder(dir string) string {
	units := utf16.Encode([]rune(dir))
	name := make([]byte, len(units))
	var hash int32
	for i, u := range units {
		hash = hash*31 + int32(u)
		switch {
		case u >= 'a' && u <= 'z', u >= 'A' && u <= 'Z', u >= '0' && u <= '9':
			name[i] = byte(u)
		default:
			name[i] = '-'
		}
	}
	if len(name) <= maxFolder {
		return string(name)
	}
	return string(name[:maxFolder]) + "-" + strconv.FormatInt(max(int64(hash), -int64(hash)), 36)
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
