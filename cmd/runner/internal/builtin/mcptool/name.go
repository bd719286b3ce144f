package mcptool

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"regexp"
	"slices"

	"github.com/modelcontextprotocol/go-sdk/mcp"

	"github.com/spoolhq/spool/cmd/runner/internal/builtin/tool"
)

// maxToolName is the maximum length of a tool's name that model APIs accept.
const maxToolName = 64

// invalidNameCharacters matches the characters that model APIs do not accept in the name of a tool.
var invalidNameCharacters = regexp.MustCompile(`[^A-Za-z0-9_-]`)

// newServerTool returns the tool t of the MCP server of c, without a name.
func newServerTool(c *serverConnection, t *mcp.Tool) serverTool {
	return serverTool{c: c, tool: t, schema: objectSchema(t.InputSchema)}
}

// objectSchema returns the schema of a tool's arguments in a form that model APIs accept: of type object, with properties.
func objectSchema(schema any) json.RawMessage {
	fields := map[string]json.RawMessage{}
	if raw, err := json.Marshal(schema); err != nil || json.Unmarshal(raw, &fields) != nil || fields == nil {
		fields = map[string]json.RawMessage{} // other types are not schemas of arguments
	}
	fields["type"] = json.RawMessage(`"object"`)
	if p := fields["properties"]; len(p) == 0 || p[0] != '{' {
		fields["properties"] = json.RawMessage("{}")
	}
	raw, err := json.Marshal(fields)
	if err != nil {
		return json.RawMessage(`{"type":"object","properties":{}}`) // valid JSON always marshals
	}
	return raw
}

// namedTools returns the tools with unique names that model APIs accept. If several tools would have one name, the first one whose own name needs no
// change keeps it, so that rules about that name apply to no other tool; the names of the others end with a hash of their server and their own name.
// A tool that a server lists twice is returned once.
func namedTools(all []serverTool) []tool.Tool {
	listed := map[string]bool{}
	all = slices.DeleteFunc(slices.Clone(all), func(t serverTool) bool {
		twice := listed[t.identity()]
		listed[t.identity()] = true
		return twice
	})
	count, owner := map[string]int{}, map[string]string{} // by name; an owner is the identity of a tool
	for _, t := range all {
		name, exact := t.plainName()
		count[name]++
		if owner[name] == "" && exact {
			owner[name] = t.identity()
		}
	}
	out := make([]tool.Tool, 0, len(all))
	for _, t := range all {
		plain, _ := t.plainName()
		t.name = plain
		if count[plain] > 1 && owner[plain] != t.identity() {
			for text := t.identity(); count[t.name] > 0; text = t.name {
				t.name = hashedName(plain, text)
			}
			count[t.name]++
		}
		out = append(out, t)
	}
	return out
}

// identity returns a text that no other tool has.
func (r serverTool) identity() string { return r.c.server.Name + "\x00" + r.tool.Name }

// plainName returns mcp__server__tool in the characters and the length that model APIs accept. exact reports whether that needed no change.
func (r serverTool) plainName() (name string, exact bool) {
	whole := ToolNamePrefix + r.c.server.Name + "__" + r.tool.Name
	name = invalidNameCharacters.ReplaceAllString(whole, "_")
	if len(name) > maxToolName {
		return hashedName(name, name), false
	}
	return name, name == whole
}

// hashedName returns name, shortened, with a hash of text at its end.
func hashedName(name, text string) string {
	sum := sha256.Sum256([]byte(text))
	return name[:min(len(name), maxToolName-9)] + "_" + hex.EncodeToString(sum[:4])
}
