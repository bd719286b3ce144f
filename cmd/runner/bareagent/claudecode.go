package bareagent

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/architecture"
)

// ClaudeCode describes how to run the CLI of Claude Code without Spool.
func ClaudeCode() Agent {
	return Agent{
		Architecture: architecture.ClaudeCode, Name: "Claude Code", Program: "claude", Warm: startWarmClaude,
		Command: func(command string) (string, map[string]any) {
			return "Bash", jsonObject{"command": command, "description": "Run a command"}
		},
		OneShot: &OneShotCLI{Command: "claude -p", Start: newOneShotClaude},
	}
}

// claudeVariables returns the environment variables of the CLI of Claude Code, as the runner's adapter sets them.
func claudeVariables(dir, url string) []string {
	return []string{
		"ANTHROPIC_BASE_URL=" + url, "ANTHROPIC_API_KEY=bench", "CLAUDE_CONFIG_DIR=" + filepath.Join(dir, "claude"),
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1", "CLAUDE_CODE_DISABLE_CRON=1",
	}
}

// startWarmClaude starts `claude` as one process that takes all turns of a conversation.
func startWarmClaude(path, dir, url string) (Conversation, error) {
	cmd := exec.Command(path, "-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose", //nolint:gosec // the installed CLI
		"--include-partial-messages", "--replay-user-messages", "--permission-prompt-tool", "stdio", "--permission-mode", "default")
	cmd.Env = claudeVariables(dir, url)
	hello := jsonObject{"type": "control_request", "request_id": "1", "request": jsonObject{"subtype": "initialize", "hooks": nil}}
	return startProcess(dir, cmd, &agentProcess{
		query: func(text string) any {
			return jsonObject{"type": "user", "message": jsonObject{"role": "user", "content": text}}
		},
		read: func(line []byte) lineResult { return parseClaudeLine(line, nil) },
	}, handshakeStep{hello, func(line []byte) (bool, error) {
		var l struct{ Type string }
		err := json.Unmarshal(line, &l)
		return l.Type == "control_response", err
	}})
}

// parseClaudeLine parses a line that `claude --output-format stream-json` printed. It sets session to the id of Claude
// Code's session, unless session is nil.
func parseClaudeLine(line []byte, session *string) lineResult {
	var l struct {
		Type    string
		Subtype string
		Session string `json:"session_id"`
		IsError bool   `json:"is_error"`
		Result  string
		Event   struct {
			Type  string
			Delta struct{ Type, Text string }
		}
		Message struct{ Content json.RawMessage } // of a user: a text or a list
		Request struct {
			Subtype string
			Input   json.RawMessage
		}
		RequestID string `json:"request_id"`
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return lineResult{err: err}
	}
	if l.Type == "result" && l.IsError {
		return lineResult{err: fmt.Errorf("turn ended with %s: %s", l.Subtype, l.Result)}
	}
	if session != nil && l.Session != "" {
		*session = l.Session
	}
	if l.Type == "control_request" && l.Request.Subtype == "can_use_tool" {
		return lineResult{answer: jsonObject{"type": "control_response", "response": jsonObject{
			"subtype": "success", "request_id": l.RequestID, "response": jsonObject{"behavior": "allow", "updatedInput": l.Request.Input},
		}}}
	}
	if l.Type == "user" {
		return lineResult{result: bytes.Contains(l.Message.Content, []byte(`"type":"tool_result"`))}
	}
	return lineResult{
		text:  l.Type == "stream_event" && l.Event.Type == "content_block_delta" && l.Event.Delta.Text != "",
		ended: l.Type == "result",
	}
}

// newOneShotClaude returns a conversation that runs `claude -p TEXT` for each turn, from the second turn on with
// --resume.
func newOneShotClaude(path, dir, url string) (Conversation, error) {
	return &oneShotConversation{
		dir: dir,
		command: func(text, session string) *exec.Cmd {
			args := []string{"-p", text, "--output-format", "stream-json", "--verbose", "--include-partial-messages"}
			if session != "" {
				args = append(args, "--resume", session)
			}
			cmd := exec.Command(path, args...) //nolint:gosec // the installed CLI
			cmd.Env = claudeVariables(dir, url)
			return cmd
		},
		read: parseClaudeLine,
	}, nil
}
