// Package runner is the protocol between an executor and the runner, the
// supervisor that lives in every sandbox: JSON lines in both directions over
// one attached stream. The runner journals everything an agent does with a
// number; the executor follows the journal, appends to the log and tells the
// runner what may be forgotten.
package runner

import (
	"encoding/json"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// ProtocolVersion is the version that Hello states; an executor refuses another major.
const ProtocolVersion = 1

// MaxLine is the longest line in bytes either side accepts. Longer output of an
// agent is cut by the runner, which says so in a line of type error.
const MaxLine = 8 << 20

// Op is what a command asks for.
type Op string

// The operations.
const (
	// OpStart gives the agent a query. Refused with BUSY while another runs. The
	// same execution and attempt again is answered as accepted and changes nothing.
	OpStart Op = "start"
	// OpInterrupt asks the agent to stop the turn and stay warm. A no-op when nothing runs.
	OpInterrupt Op = "interrupt"
	// OpKill ends the agent's process group; a running turn ends with outcome killed.
	OpKill Op = "kill"
	// OpAck says that every line up to Ack is stored; the runner forgets them.
	OpAck Op = "ack"
	// OpStatus asks for a Status.
	OpStatus Op = "status"
	// OpWarm starts the agent's process without a query, so that the first turn
	// finds it warm; Query says for what, without execution, content and parts.
	// A no-op while an agent runs or rests.
	OpWarm Op = "warm"
	// OpClaim gives a runner the secret that executors prove from then on, as the first line of a connection of its
	// own (see Claim). Refused with FORBIDDEN when the runner has another secret, or has been attached to without one.
	OpClaim Op = "claim"
	// OpShutdown ends the agent and the runner.
	OpShutdown Op = "shutdown"
)

// Claim is the only line of a connection that gives the runner its secret, with OpClaim, or asks for something that
// needs neither an epoch nor the journal.
type Claim struct {
	ID     uint64 `json:"id"`
	Op     Op     `json:"op"`               // OpClaim, OpStatus or OpInterrupt
	Secret string `json:"secret,omitempty"` // of OpClaim
}

// Attach is the first line that a follower sends. To a runner that was claimed, it is the first line inside the
// stream that Seal opens; the runner takes epochs from no other stream.
type Attach struct {
	Epoch uint64 `json:"epoch"` // lower than the highest seen: refused with FENCED; a higher or equal one replaces the follower before
	After uint64 `json:"after"` // lines with a greater number are sent
}

// Command is a line from the executor.
type Command struct {
	ID    uint64 `json:"id"` // repeated by the reply; 0 wants none
	Op    Op     `json:"op"`
	Epoch uint64 `json:"epoch"` // lower than the highest seen: refused with FENCED
	Query *Query `json:"query,omitempty"`
	Ack   uint64 `json:"ack,omitempty"`
}

// Query is all that an agent needs for one turn.
type Query struct {
	SessionID    string            `json:"sessionId"`
	ExecutionID  string            `json:"executionId"`
	Attempt      uint32            `json:"attempt"`
	Architecture string            `json:"architecture"`      // claude-code, codex, opencode, acp, spool
	Command      []string          `json:"command,omitempty"` // of architecture acp: the agent's program and its arguments
	Model        string            `json:"model,omitempty"`
	ModelSet     bool              `json:"modelSet,omitempty"` // of architecture acp: Env or Command have the model; it is chosen over the protocol only where the agent offers it by this name
	SystemPrompt string            `json:"systemPrompt,omitempty"`
	Content      string            `json:"content,omitempty"`
	Parts        []events.Part     `json:"parts,omitempty"`
	Policy       string            `json:"policy"`           // see Policies
	Env          map[string]string `json:"env,omitempty"`    // for the agent's process only; never journaled
	Resume       string            `json:"resume,omitempty"` // the agent's own session id of the turn before, should its process be gone
	Fork         *Fork             `json:"fork,omitempty"`   // with Resume: go on with a copy of that session

	MemoryFile string                `json:"memoryFile,omitempty"` // content of the agent's memory file (CLAUDE.md, AGENTS.md)
	Tools      events.ToolChoice     `json:"tools,omitzero"`
	Subagents  []events.SubagentSpec `json:"subagents,omitempty"`
	Commands   []events.CommandSpec  `json:"commands,omitempty"`
	MCPServers []MCPServer           `json:"mcpServers,omitempty"`
	Skills     []Skill               `json:"skills,omitempty"`
	MaxTurns   uint32                `json:"maxTurns,omitempty"` // requests to the model; 0 for no limit
	Redact     []string              `json:"redact,omitempty"`   // values that nothing the agent says may hold; never journaled

	Pace Pace `json:"pace,omitzero"`

	Authority string `json:"authority,omitempty"` // PEM: certificates of the egress proxy that the agent's process trusts beside the sandbox's own; "" for none
}

// Fork asks that the agent go on with a copy of the conversation Resume, cut after an anchor.
//
// It is sent with Resume until the log has a transcript_written of the fork itself; from then on Resume is the fork's
// own agent session, and Fork is nil. The same session, Resume and Fork always lead to the same point, also when an
// earlier attempt died during its turn. The records of Resume itself are not changed.
//
// Where a conversation can be cut depends on the architecture. Blocks that it cannot be cut after have no anchor, nor
// have blocks of sub-agents.
//
//	claude-code  after each line of the transcript: after each text, call and result, also within a turn, but not after a thought
//	codex        after each message and each result of a call, also within a turn, but not after calls that the tool
//	             exec makes, whose results the model sees at the end of its script
//	opencode     after the last text of a message, that is between turns
//	spool        after each message of the transcript: after each answer of the model and each result of a call
//	acp          not at all: the whole conversation is gone on with in place
//
// After a call without its result the agent sees the call as one that was broken off, or not at all. Without its
// records, or without the anchor in them, the agent begins a new conversation, and an error event TRANSCRIPT_LOST comes
// first: it never answers from what came after the anchor.
type Fork struct {
	Anchor string `json:"anchor,omitempty"` // of a block (events.Block.Anchor); "" for the whole conversation
}

// Pace is how fast an execution may fill the journal; 0 is no bound. It may be ahead by PaceBurst: what is faster waits, and the agent
// with it.
type Pace struct {
	EventsPerSecond uint32 `json:"eventsPerSecond,omitempty"`
	BytesPerSecond  uint32 `json:"bytesPerSecond,omitempty"`
}

// PaceBurst is how far an execution may be ahead of its Pace.
const PaceBurst = 10 * time.Second

// MCPServer is a server of tools as the agent is to reach it: every variable is filled in.
type MCPServer struct {
	Name      string            `json:"name"`
	Type      string            `json:"type"`              // stdio, http or docker
	Socket    string            `json:"socket,omitempty"`  // of docker: where the server's container is joined
	Command   []string          `json:"command,omitempty"` // of stdio; of docker, the arguments of the image's entrypoint
	Env       map[string]string `json:"env,omitempty"`     // of stdio and docker
	URL       string            `json:"url,omitempty"`     // of http
	Headers   map[string]string `json:"headers,omitempty"` // of http
	TimeoutMs uint32            `json:"timeoutMs"`         // milliseconds for a call
	Tools     []string          `json:"tools,omitempty"`   // only these; empty means all
}

// Skill is a skill that lies in the sandbox, for agents that know skills by themselves.
type Skill struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	Dir         string `json:"dir"`                // absolute, read-only
	Unlisted    bool   `json:"unlisted,omitempty"` // sub-agents' alone, whose instructions tell of it: it may be read, and is not offered to the agent
}

