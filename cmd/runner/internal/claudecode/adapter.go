// Package claudecode is the architecture claude-code: the Claude Code CLI,
// driven over its two-way protocol (JSON lines on stdin and stdout). One process
// takes turn after turn; when it is gone the next one goes on with its session.
//
// What the CLI prints was recorded with version Tested, see testdata/README.md.
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

// Architecture is its name.
const Architecture = architecture.ClaudeCode

// Tested is the version of the CLI that the recordings are of. Another one is
// used all the same, and the session's log says so.
const Tested = "2.1.197"

// program is the CLI's name on the PATH.
const program = "claude"

// maxRetries is how often the CLI asks the model again unless
// CLAUDE_CODE_MAX_RETRIES says otherwise: four waits come to 7.5 s. The CLI's
// own default of ten keeps a turn without a model for minutes.
const maxRetries = "4"

// mcpPatience is how long the first turn waits for MCP servers, in milliseconds: a
// process that a query finds warm has to show a sign of life before it is taken for hung.
const mcpPatience = "20000"

// promptDigest names the variable that stands for the handshake in the command:
// the prompts in it are too long for an argument, and others need another process.
const promptDigest = "SPOOL_AGENT_PROMPT_SHA256"

// withoutPeople are the tools that need somebody to answer, or that begin turns
// by themselves, which nobody would record.
var withoutPeople = []string{
	"AskUserQuestion", "EnterPlanMode", "ExitPlanMode", "EnterWorktree", "ExitWorktree",
	"CronCreate", "CronDelete", "CronList", "ScheduleWakeup",
}

// inherited are variables by which one Claude Code recognises another as its parent.
var inherited = []string{"CLAUDECODE", "CLAUDE_CODE_ENTRYPOINT", "CLAUDE_CODE_SSE_PORT", "CLAUDE_CODE_SESSION", "CLAUDE_CODE_CHILD"}

// Adapter drives Claude Code.
type Adapter struct {
	Now func() time.Time // measures tools; nil for time.Now
}

// Command starts the `claude` of the agent's PATH with its files in the state folder.
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
	// No --session-id: the CLI refuses one that it has used, and a process that
	// died early must not block its session. The id is learnt from what it prints.
	resume, err := resumeArgs(l)
	if err != nil {
		return agent.Command{}, err
	}
	args = append(args, resume...)
	set := map[string]string{
		"CLAUDE_CONFIG_DIR":                        config(l.Place),
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
		// What runs on after a turn's end would begin turns that nobody asked for.
		"CLAUDE_CODE_DISABLE_BACKGROUND_TASKS": "1",
		"CLAUDE_CODE_DISABLE_CRON":             "1",
	}
	if !has(l, "CLAUDE_CODE_MAX_RETRIES") {
		set["CLAUDE_CODE_MAX_RETRIES"] = maxRetries
	}
	if shake := newHandshake(l); shake.says() {
		sum := sha256.Sum256(shake.bytes())
		set[promptDigest] = hex.EncodeToString(sum[:])
	}
	if len(l.MCPServers) > 0 {
		_, variables := mcpServers(l)
		maps.Copy(set, variables)
		// By default a turn begins without a server that takes longer than five seconds to start.
		set["MCP_CONNECTION_NONBLOCKING"], set["MCP_CONNECT_TIMEOUT_MS"] = "0", mcpPatience
	}
	return agent.Command{Path: path, Args: args, Env: l.Environment(set, inherited...), Files: files}, nil
}

// Open sends the handshake. Its answer is the process's first line, so that it
// shows signs of life before any query.
func (a Adapter) Open(l agent.Launch, in agent.Stdin) agent.Session {
	if a.Now == nil {
		a.Now = time.Now
	}
	s := newSession(l.Place, in, a.Now)
	s.scope = newScope(l)
	s.lost = lost(l)
	s.initialize(newHandshake(l))
	return s
}

// Transcript is the CLI's own record of a session.
func (Adapter) Transcript(p agent.Place, agentSession string) (string, error) {
	if !isUUID(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want a UUID in lower case", agentSession)
	}
	// The CLI names the folder after the working directory as the system tells it.
	dir, err := filepath.EvalSymlinks(p.Workspace)
	if err != nil {
		return "", fmt.Errorf("workspace: %w", err)
	}
	return filepath.Join(config(p), "projects", folder(dir), agentSession+".jsonl"), nil
}

// configName is the CLI's configuration folder below the state folder.
const configName = "claude"

// config is the CLI's configuration folder.
func config(p agent.Place) string { return filepath.Join(p.State, configName) }

// hasTranscript reports whether a session has a transcript here: without one "claude --resume" exits at once.
func hasTranscript(p agent.Place, agentSession string) bool {
	path, err := Adapter{}.Transcript(p, agentSession)
	if err != nil {
		return false
	}
	info, err := os.Stat(path)
	return err == nil && info.Mode().IsRegular() && info.Size() > 0
}

func has(l agent.Launch, name string) bool {
	_, ok := l.Env[name]
	return ok || slices.ContainsFunc(l.Environ, func(kv string) bool { return strings.HasPrefix(kv, name+"=") })
}

// lookup finds the CLI on the PATH that the agent will have.
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
	return "", &runner.Error{
		Code:    "AGENT_NOT_FOUND",
		Message: "Claude Code is not installed: no program `" + program + "` on the sandbox's PATH; install it with `npm i -g @anthropic-ai/claude-code`",
	}
}

// maxFolder is from where on the CLI shortens a folder's name, in UTF-16 units.
const maxFolder = 200

// folder is the CLI's name for a working directory's transcripts.
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

// isUUID accepts the canonical form alone: the id becomes a file's name.
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
