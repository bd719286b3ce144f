package definition

import (
	"cmp"
	"encoding/base64"
	"errors"
	"io/fs"
	"maps"
	"math"
	"reflect"
	"slices"
	"strings"
	"unicode/utf8"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/dependency"
	"github.com/spoolhq/spool/pkg/egress"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

// CheckAgent returns the errors in the spec of an agent in no particular order, or nil.
func CheckAgent(s events.AgentSpec) []FieldError {
	var c specChecker
	c.checkStoredTexts(reflect.ValueOf(s), "")
	c.checkLine("name", s.Name)
	c.checkText("description", s.Description, MaxDescriptionSize)
	c.checkLine("model", s.Model)
	c.checkText("instructions", s.Instructions, MaxTextSize)
	if n := utf8.RuneCountInString(strings.TrimSpace(s.Instructions)); n < MinInstructionsLength {
		c.addError("instructions", "has %d characters; at least %d are required", n, MinInstructionsLength)
	}
	c.checkText("memoryFile", s.MemoryFile, MaxTextSize)
	c.checkList("tools.allow", s.Tools.Allow)
	c.checkList("tools.deny", s.Tools.Deny)
	c.checkReferences("skills", s.Skills, MaxListEntries)
	c.checkSubagents(s)
	c.checkSlashCommands(s.Commands)
	c.checkServers(s.MCPServers)
	c.checkDeclarations(s.Environment)
	c.checkFiles(s.Files)
	c.checkDependencies(s.Dependencies)
	c.checkSandbox(s)
	if b := s.Limits.BudgetUSD; b < 0 || math.IsNaN(b) || math.IsInf(b, 0) {
		c.addError("limits.budgetUsd", "must be a number of dollars, 0 or more")
	}
	c.addOptionError(command.CheckBudget("limits.session", s.Limits.Session), "limits.session.costUsd", "limits.session.costUsd")
	if s.Limits.SubagentDepth > MaxSubagentDepth {
		c.addError("limits.subagentDepth", "is %d; the limit is %d", s.Limits.SubagentDepth, MaxSubagentDepth)
	}
	c.checkRetries(s.Retries)
	c.checkLoops(s.Loops)
	c.addOptionError(command.CheckOptions(events.Options{OnConversationLoss: s.Conversation.OnLoss}), "sessionOptions.onConversationLoss", "conversation.onLoss")
	for _, wrong := range permission.Check(s.Permissions) {
		c.addError(wrong.Field, "%s", wrong.Detail)
	}
	name, ok := architecture.Canonical(s.Architecture)
	switch {
	case s.Architecture == "":
		c.addError("architecture", "is required; must be one of %s", architecture.FormatNames())
	case !ok:
		c.addError("architecture", "unknown architecture %.64q; must be one of %s", s.Architecture, architecture.FormatNames())
	default:
		c.checkArchitectureSupport(s, name)
		c.addOptionError(errors.Join(command.CheckOptions(events.Options{ModelProvider: s.ModelProvider}), command.CheckModelProvider(name, s.ModelProvider)), "sessionOptions.modelProvider", "modelProvider")
		settings := command.CheckOptions(events.Options{ModelSettings: s.ModelSettings})
		if settings == nil && name == ACP { // for other architectures SupportTable refuses the settings; the model may come from the session
			settings = command.CheckModelSettings(name, events.Options{Model: cmp.Or(s.Model, "the session's"), ModelProvider: s.ModelProvider, ModelSettings: s.ModelSettings})
		}
		c.addOptionError(settings, "sessionOptions.", "")
		if name == ACP {
			c.addOptionError(command.CheckCommand(name, s.Command), "sessionOptions.command", "command")
		}
	}
	return c.errs
}

func (c *specChecker) checkRetries(r events.Retries) {
	if r.Attempts > MaxAttempts {
		c.addError("retries.attempts", "is %d; the limit is %d", r.Attempts, MaxAttempts)
	}
	if most := uint32(events.MaxBackoff.Milliseconds()); r.BackoffMs > most {
		c.addError("retries.backoffMs", "is %d; the limit is %d (five minutes)", r.BackoffMs, most)
	}
	if r.Attempts == 1 && r.BackoffMs > 0 {
		c.addError("retries.backoffMs", "must not be set if retries.attempts is 1")
	}
}

func (c *specChecker) checkLoops(l events.Loops) {
	switch l.Action {
	case "", events.LoopActionStop:
	case events.LoopActionWarn:
		if l.Stop > 0 {
			c.addError("loops.stop", "must not be set if loops.action is warn")
			return
		}
	case events.LoopActionNone:
		if l != (events.Loops{Action: events.LoopActionNone}) {
			c.addError("loops.action", "none must be the only field of loops")
		}
		return
	default:
		c.addError("loops.action", "%.64q is not an action; must be %s, %s or %s", l.Action, events.LoopActionStop, events.LoopActionWarn, events.LoopActionNone)
		return
	}
	before := len(c.errs)
	for field, n := range map[string]uint32{"loops.warn": l.Warn, "loops.stop": l.Stop, "loops.window": l.Window} {
		switch {
		case n == 1:
			c.addError(field, "is 1; must be 2 or more, because a single call repeats nothing")
		case n > MaxLoopWindow:
			c.addError(field, "is %d; the limit is %d", n, MaxLoopWindow)
		}
	}
	set := l.WithDefaults()
	switch last := max(set.Warn, set.Stop); {
	case len(c.errs) > before:
	case set.Stop > 0 && set.Warn > set.Stop:
		c.addError("loops.warn", "is %d; must not be more than loops.stop, which is %d", set.Warn, set.Stop)
	case last > set.Window:
		c.addError("loops.window", "is %d; must not be less than loops.warn and loops.stop, of which the greater is %d", set.Window, last)
	}
}

// checkSandbox checks the sandbox fields of an agent, which session options have too, with the rules of session
// options.
func (c *specChecker) checkSandbox(s events.AgentSpec) {
	c.addOptionError(command.CheckOptions(events.Options{Image: s.Image}), "sessionOptions.image", "image")
	c.addOptionError(command.CheckOptions(events.Options{Command: s.Command}), "sessionOptions.command", "command")
	c.checkEgress(s.Egress)
}

// checkEgress adds an error for each invalid entry of an egress allowlist.
func (c *specChecker) checkEgress(list []string) {
	c.checkCount("egress", len(list), command.MaxEgressEntries)
	for i, entry := range list {
		var wrong *egress.EntryError
		if _, err := egress.ParseAllowlist([]string{entry}); errors.As(err, &wrong) {
			c.addError(joinIndex("egress", i), "%s; %s", wrong.Reason, egress.EntrySyntax)
		}
	}
}

func (c *specChecker) checkSubagents(agent events.AgentSpec) {
	c.checkCount("subagents", len(agent.Subagents), MaxListEntries)
	seen := map[string]int{}
	for i, s := range agent.Subagents {
		at := joinIndex("subagents", i)
		c.checkName(seen, "subagents", i, s.Name, "-")
		if c.checkNotEmpty(joinField(at, "description"), s.Description) {
			c.checkText(joinField(at, "description"), s.Description, MaxDescriptionSize)
		}
		if c.checkNotEmpty(joinField(at, "instructions"), s.Instructions) {
			c.checkText(joinField(at, "instructions"), s.Instructions, MaxTextSize)
		}
		c.checkLine(joinField(at, "model"), s.Model)
		c.checkList(joinField(at, "tools"), s.Tools)
		c.checkList(joinField(at, "mcpServers"), s.MCPServers)
		for j, name := range s.MCPServers {
			if name != "" && !slices.ContainsFunc(agent.MCPServers, func(m events.MCPServer) bool { return m.Name == name }) {
				c.addError(joinIndex(joinField(at, "mcpServers"), j), "%.64q is not an MCP server of the agent", name)
			}
		}
		c.checkReferences(joinField(at, "skills"), s.Skills, MaxListEntries)
	}
	if slices.ContainsFunc(agent.Subagents, func(s events.SubagentSpec) bool { return len(s.MCPServers) > 0 }) {
		c.checkServerNames(agent.MCPServers)
	}
}

// checkServerNames adds errors for MCP servers whose tool names, server__tool, would be ambiguous.
func (c *specChecker) checkServerNames(list []events.MCPServer) {
	for i, longer := range list {
		for j, s := range list {
			if s.Name != "" && strings.HasPrefix(longer.Name, s.Name+"__") {
				c.addError(joinField(joinIndex("mcpServers", i), "name"), "%q could be a tool of %s; server names must not begin with the name of another server and \"__\"", longer.Name, joinIndex("mcpServers", j))
			}
		}
	}
}

func (c *specChecker) checkSlashCommands(list []events.CommandSpec) {
	c.checkCount("commands", len(list), MaxListEntries)
	seen := map[string]int{}
	for i, s := range list {
		at := joinIndex("commands", i)
		c.checkName(seen, "commands", i, s.Name, "-")
		c.checkText(joinField(at, "description"), s.Description, MaxDescriptionSize)
		if c.checkNotEmpty(joinField(at, "prompt"), s.Prompt) {
			c.checkText(joinField(at, "prompt"), s.Prompt, MaxTextSize)
		}
	}
}

// checkName adds an error unless the name of the list's i-th element is unique and consists of a-z, 0-9 and the given
// separators.
func (c *specChecker) checkName(seen map[string]int, list string, i int, name, separators string) {
	field := joinField(joinIndex(list, i), "name")
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	if name == "" || len(name) > maxNameLength || strings.Trim(name, letters+separators) != "" || strings.Contains(separators, name[:1]) {
		c.addError(field, "%.64q is not a name; must have 1 to %d characters of a-z, 0-9 and %s, and begin with a letter or digit", name, maxNameLength, strings.Join(strings.Split(separators, ""), " "))
		return
	}
	c.checkUnique(seen, list, "name", name, i)
}

func (c *specChecker) checkDeclarations(all map[string]events.Declaration) {
	c.checkCount("environment", len(all), MaxListEntries)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		d, field := all[name], joinField("environment", name)
		c.checkVariable(field, name)
		c.checkText(joinField(field, "value"), d.Value, MaxVariableSize)
		c.checkText(joinField(field, "description"), d.Description, MaxDescriptionSize)
		if d.Secret && d.Value != "" {
			c.addError(joinField(field, "value"), "must not be set: agents hold no secrets; set the value in an environment, or in the request")
		}
	}
}

