// Package agenttest is the suite that the adapter of every agent passes.
//
// Exercise runs the part of the suite that Capabilities describe: it replays recorded output of the agent's CLI and
// compares the journal with golden files, it runs the CLI itself under the real supervisor against a scripted model,
// and it runs the CLI alone, as the benchmark "turn" does. A test of something that one agent alone has uses the parts directly: Harness, ReplayLines, Journal.
package agenttest

import (
	"testing"
	"time"

	"github.com/spoolhq/spool/cmd/runner/bareagent"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// AgentUnderTest describes the agent and the adapter that the suite tests.
type AgentUnderTest struct {
	Architecture string
	Adapter      agent.Adapter

	// Program is the name of the agent's CLI. Tests that run the CLI are skipped when it is not on the PATH.
	// "" means that the test binary itself is the agent; see Command.
	Program string
	// Install is the shell command that installs Program. The error AGENT_NOT_FOUND has to contain it.
	Install string
	// Command is the command of every query, for architecture acp.
	Command []string
	// Environ are variables, KEY=value, that the supervisor's process has in addition to PATH and HOME.
	Environ []string
	// Env returns the environment of every query for a scripted model at the URL, which has no path.
	Env func(modelURL string) map[string]string
	// NoModel means that the agent needs no scripted model; Env is called with "".
	NoModel bool
	// Model is the model of every query; "" for the CLI's default.
	Model string
	// MuteKill is the supervisor's limit of that name; 0 for its default.
	MuteKill time.Duration
}

// Capabilities describe which parts of the suite apply to an agent, each with the data that the part needs. A nil field
// means that the agent does not have the capability.
type Capabilities struct {
	Goldens      *Goldens
	Conversation *Conversation
	Confinement  *ConfinementCheck
	Resume       *ResumeCheck
	Settings     *WorkspaceSettings
	Fork         *ForkCheck
	Provided     *ProvidedCheck
	ProxyRestart *ProxyRestartCheck
	// Bare returns the agent without Spool, with which the benchmark "turn" compares the agent in Spool.
	Bare func() bareagent.Agent
}

// Exercise runs the conformance suite of adapters for the agent s, as far as its capabilities c apply.
func Exercise(t *testing.T, s AgentUnderTest, c Capabilities) {
	t.Helper()
	if c.Goldens != nil {
		t.Run("goldens", func(t *testing.T) { checkGoldens(t, s, *c.Goldens) })
		t.Run("lines in any order", func(t *testing.T) { t.Parallel(); checkDisorderedReplay(t, s, *c.Goldens) })
	}
	if s.Program != "" {
		t.Run("missing CLI", func(t *testing.T) { t.Parallel(); checkMissingCLI(t, s) })
	}
	if c.Conversation != nil {
		t.Run("one process for all turns", func(t *testing.T) { t.Parallel(); checkOneProcess(t, s, *c.Conversation, c.Confinement) })
		t.Run("interrupt before the process has started", func(t *testing.T) { t.Parallel(); checkInterruptAtOnce(t, s) })
	}
	if c.Resume != nil {
		t.Run("resume", func(t *testing.T) { t.Parallel(); checkResume(t, s, *c.Resume) })
	}
	if c.Settings != nil {
		t.Run("settings in the workspace", func(t *testing.T) { t.Parallel(); checkWorkspaceSettings(t, s, *c.Settings, *c.Confinement) })
	}
	if c.Fork != nil {
		t.Run("fork", func(t *testing.T) { t.Parallel(); checkFork(t, s, *c.Fork) })
	}
	if c.Provided != nil {
		t.Run("provided transcript", func(t *testing.T) { t.Parallel(); checkProvided(t, s, *c.Provided) })
	}
	if c.ProxyRestart != nil {
		t.Run("restart of the egress proxy", func(t *testing.T) { t.Parallel(); checkProxyRestart(t, s, *c.ProxyRestart) })
	}
	if c.Bare != nil {
		t.Run("bare agent", func(t *testing.T) { t.Parallel(); checkBareAgent(t, s, c.Bare()) })
	}
}
