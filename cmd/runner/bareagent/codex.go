package bareagent

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"

	"github.com/spoolhq/spool/cmd/runner/internal/codexcli"
	"github.com/spoolhq/spool/pkg/architecture"
)

// codexModel is the name of a model that the CLI of Codex accepts.
const codexModel = "gpt-5.5"

// Codex describes how to run the CLI of Codex without Spool.
func Codex() Agent {
	return Agent{
		Architecture: architecture.Codex, Name: "Codex", Program: "codex", Model: codexModel, Warm: startWarmCodex,
		OneShot: &OneShotCLI{Command: "codex exec", Whole: true, Start: newOneShotCodex},
	}
}

// codexSettings returns the arguments with settings of the CLI of Codex, as the runner's adapter passes them. url is
// the model API.
func codexSettings(url string) (args []string) {
	for _, s := range []string{
		`model_provider="spool"`, `model_providers.spool.name="Spool"`, `model_providers.spool.wire_api="responses"`,
		`model_providers.spool.base_url="` + url + `/v1"`, `model_providers.spool.env_key="OPENAI_API_KEY"`, `model="` + codexModel + `"`,
		`features.unbounded_connection_retries=false`, `sandbox_mode="danger-full-access"`, `web_search="disabled"`, `tools.update_plan.enabled=true`,
		`features.goals=false`, `features.sleep_tool=false`, `analytics.enabled=false`, `otel.exporter="none"`, `otel.metrics_exporter="none"`,
		`check_for_update_on_startup=false`, `features.apps=false`, `features.plugins=false`, `features.remote_plugin=false`,
		`features.skill_mcp_dependency_install=false`, `features.image_generation=false`, `features.shell_snapshot=false`, `history.persistence="none"`,
	} {
		args = append(args, "-c", s)
	}
	return args
}

// codexVariables returns the environment variables of the CLI of Codex, and creates the folder CODEX_HOME that they
// name.
func codexVariables(dir string) ([]string, error) {
	home := filepath.Join(dir, "codex")
	return []string{"OPENAI_API_KEY=bench", "CODEX_HOME=" + home, "NO_COLOR=1"}, os.MkdirAll(home, 0o700)
}

// startWarmCodex starts `codex app-server` and opens the thread that takes all turns of a conversation.
func startWarmCodex(path, dir, url string) (Conversation, error) {
	env, err := codexVariables(dir)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(codexcli.NativeProgram(path), append([]string{"app-server"}, codexSettings(url)...)...) //nolint:gosec // the installed CLI
	cmd.Env = env
	var started struct{ Thread struct{ ID string } }
	id := 2
	hello := jsonObject{"clientInfo": jsonObject{"name": "spool", "title": "Spool", "version": "1"}, "capabilities": jsonObject{"experimentalApi": true}}
	start := jsonObject{
		"cwd": filepath.Join(dir, "workspace"), "approvalPolicy": "untrusted", "approvalsReviewer": "user", "sandbox": "read-only", "model": codexModel,
	}
	return startProcess(dir, cmd, &agentProcess{
		query: func(text string) any {
			id++
			return jsonObject{"id": id, "method": "turn/start", "params": jsonObject{
				"threadId": started.Thread.ID, "input": []jsonObject{{"type": "text", "text": text}},
				"sandboxPolicy": jsonObject{"type": "externalSandbox", "networkAccess": "enabled"},
			}}
		},
		read: parseAppServerLine,
	},
		handshakeStep{jsonObject{"id": 1, "method": "initialize", "params": hello}, matchResponse(1, &struct{}{})},
		handshakeStep{request: jsonObject{"method": "initialized"}},
		handshakeStep{jsonObject{"id": 2, "method": "thread/start", "params": start}, matchResponse(2, &started)})
}

// parseAppServerLine parses a line that `codex app-server` printed. The result has an error if the line is not JSON or
// refuses a request, or if the line ends a turn that has failed.
func parseAppServerLine(line []byte) lineResult {
	var l struct {
		Method string
		Params struct {
			Delta string
			Turn  struct {
				Status string
				Error  *struct{ Message string }
			}
		}
		Error *struct{ Message string }
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return lineResult{err: err}
	}
	if l.Error != nil {
		return lineResult{err: fmt.Errorf("request: %s", l.Error.Message)}
	}
	ended := l.Method == "turn/completed"
	if ended && l.Params.Turn.Status != "completed" {
		return lineResult{err: fmt.Errorf("turn ended as %s: %s", l.Params.Turn.Status, line)}
	}
	return lineResult{text: l.Method == "item/agentMessage/delta" && l.Params.Delta != "", ended: ended}
}

// newOneShotCodex returns a conversation that runs `codex exec TEXT` for each turn, from the second turn on with
// `resume`.
func newOneShotCodex(path, dir, url string) (Conversation, error) {
	env, err := codexVariables(dir)
	return &oneShotConversation{
		dir: dir,
		command: func(text, session string) *exec.Cmd {
			args := []string{"exec"}
			if session != "" {
				args = append(args, "resume")
			}
			args = slices.Concat(args, codexSettings(url), []string{"--json", "--skip-git-repo-check"})
			if session != "" {
				args = append(args, session)
			}
			cmd := exec.Command(path, append(args, text)...) //nolint:gosec // the installed CLI
			cmd.Env = slices.Clone(env)
			return cmd
		},
		read: parseCodexExecLine,
	}, err
}

// parseCodexExecLine parses a line that `codex exec --json` printed. It sets session to the id of Codex's session.
func parseCodexExecLine(line []byte, session *string) lineResult {
	var l struct {
		Type   string
		Thread string `json:"thread_id"`
		Item   struct{ Type, Text string }
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return lineResult{err: fmt.Errorf("%w: %s", err, line)}
	}
	if l.Thread != "" {
		*session = l.Thread
	}
	if l.Type == "turn.failed" {
		return lineResult{err: fmt.Errorf("turn failed: %s", line)}
	}
	return lineResult{text: l.Type == "item.completed" && l.Item.Type == "agent_message" && l.Item.Text != "", ended: l.Type == "turn.completed"}
}
