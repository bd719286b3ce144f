package bareagent

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/runner"
)

// BuiltIn describes how to run Spool's built-in agent, `runner agent`, without the rest of Spool.
func BuiltIn() Agent {
	return Agent{
		Architecture: architecture.Spool, Name: "the built-in agent", Warm: startWarmBuiltIn,
		Command: func(command string) (string, map[string]any) {
			return "run_code", jsonObject{"language": "bash", "code": command}
		},
	}
}

// startWarmBuiltIn starts `runner agent` as one process that takes all turns of a conversation.
func startWarmBuiltIn(path, dir, url string) (Conversation, error) {
	state := filepath.Join(dir, "state")
	if err := os.MkdirAll(state, 0o700); err != nil {
		return nil, err
	}
	cmd := exec.Command(path, "agent", "--workspace", filepath.Join(dir, "workspace"), "--state", state) //nolint:gosec // the path of the runner
	cmd.Env = []string{"OPENAI_BASE_URL=" + url + "/v1", "OPENAI_API_KEY=bench"}
	n := 0
	call := "" // the reference of the last result of a call
	return startProcess(dir, cmd, &agentProcess{
		query: func(text string) any {
			n++
			return jsonObject{"op": "query", "query": runner.Query{
				SessionID: "bare", ExecutionID: fmt.Sprint("bare-", n), Attempt: 1, Architecture: architecture.Spool, Content: text,
			}}
		},
		read: func(line []byte) lineResult {
			var l struct {
				Op    string
				Ref   string
				Text  string
				Block struct{ Kind events.BlockKind }
				Ended *runner.TurnEnd

				Permission struct{ ID string }
			}
			if err := json.Unmarshal(line, &l); err != nil {
				return lineResult{err: err}
			}
			if l.Ended != nil && l.Ended.Outcome != runner.OutcomeCompleted {
				return lineResult{err: fmt.Errorf("turn ended with %+v", *l.Ended)}
			}
			if l.Op == "open" && l.Block.Kind == events.KindToolResult {
				call = l.Ref
			}
			r := lineResult{text: l.Op == "text" && l.Text != "", ended: l.Ended != nil, result: l.Op == "complete" && call != "" && l.Ref == call}
			if l.Op == "permission" {
				r.answer = jsonObject{"op": "permission", "permission": jsonObject{"id": l.Permission.ID, "allowed": true}}
			}
			return r
		},
	})
}
