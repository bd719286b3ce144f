// Package agent defines what an adapter of an agent implements. An architecture is an Adapter of three small methods:
//
//   - Command returns the process to start,
//   - OpenSession returns a Session, which translates a query into lines for the process's stdin, and each line of its
//     stdout into calls of a Turn,
//   - TranscriptPath returns the path of the agent's own record of a session.
//
// The supervisor does everything else, for all architectures alike: it starts and ends the process and its
// descendants, reuses it from turn to turn, handles lines that are not JSON or too long, standard error, silence,
// exits in the middle of a turn and back-pressure, and keeps the invariants of the journal. So a Session does no I/O
// and starts no goroutine, and package agenttest tests it with recorded lines.
package agent

import (
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// Adapter starts and drives the agents of one architecture; each architecture implements it once.
type Adapter interface {
	// Command returns the process to start. Its result depends on the Launch alone: a warm process takes the next
	// query as long as Command returns the same for it, Resume and Fork aside. For a Fork, Command also writes the
	// copy of the agent's records and cuts it at the anchor, again at each call. If the CLI is not installed, the
	// error is a *runner.CommandError with code AGENT_NOT_FOUND whose message says how to install it.
	Command(Launch) (Command, error)
	// OpenSession returns a session for a process that has just been started, and sends the handshake if there is one.
	OpenSession(Launch, Stdin) Session
	// TranscriptPath returns the absolute path of the agent's own record of a session.
	TranscriptPath(p Folders, agentSession string) (string, error)
}

// Session translates between the stdio of one process and the calls of a Turn. One goroutine calls BeginTurn and HandleLine.
// Interrupt may be called by any goroutine, also while HandleLine is blocked because the journal is full.
type Session interface {
	// BeginTurn sends a query. It is not called again before the turn has ended. The agent has to print a line soon after:
	// a warm process that prints nothing is considered hung and is replaced.
	BeginTurn(runner.Query, *Turn) error
	// HandleLine takes one line of stdout: a JSON value without its newline, which must not be used after HandleLine
	// has returned. HandleLine ends the turn by Turn.End. Between turns, what is written to t becomes events of the next turn. An error means that the
	// line does not belong to the agent's protocol; the line is journaled, and the turn goes on.
	HandleLine(line []byte, t *Turn) error
	// Interrupt asks the agent to stop the turn and to stay warm. The turn still ends by Turn.End, with outcome
	// interrupted.
	Interrupt() error
}

// Stdin queues lines for the standard input of an agent's process. Send does not wait for the process and is safe for
// concurrent use. Send does not report whether the process has ended.
type Stdin interface {
	// Send writes v as one line of JSON. It fails only if v cannot be encoded.
	Send(v any) error
}

// Folders holds the absolute paths of the two folders of a sandbox in which an agent works.
type Folders struct {
	Workspace string // absolute; the agent's working directory
	State     string // absolute; outside the workspace, kept as long as the sandbox: configuration, transcripts
}

// Launch holds everything that determines how the process of an agent is started.
type Launch struct {
	Folders
	SessionID         string
	Command           []string          // from the query, for architecture acp: the agent's program and its arguments
	Model             string            // the query's, else the profile's; "" for the architecture's default
	ModelSet          bool              // the environment or the command name the model
	SystemPrompt      string            // the query's, else the profile's; "" for the architecture's default
	MemoryFile        string            // content of the agent's memory file (CLAUDE.md, AGENTS.md), likewise; "" for none
	Env               map[string]string // from the query, only for the process: must never be journaled
	Resume            string            // the agent's own session id to resume; "" for a new session
	Fork              *runner.Fork      // from the query, with Resume: continue with a copy of that session
	ContinueAfterLoss bool              // from the query: begin a new conversation if Resume cannot be continued
	Environ           []string          // the runner's own environment, KEY=value
	Executable        string            // the runner's own binary

	// From the query, else from the profile. A field that the architecture does not support was refused when the agent
	// was applied.
	Tools      events.ToolChoice
	Subagents  []events.SubagentSpec
	Commands   []events.CommandSpec
	MCPServers []runner.MCPServer
	Skills     []runner.Skill
	MaxTurns   uint32 // requests to the model in one turn; 0 for no limit

	SubagentDepth uint32 // levels of sub-agents that may be started; 0 for no limit

	Permissions          events.Permissions // the agent's permission policy
	ExecutionPermissions events.ExecutionPermissions
}

// MainAgentSkills returns the skills of the launch that the main agent may use. It leaves out those that only
// sub-agents may use.
func (l Launch) MainAgentSkills() []runner.Skill {
	return slices.DeleteFunc(slices.Clone(l.Skills), func(s runner.Skill) bool { return s.Unlisted })
}

// LoadedSkill returns the skill with the given name and folder, in the form that events have. It has a version if it is a skill of the launch.
func (l Launch) LoadedSkill(name, dir string) *events.LoadedSkill {
	skill := &events.LoadedSkill{Name: name, Path: dir}
	for _, s := range l.Skills {
		if s.Name == name && s.Dir == dir {
			skill.Version = s.Version
		}
	}
	return skill
}

// Command is the command line, environment and files of an agent's process. The supervisor starts the process in the
// workspace, in a session and process group of its own, with pipes as its stdio.
type Command struct {
	Path  string       // absolute
	Args  []string     // without the program's name
	Env   []string     // the whole environment, KEY=value
	Files []LaunchFile // written before the process starts (package launchfiles)
}

// LaunchFile is a file in the state folder that the runner writes before it starts an agent's process. The runner removes the
// file when it starts a process whose Command does not have the file.
type LaunchFile struct {
	Path    string // relative to the state folder, with slashes
	Content string
	Link    string // in place of Content: the path that a symbolic link leads to
}

// UnsavedFolder is the path, relative to the state folder, of the folder that snapshots leave out. It is for files that
// hold secrets.
const UnsavedFolder = "launch"

// ProvidedTranscript is the path, relative to the state folder, of the transcript that a client uploaded for the
// session.
const ProvidedTranscript = UnsavedFolder + "/transcript"

// Environment returns the environment of an agent's process as KEY=value. l.Env overrides variables of the runner's own
// environment, and set overrides both. Variables of the runner's environment are left out if they begin with one of
// dropPrefixes, or are settings of the runner (SPOOL_RUNNER_…).
func (l Launch) Environment(set map[string]string, dropPrefixes ...string) []string {
	var out []string
	drop := append([]string{"SPOOL_RUNNER_"}, dropPrefixes...)
	for _, kv := range l.Environ {
		key, _, _ := strings.Cut(kv, "=")
		_, inEnv := l.Env[key]
		_, inSet := set[key]
		if !inEnv && !inSet && !hasPrefix(key, drop) {
			out = append(out, kv)
		}
	}
	for _, k := range sortedKeys(l.Env) {
		if _, over := set[k]; !over {
			out = append(out, k+"="+l.Env[k])
		}
	}
	for _, k := range sortedKeys(set) {
		out = append(out, k+"="+set[k])
	}
	return out
}