// The way out of a sandbox without a network. The runner listens on
// EgressAddress and joins each connection to the egress proxy's Unix socket,
// or to its TLS port where sandbox and proxy are on different machines, after a first line that says whose it is: EgressPreamble, the token, newline.
// Then HTTP follows: requests to the model routes (EgressRoutes), proxy requests
// (an absolute URI, or CONNECT) to hosts of the allowlist.
const (
	EgressAddress  = "127.0.0.1:7070"
	EgressURL      = "http://" + EgressAddress
	EgressPreamble = "SPOOL/1 "
)

// EgressHosts may follow the token on the first line: a connection with it
// reaches hosts of the allowlist alone, no models and no MCP servers.
const EgressHosts = " hosts"

// EgressRoutes are the first path elements under EgressURL by which agents
// reach models; the proxy puts the credentials in. A custom host's is its name.
const (
	EgressAnthropic = "anthropic" // stands for a base URL without /v1
	EgressOpenAI    = "openai"    // with /v1
	EgressNVIDIA    = "nvidia"    // with /v1
)

// EgressMCP is the path under EgressURL by which agents reach MCP servers, each
// by its name; the proxy puts the credentials in.
const EgressMCP = "/mcp/"

// The permission policies. There is one so far: what stays inside the workspace
// is allowed, the rest is denied with the reason told to the agent.
const PolicyWorkspace = "workspace"

