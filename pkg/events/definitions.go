package events

import (
	"cmp"
	"time"
)

// AgentSpec is the definition of an agent. Fields that the architecture does not support are rejected when the
// agent is applied, see docs/agents.md.
type AgentSpec struct {
	Name          string                 `json:"name,omitempty"`          // display name
	Description   string                 `json:"description,omitempty"`   // display text
	Architecture  string                 `json:"architecture"`            // claude-code, codex, opencode, acp or spool
	Model         string                 `json:"model,omitempty"`         // "" means the architecture's default
	ModelProvider string                 `json:"modelProvider,omitempty"` // the API by which models are reached: anthropic, openai or nvidia; "" means the executor's default for the architecture
	Instructions  string                 `json:"instructions"`            // the system prompt: 10 characters or more
	MemoryFile    string                 `json:"memoryFile,omitempty"`    // content of CLAUDE.md or AGENTS.md
	Tools         ToolChoice             `json:"tools,omitzero"`
	Skills        []Reference            `json:"skills,omitempty"`
	Subagents     []SubagentSpec         `json:"subagents,omitempty"`
	Commands      []CommandSpec          `json:"commands,omitempty"`
	MCPServers    []MCPServer            `json:"mcpServers,omitempty"`
	Environment   map[string]Declaration `json:"environment,omitempty"`  // variables: the lowest layer
	Files         []FileSpec             `json:"files,omitempty"`        // of a new workspace
	Command       []string               `json:"command,omitempty"`      // of architecture acp: the agent's program and its arguments
	ModelSettings ModelSettings          `json:"modelSettings,omitzero"` // of architecture acp: how the agent is given its model
	Image         string                 `json:"image,omitempty"`        // of the sandbox
	Dependencies  Dependencies           `json:"dependencies,omitzero"`
	Egress        []string               `json:"egress,omitempty"` // hosts besides the model APIs that the sandbox may reach; a prefix of HTTP methods and a space restricts the host to these methods
	Limits        Limits                 `json:"limits,omitzero"`
	Retries       Retries                `json:"retries,omitzero"`     // what happens when the agent's process or its sandbox dies during an execution
	Loops         Loops                  `json:"loops,omitzero"`       // what happens when the agent repeats a tool call
	Permissions   Permissions            `json:"permissions,omitzero"` // what the agent may do
	Conversation  Conversation           `json:"conversation,omitzero"`
}

// Values of Conversation.OnLoss.
const (
	OnLossFail     = "fail"
	OnLossContinue = "continue"
)

// Conversation defines how the agent continues a session's conversation in another process.
type Conversation struct {
	OnLoss string `json:"onLoss,omitempty"` // what happens to a turn whose agent cannot continue the conversation: fail (the default): the execution fails with CONVERSATION_LOST; continue: the agent runs without it, after an error event TRANSCRIPT_LOST
}

// ToolChoice restricts an agent's tools, by the names that the agent itself uses.
type ToolChoice struct {
	Allow []string `json:"allow,omitempty"` // only these tools; empty means all
	Deny  []string `json:"deny,omitempty"`  // except these tools
}

// SubagentSpec defines an agent that the main agent may start.
type SubagentSpec struct {
	Name         string      `json:"name"`        // a-z, 0-9 and hyphens
	Description  string      `json:"description"` // when to use it
	Instructions string      `json:"instructions"`
	Model        string      `json:"model,omitempty"`
	Tools        []string    `json:"tools,omitempty"`      // only these tools; empty means the main agent's tools
	MCPServers   []string    `json:"mcpServers,omitempty"` // only these servers of the main agent, by name, in addition to Tools; empty means all servers if Tools is empty, and none otherwise
	Skills       []Reference `json:"skills,omitempty"`     // in addition to the agent's skills; listed in the sub-agent's instructions
}

