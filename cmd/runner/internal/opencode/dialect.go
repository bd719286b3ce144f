package opencode

import (
	"encoding/json"
	"fmt"
	"strings"
	"time"

	sdk "github.com/coder/acp-go-sdk"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// startTime is the time for which OpenCode may be silent when it starts. It migrates its database and imports or copies a session before it answers.
const startTime = 3 * time.Minute

// newDialect returns the dialect of the Agent Client Protocol that OpenCode speaks.
func newDialect(l agent.Launch, now func() time.Time) acp.Dialect {
	name := modelName(l)
	return acp.Dialect{
		Now: now, Version: TestedVersion, Model: providerName + "/" + name, Shown: name,
		// It sends a file that it is about to write to the client, whether offered or not, and then writes the file
		// itself.
		AcceptWrites: true,
		// Its session/list reads the database by a request to its own server, which delays the query.
		AnswersInitialize: true,
		StartTime:         startTime,
		Forks:             true,
		Anchors:           true,
		Skills:            acp.SkillFolders(l),
		Transcript:        func(string) string { return databasePath(l.Folders) },
		Tool:              newToolClassifier(l),
		Notice:            decodeNotice,
	}
}

// toolKinds maps the CLI's own tools to the permission kinds of their calls. Other tools are not allowed.
var toolKinds = map[string]acp.ToolInfo{
	"read": {Kind: permission.KindRead}, "write": {Kind: permission.KindEdit}, "edit": {Kind: permission.KindEdit},
	"multiedit": {Kind: permission.KindEdit}, "patch": {Kind: permission.KindEdit}, "apply_patch": {Kind: permission.KindEdit},
	"glob": {Kind: permission.KindRead, Search: true}, "grep": {Kind: permission.KindRead, Search: true}, "list": {Kind: permission.KindRead, Search: true},
	"bash": {Kind: permission.KindShell}, "task": {Kind: permission.KindAgent},
	"todowrite": {Kind: permission.KindBookkeeping}, "todoread": {Kind: permission.KindBookkeeping}, "skill": {Kind: permission.KindBookkeeping}, "invalid": {Kind: permission.KindBookkeeping},
	"webfetch": {Kind: permission.KindNetwork}, "websearch": {Kind: permission.KindNetwork}, "codesearch": {Kind: permission.KindNetwork},
}

// callArguments holds the arguments of a tool call that the adapter reads.
type callArguments struct {
	Prompt string      `json:"prompt"` // task
	Agent  string      `json:"subagent_type"`
	Todos  []todoEntry `json:"todos"` // todowrite
	Skill  string      `json:"name"`  // skill
}

// todoEntry is an entry of the agent's list of todowrite.
type todoEntry struct {
	ID       string `json:"id"` // not in the tool's schema, but the CLI passes it on
	Content  string `json:"content"`
	Status   string `json:"status"`
	Priority string `json:"priority"`
}

// callOutput holds the fields of a tool call's output that the adapter reads.
type callOutput struct {
	Metadata struct {
		Exit *int   `json:"exit"` // bash
		Dir  string `json:"dir"`  // skill
	} `json:"metadata"`
	Output string `json:"output"`
}

// classifyTool returns the permission kind of a tool call, and more for some of the CLI's own tools. The kind of an
// unknown tool is permission.KindUnknown. Arguments of an unexpected type are ignored.
func classifyTool(c acp.ToolCall) *acp.ToolInfo {
	name := c.Name
	var in callArguments
	if json.Unmarshal(c.Input, &in) != nil {
		in = callArguments{}
	}
	switch {
	case c.Kind == sdk.ToolKindExecute:
		name = "bash" // a command of a sub-agent has the command as its title
	}
	known, ok := toolKinds[name]
	if !ok {
		return &acp.ToolInfo{Kind: permission.KindUnknown}
	}
	var out callOutput
	if json.Unmarshal(c.Output, &out) != nil {
		out = callOutput{}
	}
	switch known.Name = name; name {
	case "bash":
		known.Failed = out.Metadata.Exit != nil && *out.Metadata.Exit != 0
	case "task":
		known.Subagent = &acp.SubagentCall{Name: in.Agent, Prompt: in.Prompt, Said: subagentAnswer(out.Output)}
	case "todowrite":
		known.Plan = &events.Plan{}
		for _, t := range in.Todos {
			known.Plan.Items = append(known.Plan.Items, events.PlanItem{
				ItemID: t.ID, Content: t.Content, Status: events.ParsePlanStatus(t.Status), Priority: t.Priority,
			})
		}
	case "skill":
		if in.Skill != "" {
			known.Skill = &events.LoadedSkill{Name: in.Skill, Path: out.Metadata.Dir}
		}
	}
	return &known
}

// subagentAnswer returns the answer of a sub-agent from the output of the call that ran it, without the text for the
// model that the CLI adds.
func subagentAnswer(output string) string {
	_, rest, ok := strings.Cut(output, "<task_result>")
	if !ok {
		return output
	}
	text, _, _ := strings.Cut(rest, "</task_result>")
	return strings.TrimSpace(text)
}

// pluginReport is a notification that plugin.js, the adapter's plugin in the CLI, sends.
type pluginReport struct {
	Kind    string `json:"kind"` // retry, error, usage, over, forked, text, update, permission, replied
	Session string `json:"session"`
	Name    string `json:"name"`    // error
	Message string `json:"message"` // retry, error; forked: why it failed
	Status  int    `json:"status"`
	Attempt int    `json:"attempt"` // retry
	WaitMs  int    `json:"waitMs"`
	ID      string `json:"id"` // text: the id of the message, or of the part if it is a thought; permission, replied: of the request
	Thought bool   `json:"thought"`
	Text    string `json:"text"`
	Finish  string `json:"finish"` // usage
	Call    string `json:"call"`   // permission
	Tool    string `json:"tool"`

	Input    json.RawMessage `json:"input"`
	Metadata json.RawMessage `json:"metadata"`

	Update json.RawMessage `json:"update"`
	Parent struct {
		Session string `json:"session"`
		Call    string `json:"call"`
	} `json:"parent"` // update, permission: the call that runs the sub-agent, or that an update of the main agent is about

	Cost   float64 `json:"cost"`
	Tokens struct {
		Input     uint32 `json:"input"`
		Output    uint32 `json:"output"`
		Reasoning uint32 `json:"reasoning"`
		Cache     struct {
			Read  uint32 `json:"read"`
			Write uint32 `json:"write"`
		} `json:"cache"`
	} `json:"tokens"`
}

// decodeNotice returns the Notice for a notification of plugin.js, the adapter's plugin in the CLI, or nil for another
// notification.
func decodeNotice(method string, params json.RawMessage) *acp.Notice {
	var e pluginReport
	if method != "_spool/event" || json.Unmarshal(params, &e) != nil {
		return nil
	}
	n := &acp.Notice{Session: e.Session, Parent: e.Parent.Session, ParentCall: e.Parent.Call}
	switch e.Kind {
	case "update":
		n.Update = e.Update
	case "retry":
		n.Warning = fmt.Sprintf("the model failed (%s); attempt %d in %d ms", e.Message, e.Attempt+1, max(e.WaitMs, 0))
	case "error":
		n.Status = e.Status
	case "usage":
		n.Cut = e.Finish == "length"
		n.CostUSD = e.Cost
		n.Usage = events.Usage{
			InputTokens: e.Tokens.Input, OutputTokens: e.Tokens.Output + e.Tokens.Reasoning,
			CacheReadTokens: e.Tokens.Cache.Read, CacheWriteTokens: e.Tokens.Cache.Write,
		}
	case "over":
		n.Over = true
	case "text":
		n.Text = &acp.EarlyTextPiece{Message: e.ID, Thought: e.Thought, Piece: e.Text}
	case "permission":
		n.Request = &acp.SubagentRequest{ID: e.ID, Call: acp.ToolCall{ID: e.Call, Name: e.Tool, Input: e.Metadata}, Input: e.Input}
	case "replied":
		n.Request = &acp.SubagentRequest{ID: e.ID, Over: true}
	case "forked":
		n.Forked = &acp.ForkResult{Session: e.Session, Error: e.Message}
		if e.Session == "" && e.Message == "" {
			n.Forked.Error = "OpenCode made no copy of it"
		}
	default:
		return nil
	}
	return n
}
