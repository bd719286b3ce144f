package events

import "encoding/json"

// ApprovalKind is the kind of request that a person decides.
type ApprovalKind string

// The kinds of approval requests.
const (
	ApprovalTool        ApprovalKind = "tool"        // the agent wants to call a tool
	ApprovalPlan        ApprovalKind = "plan"        // the agent wants to leave plan mode and carry out its plan
	ApprovalQuestion    ApprovalKind = "question"    // the agent asks the user questions
	ApprovalElicitation ApprovalKind = "elicitation" // an MCP server asks the user for data
)

// MaxOpenApprovals is the maximum number of open approval requests of an execution. The runner keeps further requests
// waiting without recording them.
const MaxOpenApprovals = 100

// ApprovalRequested records that the agent waits for a person to decide. The call does not run until then.
type ApprovalRequested struct {
	ApprovalID string          `json:"approvalId"`
	Kind       ApprovalKind    `json:"kind"` // tool, plan, question or elicitation
	ToolName   string          `json:"toolName,omitempty"`
	ToolUseID  string          `json:"toolUseId,omitempty"`
	Rule       string          `json:"rule,omitempty"`   // the rule of the policy that requires a person
	Reason     string          `json:"reason,omitempty"` // what the agent itself says about the call: nobody has checked it, and clients mark it as the agent's words
	Title      string          `json:"title,omitempty"`  // one line for a list
	Preview    ApprovalPreview `json:"preview,omitzero"`
	Input      json.RawMessage `json:"input,omitempty"` // the arguments; left out if they are larger than 64 KiB
	Editable   bool            `json:"editable,omitempty"`
	Class      string          `json:"class,omitempty"`     // the calls that approve_all covers; "" if approve_all is not possible
	Questions  []Question      `json:"questions,omitempty"` // for kind question
	Schema     json.RawMessage `json:"schema,omitempty"`    // JSON schema of the answer, for kind elicitation; of the arguments, if it is known, for kind tool
	TimeoutMs  uint32          `json:"timeoutMs,omitempty"` // milliseconds after which the request is denied; 0 means never
}

// ApprovalPreview shows what a call would do. Secrets are redacted. Characters that a reader would not see, or that
// would change how a text is shown, are escaped, as in \u{202e}. Command, cwd, paths, hosts and url are whole: a call
// with a larger one than 128 KiB is denied.
type ApprovalPreview struct {
	Command   string     `json:"command,omitempty"`
	Cwd       string     `json:"cwd,omitempty"`   // working directory of the command, if it is not the workspace
	Paths     []string   `json:"paths,omitempty"` // all files that the call names
	Hosts     []string   `json:"hosts,omitempty"` // all hosts that the call names
	Diff      string     `json:"diff,omitempty"`
	URL       string     `json:"url,omitempty"`
	Text      string     `json:"text,omitempty"`      // a plan, a message, or arguments of another form
	Truncated bool       `json:"truncated,omitempty"` // a text was longer than its limit and is cut
	Cut       []CutField `json:"cut,omitempty"`       // with truncated: the fields of the request that are not whole
}

// CutField is a field of an approval request that is not whole.
type CutField struct {
	Field string `json:"field"` // diff, text, reason or input
	Bytes uint32 `json:"bytes"` // length of the whole
}

// Question is a question of the agent to the user.
type Question struct {
	ID       string           `json:"id"` // unique in the request
	Header   string           `json:"header,omitempty"`
	Question string           `json:"question"`
	Options  []QuestionOption `json:"options,omitempty"`
	Multiple bool             `json:"multiple,omitempty"` // several options may be chosen
	Other    bool             `json:"other,omitempty"`    // a text that is not an option is accepted
	Secret   bool             `json:"secret,omitempty"`   // the answer is not stored in the log
}

// QuestionOption is an answer that a question offers.
type QuestionOption struct {
	Label       string `json:"label"`
	Description string `json:"description,omitempty"`
}

// Decisions of a person on an approval request.
const (
	DecisionApprove    = "approve"
	DecisionApproveAll = "approve_all" // this request, and all later ones of its class in the execution
	DecisionSkip       = "skip"        // the call does not run, and the agent is told to go on without it
	DecisionReject     = "reject"      // the call does not run, and the agent receives the comment
	DecisionAnswer     = "answer"      // the answers to questions or to an elicitation
)

// ApprovalDecided records the decision of a person, who is the actor of the commit. It takes effect with
// approval_resolved: a request that was retracted before stays retracted.
type ApprovalDecided struct {
	ApprovalID string              `json:"approvalId"`
	Decision   string              `json:"decision"`            // approve, approve_all, skip, reject or answer
	Arguments  json.RawMessage     `json:"arguments,omitempty"` // replace the arguments of the call, with approve
	Comment    string              `json:"comment,omitempty"`
	Answers    map[string][]string `json:"answers,omitempty"` // by the id of the question, without those to secret questions
	Content    json.RawMessage     `json:"content,omitempty"` // the answer to an elicitation
	Sealed     map[string]string   `json:"sealed,omitempty"`  // by the id of a secret question: the key in bucket secrets that holds its encrypted answer, a JSON list of texts
}

// Causes of an ApprovalResolved event.
const (
	ResolvedByPerson  = "person"  // approval_decided
	ResolvedByClass   = "class"   // a person has approved all requests of the class
	ResolvedByTimeout = "timeout" // nobody decided in time
)

// ApprovalResolved records that the agent received the decision on a request.
type ApprovalResolved struct {
	ApprovalID string `json:"approvalId"`
	Outcome    string `json:"outcome"` // approved, rejected, skipped or answered
	Cause      string `json:"cause"`   // person, class or timeout
	Class      string `json:"class,omitempty"`
	All        bool   `json:"all,omitempty"` // later requests of the class are approved in this execution
}

// Outcomes of an ApprovalResolved event.
const (
	OutcomeApproved = "approved"
	OutcomeRejected = "rejected"
	OutcomeSkipped  = "skipped"
	OutcomeAnswered = "answered"
)

// ApprovalRetracted records that a request ended without a decision: the agent withdrew it, or its turn or process
// ended. A later decision has no effect.
type ApprovalRetracted struct {
	ApprovalID string `json:"approvalId"`
	Reason     string `json:"reason"` // withdrawn, turn_ended, attempt_failed or execution_ended
}

// AgentDenied records that the agent's own program denied a call of a tool, without asking.
type AgentDenied struct {
	ToolName  string `json:"toolName"`
	ToolUseID string `json:"toolUseId,omitempty"`
	Code      string `json:"code,omitempty"` // of the agent's program
	Reason    string `json:"reason,omitempty"`
}
