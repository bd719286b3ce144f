// Package runner defines the protocol between an executor and the runner, the supervisor inside every sandbox: JSON
// lines in both directions over one attached stream. The runner journals everything that an agent does, with
// sequence numbers. The executor follows the journal, appends it to the log and acknowledges entries, which the
// runner then discards.
package runner

import (
	"cmp"
	"encoding/json"
	"time"

	"github.com/spoolhq/spool/pkg/events"
)

// RestrictedCommand is the command of the runner's program that executes another program with the rules of package
// landlock. Only landlock.Rules.Start uses it.
const RestrictedCommand = "restricted"

// ProtocolVersion is the version of the runner protocol that Hello states. An executor rejects another major version.
const ProtocolVersion = 1

// MaxLineLength is the maximum length in bytes of a line that executor and runner send. The runner truncates longer
// output of an agent and adds a line of type error.
const MaxLineLength = 8 << 20

// Op is the operation that a Command requests of the runner.
type Op string

// The operations.
const (
	// OpStart sends the agent a query. The runner refuses it with BUSY while another query runs. Repeating the same
	// execution and attempt is accepted and changes nothing.
	OpStart Op = "start"
	// OpInterrupt requests that the agent stop the turn and keep its process. It does nothing if no turn runs.
	OpInterrupt Op = "interrupt"
	// OpKill kills the agent's process group. A running turn ends with outcome killed.
	OpKill Op = "kill"
	// OpAck states that the executor has stored every journal line up to Ack. The runner discards these lines.
	OpAck Op = "ack"
	// OpStatus requests the runner's Status.
	OpStatus Op = "status"
	// OpWarm starts the agent's process without a query, so that the first turn finds it running. Query must be
	// set, without execution, content and parts. OpWarm does nothing if an agent's process exists.
	OpWarm Op = "warm"
	// OpClaim sends a runner the secret that executors must prove from then on. It is the first line of a separate
	// connection (see Claim). It is refused with FORBIDDEN if the runner has another secret, or if an executor has
	// attached without a secret before.
	OpClaim Op = "claim"
	// OpDecide sends the decision on an approval request. The journal shows its effect: approval_resolved. A decision on
	// a request that is not open is ignored.
	OpDecide Op = "decide"
	// OpShutdown ends the agent's process and the runner.
	OpShutdown Op = "shutdown"
)

// Claim is the only line of a connection to the runner that either sends the secret (OpClaim), or requests an operation
// that needs neither an epoch nor the journal.
type Claim struct {
	ID     uint64 `json:"id"`
	Op     Op     `json:"op"`               // OpClaim, OpStatus or OpInterrupt
	Secret string `json:"secret,omitempty"` // OpClaim only
}

// Attach is the first line that a follower sends to the runner. If the runner was claimed, Attach is the first line
// inside the stream that OpenSealedStream opens; the runner accepts epochs from no other stream.
type Attach struct {
	Epoch uint64 `json:"epoch"` // refused with FENCED if lower than the highest epoch that the runner has received; otherwise the follower replaces the previous one
	After uint64 `json:"after"` // lines with a greater number are sent
}

// Command is a line that the executor sends to the runner.
type Command struct {
	ID    uint64 `json:"id"` // repeated by the reply; 0 requests no reply
	Op    Op     `json:"op"`
	Epoch uint64 `json:"epoch"` // refused with FENCED if lower than the highest epoch that the runner has received
	Query *Query `json:"query,omitempty"`
	Ack   uint64 `json:"ack,omitempty"`

	Verdict *ApprovalDecision `json:"verdict,omitempty"` // for OpDecide
}

// ApprovalDecision is the decision on an approval request. Its answers include those to secret questions.
type ApprovalDecision struct {
	events.ApprovalDecided
	// Timeout reports that nobody decided in time: the request is rejected.
	Timeout bool `json:"timeout,omitempty"`
	// Redact are values that the runner removes from all later output of the agent: secret answers.
	Redact []string `json:"redact,omitempty"`
}

// ApprovalID returns the id of an approval request in the log, from the execution, the name of the journal and the id in the journal. A
// runner chooses the latter two, so that only the execution keeps it from naming a request of another execution.
func ApprovalID(execution, journal, local string) string {
	return events.DeriveID(events.KindApproval, execution, journal, local)
}