func (c *specChecker) checkDependencies(d events.Dependencies) {
	var list dependency.Errors
	_, err := dependency.Parse(d)
	errors.As(err, &list) // Parse returns no other error
	for _, wrong := range list {
		field := joinField("dependencies", wrong.List)
		if wrong.Index >= 0 {
			field = joinIndex(field, wrong.Index)
		}
		c.addError(field, "%s", wrong.Detail)
	}
}

func (c *specChecker) checkFiles(list []events.FileSpec) {
	c.checkCount("files", len(list), MaxListEntries)
	seen, total := map[string]int{}, 0
	for i, f := range list {
		at := joinIndex("files", i)
		c.addOptionError(command.CheckPath("path", f.Path, false), "path", joinField(at, "path"))
		c.checkUnique(seen, "files", "path", f.Path, i)
		if f.Mode > uint32(fs.ModePerm) {
			c.addError(joinField(at, "mode"), "%#o is not permission bits; the limit is %#o", f.Mode, uint32(fs.ModePerm))
		}
		content, err := base64.StdEncoding.Strict().DecodeString(f.ContentBase64)
		switch {
		case f.Content != "" && f.ContentBase64 != "":
			c.addError(joinField(at, "contentBase64"), "must not be set together with content")
		case err != nil:
			c.addError(joinField(at, "contentBase64"), "is not base64: %v", err)
		}
		total += len(f.Content) + len(content)
	}
	for i, f := range list { // a file cannot also be a folder
		for dir, below := parentDir(f.Path); below; dir, below = parentDir(dir) {
			if other, ok := seen[dir]; ok {
				c.addError(joinField(joinIndex("files", i), "path"), "folder %s is also a file: %s", dir, joinIndex("files", other))
				break
			}
		}
	}
	if total > MaxFilesSize {
		c.addError("files", "has %d bytes together; the limit is %d", total, MaxFilesSize)
	}
}

// parentDir returns the folder of a relative path; ok is false if the path is at the top.
func parentDir(path string) (string, bool) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", false
	}
	return path[:i], true
}
