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
				c.fail(within(at, "type"), "there are more than %d servers of type docker", MaxContainers)
			}
		default:
			c.fail(within(at, "type"), "%.64q is not one of %s, %s and %s", s.Type, events.MCPStdio, events.MCPHTTP, events.MCPDocker)
		}
		if s.Type != events.MCPDocker && s.Image != "" {
			c.fail(within(at, "image"), "only a server of type docker has one")
		}
		if s.TimeoutMs > MaxTimeoutMs {
			c.fail(within(at, "timeoutMs"), "%d ms is not between 1 and %d", s.TimeoutMs, MaxTimeoutMs)
		}
		c.list(within(at, "tools"), s.Tools)
	}
}

func (c *checker) stdio(at string, s events.MCPServer) {
	field := within(at, "command")
	if len(s.Command) == 0 {
		c.fail(field, "it is missing: a server of type stdio is a program that runs in the sandbox")
	}
	c.option(command.CheckOptions(events.Options{Command: s.Command}), "sessionOptions.command", field)
	c.process(at, s)
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
	c.process(at, s)
}

// process checks the fields that all started servers share.
func (c *checker) process(at string, s events.MCPServer) {
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
		c.fail(within(at, "url"), "a server of type %s has none", s.Type)
	}
	if len(s.Headers) > 0 {
		c.fail(within(at, "headers"), "a server of type %s has none", s.Type)
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
			c.fail(field, "%.64q is not the name of a header", name)
		case slices.Contains([]string{"host", "connection", "content-length", "transfer-encoding", "upgrade", "te", "trailer"}, folded):
			c.fail(field, "this header belongs to the connection")
		case twice:
			c.fail(field, "%s stands there already", before)
		}
		seen[folded] = name
		if strings.ContainsFunc(value, func(r rune) bool { return r < ' ' && r != '\t' || r == 0x7f }) {
			c.fail(field, "a header's value has no line breaks and no control characters")
		}
		c.text(field, value, MaxDescription)
		c.placeholders(field, value)
	}
	if len(s.Command) > 0 {
		c.fail(within(at, "command"), "a server of type http has none")
	}
	if len(s.Env) > 0 {
		c.fail(within(at, "env"), "a server of type http has none")
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
		c.fail(field, "it is not an absolute address with http or https, such as https://example.com/mcp")
	case u.User != nil:
		c.fail(field, "it holds a user's name: give credentials as a header, with ${VARIABLE}")
	case u.Fragment != "" || strings.HasSuffix(filled, "#"):
		c.fail(field, "it holds a fragment, which no server sees")
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