// Query is everything that an agent needs to run one turn.
type Query struct {
	SessionID    string            `json:"sessionId"`
	ExecutionID  string            `json:"executionId"`
	Attempt      uint32            `json:"attempt"`
	Architecture string            `json:"architecture"`      // claude-code, codex, opencode, acp, spool
	Command      []string          `json:"command,omitempty"` // architecture acp: the agent's program and its arguments
	Model        string            `json:"model,omitempty"`
	ModelSet     bool              `json:"modelSet,omitempty"` // architecture acp: Env or Command already set the model; the runner selects it over the protocol only if the agent offers it by this name
	SystemPrompt string            `json:"systemPrompt,omitempty"`
	Content      string            `json:"content,omitempty"`
	Parts        []events.Part     `json:"parts,omitempty"`
	Env          map[string]string `json:"env,omitempty"`    // for the agent's process only; never journaled
	Resume       string            `json:"resume,omitempty"` // the agent's own session id of the previous turn, used if the agent's process has ended
	Fork         *Fork             `json:"fork,omitempty"`   // with Resume: continue with a copy of that session
	// ContinueAfterLoss allows the agent to begin a new conversation if Resume cannot be continued. Otherwise the turn
	// fails with CodeConversationLost.
	ContinueAfterLoss bool `json:"continueAfterLoss,omitempty"`

	MemoryFile string                `json:"memoryFile,omitempty"` // content of the agent's memory file (CLAUDE.md, AGENTS.md)
	Tools      events.ToolChoice     `json:"tools,omitzero"`
	Subagents  []events.SubagentSpec `json:"subagents,omitempty"`
	Commands   []events.CommandSpec  `json:"commands,omitempty"`
	MCPServers []MCPServer           `json:"mcpServers,omitempty"`
	Skills     []Skill               `json:"skills,omitempty"`
	MaxTurns   uint32                `json:"maxTurns,omitempty"` // maximum number of model requests; 0 for no limit
	// SubagentDepth is the number of levels of sub-agents that the agent may start below itself; 0 means that the runner limits nothing.
	SubagentDepth uint32   `json:"subagentDepth,omitempty"`
	Redact        []string `json:"redact,omitempty"` // values that the runner removes from all output of the agent; never journaled

	Permissions          events.Permissions          `json:"permissions,omitzero"`          // the agent's permission policy
	ExecutionPermissions events.ExecutionPermissions `json:"executionPermissions,omitzero"` // adapt the policy to the execution
	Approved             []string                    `json:"approved,omitempty"`            // classes of which a person has approved all requests in an earlier attempt

	Pace OutputRate `json:"pace,omitzero"`

	Authority string `json:"authority,omitempty"` // certificates of the egress proxy in PEM form that the agent's process trusts in addition to the sandbox's own; "" for none
}

// Fork requests that the agent continue with a copy of the conversation Resume, cut after an anchor.
//
// It is sent with Resume until the log has a transcript_written of the fork itself. From then on Resume is the
// fork's own agent session, and Fork is nil. The same session, Resume and Fork always lead to the same point, even
// if an earlier attempt died during its turn. The records of Resume itself are not changed.
//
// Where a conversation can be cut depends on the architecture. Blocks after which it cannot be cut have no anchor,
// and neither have blocks of sub-agents.
//
//	claude-code  after each line of the transcript: after each text, call and result, also during a turn, but not after thinking
//	codex        after each message and each result of a call, also during a turn, but not after calls that the tool
//	             exec makes, whose results the model sees at the end of its script
//	opencode     after the last text of a message: between turns
//	spool        after each message of the transcript: after each response of the model and each result of a call
//	acp          never: the agent continues the original conversation
//
// After a tool call without its result the agent sees an aborted call, or none. If the records or the anchor are
// missing, the conversation is lost, see Query.ContinueAfterLoss: the agent never answers from text after the anchor.
// If it may continue, an error event TRANSCRIPT_LOST comes first.
type Fork struct {
	Anchor string `json:"anchor,omitempty"` // anchor of a block (events.Block.Anchor); "" for the whole conversation
	// Provided requests that the agent continue with the transcript that `runner provide-transcript` stored in the
	// sandbox, instead of a conversation in the agent's own records. The copy contains only the conversation.
	// Supported by claude-code, codex and opencode; Anchor must be empty.
	Provided bool `json:"provided,omitempty"`
}

