package events

import "time"

// AgentSpec is what an agent is made of. Fields that its architecture cannot
// honour are refused when it is applied, see docs/agents.md.
type AgentSpec struct {
	Name          string                 `json:"name,omitempty"`          // for people
	Description   string                 `json:"description,omitempty"`   // for people
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
	Egress        []string               `json:"egress,omitempty"` // hosts beside the models' that the sandbox may reach, each after methods and a space where not all are allowed
	Limits        Limits                 `json:"limits,omitzero"`
	Retries       Retries                `json:"retries,omitzero"` // what follows when the agent's process, or its sandbox, dies amid an execution
}

// ToolChoice narrows the tools that an agent has, by the agent's own names for them.
type ToolChoice struct {
	Allow []string `json:"allow,omitempty"` // only these; empty means all
	Deny  []string `json:"deny,omitempty"`  // not these
}

// SubagentSpec is an agent that another may start.
type SubagentSpec struct {
	Name         string      `json:"name"`        // a-z, 0-9 and hyphens
	Description  string      `json:"description"` // when to use it
	Instructions string      `json:"instructions"`
	Model        string      `json:"model,omitempty"`
	Tools        []string    `json:"tools,omitempty"`      // only these; empty means those of the agent
	MCPServers   []string    `json:"mcpServers,omitempty"` // by name, only these of the agent's, beside its tools; empty means all of them where it has no list of tools, and none where it has
	Skills       []Reference `json:"skills,omitempty"`     // beside the agent's: listed in its own instructions
}

// CommandSpec is a prompt by name, called as /name.
type CommandSpec struct {
	Name        string `json:"name"` // a-z, 0-9 and hyphens
	Description string `json:"description,omitempty"`
	Prompt      string `json:"prompt"` // $ARGUMENTS stands for what follows the name
}

// Transports of an MCP server.
const (
	MCPStdio  = "stdio"
	MCPHTTP   = "http"
	MCPDocker = "docker" // stdio, of a container beside the sandbox
)

// MCPServer is a server of tools. ${VAR} in its strings stands for a variable of the merged environment.
type MCPServer struct {
	Name      string            `json:"name"`                // a-z, 0-9, hyphens and underscores
	Type      string            `json:"type"`                // stdio, http or docker
	Image     string            `json:"image,omitempty"`     // of docker: the server's container
	Command   []string          `json:"command,omitempty"`   // of stdio: the program and its arguments, in the sandbox; of docker: arguments after the image's entrypoint, in place of its own
	Env       map[string]string `json:"env,omitempty"`       // of stdio and docker
	URL       string            `json:"url,omitempty"`       // of http: streamable HTTP
	Headers   map[string]string `json:"headers,omitempty"`   // of http; put in by the egress proxy
	TimeoutMs uint32            `json:"timeoutMs,omitempty"` // milliseconds for a call; default 30 s, at most 300 s
	Tools     []string          `json:"tools,omitempty"`     // only these; empty means all
}

// Declaration is a variable that an agent has or wants.
type Declaration struct {
	Value       string `json:"value,omitempty"`
	Secret      bool   `json:"secret,omitempty"` // its value is never shown; it must come from an environment or the run
	Required    bool   `json:"required,omitempty"`
	Description string `json:"description,omitempty"`
}

// Dependencies are packages that are installed once for all sandboxes of an image, not at each run.
type Dependencies struct {
	NPM []string `json:"npm,omitempty"` // of Node, with exact versions: name@1.2.3 or @scope/name@1.2.3
	PIP []string `json:"pip,omitempty"` // of Python, with exact versions: name==1.2.3 or name[extra]==1.2.3
}

// FileSpec is a file of a new workspace.
type FileSpec struct {
	Path          string `json:"path"` // relative, with slashes
	Content       string `json:"content,omitempty"`
	ContentBase64 string `json:"contentBase64,omitempty"` // in place of content
	Mode          uint32 `json:"mode,omitempty"`          // permission bits; 0 means 0644
}

// Limits bound what an agent may take; 0 means the server's default, or none.
type Limits struct {
	Turns        uint32  `json:"turns,omitempty"`        // requests to the model in one execution
	BudgetUSD    float64 `json:"budgetUsd,omitempty"`    // of one execution
	Tokens       uint32  `json:"tokens,omitempty"`       // of one execution, in and out
	TimeMs       uint32  `json:"timeMs,omitempty"`       // milliseconds of one execution
	OutputEvents uint32  `json:"outputEvents,omitempty"` // events that the agent writes in one execution; less than the server's limit, or it has no effect
	OutputBytes  uint32  `json:"outputBytes,omitempty"`  // bytes of these events, likewise
	Session      Budget  `json:"session,omitzero"`       // of a whole session, unless the session has one
}

// Retries say how often an execution's agent is started. The zero value is once, and again
// after the loss of a sandbox, at once and as often as executors are set to (--max-attempts).
type Retries struct {
	Attempts  uint32 `json:"attempts,omitempty"`  // starts of the agent in one execution, at most 20; 1 means never again, after the loss of a sandbox either
	BackoffMs uint32 `json:"backoffMs,omitempty"` // milliseconds before the second start, at most 300 s; doubled before each further one, up to 300 s
}

// MaxBackoff bounds the wait before a further start of an execution's agent.
const MaxBackoff = 5 * time.Minute

// Backoff is the wait after a number of starts that died: 1, 2, …
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

// InstanceSpec is an agent with environments.
type InstanceSpec struct {
	Description  string      `json:"description,omitempty"`
	Agent        Reference   `json:"agent"`
	Environments []Reference `json:"environments,omitempty"` // a later one wins
}

// EnvironmentSpec is a set of variables, and of hosts.
type EnvironmentSpec struct {
	Description string              `json:"description,omitempty"`
	Variables   map[string]Variable `json:"variables"`        // by name: A-Z, a-z, 0-9 and _, not a digit first
	Egress      []string            `json:"egress,omitempty"` // hosts that sandboxes of its executions may reach, in the form of an agent's
}

// Variable is a variable of an environment. Of a secret only where its value lies is known here.
type Variable struct {
	Value       string `json:"value,omitempty"`
	Secret      bool   `json:"secret,omitempty"`
	Sealed      string `json:"sealed,omitempty"` // of a secret: the key in bucket secrets under which its value lies encrypted
	Description string `json:"description,omitempty"`
}
