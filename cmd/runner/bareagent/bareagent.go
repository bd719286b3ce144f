// Package bareagent runs agents without Spool: a warm process on its stdio, driven as the runner's adapter drives it, and
// the one-shot form of a CLI, which starts a process for every turn.
//
// The benchmark "turn" compares every agent that Agents returns with the same agent in Spool, and the conformance suite
// (package agenttest) checks that it works.
package bareagent

import (
	"context"
	"io"
	"time"
)

// Conversation is a running conversation with an agent's CLI, to which turns are sent one after the other. It is not
// safe for concurrent use.
type Conversation interface {
	// Turn sends a text and blocks until the turn has completed. It returns the time from the text to the first text of
	// the answer. The end of ctx kills the process.
	Turn(ctx context.Context, text string) (time.Duration, error)
	io.Closer
}

// PermissionConversation is a Conversation with an agent that requests a permission before it calls a tool.
type PermissionConversation interface {
	Conversation
	// Ask sends a text and blocks until the turn has completed. The agent must ask about exactly one call, which is allowed
	// at once. Ask returns the time from that answer to the result of the call. The end of ctx kills the process.
	Ask(ctx context.Context, text string) (time.Duration, error)
}

// Agent describes how to run an agent's CLI without Spool, to compare its speed.
type Agent struct {
	Architecture string // the name of its architecture in Spool
	Name         string // for people
	Program      string // on the PATH; "" for the runner itself
	Model        string // a model that the agent accepts, which a session in Spool needs too; "" for the default

	// Warm starts a process for all turns of a conversation, and returns when its handshake is over. path is the absolute
	// path of Program, dir a folder for the workspace and the agent's own files, and modelURL the URL of a scripted
	// model, without /v1.
	Warm func(path, dir, modelURL string) (Conversation, error)
	// Command returns the tool and its input by which the agent runs a shell command. It is nil unless the agent asks about
	// such calls, and the conversation of Warm is a PermissionConversation.
	Command func(command string) (tool string, input map[string]any)
	// OneShot is the form that starts a process for every turn; nil if there is none.
	OneShot *OneShotCLI
}

// OneShotCLI describes how to run a CLI that takes one text as an argument, prints the answer and ends. A conversation
// starts a new process for every turn.
type OneShotCLI struct {
	Command string // the command as users type it, without the text
	// Whole means that the CLI prints the text of a turn when it is complete.
	Whole bool
	// Start prepares a conversation, whose later turns continue the session of the first one. The arguments are those of
	// Warm.
	Start func(path, dir, modelURL string) (Conversation, error)
}

// Agents returns the descriptions of all agents that can run without Spool.
func Agents() []Agent { return []Agent{BuiltIn(), ClaudeCode(), Codex(), OpenCode()} }

// jsonObject is a JSON object.
type jsonObject = map[string]any
