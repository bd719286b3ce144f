package acp

import (
	"encoding/json"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
	"github.com/spoolhq/spool/pkg/runner"
)

// Dialect describes where one agent differs from the protocol. The zero value is plain ACP. Every function may be nil.
type Dialect struct {
	Now func() time.Time // the clock for tool durations; nil for time.Now

	// Version is the agent's version that was recorded, or "". Another version is reported in a log event.
	Version string
	// Model is the model to choose, by the name that the agent uses, or "" for the agent's default.
	Model string
	// ModelSet reports whether environment or arguments of the process have the model. If so, the model is chosen over
	// ACP only if the agent offers it by that name.
	ModelSet bool
	// Shown is the name of the model in events; "" for Model.
	Shown string
	// Instructions are sent before the first query of a process; "" for none.
	Instructions string
	// MCPServers are sent with the session. Empty for an agent that is configured with them in another way.
	MCPServers []runner.MCPServer
	// Skills are folders outside of the workspace that the agent may read.
	Skills []string
	// AcceptWrites makes the session answer fs/write_text_file with success, although it is not offered. It is for an
	// agent that writes files itself and uses the request only to show them.
	AcceptWrites bool

	// AnswersInitialize reports whether the agent answers a repeated initialize at once, also while it handles a query, and
	// without an effect. The query does not wait for session/list then.
	AnswersInitialize bool

	// StartTime is the time for which the agent may be silent in the handshake. It is set for an agent that copies or imports a session
	// before it answers. If the turn's own limit is longer, that limit applies.
	StartTime time.Duration

	// Forks reports whether the process itself forks the session of a launch with a Fork when it starts, and sends a
	// Notice with Forked.
	Forks bool
	// Anchors reports whether the id of a message is an anchor: the process can fork after that message.
	Anchors bool

	// Transcript is the path of the session, or "" if it is unknown.
	Transcript func(session string) string
	// Tool returns what the agent itself says about a call, beyond the protocol, or nil.
	Tool func(ToolCall) *ToolInfo
	// Notice decodes a notification that is not part of the protocol, or returns nil.
	Notice func(method string, params json.RawMessage) *Notice
}

// ToolCall is a call of a tool by the agent, with the fields that the agent has reported so far.
type ToolCall struct {
	ID     string
	Name   string // the first title: most agents put the tool's name there
	Title  string // the last title
	Kind   sdk.ToolKind
	Input  json.RawMessage // null or {} until it is known
	Output json.RawMessage // rawOutput
	Paths  []string        // locations and diffs
	Asks   string          // in a permission request: the title that the request gave
}

// Notice is the decoded form of a notification that an agent sends and that is not part of the Agent Client Protocol.
type Notice struct {
	Session string           // session that the notice is about
	Update  json.RawMessage  // as in session/update: what a sub-agent does, or a call that runs a sub-agent; nil in other notices
	Warning string           // text of a log event
	Usage   events.Usage     // used since the last notice, also by a sub-agent
	CostUSD float64          // cost since the last notice, also of a sub-agent
	Status  int              // the HTTP status by which the model failed
	Cut     bool             // the model's last answer reached its limit of tokens
	Over    bool             // the turn has been over for some time
	Forked  *ForkResult      // the copy of the session to fork; nil in other notices
	Text    *EarlyTextPiece  // text of the turn; nil in other notices
	Request *SubagentRequest // permission request of a sub-agent; nil in other notices

	// Parent and ParentCall are, with Update and Request, the session and the call that run the sub-agent. In an update of the main
	// agent they are its session and the call that the update is about.
	Parent, ParentCall string
}

// SubagentRequest is a permission request of a sub-agent, for which the protocol has no message. The session answers it
// with the notification _spool/answer.
type SubagentRequest struct {
	ID    string          // unique in the process
	Call  ToolCall        // with the arguments as the request has them
	Input json.RawMessage // the arguments of the call itself
	Over  bool            // the agent does not wait for the answer any more; only ID is set
}

// EarlyTextPiece is a piece of the turn's text that the agent reports in a Notice before it sends the update with the same
// text. Joined, the pieces of a turn are a prefix of the text of its updates; a call of a tool ends them.
type EarlyTextPiece struct {
	Message string // the messageId of the update
	Thought bool   // the update is an agent_thought_chunk
	Piece   string
}

// ForkResult is the result of the copy of a session that the agent's process made when it started.
type ForkResult struct {
	Session string // session id of the copy
	Error   string // why the copy failed, "" if it did not
}

// ToolInfo holds what a dialect knows about a tool call beyond the protocol's own fields.
type ToolInfo struct {
	Name    string              // "" for the name of the call
	Kind    permission.CallKind // what the call does, for the policy
	Named   bool                // the agent's definition names the tool
	LeftOut bool                // the agent's definition excludes the tool
	// Search reports whether the call may omit its path.
	Search bool
	// Failed reports whether a call failed that the agent reports as completed.
	Failed bool
	// Plan is the agent's plan after the completed call; nil if the call does not change the plan.
	Plan *events.Plan
	// Skill is the skill that the completed call has loaded; nil if the call loads none.
	Skill *events.LoadedSkill
	// Subagent is set if the call runs a sub-agent.
	Subagent *SubagentCall
}

// SubagentCall holds the arguments and the result of a tool call that runs a sub-agent.
type SubagentCall struct {
	Name   string
	Prompt string
	Said   string // its last message, once it is known
}
