package server_test

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/spoolhq/spool/cmd/mockllm/server"
)

func TestScriptErrorsNameFileLineAndField(t *testing.T) {
	t.Parallel()
	cases := []struct{ name, script, want string }{
		{"empty", "", "s.yaml:1: the script is empty"},
		{"not YAML", "rules: [", "s.yaml: yaml: line 1"},
		{"no rules", "models: [a]", "s.yaml:1: rules: is missing"},
		{"rules is no list", "rules: 3", "s.yaml:1: rules: must be a list"},
		{"empty rules", "rules: []", "s.yaml:1: rules: must hold at least one rule"},
		{"unknown field", "rules:\n  - nmae: x\n    steps: [{text: x}]", "s.yaml:2: rules[0].nmae: unknown field; known are match, name, per, steps, times"},
		{"unknown condition", "rules:\n  - steps: [{text: x}]\n    match:\n      usr: x", "s.yaml:4: rules[0].match.usr: unknown field"},
		{"unknown step", "rules:\n  - steps:\n      - say: x", "s.yaml:3: rules[0].steps[0].say: unknown field"},
		{"no steps", "rules: [{name: x}]", "s.yaml:1: rules[0].steps: is missing"},
		{"empty steps", "rules: [{steps: []}]", "rules[0].steps: must hold at least one step"},
		{"two in one step", "rules: [{steps: [{text: x, delay: 1s}]}]", "rules[0].steps[0]: must hold exactly one field, and holds 2"},
		{"twice", "rules: [{steps: [{text: x}], name: a, name: b}]", "rules[0].name"},
		{"regex", "rules: [{match: {user: {regex: '('}}, steps: [{text: x}]}]", "rules[0].match.user.regex: must be a regular expression"},
		{"contains and regex", "rules: [{match: {user: {regex: a, contains: b}}, steps: [{text: x}]}]", "either contains or regex"},
		{"api", "rules: [{match: {api: soap}, steps: [{text: x}]}]", "match.api: must be one of anthropic, responses, chat"},
		{"duration", "rules: [{steps: [{delay: 3}]}]", "steps[0].delay: must be a duration such as 20ms"},
		{"status", "rules: [{steps: [{error: {status: 200}}]}]", "error.status: must be a whole number from 400 to 599"},
		{"no status", "rules: [{steps: [{error: {message: x}}]}]", "error.status: is missing"},
		{"piece", "stream: {piece: 0}\nrules: [{steps: [{text: x}]}]", "stream.piece: must be a whole number from 1"},
		{"template function", "rules: [{steps: [{text: '{{usr}}'}]}]", `steps[0].text: template: template:1: function "usr" not defined`},
		{"template field", "rules: [{steps: [{text: '{{if turn}}{{.User}}{{end}}'}]}]", "steps[0].text: .User: there are no fields"},
		{"template pattern", "rules: [{steps: [{text: '{{recall \"(\"}}'}]}]", "missing closing )"},
		{"template in an input", "rules: [{steps: [{tool: {name: A, input: {a: [{b: '{{'}]}}}]}]", "tool.input.a[0].b: template"},
		{"tool without a name", "rules: [{steps: [{tool: {input: {}}}]}]", "tool.name: is missing"},
		{"input", "rules: [{steps: [{tool: {name: A, input: 3}}]}]", "tool.input: must be a mapping"},
		{"no calls", "rules: [{steps: [{tools: []}]}]", "tools: must hold at least one call"},
		{"never reached", "rules:\n  - steps:\n      - error: {status: 500}\n      - text: x", "s.yaml:4: rules[0].steps[1]: is never reached"},
		{"steps after a tool", "rules: [{match: {tool_result: x}, steps: [{tool: {name: A}}, {tool: {name: B}}]}]", "a rule that matches on tool_result answers one request"},
		{"per without times", "rules: [{per: server, steps: [{text: x}]}]", "rules[0].per: has no effect without times"},
		{"times", "rules: [{times: 0, steps: [{text: x}]}]", "rules[0].times: must be a whole number from 1"},
		{"break", "rules: [{steps: [{break: false}]}]", "break: must be true"},
		{"stop", "rules: [{steps: [{stop: tools}]}]", "stop: must be one of end, length, refusal"},
		{"tools and none", "rules: [{match: {tools: [a], no_tools: true}, steps: [{text: x}]}]", "no_tools: contradicts tools"},
		{"stream", "rules: [{match: {stream: maybe}, steps: [{text: x}]}]", "match.stream: must be true or false"},
		{"null", "rules: [{steps: [{text: }]}]", "steps[0].text: must be a text"},
	}
	for _, c := range cases {
		t.Run(c.name, func(t *testing.T) {
			t.Parallel()
			_, err := server.ParseScript("s.yaml", []byte(c.script))
			if err == nil || !strings.Contains(err.Error(), c.want) {
				t.Errorf("got %v, want %q", err, c.want)
			}
		})
	}
}

func TestEveryMistakeIsReported(t *testing.T) {
	t.Parallel()
	_, err := server.ParseScript("s.yaml", []byte("model: x\nrules:\n  - steps: [{text: x}]\n    time: 3\n"))
	if err == nil || strings.Count(err.Error(), "\n") != 1 || !strings.Contains(err.Error(), "s.yaml:4: rules[0].time") {
		t.Errorf("got %v", err)
	}
}

func TestLoadScript(t *testing.T) {
	t.Parallel()
	file := filepath.Join(t.TempDir(), "script.json")
	if _, err := server.LoadScript(file); err == nil || !strings.Contains(err.Error(), file) {
		t.Errorf("a missing file: %v", err)
	}
	if err := os.WriteFile(file, []byte(`{"rules":[{"steps":[{"text":"json too"}]}]}`), 0o600); err != nil {
		t.Fatal(err)
	}
	script, err := server.LoadScript(file)
	if err != nil {
		t.Fatal(err)
	}
	s, err := server.New(server.Config{Script: script})
	if err != nil {
		t.Fatal(err)
	}
	if s == nil {
		t.Error("no server")
	}
}
