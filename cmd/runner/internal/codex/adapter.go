// Package codex is the adapter of the architecture codex. It drives the Codex CLI over the CLI's app server (JSON-RPC
// without the key jsonrpc, one object a line). One process runs all turns of a thread; the next process resumes the
// thread.
//
// The recordings are from version 0.169.0 of the CLI, see testdata/README.md. docs/adr/0014-codex.md gives the reasons
// for the configuration.
//
// With the approval policy "untrusted" and the sandbox policy externalSandbox, this version asks about every command, also
// about those that it takes for safe, such as ls, and about every change of files. It does not ask about the input of a
// running terminal, images, the start of sub-agents, and resources and read-only tools of MCP servers. If the permission
// policy could decide about these otherwise than that of an agent without permissions, policySettings and threadConfig make
// the CLI ask, or take the tools away.
package codex

import (
	"bytes"
	"cmp"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/cmd/runner/internal/codexcli"
	"github.com/spoolhq/spool/cmd/runner/internal/transcript"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// Architecture is the name of the architecture that runs Codex.
const Architecture = architecture.Codex

// programName is the name of Codex's CLI on the PATH.
const programName = "codex"

// TestedVersion is the version of Codex's CLI that the adapter was tested with. Another version works too; the adapter then journals a warning.
const TestedVersion = "0.169.0"

// openAIBaseURL is the address of the model API when the variable OPENAI_BASE_URL is empty.
const openAIBaseURL = "https://api.openai.com/v1"

// promptDigestVariable is an environment variable with the hash of the prompts and MCP servers, which are sent when the thread begins. The CLI does
// not read it: its value makes the command differ when they have changed, so that the supervisor starts another process.
const promptDigestVariable = "SPOOL_AGENT_PROMPT_SHA256"

// cliSettings are settings of the CLI that are passed as arguments, which take precedence over every config.toml: no file of the workspace or of an
// earlier start can change them. The values are TOML.
var cliSettings = []string{
	`model_provider="spool"`,
	`model_providers.spool.name="Spool"`,
	`model_providers.spool.wire_api="responses"`,
	// The pauses double, beginning with 200 ms: if the model API is down, the turn fails within seconds.
	`model_providers.spool.request_max_retries=2`,
	`model_providers.spool.stream_max_retries=3`,
	`features.unbounded_connection_retries=false`,
	`sandbox_mode="danger-full-access"`,
	// The policy denies the network, and the model's own search would bypass it.
	`web_search="disabled"`,
	`tools.update_plan.enabled=true`,
	// No user answers, and a goal begins turns that no query asked for.
	`features.goals=false`,
	`features.sleep_tool=false`,
	// The CLI calls the model API and no other server.
	`analytics.enabled=false`,
	`otel.exporter="none"`,
	`otel.metrics_exporter="none"`,
	`check_for_update_on_startup=false`,
	`features.apps=false`,
	`features.plugins=false`,
	`features.remote_plugin=false`,
	`features.skill_mcp_dependency_install=false`,
	`features.image_generation=false`,
	// A shell snapshot would write the shell's environment to a file.
	`features.shell_snapshot=false`,
	`history.persistence="none"`,
}

// Adapter implements agent.Adapter for Codex.
type Adapter struct{}

// Command returns the command that starts `codex` from the agent's PATH with its files in the state folder.
func (Adapter) Command(l agent.Launch) (agent.Command, error) {
	path, err := findCLI(l)
	if err != nil {
		return agent.Command{}, err
	}
	// The CLI refuses a home that does not exist.
	if err := os.MkdirAll(homeDir(l.Folders), 0o700); err != nil {
		return agent.Command{}, fmt.Errorf("home of Codex: %w", err)
	}
	configured := append(slices.Clone(cliSettings),
		"model_providers.spool.base_url="+quoteTOML(cmp.Or(l.Env["OPENAI_BASE_URL"], inheritedVariable(l, "OPENAI_BASE_URL"), openAIBaseURL)),
	)
	// If the variable is configured and not set, each turn fails. Some model servers need no key.
	if cmp.Or(l.Env["OPENAI_API_KEY"], inheritedVariable(l, "OPENAI_API_KEY")) != "" {
		configured = append(configured, `model_providers.spool.env_key="OPENAI_API_KEY"`)
	}
	if l.Model != "" {
		configured = append(configured, "model="+quoteTOML(l.Model))
	}
	configured = append(configured, policySettings(l)...)
	// A command of the agent may have written rules by which the CLI would not ask about others.
	if err := os.RemoveAll(filepath.Join(homeDir(l.Folders), "rules")); err != nil {
		return agent.Command{}, fmt.Errorf("rules of Codex: %w", err)
	}
	if l.Fork != nil {
		if err := copyForkedTranscript(l); err != nil {
			return agent.Command{}, err
		}
	}
	args := []string{"app-server"}
	for _, c := range configured {
		args = append(args, "-c", c)
	}
	set := map[string]string{"CODEX_HOME": homeDir(l.Folders), "NO_COLOR": "1"}
	if digest := handshakeDigest(l); digest != "" {
		set[promptDigestVariable] = digest
	}
	return agent.Command{Path: path, Args: args, Env: l.Environment(set, "CODEX_"), Files: definitionFiles(l)}, nil
}

// OpenSession returns the session of a process that was just started. It sends the handshake and the request for the thread at once, so that a
// query later takes a single request.
func (Adapter) OpenSession(l agent.Launch, in agent.Stdin) agent.Session {
	s := newSession(l, in)
	if l.Resume == "" {
		s.sendHandshake()
		return s
	}
	if l.Fork != nil {
		s.resume = transcript.ForkID(l)
	}
	said, err := readTranscript(l.Folders, s.resume)
	if err != nil {
		s.lost, s.resume = lostThreadReason(l), ""
	}
	s.instructed = hasInstructions(said, addedPrompt(l))
	s.sendHandshake()
	return s
}

// TranscriptPath returns the path of the file in which the CLI records a thread.
func (Adapter) TranscriptPath(p agent.Folders, agentSession string) (string, error) {
	if !isUUID(agentSession) {
		return "", fmt.Errorf("agent session %.100q: want a UUID in lower case", agentSession)
	}
	// sessions/2026/11/21/rollout-2026-11-21T20-49-08-<id>.jsonl, in local time.
	days, err := filepath.Glob(filepath.Join(escapeGlob(homeDir(p)), "sessions", "*", "*", "*", "rollout-*-"+agentSession+".jsonl"))
	if err != nil {
		return "", fmt.Errorf("transcript of %s: %w", agentSession, err)
	}
	if len(days) == 0 {
		return "", fmt.Errorf("transcript of %s: %w", agentSession, os.ErrNotExist)
	}
	return days[len(days)-1], nil
}

// homeDirName is the name of the CLI's own folder, CODEX_HOME, in the state folder.
const homeDirName = "codex"

// homeDir returns the path of the CLI's own folder, CODEX_HOME.
func homeDir(p agent.Folders) string { return filepath.Join(p.State, homeDirName) }

// readTranscript returns the content of the transcript of a thread.
func readTranscript(p agent.Folders, thread string) ([]byte, error) {
	path, err := Adapter{}.TranscriptPath(p, thread)
	if err != nil {
		return nil, err
	}
	return os.ReadFile(path) //nolint:gosec // in the state folder, by an id that was checked
}

// hasInstructions reports whether prompt is the last instruction in the transcript said. A resumed thread keeps the instructions that it began
// with.
func hasInstructions(said []byte, prompt string) bool {
	at := bytes.LastIndex(said, []byte(instructionsTag))
	return prompt == "" || at >= 0 && bytes.HasPrefix(said[at:], []byte(strings.Trim(quoteTOML(prompt), `"`)))
}

// instructionsTag is the first line of the prompts, by which they are found in a transcript.
const instructionsTag = "<agent_instructions>"

// addedPrompt returns the text that the launch adds to the CLI's own instructions, "" for none.
func addedPrompt(l agent.Launch) string {
	parts := []string{l.SystemPrompt}
	if l.MemoryFile != "" {
		parts = append(parts, "# Memory file (AGENTS.md)\n"+l.MemoryFile)
	}
	parts = slices.DeleteFunc(parts, func(p string) bool { return p == "" })
	if len(parts) == 0 {
		return ""
	}
	return instructionsTag + "\n" + strings.Join(parts, "\n\n") + "\n</agent_instructions>"
}

// quoteTOML returns s as a basic string of TOML. JSON strings are such strings.
func quoteTOML(s string) string {
	var out strings.Builder
	enc := json.NewEncoder(&out)
	enc.SetEscapeHTML(false)
	if err := enc.Encode(strings.ToValidUTF8(s, "\uFFFD")); err != nil {
		return `""` // strings always marshal
	}
	return strings.ReplaceAll(strings.TrimSpace(out.String()), "\x7f", `\u007f`)
}

// escapeGlob returns a glob pattern that matches only path.
func escapeGlob(path string) string {
	return strings.NewReplacer(`\`, `\\`, `*`, `\*`, `?`, `\?`, `[`, `\[`).Replace(path)
}

// inheritedVariable returns the value of one of the runner's environment variables, "" if it is not set.
func inheritedVariable(l agent.Launch, name string) string {
	for _, kv := range l.Environ {
		if v, ok := strings.CutPrefix(kv, name+"="); ok {
			return v
		}
	}
	return ""
}

// findCLI returns the path of Codex's CLI on the agent's PATH. The error says how to install the CLI.
func findCLI(l agent.Launch) (string, error) {
	for _, dir := range filepath.SplitList(cmp.Or(l.Env["PATH"], inheritedVariable(l, "PATH"))) {
		if !filepath.IsAbs(dir) {
			continue // never the workspace's own "codex"
		}
		at := filepath.Join(dir, programName)
		if info, err := os.Stat(at); err == nil && info.Mode().IsRegular() && info.Mode().Perm()&0o111 != 0 {
			return codexcli.NativeProgram(at), nil
		}
	}
	return "", &runner.CommandError{
		Code:    "AGENT_NOT_FOUND",
		Message: "Codex is not installed: no program `" + programName + "` on the sandbox's PATH; install it with `npm i -g @openai/codex`",
	}
}

// isUUID reports whether s is a UUID in the canonical form. The id becomes a part of a file name.
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
