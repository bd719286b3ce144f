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

func (c *checker) checkServers(list []events.MCPServer) {
	c.count("mcpServers", len(list), MaxEntries)
	seen, containers := map[string]int{}, 0
	for i, s := range list {
		at := element("mcpServers", i)
		c.checkName(seen, "mcpServers", i, s.Name, "-_")
		switch s.Type {
		case events.MCPTypeStdio:
			c.checkStdio(at, s)
		case events.MCPTypeHTTP:
			c.checkHTTP(at, s)
		case events.MCPTypeDocker:
			c.checkDocker(at, s)
			if containers++; containers == MaxContainers+1 {
				c.fail(within(at, "type"), "more than %d servers have type docker", MaxContainers)
			}
		default:
			c.fail(within(at, "type"), "%.64q is not a type; must be %s, %s or %s", s.Type, events.MCPTypeStdio, events.MCPTypeHTTP, events.MCPTypeDocker)
		}
		if s.Type != events.MCPTypeDocker && s.Image != "" {
			c.fail(within(at, "image"), "must not be set: only servers of type docker have an image")
		}
		if s.TimeoutMs > MaxTimeoutMs {
			c.fail(within(at, "timeoutMs"), "is %d ms; must be between 1 and %d", s.TimeoutMs, MaxTimeoutMs)
		}
		c.checkList(within(at, "tools"), s.Tools)
	}
}

func (c *checker) checkStdio(at string, s events.MCPServer) {
	field := within(at, "command")
	if len(s.Command) == 0 {
		c.fail(field, "is required: a server of type stdio is a program that runs in the sandbox")
	}
	c.addOptionError(command.CheckOptions(events.Options{Command: s.Command}), "sessionOptions.command", field)
	c.checkStart(at, s)
}

// checkDocker checks a server that runs in a separate container.
func (c *checker) checkDocker(at string, s events.MCPServer) {
	if c.must(within(at, "image"), s.Image) {
		c.addOptionError(command.CheckOptions(events.Options{Image: s.Image}), "sessionOptions.image", within(at, "image"))
	}
	field := within(at, "command")
	if len(s.Command) > 0 { // arguments; the first may be empty
		c.addOptionError(command.CheckOptions(events.Options{Command: append([]string{"-"}, s.Command[1:]...)}), "sessionOptions.command", field)
		c.checkText(element(field, 0), s.Command[0], command.MaxArgument)
	}
	c.checkStart(at, s)
}

// checkStart checks the fields that MCP servers with a start command share: those of types stdio and docker.
func (c *checker) checkStart(at string, s events.MCPServer) {
	for i, arg := range s.Command {
		c.checkPlaceholders(element(within(at, "command"), i), arg)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Env)) {
		field := within(within(at, "env"), name)
		c.checkVariable(field, name)
		c.checkText(field, s.Env[name], MaxValue)
		c.checkPlaceholders(field, s.Env[name])
	}
	if s.URL != "" {
		c.fail(within(at, "url"), "must not be set for a server of type %s", s.Type)
	}
	if len(s.Headers) > 0 {
		c.fail(within(at, "headers"), "must not be set for a server of type %s", s.Type)
	}
}

func (c *checker) checkHTTP(at string, s events.MCPServer) {
	c.checkURL(within(at, "url"), s.URL)
	seen := map[string]string{}
	for _, name := range slices.Sorted(maps.Keys(s.Headers)) {
		value, field := s.Headers[name], within(within(at, "headers"), name)
		folded := strings.ToLower(name)
		switch before, twice := seen[folded]; {
		case name == "" || strings.Trim(name, wordCharacters+"!#$%&'*+.^`|~") != "":
			c.fail(field, "%.64q is not a header name", name)
		case slices.Contains([]string{"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer"}, folded):
			c.fail(field, "must not be set: the connection sets this header")
		case twice:
			c.fail(field, "is already set as %s", before)
		}
		seen[folded] = name
		if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			c.fail(field, "must not have line breaks or control characters")
		}
		c.checkText(field, value, MaxDescription)
		c.checkPlaceholders(field, value)
	}
	if len(s.Command) > 0 {
		c.fail(within(at, "command"), "must not be set for a server of type http")
	}
	if len(s.Env) > 0 {
		c.fail(within(at, "env"), "must not be set for a server of type http")
	}
}

// checkURL checks an address. Parts may come from variables, whose values are unknown here.
func (c *checker) checkURL(field, s string) {
	if !c.must(field, s) || !c.checkPlaceholders(field, s) || strings.HasPrefix(s, "${") {
		return
	}
	filled, err := layers.ExpandPlaceholders(s, func(string) (string, bool) { return "1", true })
	var u *url.URL
	if err == nil {
		u, err = url.Parse(filled)
	}
	switch {
	case err != nil || u.Scheme != "http" && u.Scheme != "https" || u.Hostname() == "":
		c.fail(field, "must be an absolute URL with http or https, such as https://example.com/mcp")
	case u.User != nil:
		c.fail(field, "must not have a user name: pass credentials in a header, with ${VARIABLE}")
	case u.Fragment != "" || strings.HasSuffix(filled, "#"):
		c.fail(field, "must not have a fragment")
	}
}

// checkPlaceholders checks every ${NAME} of a text.
func (c *checker) checkPlaceholders(field, s string) bool {
	err := layers.CheckPlaceholders(s)
	if err != nil {
		c.fail(field, "%v", err)
	}
	return err == nil
}
