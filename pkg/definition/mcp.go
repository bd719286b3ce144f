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

func (c *checker) servers(list []events.MCPServer) {
	c.count("mcpServers", len(list), MaxEntries)
	seen, containers := map[string]int{}, 0
	for i, s := range list {
		at := element("mcpServers", i)
		c.name(seen, "mcpServers", i, s.Name, "-_")
		switch s.Type {
		case events.MCPStdio:
			c.stdio(at, s)
		case events.MCPHTTP:
			c.http(at, s)
		case events.MCPDocker:
			c.docker(at, s)
			if containers++; containers == MaxContainers+1 {
				c.fail(within(at, "type"), "more than %d servers have type docker", MaxContainers)
			}
		default:
			c.fail(within(at, "type"), "%.64q is not a type; must be %s, %s or %s", s.Type, events.MCPStdio, events.MCPHTTP, events.MCPDocker)
		}
		if s.Type != events.MCPDocker && s.Image != "" {
			c.fail(within(at, "image"), "must not be set: only servers of type docker have an image")
		}
		if s.TimeoutMs > MaxTimeoutMs {
			c.fail(within(at, "timeoutMs"), "is %d ms; must be between 1 and %d", s.TimeoutMs, MaxTimeoutMs)
		}
		c.list(within(at, "tools"), s.Tools)
	}
}

func (c *checker) stdio(at string, s events.MCPServer) {
	field := within(at, "command")
	if len(s.Command) == 0 {
		c.fail(field, "is required: a server of type stdio is a program that runs in the sandbox")
	}
	c.option(command.CheckOptions(events.Options{Command: s.Command}), "sessionOptions.command", field)
	c.startCommand(at, s)
}

// docker checks a server that runs in a separate container.
func (c *checker) docker(at string, s events.MCPServer) {
	if c.must(within(at, "image"), s.Image) {
		c.option(command.CheckOptions(events.Options{Image: s.Image}), "sessionOptions.image", within(at, "image"))
	}
	field := within(at, "command")
	if len(s.Command) > 0 { // arguments; the first may be empty
		c.option(command.CheckOptions(events.Options{Command: append([]string{"-"}, s.Command[1:]...)}), "sessionOptions.command", field)
		c.text(element(field, 0), s.Command[0], command.MaxArgument)
	}
	c.startCommand(at, s)
}

// startCommand checks the fields that MCP servers with a start command share: those of types stdio and docker.
func (c *checker) startCommand(at string, s events.MCPServer) {
	for i, arg := range s.Command {
		c.placeholders(element(within(at, "command"), i), arg)
	}
	for _, name := range slices.Sorted(maps.Keys(s.Env)) {
		field := within(within(at, "env"), name)
		c.variable(field, name)
		c.text(field, s.Env[name], MaxValue)
		c.placeholders(field, s.Env[name])
	}
	if s.URL != "" {
		c.fail(within(at, "url"), "must not be set for a server of type %s", s.Type)
	}
	if len(s.Headers) > 0 {
		c.fail(within(at, "headers"), "must not be set for a server of type %s", s.Type)
	}
}

func (c *checker) http(at string, s events.MCPServer) {
	c.url(within(at, "url"), s.URL)
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
		c.text(field, value, MaxDescription)
		c.placeholders(field, value)
	}
	if len(s.Command) > 0 {
		c.fail(within(at, "command"), "must not be set for a server of type http")
	}
	if len(s.Env) > 0 {
		c.fail(within(at, "env"), "must not be set for a server of type http")
	}
}

// url checks an address. Parts may come from variables, whose values are unknown here.
func (c *checker) url(field, s string) {
	if !c.must(field, s) || !c.placeholders(field, s) || strings.HasPrefix(s, "${") {
		return
	}
	filled, err := layers.Expand(s, func(string) (string, bool) { return "1", true })
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

// placeholders checks every ${NAME} of a text.
func (c *checker) placeholders(field, s string) bool {
	err := layers.CheckPlaceholders(s)
	if err != nil {
		c.fail(field, "%v", err)
	}
	return err == nil
}