// CodeConversationLost is the code of a turn that did not run because the agent cannot continue the conversation Query.Resume.
const CodeConversationLost = "CONVERSATION_LOST"

// OutputRate is the maximum rate at which an execution may write to the journal; 0 means no limit. The execution may be
// ahead of the rate by OutputBurst; then the runner delays further output, and so the agent.
type OutputRate struct {
	EventsPerSecond uint32 `json:"eventsPerSecond,omitempty"`
	BytesPerSecond  uint32 `json:"bytesPerSecond,omitempty"`
}

// OutputBurst is the time by which an execution may be ahead of its OutputRate.
const OutputBurst = 10 * time.Second

// MCPServer is an MCP server that an agent uses, with all variables replaced by their values.
type MCPServer struct {
	Name      string            `json:"name"`
	Type      string            `json:"type"`              // stdio, http or docker
	Socket    string            `json:"socket,omitempty"`  // docker: socket of the server's container
	Command   []string          `json:"command,omitempty"` // stdio: the program and its arguments; docker: the arguments of the image's entrypoint
	Env       map[string]string `json:"env,omitempty"`     // stdio and docker only
	URL       string            `json:"url,omitempty"`     // http only
	Headers   map[string]string `json:"headers,omitempty"` // http only
	TimeoutMs uint32            `json:"timeoutMs"`         // timeout of a call in milliseconds
	Tools     []string          `json:"tools,omitempty"`   // only these tools; empty means all
}

// Skill is a skill that was extracted inside the sandbox, for agents that support skills natively.
type Skill struct {
	Name        string `json:"name"`
	Description string `json:"description"`
	Dir         string `json:"dir"`                // absolute path, read-only
	Version     string `json:"version,omitempty"`  // SHA-256 of the skill's ZIP
	Unlisted    bool   `json:"unlisted,omitempty"` // the skill belongs to sub-agents, whose instructions mention it: it can be read, but is not offered to the main agent
}

// Constants of the egress of a sandbox without a network. The runner listens on EgressAddress and forwards each
// connection to the egress proxy's Unix socket, or to its TLS port if sandbox and proxy are on different machines. The
// runner first sends a line that identifies the sandbox: EgressPreamble, the token, newline. HTTP follows: requests to
// the model routes (EgressRoutes), or proxy requests (an absolute URI, or CONNECT) to hosts of the allowlist.
const (
	EgressAddress  = "127.0.0.1:7070"
	EgressURL      = "http://" + EgressAddress
	EgressPreamble = "SPOOL/1 "
)

// EgressHostsOnly may follow the token on the first line of an egress connection. It restricts the connection to hosts
// of the allowlist: no models and no MCP servers.
const EgressHostsOnly = " hosts"

// EgressRoutes are the first path elements under EgressURL through which agents reach models. The proxy adds the
// credentials. The route of a custom host is its name.
const (
	EgressRouteAnthropic = "anthropic" // base URL without /v1
	EgressRouteOpenAI    = "openai"    // base URL with /v1
	EgressRouteNVIDIA    = "nvidia"    // base URL with /v1
)

// EgressMCPPath is the path under EgressURL through which agents reach MCP servers by name. The egress proxy adds the
// credentials.
const EgressMCPPath = "/mcp/"

// PolicyName returns the name of the permission policy that decides about the query's calls: the preset of its
// permissions, or the preset of an agent without permissions.
func (q *Query) PolicyName() string { return cmp.Or(q.Permissions.Preset, events.PresetWorkspace) }

// Message is a line that the runner sends to a follower. Exactly one field is set.
type Message struct {
	Hello *Hello       `json:"hello,omitempty"` // the first line
	Line  *JournalLine `json:"line,omitempty"`
	Reply *Reply       `json:"reply,omitempty"`
}

// Hello is the first line that the runner sends to a follower (an attached executor).
type Hello struct {
	Protocol int    `json:"protocol"`
	Journal  string `json:"journal"` // jnl_…, different for every runner process
	First    uint64 `json:"first"`   // the lowest stored number; Last+1 if the journal is empty
	Last     uint64 `json:"last"`
	Status   Status `json:"status"`
}