// CommandSpec defines a slash command: a prompt that a user sends by the command's name.
type CommandSpec struct {
	Name        string `json:"name"` // a-z, 0-9 and hyphens
	Description string `json:"description,omitempty"`
	Prompt      string `json:"prompt"` // $ARGUMENTS is replaced by the text after the name
}

// Transports of an MCP server.
const (
	MCPTypeStdio  = "stdio"
	MCPTypeHTTP   = "http"
	MCPTypeDocker = "docker" // stdio of a container next to the sandbox
)

// MCPServer is a server of tools. ${VAR} in its strings is replaced by a variable of the merged environment.
type MCPServer struct {
	Name      string            `json:"name"`                // a-z, 0-9, hyphens and underscores
	Type      string            `json:"type"`                // stdio, http or docker
	Image     string            `json:"image,omitempty"`     // docker only: the image of the server's container
	Command   []string          `json:"command,omitempty"`   // stdio: the program and its arguments, run in the sandbox; docker: the arguments of the image's entrypoint, which replace the image's own
	Env       map[string]string `json:"env,omitempty"`       // stdio and docker only
	URL       string            `json:"url,omitempty"`       // http only: endpoint of streamable HTTP
	Headers   map[string]string `json:"headers,omitempty"`   // http only; added by the egress proxy
	TimeoutMs uint32            `json:"timeoutMs,omitempty"` // timeout of a call in milliseconds; default 30 s, at most 300 s
	Tools     []string          `json:"tools,omitempty"`     // only these tools; empty means all
}

// Declaration declares a variable of an agent, with or without a value.
type Declaration struct {
	Value       string `json:"value,omitempty"`
	Secret      bool   `json:"secret,omitempty"` // the value is never shown; it must come from an environment or the execution
	Required    bool   `json:"required,omitempty"`
	Description string `json:"description,omitempty"`
}

// Dependencies are packages that are installed once into an image layer, which all sandboxes of the image share.
type Dependencies struct {
	NPM []string `json:"npm,omitempty"` // Node packages with exact versions: name@1.2.3 or @scope/name@1.2.3
	PIP []string `json:"pip,omitempty"` // Python packages with exact versions: name==1.2.3 or name[extra]==1.2.3
}

// FileSpec defines a file that an agent's definition puts into every new workspace.
type FileSpec struct {
	Path          string `json:"path"` // relative, slash-separated
	Content       string `json:"content,omitempty"`
	ContentBase64 string `json:"contentBase64,omitempty"` // instead of content
	Mode          uint32 `json:"mode,omitempty"`          // permission bits; 0 means 0644
}

// Limits limit what an agent may use. 0 means the server's default, or no limit if there is none.
type Limits struct {
	Turns        uint32  `json:"turns,omitempty"`        // model requests of one execution
	BudgetUSD    float64 `json:"budgetUsd,omitempty"`    // US dollars of one execution
	Tokens       uint32  `json:"tokens,omitempty"`       // input and output tokens of one execution
	TimeMs       uint32  `json:"timeMs,omitempty"`       // milliseconds of one execution
	OutputEvents uint32  `json:"outputEvents,omitempty"` // events that the agent writes in one execution; has no effect above the server's limit
	OutputBytes  uint32  `json:"outputBytes,omitempty"`  // bytes of these events; has no effect above the server's limit
	Session      Budget  `json:"session,omitzero"`       // budget of a session that sets none itself

	SubagentDepth uint32 `json:"subagentDepth,omitempty"` // levels of sub-agents below the agent, default 5, at most 100; the execution fails with RECURSION_LIMIT when a sub-agent of a further level starts
}

// DefaultSubagentDepth is the number of levels of sub-agents below an agent without a limit of its own.
const DefaultSubagentDepth = 5

// MaxSubagentDepth returns the number of levels of sub-agents that are allowed below the agent.
func (l Limits) MaxSubagentDepth() uint32 { return cmp.Or(l.SubagentDepth, DefaultSubagentDepth) }

