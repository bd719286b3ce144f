package definition

import (
	"reflect"
	"strings"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
)

// The architectures of package architecture, as constants for the table.
const (
	ClaudeCode = architecture.ClaudeCode
	Codex      = architecture.Codex
	OpenCode   = architecture.OpenCode
	ACP        = architecture.ACP
	Spool      = architecture.Spool
)

// SupportNotes describe, by architecture, how the architecture supports a field, in a short phrase. An architecture
// without an entry does not support the field: an agent that sets the field is refused.
type SupportNotes map[string]string

// EnforcesTurnLimit reports whether the agent of an architecture enforces limits.turns itself. For all other
// architectures the egress proxy counts the requests, so limits.turns requires a sandbox with an egress proxy.
func EnforcesTurnLimit(architecture string) bool {
	return architecture == ClaudeCode || architecture == Spool
}

// sameNoteForAll returns SupportNotes in which every architecture has the same note.
func sameNoteForAll(how string) SupportNotes {
	return SupportNotes{ClaudeCode: how, Codex: how, OpenCode: how, ACP: how, Spool: how}
}

// modelProvidersNote returns the note about the model providers that an architecture can use.
func modelProvidersNote(name string) string {
	return strings.Join(architecture.ModelProvidersOf(name), " or ")
}

// SupportTable returns the table of the fields of events.AgentSpec that architectures support. Each field of tools and
// limits has a row. A list of objects has one row, and a field of its objects may have one as well, such as
// mcpServers.headers.
//
// To support a field in one more architecture, add its cell here and run go generate.
func SupportTable() map[string]SupportNotes {
	prepended, appended := "put before the first message", "appended to the instructions"
	restricted, removed := "only these of the agent's own tools are offered; tools of MCP servers too, unless the list names some of them", "not offered"
	inConfiguration, perCall, notOffered := "in the CLI's configuration", "for a call", "others are not offered"
	readOnlySkills := "listed in its own instructions, read-only in the sandbox"
	enforcedBudget := "in Docker the egress proxy refuses the next model call; else the turn is stopped when the agent reports its usage"
	countedRequests := "requests that models answered, including those of sub-agents; the egress proxy refuses the next one; only with the providers docker and modal"
	deepest := "the execution ends with RECURSION_LIMIT"
	policy := "decides about calls of tools ([permissions.md](permissions.md))"
	return map[string]SupportNotes{
		"name":             sameNoteForAll("shown to people"),
		"description":      sameNoteForAll("shown to people"),
		"architecture":     sameNoteForAll("runs the agent"),
		"model":            sameNoteForAll("the model of requests"),
		"modelProvider":    {ClaudeCode: modelProvidersNote(ClaudeCode), Codex: modelProvidersNote(Codex), OpenCode: modelProvidersNote(OpenCode), ACP: modelProvidersNote(ACP), Spool: modelProvidersNote(Spool)},
		"instructions":     {ClaudeCode: "appended to the CLI's system prompt", Codex: "developer instructions of the thread", OpenCode: "instructions in the configuration", ACP: prepended, Spool: "the system prompt"},
		"memoryFile":       {ClaudeCode: "CLAUDE.md in the CLI's configuration folder", Codex: appended, OpenCode: appended, ACP: prepended, Spool: appended},
		"tools.allow":      {ClaudeCode: restricted, OpenCode: restricted, Spool: restricted},
		"tools.deny":       {ClaudeCode: removed, OpenCode: removed, Spool: removed},
		"skills":           sameNoteForAll("listed in the prompt, read-only in the sandbox"),
		"subagents":        {ClaudeCode: "sub-agents of the session", Codex: "agent roles", OpenCode: "sub-agents in the configuration; what their rules do not allow is denied without a question"},
		"commands":         {ClaudeCode: "commands of the CLI", OpenCode: "commands of the CLI", Spool: "/name in a message is replaced by the prompt"},
		"mcpServers":       {ClaudeCode: inConfiguration, Codex: "in the thread's configuration", OpenCode: inConfiguration, ACP: "passed with the session; type http if the agent supports it", Spool: "reached by the agent itself"},
		"environment":      sameNoteForAll("variables of the agent's process"),
		"files":            sameNoteForAll("written into a new workspace"),
		"command":          {ACP: "the agent's program; required"},
		"modelSettings":    {ACP: "how the agent is given its model, by variables and arguments"},
		"image":            sameNoteForAll("the sandbox's image"),
		"dependencies.npm": sameNoteForAll("installed once; on the PATH of the sandbox and in NODE_PATH"),
		"dependencies.pip": sameNoteForAll("installed once; on the PATH of the sandbox and in PYTHONPATH"),
		"egress":           sameNoteForAll("hosts besides the models' that the sandbox reaches, by all methods or only by those before the host"),

		"subagents.tools":      {ClaudeCode: "only these", OpenCode: "only these; write and edit count as one"},
		"subagents.mcpServers": {ClaudeCode: "others are not offered, and it cannot start sub-agents", OpenCode: notOffered},
		"subagents.skills":     {ClaudeCode: readOnlySkills, Codex: readOnlySkills, OpenCode: readOnlySkills},
		"mcpServers.image":     sameNoteForAll("type docker: a container beside the sandbox, only with provider docker; the agent uses it as type stdio"),
		"mcpServers.timeoutMs": {ClaudeCode: perCall, Codex: perCall, OpenCode: perCall, Spool: perCall},
		"mcpServers.tools":     {ClaudeCode: "others are offered, and denied when called", Codex: notOffered, OpenCode: notOffered, Spool: notOffered},

		"limits.turns":        {ClaudeCode: "requests of the agent itself, not of its sub-agents", Codex: countedRequests, OpenCode: countedRequests, ACP: countedRequests, Spool: "requests to the model"},
		"limits.budgetUsd":    sameNoteForAll(enforcedBudget),
		"limits.tokens":       sameNoteForAll(enforcedBudget),
		"limits.outputEvents": sameNoteForAll("the execution ends with OUTPUT_LIMIT"),
		"limits.outputBytes":  sameNoteForAll("the execution ends with OUTPUT_LIMIT"),
		"limits.timeMs":       sameNoteForAll("the execution's time limit, unless the session has one"),
		"limits.session":      sameNoteForAll("the budget of each session that sets none: checked before each turn, and during the turn like the execution's limits"),
		"limits.subagentDepth": {
			ClaudeCode: deepest + "; a further sub-agent is not started", Codex: deepest + "; calls of a further sub-agent are denied",
			OpenCode: deepest + "; a further sub-agent is not started, and one starts others only if its `tools` name `task`",
		},
		"conversation.onLoss": sameNoteForAll("a turn whose conversation is lost"),
		"loops":               sameNoteForAll("tool calls of the agent and of each of its sub-agents, as [below](#repeated-tool-calls)"),
		"permissions":         {ClaudeCode: policy, Codex: policy, OpenCode: policy, ACP: "what the agent asks about; other calls run ([permissions.md](permissions.md))", Spool: policy},
		"retries.attempts":    sameNoteForAll("starts of the agent's process; without it, a process that died is not started again"),
		"retries.backoffMs":   sameNoteForAll("the job waits; nothing of the execution runs meanwhile"),
	}
}

