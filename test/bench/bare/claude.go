package bare

import (
	"encoding/json"
	"fmt"
	"os/exec"
	"path/filepath"
)

// claudeEnv is what the runner's adapter gives Claude Code too.
func claudeEnv(dir, url string) []string {
	return []string{
		"ANTHROPIC_BASE_URL=" + url, "ANTHROPIC_API_KEY=bench", "CLAUDE_CONFIG_DIR=" + filepath.Join(dir, "claude"),
		"CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC=1", "CLAUDE_CODE_DISABLE_BACKGROUND_TASKS=1", "CLAUDE_CODE_DISABLE_CRON=1",
	}
}

// Claude is Claude Code as the runner's adapter drives it: two-way, one process for all turns.
// It has answered the handshake.
func Claude(path, dir, url string) (Talker, error) {
	cmd := exec.Command(path, "-p", "--input-format", "stream-json", "--output-format", "stream-json", "--verbose", //nolint:gosec // the installed CLI
		"--include-partial-messages", "--replay-user-messages", "--permission-prompt-tool", "stdio", "--permission-mode", "default")
	cmd.Env = claudeEnv(dir, url)
	p, err := started(dir, cmd, &process{
		query: func(text string) any {
			return map[string]any{"type": "user", "message": map[string]any{"role": "user", "content": text}}
		},
		read: func(line []byte) said { return readClaude(line, nil) },
	})
	if err != nil {
		return nil, err
	}
	hello := map[string]any{"type": "control_request", "request_id": "1", "request": map[string]any{"subtype": "initialize", "hooks": nil}}
	err = p.greet(hello, func(line []byte) (bool, error) {
		var l struct{ Type string }
		err := json.Unmarshal(line, &l)
		return l.Type == "control_response", err
	})
	if err != nil {
		_ = p.Close() // it did not get so far
		return nil, err
	}
	return p, nil
}

// readClaude reads a line of --output-format stream-json, and the session's id where it is wanted.
func readClaude(line []byte, session *string) said {
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
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return said{err: err}
	}
	if l.Type == "result" && l.IsError {
		return said{err: fmt.Errorf("the turn ended with %s: %s", l.Subtype, l.Result)}
	}
	if session != nil && l.Session != "" {
		*session = l.Session
	}
	return said{
		text:  l.Type == "stream_event" && l.Event.Type == "content_block_delta" && l.Event.Delta.Text != "",
		ended: l.Type == "result",
	}
}

// OnceClaude is `claude -p "message"`, which goes on with its session by --resume.
func OnceClaude(path, dir, url string) (*OneShot, error) {
	return &OneShot{
		dir: dir,
		command: func(text, session string) *exec.Cmd {
			args := []string{"-p", text, "--output-format", "stream-json", "--verbose", "--include-partial-messages"}
			if session != "" {
				args = append(args, "--resume", session)
			}
			cmd := exec.Command(path, args...) //nolint:gosec // the installed CLI
			cmd.Env = claudeEnv(dir, url)
			return cmd
		},
		read: readClaude,
	}, nil
}