// Message is a line from the runner: exactly one field is set.
type Message struct {
	Hello *Hello `json:"hello,omitempty"` // the first line
	Line  *Line  `json:"line,omitempty"`
	Reply *Reply `json:"reply,omitempty"`
}

// Hello introduces the runner to a follower.
type Hello struct {
	Protocol int    `json:"protocol"`
	Journal  string `json:"journal"` // jnl_…, new with every runner process
	First    uint64 `json:"first"`   // the lowest number still kept, Last+1 if none
	Last     uint64 `json:"last"`
	Status   Status `json:"status"`
}

// Status is what the runner is doing.
type Status struct {
	ExecutionID  string `json:"executionId,omitempty"` // the one that runs
	Attempt      uint32 `json:"attempt,omitempty"`
	Architecture string `json:"architecture,omitempty"` // of the warm agent
	AgentPID     int    `json:"agentPid,omitempty"`     // 0 when no agent is warm
	MemoryBytes  uint64 `json:"memoryBytes"`            // resident, of the agent's whole process tree
	DiskBytes    uint64 `json:"diskBytes"`              // of the workspace and the agent's records, as the disk watch last saw them
}

// Reply answers a command.
type Reply struct {
	ID     uint64  `json:"id"`
	Error  *Error  `json:"error,omitempty"`
	Status *Status `json:"status,omitempty"` // answers OpStatus, and OpStart, OpWarm and OpKill with what then holds
}

// Error is a refusal.
type Error struct {
	Code    string `json:"code"` // FENCED, BUSY, INVALID_COMMAND, FORBIDDEN (without a proof of the sandbox's secret), UNKNOWN_ARCHITECTURE, AGENT_NOT_FOUND, DISK_LIMIT (until files are removed), INTERNAL
	Message string `json:"message"`
}

func (e *Error) Error() string { return e.Code + ": " + e.Message }

// Line is a journal line. Type is a run event's wire name, text_delta, or one of
// the types below. Ids of blocks inside Data are the runner's own, unique within
// its journal; the host derives the log's from (journal, id), and overrides
// whatever else a sandbox could forge.
type Line struct {
	N              uint64          `json:"n"`
	Type           events.Type     `json:"type"`
	Time           time.Time       `json:"time"`
	ExecutionID    string          `json:"executionId,omitempty"`
	ConversationID string          `json:"conversationId,omitempty"`
	Data           json.RawMessage `json:"data"`
}

// Types of lines that are not events: the host turns them into events.
const (
	// AgentStarted (data: Started) becomes execution_started.
	AgentStarted events.Type = "agent_started"
	// TurnEnded (data: Ended) becomes the terminal event. It is the last line of an execution.
	TurnEnded events.Type = "turn_ended"
)

// Started is the data of AgentStarted.
type Started struct {
	Attempt uint32 `json:"attempt"`
	Warm    bool   `json:"warm"` // the process was running already
	PID     int    `json:"pid"`
	Policy  string `json:"policy"`
}

// Outcome is how a turn ended.
type Outcome string

// The outcomes.
const (
	Completed   Outcome = "completed"
	Failed      Outcome = "failed"
	Interrupted Outcome = "interrupted" // as asked by OpInterrupt
	Killed      Outcome = "killed"      // as asked by OpKill
)

// Ended is the data of TurnEnded.
type Ended struct {
	Outcome Outcome      `json:"outcome"`
	Code    string       `json:"code,omitempty"` // of a failure: AGENT_NOT_FOUND, AGENT_EXITED, AGENT_PROTOCOL, MODEL_ERROR, MODEL_NOT_FOUND, MODEL_RATE_LIMITED, MODEL_UNAUTHORIZED, AGENT_SILENT, TURN_LIMIT (too many model calls), DISK_LIMIT, OUT_OF_MEMORY, INTERNAL
	Message string       `json:"message,omitempty"`
	Result  string       `json:"result,omitempty"` // the agent's last words
	Usage   events.Usage `json:"usage"`
	CostUSD float64      `json:"costUsd,omitempty"`
}

// Delta is the data of a text_delta line.
type Delta struct {
	BlockID string `json:"blockId"`
	Offset  uint32 `json:"offset"` // UTF-8 bytes from the block's start
	Delta   string `json:"delta"`
}