// checkArchitectureSupport adds an error for each field that is set although the architecture does not support it.
func (c *specChecker) checkArchitectureSupport(s events.AgentSpec, architecture string) {
	h := supportChecker{c, SupportTable(), architecture}
	h.checkValue(reflect.ValueOf(s), "", "")
}

type supportChecker struct {
	*specChecker
	table        map[string]SupportNotes
	architecture string
}

// checkValue checks a value and the fields inside it against SupportTable. row is the value's path in the table, field
// its path in the spec.
func (h supportChecker) checkValue(v reflect.Value, row, field string) {
	if v.IsZero() || v.Kind() == reflect.Slice && v.Len() == 0 || v.Kind() == reflect.Map && v.Len() == 0 {
		return
	}
	if cells, ok := h.table[row]; ok && cells[h.architecture] == "" {
		h.addError(field, "architecture %s does not support this field", h.architecture)
		return
	}
	switch {
	case v.Kind() == reflect.Struct:
		for _, f := range structFields(v.Type()) {
			h.checkValue(v.Field(f.index), joinField(row, f.name), joinField(field, f.name))
		}
	case v.Kind() == reflect.Slice && v.Type().Elem().Kind() == reflect.Struct:
		for i := range v.Len() {
			h.checkValue(v.Index(i), row, joinIndex(field, i))
		}
	}
}
