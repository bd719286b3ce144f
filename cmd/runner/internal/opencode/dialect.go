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

// dialect returns the differences of OpenCode from the protocol.
func dialect(l agent.Launch, now func() time.Time) acp.Dialect {
	name := model(l)
	return acp.Dialect{
		Now: now, Version: Tested, Model: provider + "/" + name, Shown: name,
		// It sends a file that it is about to write to the client, whether offered or not, and then writes the file
		// itself.
		AcceptWrites: true,
		// Its session/list reads the database by a request to its own server, which delays the query.
		AnswersInitialize: true,
		Forks:             true,
		Anchors:           true,
		Skills:            acp.SkillDirs(l),
		Transcript:        func(string) string { return database(l.Folders) },
		Tool:              classifier(l),
		Notice:            notice,
	}
}

// kinds are the CLI's tools. Other tools are not allowed.
var kinds = map[string]acp.Tool{
	"read": {Kind: permission.KindRead}, "write": {Kind: permission.KindEdit}, "edit": {Kind: permission.KindEdit},
	"multiedit": {Kind: permission.KindEdit}, "patch": {Kind: permission.KindEdit}, "apply_patch": {Kind: permission.KindEdit},
	"glob": {Kind: permission.KindRead, Search: true}, "grep": {Kind: permission.KindRead, Search: true}, "list": {Kind: permission.KindRead, Search: true},
	"bash": {Kind: permission.KindShell}, "task": {Kind: permission.KindAgent},
	"todowrite": {Kind: permission.KindBookkeeping}, "todoread": {Kind: permission.KindBookkeeping}, "skill": {Kind: permission.KindBookkeeping}, "invalid": {Kind: permission.KindBookkeeping},
	"webfetch": {Kind: permission.KindNetwork}, "websearch": {Kind: permission.KindNetwork}, "codesearch": {Kind: permission.KindNetwork},
}

// input has the arguments of a call that are used.
type input struct {
	Prompt string `json:"prompt"` // task
	Agent  string `json:"subagent_type"`
	Todos  []todo `json:"todos"` // todowrite
}

type todo struct {
	Content string `json:"content"`
	Status  string `json:"status"`
}

// result has the fields of a call's output that are used.
type result struct {
	Metadata struct {
		Exit    *int   `json:"exit"`      // bash
		Session string `json:"sessionId"` // task
	} `json:"metadata"`
	Output string `json:"output"`
}

// tool returns the kind of a call, and for some of the CLI's own tools more; another tool has permission.KindUnknown. Arguments of an unexpected type are
// ignored.
func tool(c acp.Call) *acp.Tool {
	name := c.Name
	if c.Kind == sdk.ToolKindExecute {
		name = "bash" // a command of a sub-agent has the command as its title
	}
	known, ok := kinds[name]
	if !ok {
		return &acp.Tool{Kind: permission.KindUnknown}
	}
	var in input
	if json.Unmarshal(c.Input, &in) != nil {
		in = input{}
	}
	var out result
	if json.Unmarshal(c.Output, &out) != nil {
		out = result{}
	}
	switch known.Name = name; name {
	case "bash":
		known.Failed = out.Metadata.Exit != nil && *out.Metadata.Exit != 0
	case "task":
		known.Subagent = &acp.Subagent{Name: in.Agent, Prompt: in.Prompt, Session: out.Metadata.Session, Said: answerOf(out.Output)}
	case "todowrite":
		for _, t := range in.Todos {
			known.Todos = append(known.Todos, events.TodoItem{Content: t.Content, Status: t.Status})
		}
	}
	return &known
}

// answerOf returns the answer of a sub-agent from the output of its call, without the CLI's text for the model around it.
func answerOf(output string) string {
	_, rest, ok := strings.Cut(output, "<task_result>")
	if !ok {
		return output
	}
	text, _, _ := strings.Cut(rest, "</task_result>")
	return strings.TrimSpace(text)
}

// report is a notification that plugin.js sends from within the CLI.
type report struct {
	Kind    string `json:"kind"` // retry, error, usage, over, forked, text, permission, replied
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
	Parent  string `json:"parent"` // permission: the call that runs the sub-agent
	Call    string `json:"call"`
	Tool    string `json:"tool"`

	Input    json.RawMessage `json:"input"`
	Metadata json.RawMessage `json:"metadata"`

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

// notice returns the Notice for a notification of plugin.js, or nil for another notification.
func notice(method string, params json.RawMessage) *acp.Notice {
	var e report
	if method != "_spool/event" || json.Unmarshal(params, &e) != nil {
		return nil
	}
	n := &acp.Notice{Session: e.Session}
	switch e.Kind {
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
		n.Text = &acp.Text{Message: e.ID, Thought: e.Thought, Piece: e.Text}
	case "permission":
		n.Request = &acp.Request{ID: e.ID, Conversation: e.Parent, Call: acp.Call{ID: e.Call, Name: e.Tool, Input: e.Metadata}, Input: e.Input}
	case "replied":
		n.Request = &acp.Request{ID: e.ID, Over: true}
	case "forked":
		n.Forked = &acp.Forked{Session: e.Session, Error: e.Message}
		if e.Session == "" && e.Message == "" {
			n.Forked.Error = "OpenCode made no copy of it"
		}
	default:
		return nil
	}
	return n
}
