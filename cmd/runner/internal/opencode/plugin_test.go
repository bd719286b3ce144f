package opencode

import (
	"bytes"
	"encoding/json"
	"os/exec"
	"strings"
	"testing"
)

// runPlugin passes events of the CLI, as JSON, to plugin.js in Node, and returns the reports that the plugin prints.
func runPlugin(t *testing.T, environ []string, events ...string) []pluginReport {
	t.Helper()
	if _, err := exec.LookPath("node"); err != nil {
		t.Skip("needs node, as the other agents do")
	}
	cmd := exec.CommandContext(t.Context(), "node", "--input-type=module")
	cmd.Stdin = strings.NewReader(string(pluginSource) + "\nconst plugin = await Spool({ client: {} })\nfor (const event of [" + strings.Join(events, ",\n") + "]) await plugin.event({ event })\nprocess.stdin.pause()\n")
	cmd.Env = append(cmd.Environ(), environ...)
	var said bytes.Buffer
	cmd.Stderr = &said
	out, err := cmd.Output()
	if err != nil {
		t.Fatalf("%v: %s", err, &said)
	}
	var reports []pluginReport
	for line := range strings.Lines(string(out)) {
		var m struct {
			Params pluginReport `json:"params"`
		}
		if err := json.Unmarshal([]byte(line), &m); err != nil {
			t.Fatalf("%s: %v", line, err)
		}
		reports = append(reports, m.Params)
	}
	return reports
}

// The ids of calls are unique only in a session: models count them from 1 in each conversation. The report of a request has the tool and the
// arguments of its own call, because the policy decides by them.
func TestPlugin_RequestsNameTheirOwnCalls(t *testing.T) {
	t.Parallel()
	call := func(session, tool, status, input string) string {
		return `{"type":"message.part.updated","properties":{"part":{"id":"p","sessionID":"` + session + `","type":"tool","callID":"call_1","tool":"` + tool + `","state":{"status":"` + status + `","input":` + input + `}}}}`
	}
	created := func(session string) string {
		return `{"type":"session.created","properties":{"info":{"id":"` + session + `","parentID":"main"}}}`
	}
	asked := `{"type":"permission.asked","properties":{"id":"req","sessionID":"a","permission":"bash","metadata":{},"tool":{"callID":"call_1"}}}`
	for name, between := range map[string]string{
		"another sub-agent begins a call":  call("b", "read", "running", `{"filePath":"x"}`),
		"another sub-agent ends a call":    call("b", "read", "error", `{"filePath":"x"}`),
		"the call that runs the sub-agent": call("main", "task", "running", `{"prompt":"x"}`),
	} {
		t.Run(name, func(t *testing.T) {
			t.Parallel()
			var requests []pluginReport
			for _, r := range runPlugin(t, []string{reportAsksVariable + "=1"}, created("a"), created("b"), call("a", "bash", "running", `{"command":"rm x"}`), between, asked) {
				if r.Kind == "permission" {
					requests = append(requests, r)
				}
			}
			if len(requests) != 1 || requests[0].Tool != "bash" || string(requests[0].Input) != `{"command":"rm x"}` {
				t.Errorf("requests %+v", requests)
			}
		})
	}
}
