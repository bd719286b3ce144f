package definition

import (
	"maps"
	"net/url"
	"slices"
	"strings"

	"github.com/spoolhq/spool/pkg/api/command"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/events/layers"
)

func (c *specChecker) checkServers(list []events.MCPServer) {
	c.checkCount("mcpServers", len(list), MaxListEntries)
	seen, containers := map[string]int{}, 0
	for i, s := range list {
		at := joinIndex("mcpServers", i)
		c.checkName(seen, "mcpServers", i, s.Name, "-_")
		switch s.Type {
		case events.MCPTypeStdio:
			c.checkStdio(at, s)
		case events.MCPTypeHTTP:
			c.checkHTTP(at, s)
		case events.MCPTypeDocker:
			c.checkDocker(at, s)
			if containers++; containers == MaxMCPContainers+1 {
				c.addError(joinField(at, "type"), "more than %d servers have type docker", MaxMCPContainers)
			}
		default:
			c.addError(joinField(at, "type"), "%.64q is not a type; must be %s, %s or %s", s.Type, events.MCPTypeStdio, events.MCPTypeHTTP, events.MCPTypeDocker)
		}
		if s.Type != events.MCPTypeDocker && s.Image != "" {
			c.addError(joinField(at, "image"), "must not be set: only servers of type docker have an image")
		}
		if s.TimeoutMs > MaxTimeoutMs {
			c.addError(joinField(at, "timeoutMs"), "is %d ms; must be between 1 and %d", s.TimeoutMs, MaxTimeoutMs)
		}
		c.checkList(joinField(at, "tools"), s.Tools)
	}
}

func (c *specChecker) checkStdio(at string, s events.MCPServer) {
	field := joinField(at, "command")
	if len(s.Command) == 0 {
		c.addError(field, "is required: a server of type stdio is a program that runs in the sandbox")
	}
	c.addOptionError(command.CheckOptions(events.Options{Command: s.Command}), "sessionOptions.command", field)
	c.checkStartCommand(at, s)
}

// checkDocker checks an MCP server of type docker, which runs in a separate container.
func (c *specChecker) checkDocker(at string, s events.MCPServer) {
	if c.checkNotEmpty(joinField(at, "image"), s.Image) {
		c.addOptionError(command.CheckOptions(events.Options{Image: s.Image}), "sessionOptions.image", joinField(at, "image"))
	}
	field := joinField(at, "command")
	if len(s.Command) > 0 { // arguments; the first may be empty
		c.addOptionError(command.CheckOptions(events.Options{Command: append([]string{"-"}, s.Command[1:]...)}), "sessionOptions.command", field)
		c.checkText(joinIndex(field, 0), s.Command[0], command.MaxArgumentLength)
	}
	c.checkStartCommand(at, s)
}

// checkStartCommand checks the fields that MCP servers of types stdio and docker share, which are started by a command.
func (c *specChecker) checkStartCommand(at string, s events.MCPServer) {
	for i, arg := range s.Command {
		c.checkPlaceholders(joinIndex(joinField(at, "command"), i), arg)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Env)) {
		field := joinField(joinField(at, "env"), name)
		c.checkVariable(field, name)
		c.checkText(field, s.Env[name], MaxVariableSize)
		c.checkPlaceholders(field, s.Env[name])
	}
	if s.URL != "" {
		c.addError(joinField(at, "url"), "must not be set for a server of type %s", s.Type)
	}
	if len(s.Headers) > 0 {
		c.addError(joinField(at, "headers"), "must not be set for a server of type %s", s.Type)
	}
}

func (c *specChecker) checkHTTP(at string, s events.MCPServer) {
	c.checkURL(joinField(at, "url"), s.URL)
	seen := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(s.Headers)) {
		value, field := s.Headers[name], joinField(joinField(at, "headers"), name)
		folded := strings.ToLower(name)
		switch before, twice := seen[folded]; {
		case name == "" || strings.Trim(name, wordCharacters+"!#$%&'*+.^`|~") != "":
			c.addError(field, "%.64q is not a header name", name)
		case slices.Contains([]string{"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer"}, folded):
			c.addError(field, "must not be set: the connection sets this header")
		case twice:
			c.addError(field, "is already set as %s", before)
		}
		seen[folded] = name
		if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			c.addError(field, "must not have line breaks or control characters")
		}
		c.checkText(field, value, MaxDescriptionSize)
		c.checkPlaceholders(field, value)
	}
	if len(s.Command) > 0 {
		c.addError(joinField(at, "command"), "must not be set for a server of type http")
	}
	if len(s.Env) > 0 {
		c.addError(joinField(at, "env"), "must not be set for a server of type http")
	}
}

// checkURL adds an error if the URL of an MCP server is invalid. Parts of the URL may come from variables, whose values
// are unknown here.
func (c *specChecker) checkURL(field, s string) {
	if !c.checkNotEmpty(field, s) || !c.checkPlaceholders(field, s) || strings.HasPrefix(s, "${") {
		return
	}
	filled, err := layers.ExpandPlaceholders(s, func(string) (string, bool) { return "1", true })
	var u *url.URL
	if err == nil {
		u, err = url.Parse(filled)
	}
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		c.addError(field, "must be an absolute URL with http or https, such as https://example.com/mcp")
	case u.User != nil:
		c.addError(field, "must not have a user name: pass credentials in a header, with ${VARIABLE}")
	case u.Fragment != "" || strings.HasSuffix(filled, "#"):
		c.addError(field, "must not have a fragment")
	}
}

// checkPlaceholders adds an error unless every ${NAME} of a text is a valid placeholder, and reports whether all are.
func (c *specChecker) checkPlaceholders(field, s string) bool {
	err := layers.CheckPlaceholders(s)
	if err != nil {
		c.addError(field, "%v", err)
	}
	return err == nil
}
