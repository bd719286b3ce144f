package command

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
)

const strictAgent = `{"ref":{"slug":"strict","version":"%s"},"tags":["latest"],"createdAt":"2026-01-02T03:04:05Z",` +
	`"spec":{"architecture":"claude-code","instructions":"Review\nall of it.\n","mood":"new","tools":{"deny":["Write"]},"permissions":{"preset":"ask","rules":[{"tool":"Bash","command":["git push"],"then":"ask"},{"path":["**/.env"],"then":"deny"}],"unattended":"skip"%s}}}`

func TestPermissionsExplain_NamesTheRule(t *testing.T) {
	t.Parallel()
	c := serveCatalogue(t, func(string) (int, string) { return 200, fmt.Sprintf(strictAgent, version, "") })
	for call, want := range map[string]string{
		"Bash(git push\x1b[2J origin)": "ACTION      ask\nRULE        rules[0] {\"tool\":\"Bash\",\"command\":[\"git push\"],\"then\":\"ask\"}\nLAYER       agent\nCLASS       the command `git push [2J origin…` (SHA-256 1a0d1fdb42ee6a7fc1b0fc24e0ef32bf)\nUNATTENDED  skip\n",
		"Bash(git push origin)":        "ACTION      ask\nRULE        rules[0] {\"tool\":\"Bash\",\"command\":[\"git push\"],\"then\":\"ask\"}\nLAYER       agent\nCLASS       commands that begin with `git push`\nUNATTENDED  skip\n",
		"Read(a/.env)":                 "ACTION  deny\nRULE    rules[1] {\"path\":[\"**/.env\"],\"then\":\"deny\"}\nLAYER   agent\nREASON  The permission policy does not allow this call of Read. Go on without it.\n",
		"Read(a)":                      "ACTION  allow\nRULE    workspace-path\nLAYER   preset\n",
		"Write(a)":                     "ACTION  deny\nRULE    left-out\nLAYER   tools\nREASON  The tool \"Write\" is not one that this agent has. Go on without it.\n",
	} {
		got := spool(t, testIO(t), "permissions", "explain", "--agent", "strict", call, "--url", c.URL)
		if strings.Contains(want, "SHA-256") {
			got.out, want = strings.Split(got.out, "SHA-256")[0], strings.Split(want, "SHA-256")[0]
		}
		if got != (result{ExitDone, want, ""}) {
			t.Errorf("%q: %d %s\n%s", call, got.code, got.err, got.out)
		}
	}
	if requested := c.requests(); requested[0] != "GET /api/agents/strict" {
		t.Errorf("requested %v", requested)
	}
	got := spool(t, testIO(t), "permissions", "explain", "--agent", "strict", "Read(a)", "--json", "--url", c.URL)
	if got != (result{ExitDone, `{"call":"Read(a)","action":"allow","rule":"workspace-path","layer":"preset"}` + "\n", ""}) {
		t.Errorf("%+v", got)
	}
	newer := serveCatalogue(t, func(string) (int, string) { return 200, fmt.Sprintf(strictAgent, version, `,"mood":"new"`) })
	if got := spool(t, testIO(t), "permissions", "explain", "--agent", "strict", "Read(a)", "--url", newer.URL); got.code != ExitFailed || got.out != "" || !strings.Contains(got.err, "this version of spool does not know all of its permissions") {
		t.Errorf("permissions of a newer server: %+v", got)
	}
}

func TestPermissionsExplain_ReadsFiles(t *testing.T) {
	t.Parallel()
	dir := t.TempDir()
	write := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o600); err != nil {
			t.Fatal(err)
		}
		return path
	}
	const agent = "kind: agent\nslug: %s\nspec:\n  architecture: spool\n  instructions: Say hello to all.\n  permissions: {preset: %s}\n"
	one := write("one.yaml", fmt.Sprintf(agent, "a", "read-only"))
	two := write("two.yaml", fmt.Sprintf(agent, "a", "full")+"---\n"+fmt.Sprintf(agent, "b", "read-only"))
	broken := write("broken.yaml", fmt.Sprintf(agent, "a", "yolo"))
	none := write("none.yaml", "kind: environment\nslug: e\nspec: {variables: {A: {value: x}}}\n")
	message := write("message.yaml", "rules:\n  - {tool: write_file, then: ask}\nunattended: true\n")
	asJSON := write("message.json", `{"rules":[{"then":"allow"}]}`)
	unknown := write("unknown.yaml", "rules: []\nmood: new\n")
	wrong := write("wrong.yaml", "rules: [{then: never}]\n")
	const call = "write_file(x)"
	for _, x := range []struct {
		args []string
		code int
		want string // in the output, or in the error
	}{
		{[]string{"-f", one, call}, ExitDone, "ACTION  deny\nRULE    read-only\n"},
		{[]string{"-f", one, "--agent", "a@stable", call}, ExitDone, "RULE    read-only\n"},
		{[]string{"-f", two, "--agent", "b", call}, ExitDone, "RULE    read-only\n"},
		{[]string{"-f", one, "--execution-permissions", message, call}, ExitDone, "execution.rules[0] {\"tool\":\"write_file\",\"then\":\"ask\"}\nLAYER       execution\n"},
		{[]string{"-f", one, "--execution-permissions", asJSON, call}, ExitDone, "ACTION  allow\nRULE    execution.rules[0] "},
		{[]string{"-f", two, call}, ExitUsage, "agent: the file has 2 agents; name one of them with --agent"},
		{[]string{"-f", one, "--agent", "c", call}, ExitUsage, "agent: the file has no agent c"},
		{[]string{"-f", none, call}, ExitUsage, "file: the file has no agent"},
		{[]string{"-f", broken, call}, ExitUsage, `broken.yaml:6:25: spec.permissions.preset: "yolo" is not known`},
		{[]string{"-f", broken, call}, ExitUsage, "spool: nothing was decided: the file has an error"},
		{[]string{"-f", filepath.Join(dir, "missing"), call}, ExitUsage, "file: open "},
		{[]string{"-f", one, "--execution-permissions", unknown, call}, ExitUsage, `execution-permissions: json: unknown field "mood"`},
		{[]string{"-f", one, "--execution-permissions", wrong, call}, ExitUsage, `execution-permissions: permissions.rules[0].then: "never" is not known`},
		{[]string{"-f", one, "--execution-permissions", filepath.Join(dir, "missing"), call}, ExitUsage, "execution-permissions: open "},
		{[]string{"-f", one, "rm -rf x"}, ExitUsage, "call: \"rm -rf x\" is not a call"},
		{[]string{call}, ExitUsage, "agent: name an agent with --agent, or a file with --file"},
		{[]string{"--agent", "*", call}, ExitUsage, "agent: slug: "},
	} {
		got := spool(t, testIO(t), append([]string{"permissions", "explain"}, x.args...)...)
		text := got.out
		if x.code != ExitDone {
			text = got.err
		}
		if got.code != x.code || !strings.Contains(text, x.want) || x.code != ExitDone && got.out != "" {
			t.Errorf("%v: %+v, want %d %q", x.args, got, x.code, x.want)
		}
	}
}

