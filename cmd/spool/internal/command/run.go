package command

import (
	"fmt"
	"io"
	"os"
	"strings"
	"unicode/utf8"

	spoolv1 "github.com/spoolhq/spool/pkg/api/spool/v1"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
)

// maxQueryBytes is the maximum size of a query.
const maxQueryBytes = 1 << 20

type runCommand struct {
	serverFlags
	Agent    string   `placeholder:"A" help:"The agent of the new session: [ORG/]SLUG[@VERSION]."`
	Instance string   `placeholder:"I" help:"An agent instance, instead of --agent."`
	Env      []string `placeholder:"E" help:"An environment of the new session; may be repeated. A later one overrides an earlier one."`
	variableFlags
	Architecture       string `placeholder:"A" help:"Architecture of the agent: claude-code, codex, opencode, acp or spool."`
	Session            string `placeholder:"SESSION" help:"Continue a session; by default a new one is created."`
	Sandbox            string `placeholder:"P" help:"Sandbox provider of the new session."`
	Model              string `placeholder:"M" help:"Model of the new session."`
	ModelProvider      string `name:"model-provider" placeholder:"P" help:"The API of the model: anthropic, openai or nvidia."`
	OnConversationLoss string `enum:",fail,continue" default:"" placeholder:"fail|continue" help:"What happens to a turn whose agent cannot continue the conversation; by default what the agent's definition says, or fail."`

	ModelPreset string   `placeholder:"PRESET" help:"With --architecture acp: how the agent receives its model: claude, opencode or qwen (docs/agents.md)."`
	Image       string   `placeholder:"IMAGE" help:"Image of the new session's sandbox."`
	Command     string   `placeholder:"\"PROGRAM ARG…\"" help:"With --architecture acp: the agent's program and its arguments; quote arguments with spaces."`
	Egress      []string `sep:"none" placeholder:"HOST" help:"A host besides the model APIs that the sandbox may reach: host, host:port or *.host; a prefix of HTTP methods restricts the host to these methods (GET,HEAD api.example.com); may be repeated."`
	budgetFlags `prefix:"budget-"`
	File        []string `sep:"none" placeholder:"F" help:"A file or a folder to put into the workspace first; may be repeated."`
	folderFlags `embed:""`
	Transcript  string   `placeholder:"FILE" help:"A transcript of Claude Code, Codex or OpenCode (the output of opencode export), whose conversation the agent of the new session continues."`
	Detach      bool     `help:"Print the ids and exit without waiting for the end."`
	Wait        waitFlag `help:"With --json: print one object when the query has ended, with the execution and the cursor after it, instead of the events. --wait=30s waits for 30 seconds at most and then prints the execution as it is, with exit code 124; the query continues."`
	Unattended  bool     `help:"Nobody is there to decide: calls that a person would decide are denied or skipped, as the agent's permissions say. This is the default if standard input is not a terminal."`
	Attended    bool     `help:"Somebody decides elsewhere, for example with spool approvals, although standard input is not a terminal."`
	MockLLM     bool     `name:"mock-llm" env:"SPOOL_MOCK_LLM" help:"If this run starts a stack, use a scripted model server instead of real models."`
	Query       string   `arg:"" optional:"" help:"The query; without it, or with -, it is read from standard input."`
}

// Run sends a query to a new or an existing session, and prints the output of the execution until its end. With
// c.Detach it only prints the ids. With c.Wait it prints nothing but the execution after its end.
func (c *runCommand) Run(a *app) error {
	query, err := c.readQuery(a)
	if err != nil {
		return err
	}
	if c.Unattended && c.Attended {
		return usageError("attended: --attended and --unattended exclude each other")
	}
	if err := c.checkWait(); err != nil {
		return err
	}
	options, err := c.sessionOptions()
	if err != nil {
		return err
	}
	files, err := readQueryFiles(c.File)
	if err != nil {
		return err
	}
	variables, err := c.readVariables(a)
	if err != nil {
		return err
	}
	folder, err := c.folderFlags.resolveFolder(a, c.Session)
	if err != nil {
		return err
	}
	if c.Session != "" {
		if err := checkID("session", events.KindSession, c.Session); err != nil {
			return err
		}
		if c.Transcript != "" || c.Agent != "" || c.Instance != "" || len(c.Env) > 0 || c.Architecture != "" || c.Sandbox != "" || c.Model != "" || options != nil {
			return usageError("session: --agent, --instance, --env, --architecture, --sandbox, --model, --model-provider, --model-preset, --image, --command, --egress, --on-conversation-loss and the budget are set when a session is created, as is --transcript; leave them out with --session")
		}
	}
	r := &queryRun{app: a, cmd: c, query: query, options: options, files: files, folder: folder, variables: variables, typed: make(chan os.Signal, 16), watcher: &sessionWatcher{app: a, json: c.JSON, quiet: c.Wait.set}}
	return r.run()
}

// sessionOptions returns the options for a new session, or nil if no flag sets one.
func (c *runCommand) sessionOptions() (*spoolv1.SessionOptions, error) {
	command, err := splitWords(c.Command)
	if err != nil {
		return nil, usageError("command: %v", err)
	}
	if _, err := egress.ParseAllowlist(c.Egress); err != nil {
		return nil, usageError("egress: %v", err)
	}
	budget, err := c.toBudget("budget-")
	if err != nil {
		return nil, err
	}
	if c.Image == "" && c.ModelProvider == "" && c.ModelPreset == "" && command == nil && c.Egress == nil && budget == nil && c.OnConversationLoss == "" {
		return nil, nil
	}
	var settings *spoolv1.ModelSettings
	if c.ModelPreset != "" {
		settings = &spoolv1.ModelSettings{Preset: c.ModelPreset}
	}
	return &spoolv1.SessionOptions{ModelSettings: settings, ModelProvider: c.ModelProvider, Image: c.Image, Command: command, Egress: c.Egress, Budget: budget, OnConversationLoss: c.OnConversationLoss}, nil
}

// readQuery returns the text of the query, from the arguments or from standard input.
func (c *runCommand) readQuery(a *app) (string, error) {
	q := c.Query
	if q == "" || q == "-" {
		if q == "" && a.InTTY {
			return "", usageError("query: state what to do, for example spool run \"list the files\", or use a pipe")
		}
		b, err := io.ReadAll(io.LimitReader(a.In, maxQueryBytes+1))
		if err != nil {
			return "", fmt.Errorf("query: read standard input: %w", err)
		}
		q = strings.TrimRight(string(b), "\r\n")
	}
	switch {
	case len(q) > maxQueryBytes:
		return "", usageError("query: larger than 1 MiB; put long text into a file of the workspace")
	case strings.TrimSpace(q) == "":
		return "", usageError("query: empty")
	case !utf8.ValidString(q):
		return "", usageError("query: not valid UTF-8")
	}
	return q, nil
}