// Status is the state of the runner and its agent.
type Status struct {
	ExecutionID  string `json:"executionId,omitempty"` // the running execution
	Attempt      uint32 `json:"attempt,omitempty"`
	Architecture string `json:"architecture,omitempty"` // of the running agent process
	AgentPID     int    `json:"agentPid,omitempty"`     // 0 if no agent process runs
	MemoryBytes  uint64 `json:"memoryBytes"`            // resident memory of the agent's process tree
	DiskBytes    uint64 `json:"diskBytes"`              // size of the workspace and the agent's records when the runner last measured it
}

// Reply is the line with which the runner answers a Command.
type Reply struct {
	ID     uint64        `json:"id"`
	Error  *CommandError `json:"error,omitempty"`
	Status *Status       `json:"status,omitempty"` // reply to OpStatus; for OpStart, OpWarm and OpKill the status after the command
}

// CodeStopping is the code of the error with which a runner refuses a query because it is shutting down.
const CodeStopping = "STOPPING"

// CommandError is the reason why the runner refused a Command.
type CommandError struct {
	Code    string `json:"code"` // FENCED, BUSY, INVALID_COMMAND, FORBIDDEN (without a proof of the sandbox's secret), UNKNOWN_ARCHITECTURE, AGENT_NOT_FOUND, DISK_LIMIT (until files are removed), CodeStopping, INTERNAL
	Message string `json:"message"`
}

func (e *CommandError) Error() string { return e.Code + ": " + e.Message }

// JournalLine is a line of the runner's journal. Type is the wire name of a run event, text_delta, or one of the types
// below. Ids of blocks inside Data are unique within the journal only: the executor derives the ids for the log from
// (journal, id), and replaces every other field that a sandbox could forge.
type JournalLine struct {
	N              uint64          `json:"n"`
	Type           events.Type     `json:"type"`
	Time           time.Time       `json:"time"`
	ExecutionID    string          `json:"executionId,omitempty"`
	ConversationID string          `json:"conversationId,omitempty"`
	Data           json.RawMessage `json:"data"`
}

// Types of lines that are not events. The executor converts them into events.
const (
	// AgentStarted is the type of the journal line with which a turn begins; its data is a TurnStart. It becomes the event
	// execution_started.
	AgentStarted events.Type = "agent_started"
	// TurnEnded is the type of the last journal line of an execution; its data is a TurnEnd. It becomes the execution's
	// terminal event.
	TurnEnded events.Type = "turn_ended"
)

// TurnStart is the data of a journal line of type AgentStarted.
type TurnStart struct {
	Attempt uint32 `json:"attempt"`
	Warm    bool   `json:"warm"` // the agent's process was already running
	PID     int    `json:"pid"`
	Policy  string `json:"policy"` // see Query.PolicyName
}

// Outcome is the way in which a turn of the agent ended.
type Outcome string

// The outcomes.
const (
	OutcomeCompleted   Outcome = "completed"
	OutcomeFailed      Outcome = "failed"
	OutcomeInterrupted Outcome = "interrupted" // requested by OpInterrupt
	OutcomeKilled      Outcome = "killed"      // requested by OpKill
)

// TurnEnd is the data of a journal line of type TurnEnded.
type TurnEnd struct {
	Outcome Outcome      `json:"outcome"`
	Code    string       `json:"code,omitempty"` // for OutcomeFailed: AGENT_NOT_FOUND, AGENT_EXITED, AGENT_PROTOCOL, MODEL_CONTEXT_EXCEEDED, MODEL_EMPTY_ANSWER, MODEL_ERROR, MODEL_NOT_FOUND, MODEL_RATE_LIMITED, MODEL_UNAUTHORIZED, AGENT_SILENT, TURN_LIMIT (too many model calls), DISK_LIMIT, OUT_OF_MEMORY, INTERNAL
	Message string       `json:"message,omitempty"`
	Result  string       `json:"result,omitempty"` // the agent's whole last answer
	Usage   events.Usage `json:"usage"`
	CostUSD float64      `json:"costUsd,omitempty"`
}

// TextDelta is the data of a journal line of type text_delta.
type TextDelta struct {
	BlockID string `json:"blockId"`
	Offset  uint32 `json:"offset"` // in UTF-8 bytes from the start of the block
	Delta   string `json:"delta"`
}