// TestPages_PermissionExamplesDecideAsShown tests the tables and the output of docs/permissions.md.
func TestPages_PermissionExamplesDecideAsShown(t *testing.T) {
	t.Parallel()
	data, err := os.ReadFile("../../../../docs/permissions.md")
	if err != nil {
		t.Fatal(err)
	}
	page := string(data)
	block := func(language string) string {
		_, rest, _ := strings.Cut(page, "```"+language+"\n")
		text, _, ok := strings.Cut(rest, "```\n")
		if !ok {
			t.Fatalf("the page has no block of %s", language)
		}
		return text
	}
	file := filepath.Join(t.TempDir(), "maintainer.yaml")
	explain := func(agent, call string) string {
		if err := os.WriteFile(file, []byte(agent), 0o600); err != nil {
			t.Fatal(err)
		}
		got := spool(t, testIO(t), "permissions", "explain", "-f", file, call)
		if got.code != ExitDone {
			t.Errorf("%s: %+v", call, got)
		}
		return got.out
	}
	decision := func(agent, call string) string {
		words := strings.Fields(explain(agent, call))
		if len(words) < 4 {
			return ""
		}
		return words[1] + " " + words[3]
	}
	for _, row := range tableRows(t, page, "| call | decision | rule |") {
		if got := decision(block("yaml"), row[0]); got != row[1]+" "+row[2] {
			t.Errorf("%s: %s, the page has %s", row[0], got, row[1:])
		}
	}
	if got := explain(block("yaml"), "Bash(rm -rf x)"); got != block("text") {
		t.Errorf("explain prints\n%s", got)
	}
	const agent = "kind: agent\nslug: a\nspec:\n  architecture: claude-code\n  instructions: Say hello to all.\n  mcpServers: [{name: s, type: http, url: 'https://example.com'}]\n  permissions: "
	callOf := map[string]string{
		"read a file in the workspace, or of a skill": "Read(a)", "read a file elsewhere": "Read(/etc/passwd)", "change a file in the workspace": "Edit(a)", "change a file elsewhere": "Edit(/etc/passwd)",
		"run a command": "Bash(ls)", "reach the network with a tool": "WebFetch(example.com)", "start a sub-agent": "Task", "keep lists and notes": "TodoWrite", "call a tool of the agent's MCP servers": "mcp__s__t",
		"ask the user, or leave plan mode": "ExitPlanMode", "call any other tool": "Other",
	}
	rows := tableRows(t, page, "| call | `workspace` | `read-only` | `ask` | `full` |")
	if len(rows) != len(callOf) {
		t.Errorf("the table of presets has %d rows, want %d", len(rows), len(callOf))
	}
	for _, row := range rows {
		for i, preset := range []string{"workspace", "read-only", "ask", "full"} {
			if got, _, _ := strings.Cut(decision(agent+"{preset: "+preset+"}\n", callOf[row[0]]), " "); got != row[1+i] {
				t.Errorf("%s: %s decides %q, the page has %s", row[0], preset, got, row[1+i])
			}
		}
	}
	for _, row := range tableRows(t, page, "| entry | command | `allow` | `deny` and `ask` |") {
		for then, cell := range map[string]string{"allow": row[2], "deny": row[3], "ask": row[3]} {
			got := decision(agent+fmt.Sprintf("{rules: [{command: [%s], then: %s}]}\n", row[0], then), "Bash("+row[1]+")")
			if matches := got == then+" rules[0]"; matches != (cell == "matches") {
				t.Errorf("%s: rule %s of %s decides %s, the page has %s", row[1], then, row[0], got, cell)
			}
		}
	}
}

// tableRows returns the cells of a table of a page, without the backticks of code.
func tableRows(t *testing.T, page, head string) (rows [][]string) {
	t.Helper()
	_, rest, ok := strings.Cut(page, head+"\n")
	if !ok {
		t.Fatalf("the page has no table %s", head)
	}
	for line := range strings.Lines(rest) {
		if !strings.HasPrefix(line, "| ") {
			break
		}
		if cells := strings.Split(strings.Trim(line, "| \n"), " | "); cells[0] != "---" {
			for i := range cells {
				cells[i] = strings.Trim(cells[i], "`")
			}
			rows = append(rows, cells)
		}
	}
	if len(rows) < 10 {
		t.Errorf("the table %s has %d rows", head, len(rows))
	}
	return rows
}
