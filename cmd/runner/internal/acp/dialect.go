package acp

import (
	"encoding/json"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// Dialect is what one agent does in its own way. The zero value is plain ACP;
// every function may be nil.
type Dialect struct {
	Now func() time.Time // measures tools; nil for time.Now

	// Version is the agent's version that was recorded; another one is said in a
	// log event. "" for none.
	Version string
	// Model is the model to choose, as the agent names it; "" for the agent's own choice.
	Model string
	// ModelSet reports whether the process was started with the model, by its
	// environment or its arguments: then the model is chosen over ACP only if the
	// agent offers it by that name.
	ModelSet bool
	// Shown is the model's name in events; "" for Model.
	Shown string
	// Instructions go before the first query that a process gets; "" for none.
	Instructions string
	// MCPServers go with the session; none for an agent that learns of them in another way.
	MCPServers []runner.MCPServer
	// Skills are folders outside of the workspace that may be read.
	Skills []string
	// AcceptWrites answers fs/write_text_file, which is not offered, as done: for
	// an agent that only shows there what it writes itself.
	AcceptWrites bool

	// Forks reports that the process forks the session of a launch with a Fork by
	// itself when it starts, and sends a Notice with Forked.
	Forks bool
	// Anchors reports that the id of a message is the position after it at which the
	// process can fork.
	Anchors bool

	// Transcript is where the agent keeps a session, "" for unknown.
	Transcript func(session string) string
	// Tool refines what the protocol says of a call, or gives nil.
	Tool func(Call) *Tool
	// Notice reads a notification that is not the protocol's, or gives nil.
	Notice func(method string, params json.RawMessage) *Notice
}

// Call is a tool's call, as far as it is known.
type Call struct {
	ID     string
	Name   string // the first title: most agents put the tool's name there
	Title  string // the last one
	Kind   sdk.ToolKind
	Input  json.RawMessage // null or {} until it is known
	Output json.RawMessage // rawOutput
	Paths  []string        // locations and diffs
	Asks   string          // in a permission request: the title that the request gave
}

// Notice is what an agent tells beside the protocol.
type Notice struct {
	Session string       // whose it is
	Warning string       // to be journaled as a log event
	Usage   events.Usage // taken since the last notice, also by a sub-agent
	CostUSD float64      // likewise
	Status  int          // the HTTP status by which the model failed
	Cut     bool         // the model's last answer reached its limit of tokens
	Over    bool         // the turn has been over for a while
	Forked  *Forked      // the copy of the session to fork; nil in other notices
}

// Forked is the result of a fork.
type Forked struct {
	Session string // the copy
	Error   string // why there is none, "" if there is one
}

// Tool is what a dialect knows of a call.
type Tool struct {
	Name  string // "" for the call's own
	Class Class
	// Search tells that the call may leave out its path.
	Search bool
	// Failed tells that a call that the agent calls completed did fail.
	Failed bool
	// Todos is the agent's list after the call, nil if the call is about something else.
	Todos []events.TodoItem
	// Subagent is set for a call that is a sub-agent.
	Subagent *Subagent
}

// Subagent is a sub-agent's call.
type Subagent struct {
	Name    string
	Prompt  string
	Session string // its own session, when it is known
	Said    string // its last words, when they are known
}
