package cli

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin"
	"github.com/spoolhq/spool/cmd/runner/internal/profile"
	"github.com/spoolhq/spool/pkg/architecture"
)

// printJSON prints v as one line of JSON.
func (s *System) printJSON(v any) error {
	if err := json.NewEncoder(s.Stdout).Encode(v); err != nil {
		return fmt.Errorf("print: %w", err)
	}
	return nil
}

// loadProfileCommand is the command load-agent-profile, which stores a profile for later queries.
type loadProfileCommand struct {
	State string `required:"" help:"The state folder." env:"SPOOL_RUNNER_STATE"`
}

func (c *loadProfileCommand) Run(sys *System) error {
	p, err := profile.Read(sys.Stdin)
	if err != nil {
		return err
	}
	if err := profile.Save(c.State, p); err != nil {
		return err
	}
	return sys.printJSON(map[string]any{"type": "agent_profile_loaded", "systemPromptBytes": len(p.SystemPrompt), "memoryFileBytes": len(p.MemoryFile), "model": p.Model})
}

// transcriptFlags are the flags that identify the transcript of an agent session.
type transcriptFlags struct {
	Architecture string `required:"" help:"Architecture of the agent that wrote the transcript, such as spool or claude-code."`
	AgentSession string `required:"" help:"The agent's own session id."`
	Workspace    string `required:"" help:"The workspace, an existing folder." env:"SPOOL_RUNNER_WORKSPACE"`
	State        string `required:"" help:"The state folder." env:"SPOOL_RUNNER_STATE"`
}

// transcriptPath returns the path at which the agent stores the transcript.
func (c transcriptFlags) transcriptPath(sys *System) (string, error) {
	if name, ok := architecture.Canonical(c.Architecture); ok {
		c.Architecture = name
	}
	a, ok := sys.Architectures[c.Architecture]
	if !ok {
		return "", fmt.Errorf("architecture: %q is not known to this runner", c.Architecture)
	}
	place, err := prepareFolders(c.Workspace, c.State)
	if err != nil {
		return "", err
	}
	return a.TranscriptPath(place, c.AgentSession)
}

// loadTranscriptCommand is the command load-session-transcript, which writes a transcript to the path where the agent
// reads it.
type loadTranscriptCommand struct {
	At transcriptFlags `embed:""`
}

func (c *loadTranscriptCommand) Run(sys *System) error {
	path, err := c.At.transcriptPath(sys)
	if err != nil {
		return err
	}
	n, err := replaceFile(path, sys.Stdin)
	if err != nil {
		return err
	}
	return sys.printJSON(map[string]any{"type": "session_transcript_loaded", "agentSessionId": c.At.AgentSession, "path": path, "bytes": n})
}

// replaceFile replaces the file at path atomically by the content of from, and returns the number of bytes.
func replaceFile(path string, from io.Reader) (int64, error) {
	if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
		return 0, fmt.Errorf("make transcript folder: %w", err)
	}
	f, err := os.CreateTemp(filepath.Dir(path), ".spool-*")
	if err != nil {
		return 0, fmt.Errorf("write transcript: %w", err)
	}
	n, err := io.Copy(f, from)
	if err = errors.Join(err, f.Close()); err == nil {
		err = os.Rename(f.Name(), path)
	}
	if err != nil {
		return 0, errors.Join(fmt.Errorf("write transcript: %w", err), os.Remove(f.Name()))
	}
	return n, nil
}

// readTranscriptCommand is the command read-session-transcript, which prints an agent's transcript.
type readTranscriptCommand struct {
	At transcriptFlags `embed:""`
}

func (c *readTranscriptCommand) Run(sys *System) error {
	path, err := c.At.transcriptPath(sys)
	if err != nil {
		return err
	}
	f, err := os.Open(path)
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("agent-session: %q has no transcript here (%s)", c.At.AgentSession, path)
	}
	if err != nil {
		return fmt.Errorf("read transcript: %w", err)
	}
	defer f.Close() //nolint:errcheck // nothing was written
	if _, err := io.Copy(sys.Stdout, f); err != nil {
		return fmt.Errorf("read transcript: %w", err)
	}
	return nil
}

// builtinAgentCommand is the command agent, the process of the built-in agent.
type builtinAgentCommand struct {
	Workspace string `required:"" help:"The workspace, an existing folder."`
	State     string `required:"" help:"The state folder."`
	Resume    string `help:"The agent's own session id to go on with."`
}

// Help returns the help text about the agent's environment variables.
func (*builtinAgentCommand) Help() string {
	return "Variables: OPENAI_BASE_URL (with /v1), OPENAI_API_KEY, OPENAI_MODEL (when the query names none), " +
		"SPOOL_AGENT_MAX_STEPS (answers of the model in one turn, 50), SPOOL_AGENT_MODEL_TIMEOUT (silence of the model, 2m), " +
		"SPOOL_AGENT_CODE_TIMEOUT (of run_code, 60s)."
}

func (c *builtinAgentCommand) Run(ctx context.Context, sys *System, log *slog.Logger) error {
	hideProcess(log)
	p := builtin.AgentProcess{
		Workspace: c.Workspace, State: c.State, Resume: c.Resume, Getenv: sys.Getenv, Environ: sys.Environ,
		Log: slog.New(log.Handler()).With("agent", builtin.Architecture),
	}
	return p.Run(ctx, sys.Stdin, sys.Stdout)
}
