package permission_test

import (
	"reflect"
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

func TestParseCall_KnowsTheToolsOfTheArchitectures(t *testing.T) {
	t.Parallel()
	agent := events.AgentSpec{
		Tools:      events.ToolChoice{Allow: []string{"WebFetch"}, Deny: []string{"Write"}},
		MCPServers: []events.MCPServer{{Name: "desk"}, {Name: "desk_b", Tools: []string{"note"}}},
	}
	for text, want := range map[string]permission.Call{
		"Bash(rm -rf x)":               {Tool: "Bash", Kind: permission.KindShell, Command: "rm -rf x"},
		" shell(echo (a) )) ":          {Tool: "shell", Kind: permission.KindShell, Command: "echo (a) )"},
		"bash(ls)":                     {Tool: "bash", Kind: permission.KindShell, Command: "ls"},
		"BashOutput":                   {Tool: "BashOutput", Kind: permission.KindShell},
		"Read(a/../b)":                 {Tool: "Read", Kind: permission.KindRead, Paths: []permission.Path{{Path: "b"}}},
		"read_file(/workspace/a/)":     {Tool: "read_file", Kind: permission.KindRead, Paths: []permission.Path{{Path: "a"}}},
		"LS(/workspace)":               {Tool: "LS", Kind: permission.KindRead, Paths: []permission.Path{{Path: "."}}},
		"Grep":                         {Tool: "Grep", Kind: permission.KindRead},
		"Edit(../x)":                   {Tool: "Edit", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "/x", Outside: true}}},
		"Edit(/workspaces/x)":          {Tool: "Edit", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "/workspaces/x", Outside: true}}},
		"edit(~/x)":                    {Tool: "edit", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "~/x", Outside: true}}},
		"apply_patch(a)":               {Tool: "apply_patch", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "a"}}},
		"Write(a)":                     {Tool: "Write", Kind: permission.KindEdit, Paths: []permission.Path{{Path: "a"}}, LeftOut: true},
		"WebFetch(https://a.com:8/x?)": {Tool: "WebFetch", Kind: permission.KindNetwork, Hosts: []string{"a.com"}, Named: true},
		"webfetch(a.com)":              {Tool: "webfetch", Kind: permission.KindNetwork, Hosts: []string{"a.com"}},
		"WebSearch(some words)":        {Tool: "WebSearch", Kind: permission.KindNetwork},
		"Task(explore)":                {Tool: "Task", Kind: permission.KindAgent},
		"AskUserQuestion":              {Tool: "AskUserQuestion", Kind: permission.KindQuestion},
		"TodoWrite":                    {Tool: "TodoWrite", Kind: permission.KindBookkeeping},
		"mcp__desk__note":              {Tool: "mcp__desk__note", Kind: permission.KindMCPTool},
		"mcp__desk__note({})":          {Tool: "mcp__desk__note", Kind: permission.KindMCPTool},
		"desk_b_note":                  {Tool: "desk_b_note", Kind: permission.KindMCPTool},
		"desk_b__other":                {Tool: "desk_b__other", Kind: permission.KindMCPTool, LeftOut: true},
		"mcp__nobody__x":               {Tool: "mcp__nobody__x", Kind: permission.KindUnknown},
		"Nonsense":                     {Tool: "Nonsense", Kind: permission.KindUnknown},
	} {
		if got, err := permission.ParseCall(text, agent); err != nil || !reflect.DeepEqual(got, want) {
			t.Errorf("%s: %+v (%v), want %+v", text, got, err, want)
		}
	}
	for text, want := range map[string]string{
		"": "is not a call", "(x)": "is not a call", "rm -rf x": "is not a call", "Bash(ls": "no closing parenthesis", "Bash": "Bash needs an argument; write Bash(command)", "Read()": "write Read(path)", "Bash( )": "needs an argument",
		"WebFetch": "write WebFetch(URL)", "WebFetch(http://)": "not a URL", "WebFetch(a b)": "not a URL", "Nonsense(x)": "arguments of \"Nonsense\" are not known", "a)": "is not a call",
	} {
		if got, err := permission.ParseCall(text, agent); err == nil || !strings.Contains(err.Error(), want) {
			t.Errorf("%s: %+v (%v), want %s", text, got, err, want)
		}
	}
}
