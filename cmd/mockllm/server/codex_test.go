package server_test

import (
	"encoding/json"
	"strings"
	"testing"
)

const codexScript = `
rules:
  - match: {user: delegate, tools: [agents.spawn]}
    steps:
      - tool: {name: agents.spawn, input: {task: count}}
      - text: 'spawned {{result | find "id=([0-9]+)"}}{{result | find "absent"}}'
  - match: {user: run, tools: [exec]}
    steps:
      - tool: {name: exec, input: 'text({{json "a\nb"}})'}
      - text: 'ran: {{result}}'
  - steps: [{text: 'said {{user}} in turn {{turn}}'}]
`

// codexTools declares tools in the input, in namespaces, as Codex does for some models.
const codexTools = `{"type":"additional_tools","role":"developer","tools":[
	{"type":"namespace","name":"functions","tools":[{"type":"custom","name":"exec"},{"type":"function","name":"wait"}]},
	{"type":"namespace","name":"agents","tools":[{"type":"function","name":"spawn"}]}]}`

// codexAsk sends items and returns the first item of the answer.
func codexAsk(t *testing.T, url string, items ...string) map[string]any {
	t.Helper()
	res := post(t, url+"/v1/responses", `{"model":"m","input":[`+strings.Join(items, ",")+`]}`)
	var answer struct {
		Output []map[string]any `json:"output"`
	}
	body := read(t, res)
	if err := json.Unmarshal([]byte(body), &answer); err != nil || len(answer.Output) == 0 {
		t.Fatalf("%v: %s", err, body)
	}
	return answer.Output[0]
}

func codexText(t *testing.T, url string, items ...string) string {
	t.Helper()
	content, _ := codexAsk(t, url, items...)["content"].([]any)
	if len(content) == 0 {
		t.Fatal("the answer is no text")
	}
	part, _ := content[0].(map[string]any)
	text, _ := part["text"].(string)
	return text
}

func codexUser(text string) string {
	raw, _ := json.Marshal(text) //nolint:errcheck // a text
	return `{"type":"message","role":"user","content":[{"type":"input_text","text":` + string(raw) + `}]}`
}

func TestCodexToolsInTheInput(t *testing.T) {
	t.Parallel()
	_, url := start(t, codexScript)
	call := codexAsk(t, url, codexTools, codexUser("run it"))
	if call["type"] != "custom_tool_call" || call["name"] != "exec" || call["namespace"] != nil || call["input"] != `text("a\nb")` {
		t.Errorf("call %v", call)
	}
	done := `{"type":"custom_tool_call","call_id":"c1","name":"exec","input":"x"},{"type":"custom_tool_call_output","call_id":"c1","output":"fine"}`
	if got := codexText(t, url, codexTools, codexUser("run it"), done); got != "ran: fine" {
		t.Errorf("said %q", got)
	}
	call = codexAsk(t, url, codexTools, codexUser("delegate it"))
	if call["type"] != "function_call" || call["name"] != "spawn" || call["namespace"] != "agents" {
		t.Errorf("call %v", call)
	}
	done = `{"type":"function_call","call_id":"c1","namespace":"agents","name":"spawn","arguments":"{}"},{"type":"function_call_output","call_id":"c1","output":"id=17"}`
	if got := codexText(t, url, codexTools, codexUser("delegate it"), done); got != "spawned 17" {
		t.Errorf("said %q", got)
	}
	// Without the namespace nothing is offered.
	if got := codexText(t, url, codexUser("delegate it")); got != "said delegate it in turn 1" {
		t.Errorf("said %q", got)
	}
	res := post(t, url+"/v1/responses", `{"model":"m","input":[{"type":"additional_tools","tools":[{"type":"namespace","name":"n","tools":[5]}]}]}`)
	if body := read(t, res); res.StatusCode != 400 || !strings.Contains(body, "input[0]") || !strings.Contains(body, "tools[0]: tools[0]") {
		t.Errorf("status %d: %s", res.StatusCode, body)
	}
}

// A message from one agent to its sub-agent counts as text of a user; a message to the parent agent is ignored.
func TestCodexAgentMessages(t *testing.T) {
	t.Parallel()
	_, url := start(t, codexScript)
	task := `{"type":"agent_message","author":"/root","recipient":"/root/counter","content":[
		{"type":"input_text","text":"Message Type: NEW_TASK\nPayload:\n"},{"type":"encrypted_content","encrypted_content":"count the files"}]}`
	environment := codexUser("<environment_context><cwd>/ws</cwd></environment_context>")
	if got := codexText(t, url, environment, task); got != "said count the files in turn 1" {
		t.Errorf("said %q", got)
	}
	report := `{"type":"agent_message","author":"/root/counter","recipient":"/root","content":[{"type":"input_text","text":"Payload:\nseven"}]}`
	told := codexUser("<subagent_notification>{}</subagent_notification>")
	if got := codexText(t, url, environment, codexUser("hello"), report, told); got != "said hello in turn 1" {
		t.Errorf("said %q", got)
	}
}
