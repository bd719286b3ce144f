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

// CheckAgent returns the errors of an agent in no particular order, or nil.
func CheckAgent(s events.AgentSpec) []FieldError {
	var c checker
	c.checkStrings(reflect.ValueOf(s), "")
	c.checkLabel("name", s.Name)
	c.checkText("description", s.Description, MaxDescription)
	c.checkLabel("model", s.Model)
	c.checkText("instructions", s.Instructions, MaxText)
	if n := utf8.RuneCountInString(strings.TrimSpace(s.Instructions)); n < MinInstructions {
		c.fail("instructions", "has %d characters; at least %d are required", n, MinInstructions)
	}
	c.checkText("memoryFile", s.MemoryFile, MaxText)
	c.checkList("tools.allow", s.Tools.Allow)
	c.checkList("tools.deny", s.Tools.Deny)
	c.checkReferences("skills", s.Skills, MaxEntries)
	c.checkSubagents(s)
	c.checkCommands(s.Commands)
	c.checkServers(s.MCPServers)
	c.checkDeclarations(s.Environment)
	c.checkFiles(s.Files)
	c.checkDependencies(s.Dependencies)
	c.checkSandbox(s)
	if b := s.Limits.BudgetUSD; b < 0 || math.IsNaN(b) || math.IsInf(b, 0) {
		c.fail("limits.budgetUsd", "must be a number of dollars, 0 or more")
	}
	c.addOptionError(command.CheckBudget("limits.session", s.Limits.Session), "limits.session.costUsd", "limits.session.costUsd")
	if s.Limits.SubagentDepth > MaxSubagentDepth {
		c.fail("limits.subagentDepth", "is %d; the limit is %d", s.Limits.SubagentDepth, MaxSubagentDepth)
	}
	c.checkRetries(s.Retries)
	c.checkLoops(s.Loops)
	for _, wrong := range permission.Check(s.Permissions) {
		c.fail(wrong.Field, "%s", wrong.Detail)
	}
	name, ok := architecture.Canonical(s.Architecture)
	switch {
	case s.Architecture == "":
		c.fail("architecture", "is required; must be one of %s", architecture.List())
	case !ok:
		c.fail("architecture", "unknown architecture %.64q; must be one of %s", s.Architecture, architecture.List())
	default:
		c.checkSupport(s, name)
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

func (c *checker) checkRetries(r events.Retries) {
	if r.Attempts > MaxAttempts {
		c.fail("retries.attempts", "is %d; the limit is %d", r.Attempts, MaxAttempts)
	}
	if most := uint32(events.MaxBackoff.Milliseconds()); r.BackoffMs > most {
		c.fail("retries.backoffMs", "is %d; the limit is %d (five minutes)", r.BackoffMs, most)
	}
	if r.Attempts == 1 && r.BackoffMs > 0 {
		c.fail("retries.backoffMs", "must not be set if retries.attempts is 1")
	}
}

func (c *checker) checkLoops(l events.Loops) {
	switch l.Action {
	case "", events.LoopActionStop:
	case events.LoopActionWarn:
		if l.Stop > 0 {
			c.fail("loops.stop", "must not be set if loops.action is warn")
			return
		}
	case events.LoopActionNone:
		if l != (events.Loops{Action: events.LoopActionNone}) {
			c.fail("loops.action", "none must be the only field of loops")
		}
		return
	default:
		c.fail("loops.action", "%.64q is not an action; must be %s, %s or %s", l.Action, events.LoopActionStop, events.LoopActionWarn, events.LoopActionNone)
		return
	}
	before := len(c.errs)
	for field, n := range map[string]uint32{"loops.warn": l.Warn, "loops.stop": l.Stop, "loops.window": l.Window} {
		switch {
		case n == 1:
			c.fail(field, "is 1; must be 2 or more, because a single call repeats nothing")
		case n > MaxLoopWindow:
			c.fail(field, "is %d; the limit is %d", n, MaxLoopWindow)
		}
	}
	set := l.WithDefaults()
	switch last := max(set.Warn, set.Stop); {
	case len(c.errs) > before:
	case set.Stop > 0 && set.Warn > set.Stop:
		c.fail("loops.warn", "is %d; must not be more than loops.stop, which is %d", set.Warn, set.Stop)
	case last > set.Window:
		c.fail("loops.window", "is %d; must not be less than loops.warn and loops.stop, of which the greater is %d", set.Window, last)
	}
}

// checkSandbox checks the fields that agents and the options of sessions share, with the rules of the options.
func (c *checker) checkSandbox(s events.AgentSpec) {
	c.addOptionError(command.CheckOptions(events.Options{Image: s.Image}), "sessionOptions.image", "image")
	c.addOptionError(command.CheckOptions(events.Options{Command: s.Command}), "sessionOptions.command", "command")
	c.checkEgress(s.Egress)
}

// checkEgress checks each entry of an allowlist.
func (c *checker) checkEgress(list []string) {
	c.count("egress", len(list), command.MaxEgress)
	for i, entry := range list {
		var wrong *egress.EntryError
		if _, err := egress.ParseAllowlist([]string{entry}); errors.As(err, &wrong) {
			c.fail(element("egress", i), "%s; %s", wrong.Reason, egress.EntryForm)
		}
	}
}

func (c *checker) checkSubagents(agent events.AgentSpec) {
	c.count("subagents", len(agent.Subagents), MaxEntries)
	seen := map[string]int{}
	for i, s := range agent.Subagents {
		at := element("subagents", i)
		c.checkName(seen, "subagents", i, s.Name, "-")
		if c.must(within(at, "description"), s.Description) {
			c.checkText(within(at, "description"), s.Description, MaxDescription)
		}
		if c.must(within(at, "instructions"), s.Instructions) {
			c.checkText(within(at, "instructions"), s.Instructions, MaxText)
		}
		c.checkLabel(within(at, "model"), s.Model)
		c.checkList(within(at, "tools"), s.Tools)
		c.checkList(within(at, "mcpServers"), s.MCPServers)
		for j, name := range s.MCPServers {
			if name != "" && !slices.ContainsFunc(agent.MCPServers, func(m events.MCPServer) bool { return m.Name == name }) {
				c.fail(element(within(at, "mcpServers"), j), "%.64q is not an MCP server of the agent", name)
			}
		}
		c.checkReferences(within(at, "skills"), s.Skills, MaxEntries)
	}
	if slices.ContainsFunc(agent.Subagents, func(s events.SubagentSpec) bool { return len(s.MCPServers) > 0 }) {
		c.checkServerNames(agent.MCPServers)
	}
}

// checkServerNames adds errors for servers whose tool names, server__tool, would be ambiguous.
func (c *checker) checkServerNames(list []events.MCPServer) {
	for i, longer := range list {
		for j, s := range list {
			if s.Name != "" && strings.HasPrefix(longer.Name, s.Name+"__") {
				c.fail(within(element("mcpServers", i), "name"), "%q could be a tool of %s; server names must not begin with the name of another server and \"__\"", longer.Name, element("mcpServers", j))
			}
		}
	}
}

func (c *checker) checkCommands(list []events.CommandSpec) {
	c.count("commands", len(list), MaxEntries)
	seen := map[string]int{}
	for i, s := range list {
		at := element("commands", i)
		c.checkName(seen, "commands", i, s.Name, "-")
		c.checkText(within(at, "description"), s.Description, MaxDescription)
		if c.must(within(at, "prompt"), s.Prompt) {
			c.checkText(within(at, "prompt"), s.Prompt, MaxText)
		}
	}
}

// checkName checks the name of the list's i-th element: a-z, 0-9 and the given joints, without duplicates.
func (c *checker) checkName(seen map[string]int, list string, i int, name, separators string) {
	field := within(element(list, i), "name")
	const letters = "abcdefghijklmnopqrstuvwxyz0123456789"
	if name == "" || len(name) > maxName || strings.Trim(name, letters+separators) != "" || strings.Contains(separators, name[:1]) {
		c.fail(field, "%.64q is not a name; must have 1 to %d characters of a-z, 0-9 and %s, and begin with a letter or digit", name, maxName, strings.Join(strings.Split(separators, ""), " "))
		return
	}
	c.checkUnique(seen, list, "name", name, i)
}

func (c *checker) checkDeclarations(all map[string]events.Declaration) {
	c.count("environment", len(all), MaxEntries)
	for _, name := range slices.Sorted(maps.Keys(all)) {
		d, field := all[name], within("environment", name)
		c.checkVariable(field, name)
		c.checkText(within(field, "value"), d.Value, MaxValue)
		c.checkText(within(field, "description"), d.Description, MaxDescription)
		if d.Secret && d.Value != "" {
			c.fail(within(field, "value"), "must not be set: agents hold no secrets; set the value in an environment, or in the request")
		}
	}
}

func (c *checker) checkDependencies(d events.Dependencies) {
	var list dependency.Errors
	_, err := dependency.Parse(d)
	errors.As(err, &list) // Parse returns no other error
	for _, wrong := range list {
		field := within("dependencies", wrong.List)
		if wrong.Index >= 0 {
			field = element(field, wrong.Index)
		}
		c.fail(field, "%s", wrong.Detail)
	}
}

func (c *checker) checkFiles(list []events.FileSpec) {
	c.count("files", len(list), MaxEntries)
	seen, total := map[string]int{}, 0
	for i, f := range list {
		at := element("files", i)
		c.addOptionError(command.CheckPath("path", f.Path, false), "path", within(at, "path"))
		c.checkUnique(seen, "files", "path", f.Path, i)
		if f.Mode > uint32(fs.ModePerm) {
			c.fail(within(at, "mode"), "%#o is not permission bits; the limit is %#o", f.Mode, uint32(fs.ModePerm))
		}
		content, err := base64.StdEncoding.Strict().DecodeString(f.ContentBase64)
		switch {
		case f.Content != "" && f.ContentBase64 != "":
			c.fail(within(at, "contentBase64"), "must not be set together with content")
		case err != nil:
			c.fail(within(at, "contentBase64"), "is not base64: %v", err)
		}
		total += len(f.Content) + len(content)
	}
	for i, f := range list { // a file cannot also be a folder
		for dir, below := parentDir(f.Path); below; dir, below = parentDir(dir) {
			if other, ok := seen[dir]; ok {
				c.fail(within(element("files", i), "path"), "folder %s is also a file: %s", dir, element("files", other))
				break
			}
		}
	}
	if total > MaxFiles {
		c.fail("files", "has %d bytes together; the limit is %d", total, MaxFiles)
	}
}

// parentDir returns the folder of a path, if it has one.
func parentDir(path string) (string, bool) {
	i := strings.LastIndexByte(path, '/')
	if i < 0 {
		return "", false
	}
	return path[:i], true
}
