package bareagent

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/architecture"
	"github.com/spoolhq/spool/pkg/runner"
)

// BuiltIn returns the built-in agent, `runner agent`.
func BuiltIn() Agent {
	return Agent{Architecture: architecture.Spool, Name: "the built-in agent", Warm: warmBuiltIn}
}

func warmBuiltIn(path, dir, url string) (Conversation, error) {
	state := filepath.Join(dir, "state")
	if err := os.MkdirAll(state, 0o700); err != nil {
		return nil, err
	}
	cmd := exec.Command(path, "agent", "--workspace", filepath.Join(dir, "workspace"), "--state", state) //nolint:gosec // the path of the runner
	cmd.Env = []string{"OPENAI_BASE_URL=" + url + "/v1", "OPENAI_API_KEY=bench"}
	n := 0
	return startProcess(dir, cmd, &process{
		query: func(text string) any {
			n++
			return object{"op": "query", "query": runner.Query{
				SessionID: "bare", ExecutionID: fmt.Sprint("bare-", n), Attempt: 1, Architecture: architecture.Spool, Content: text, Policy: runner.PolicyWorkspace,
			}}
		},
		read: func(line []byte) lineResult {
			var l struct {
				Op    string
				Text  string
				Ended *runner.Ended
			}
			if err := json.Unmarshal(line, &l); err != nil {
				return lineResult{err: err}
			}
			if l.Op == "permission" {
				return lineResult{err: errors.New("the agent asks whether it may call a tool, which only the runner decides")}
			}
			if l.Ended != nil && l.Ended.Outcome != runner.Completed {
				return lineResult{err: fmt.Errorf("turn ended with %+v", *l.Ended)}
			}
			return lineResult{text: l.Op == "text" && l.Text != "", ended: l.Ended != nil}
		},
	})
}
