package opencode

import (
	"encoding/json"
	"strings"
	"time"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
	"github.com/spoolhq/spool/pkg/events"
)

// dialect is what OpenCode does in its own way.
func dialect(l agent.Launch, now func() time.Time) acp.Dialect {
	name := model(l)
	return acp.Dialect{
		Now: now, Version: Version, Model: provider + "/" + name, Shown: name,
		// It sends what it is about to write to editors, offered or not, and writes it itself.
		AcceptWrites: true,
		Transcript:   func(string) string { return database(l.Place) },
		Tool:         tool,
	}
}

// classes are the CLI's tools. What is not among them is not allowed.
var classes = map[string]acp.Tool{
	"read": {Class: acp.ClassFile}, "write": {Class: acp.ClassFile}, "edit": {Class: acp.ClassFile},
	"multiedit": {Class: acp.ClassFile}, "patch": {Class: acp.ClassFile}, "apply_patch": {Class: acp.ClassFile},
	"glob": {Class: acp.ClassFile, Search: true}, "grep": {Class: acp.ClassFile, Search: true}, "list": {Class: acp.ClassFile, Search: true},
	"bash": {Class: acp.ClassShell}, "task": {Class: acp.ClassAgent},
	"todowrite": {Class: acp.ClassBooks}, "todoread": {Class: acp.ClassBooks}, "skill": {Class: acp.ClassBooks}, "invalid": {Class: acp.ClassBooks},
	"webfetch": {Class: acp.ClassNetwork}, "websearch": {Class: acp.ClassNetwork}, "codesearch": {Class: acp.ClassNetwork},
}

// input is what is read of a call's arguments.
type input struct {
	Prompt string `json:"prompt"` // task
	Agent  string `json:"subagent_type"`
	Todos  []todo `json:"todos"` // todowrite
}

type todo struct {
	Content string `json:"content"`
	Status  string `json:"status"`
}

// result is what is read of a call's output.
type result struct {
	Metadata struct {
		Exit    *int   `json:"exit"`      // bash
		Session string `json:"sessionId"` // task
	} `json:"metadata"`
	Output string `json:"output"`
}

// tool says what a call is; what has another shape than expected says nothing.
func tool(c acp.Call) *acp.Tool {
	known, ok := classes[c.Name]
	if !ok {
		return &acp.Tool{Class: acp.ClassUnknown}
	}
	var in input
	if json.Unmarshal(c.Input, &in) != nil {
		in = input{}
	}
	var out result
	if json.Unmarshal(c.Output, &out) != nil {
		out = result{}
	}
	switch c.Name {
	case "bash":
		known.Failed = out.Metadata.Exit != nil && *out.Metadata.Exit != 0
	case "task":
		known.Subagent = &acp.Subagent{Name: in.Agent, Prompt: in.Prompt, Session: out.Metadata.Session, Said: said(out.Output)}
	case "todowrite":
		for _, t := range in.Todos {
			known.Todos = append(known.Todos, events.TodoItem{Content: t.Content, Status: t.Status})
		}
	}
	return &known
}

// said is a sub-agent's answer without the CLI's note to the model around it.
func said(output string) string {
	_, rest, ok := strings.Cut(output, "<task_result>")
	if !ok {
		return output
	}
	text, _, _ := strings.Cut(rest, "</task_result>")
	return strings.TrimSpace(text)
}
