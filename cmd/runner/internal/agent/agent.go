// Package agent is the seam between the runner and the architectures it can
// run. An architecture is an Adapter of three small methods:
//
//   - Command says how its process is started,
//   - Open gives a Session, which translates: a query into lines for the
//     process's stdin, and each line of its stdout into calls on a Turn,
//   - Transcript says where the process keeps its own record.
//
// Everything else is the supervisor's, once for all architectures: the process
// and its descendants, warm reuse from turn to turn, lines that are no JSON or
// too long, standard error, silence, exits in the middle of a turn, back-pressure,
// the journal's invariants. So a Session does no I/O of its own, starts no
// goroutine and can be tested by feeding it recorded lines (package agenttest).
package agent

import (
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// Adapter is one architecture.
type Adapter interface {
	// Command says how the agent's process is started. It must be a function of
	// the Launch alone: a warm process takes the next query as long as Command
	// gives the same answer for it, Resume and Fork apart. For a Fork it also lays down
	// the copy of the agent's records, and cuts it: anew at each call. A missing CLI is a
	// *runner.Error with code AGENT_NOT_FOUND whose message names the remedy.
	Command(Launch) (Command, error)
	// Open begins the conversation with a process that has just been started; a
	// handshake is sent from here.
	Open(Launch, Stdin) Session
	// Transcript is the absolute path of the agent's own record of one of its sessions.
	Transcript(p Place, agentSession string) (string, error)
}

// Session translates between one process's stdio and the vocabulary of blocks.
// Begin and Line are called by one goroutine; Interrupt by any, also while a
// Line is blocked because the journal is full.
type Session interface {
	// Begin sends a query. It is not called again before the turn has ended. The
	// agent has to print some line soon after: a warm process that stays mute is
	// taken for hung and replaced.
	Begin(runner.Query, *Turn) error
	// Line takes one line of stdout: one valid JSON value, without its newline,
	// valid until Line returns. Line ends the turn by Turn.End. Between turns the
	// Turn is one that drops what it is told. An error means that the line is not
	// of the agent's protocol: it is journaled, and the turn goes on.
	Line(line []byte, t *Turn) error
	// Interrupt asks the agent to stop the turn and stay warm; the turn still ends
	// by Turn.End, with outcome interrupted.
	Interrupt() error
}

// Stdin queues lines for the process. Send never waits for the process and is
// safe for concurrent use; a process that is gone shows by its exit.
type Stdin interface {
	// Send writes v as one line of JSON. The error is one of encoding.
	Send(v any) error
}

// Place is where an agent works.
type Place struct {
	Workspace string // absolute; the agent's working directory
	State     string // absolute; outside the workspace, kept as long as the sandbox: configuration, transcripts
}

// Launch is what a process is started for.
type Launch struct {
	Place
	SessionID    string
	Command      []string          // the query's, for architecture acp: the agent's program and its arguments
	Model        string            // the query's, else the profile's; "" for the architecture's default
	ModelSet     bool              // the environment or the command have the model
	SystemPrompt string            // the query's, else the profile's; "" for the architecture's default
	MemoryFile   string            // content of the agent's memory file (CLAUDE.md, AGENTS.md), likewise; "" for none
	Policy       string            // runner.PolicyWorkspace
	Env          map[string]string // the query's, for the process only: never to be journaled
	Resume       string            // the agent's own session id to go on with; "" for a new one
	Fork         *runner.Fork      // the query's, with Resume: go on with a copy of that session
	Environ      []string          // the runner's own environment, KEY=value
	Executable   string            // the runner's own binary

	// The query's, else the profile's. What an architecture has no means for was refused when the agent was applied.
	Tools      events.ToolChoice
	Subagents  []events.SubagentSpec
	Commands   []events.CommandSpec
	MCPServers []runner.MCPServer
	Skills     []runner.Skill
	MaxTurns   uint32 // requests to the model in one turn; 0 for no limit
}

// Listed are the skills that the agent itself is offered: not those that are sub-agents' alone.
func (l Launch) Listed() []runner.Skill {
	return slices.DeleteFunc(slices.Clone(l.Skills), func(s runner.Skill) bool { return s.Unlisted })
}

// Command is a process to start. The supervisor starts it in the workspace, in
// a session and process group of its own, with pipes as its stdio.
type Command struct {
	Path  string   // absolute
	Args  []string // without the program's name
	Env   []string // the whole environment, KEY=value
	Files []File   // laid down before it starts (package launchfiles)
}

// File is a file that a process finds when it starts, and that goes when another
// one starts without it.
type File struct {
	Path    string // relative to the state folder, with slashes
	Content string
	Link    string // in place of Content: the path that a symbolic link leads to
}

// Unkept is the folder below the state folder that is in no snapshot: for files with secrets in them.
const Unkept = "launch"

// Provided is the file below the state folder with the transcript that a caller provided for the session.
const Provided = Unkept + "/transcript"

// Environment merges the runner's environment with the launch's and with what
// the adapter sets (which wins), leaving out variables with one of the given
// prefixes. The runner's own settings (SPOOL_RUNNER_…) never reach an agent.
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