// Retries define how often an execution's agent is started. The zero value means one start, and further starts only
// after the loss of a sandbox: without a wait, up to the executors' --max-attempts.
type Retries struct {
	Attempts  uint32 `json:"attempts,omitempty"`  // starts of the agent in one execution, at most 20; 1 means no retry, not even after the loss of a sandbox
	BackoffMs uint32 `json:"backoffMs,omitempty"` // wait before the second start in milliseconds, at most 300 s; doubled before each further start, up to 300 s
}

// Actions of Loops.
const (
	LoopActionStop = "stop"
	LoopActionWarn = "warn"
	LoopActionNone = "none"
)

// Loops define what happens when an agent repeats a tool call without progress. The zero value means the defaults.
type Loops struct {
	Action string `json:"action,omitempty"` // stop (the default): warn, then fail the execution with LOOP_DETECTED; warn: only warn; none: repeated calls are not looked for
	Warn   uint32 `json:"warn,omitempty"`   // number of equal calls in a row after which the log gets a loop_detected event; default 3, or stop if that is less
	Stop   uint32 `json:"stop,omitempty"`   // number of equal calls in a row after which the execution fails; default 5, or warn if that is more
	Window uint32 `json:"window,omitempty"` // number of last calls of a conversation that are compared; default 10, or the greater of warn and stop if that is more; at most 100
}

// Defaults of Loops.
const (
	DefaultLoopWarnCalls   = 3
	DefaultLoopStopCalls   = 5
	DefaultLoopWindowCalls = 10
)

// WithDefaults returns l with the defaults for fields that are not set. Numbers that have no effect with the action are 0.
func (l Loops) WithDefaults() Loops {
	l.Action = cmp.Or(l.Action, LoopActionStop)
	switch l.Action {
	case LoopActionNone:
		return Loops{Action: LoopActionNone}
	case LoopActionWarn:
		l.Warn, l.Stop = cmp.Or(l.Warn, DefaultLoopWarnCalls), 0
	default:
		switch {
		case l.Warn == 0 && l.Stop == 0:
			l.Warn, l.Stop = DefaultLoopWarnCalls, DefaultLoopStopCalls
		case l.Warn == 0:
			l.Warn = min(DefaultLoopWarnCalls, l.Stop)
		case l.Stop == 0:
			l.Stop = max(DefaultLoopStopCalls, l.Warn)
		}
	}
	l.Window = cmp.Or(l.Window, max(DefaultLoopWindowCalls, l.Warn, l.Stop))
	return l
}

// MaxBackoff is the maximum wait before the agent of an execution is started again.
const MaxBackoff = 5 * time.Minute

// Backoff returns the wait after the given number of attempts has died: 1, 2, …
func (r Retries) Backoff(died uint32) time.Duration {
	wait := time.Duration(r.BackoffMs) * time.Millisecond
	for range died - min(died, 1) {
		if wait >= MaxBackoff {
			break
		}
		wait *= 2
	}
	return min(wait, MaxBackoff)
}

// InstanceSpec defines an agent instance: an agent together with environments.
type InstanceSpec struct {
	Description  string      `json:"description,omitempty"`
	Agent        Reference   `json:"agent"`
	Environments []Reference `json:"environments,omitempty"` // a later environment overrides an earlier one
}

// EnvironmentSpec is a set of variables and of allowed hosts.
type EnvironmentSpec struct {
	Description string              `json:"description,omitempty"`
	Variables   map[string]Variable `json:"variables"`        // by name: A-Z, a-z, 0-9 and _, not starting with a digit
	Egress      []string            `json:"egress,omitempty"` // hosts that the sandbox of an execution may reach, in the form of AgentSpec
}

// Variable is a variable of an environment. For a secret it holds only where the encrypted value is stored.
type Variable struct {
	Value       string `json:"value,omitempty"`
	Secret      bool   `json:"secret,omitempty"`
	Sealed      string `json:"sealed,omitempty"` // secrets only: the key in bucket secrets that holds the encrypted value
	Description string `json:"description,omitempty"`
}
