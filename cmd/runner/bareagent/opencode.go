package bareagent

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"

	"github.com/spoolhq/spool/pkg/architecture"
)

// openCodeModel is the name of the model that OpenCode requests. The scripted model server accepts any name.
const openCodeModel = "known-model"

// OpenCode describes how to run OpenCode without Spool.
func OpenCode() Agent {
	return Agent{
		Architecture: architecture.OpenCode, Name: "OpenCode", Program: "opencode", Model: openCodeModel, Warm: startWarmOpenCode,
		OneShot: &OneShotCLI{Command: "opencode run", Whole: true, Start: newOneShotOpenCode},
	}
}

// OpenCodeVariables returns the environment variables of OpenCode, as the runner's adapter sets them, but without the
// adapter's plugin. It writes the files without which the CLI would ask a package registry.
func OpenCodeVariables(dir, url string) ([]string, error) {
	home := func(kind string) string { return filepath.Join(dir, "opencode", kind) }
	config, err := json.Marshal(jsonObject{
		"$schema": "https://opencode.ai/config.json", "autoupdate": false, "share": "disabled", "lsp": false, "formatter": false,
		"model": "spool/" + openCodeModel, "small_model": "spool/" + openCodeModel, "enabled_providers": []string{"spool"},
		"provider": jsonObject{"spool": jsonObject{
			"npm": "@ai-sdk/openai-compatible", "name": "Spool",
			"options": jsonObject{"baseURL": url + "/v1", "apiKey": "bench"},
			"models": jsonObject{openCodeModel: jsonObject{
				"name": openCodeModel, "tool_call": true, "attachment": true,
				"modalities": jsonObject{"input": []string{"text", "image"}, "output": []string{"text"}}, "limit": jsonObject{"context": 128_000, "output": 32_000},
			}},
		}},
		"permission": jsonObject{"*": "ask", "question": "deny", "doom_loop": "deny"},
		"agent":      jsonObject{"title": jsonObject{"disable": true}},
	})
	if err != nil {
		return nil, err
	}
	folder := filepath.Join(home("config"), "opencode")
	if err := os.MkdirAll(filepath.Join(folder, "node_modules"), 0o700); err != nil {
		return nil, err
	}
	const lock = `{"name":"opencode","lockfileVersion":3,"packages":{"":{"dependencies":{"@opencode-ai/plugin":"*"}}}}`
	return []string{
		"OPENCODE_CONFIG_CONTENT=" + string(config),
		"XDG_DATA_HOME=" + home("data"), "XDG_CONFIG_HOME=" + home("config"), "XDG_CACHE_HOME=" + home("cache"), "XDG_STATE_HOME=" + home("state"),
		"OPENCODE_DISABLE_PROJECT_CONFIG=1", "OPENCODE_DISABLE_CLAUDE_CODE=1", "OPENCODE_DISABLE_EXTERNAL_SKILLS=1", "OPENCODE_DISABLE_MODELS_FETCH=1",
		"OPENCODE_DISABLE_AUTOUPDATE=1", "OPENCODE_DISABLE_LSP_DOWNLOAD=1", "OPENCODE_DISABLE_DEFAULT_PLUGINS=1", "OPENCODE_DISABLE_SHARE=1",
	}, os.WriteFile(filepath.Join(folder, "package-lock.json"), []byte(lock), 0o600)
}

// startWarmOpenCode starts `opencode acp`, which speaks the Agent Client Protocol on its stdio, and opens a session
// that takes all turns of a conversation.
func startWarmOpenCode(path, dir, url string) (Conversation, error) {
	env, err := OpenCodeVariables(dir, url)
	if err != nil {
		return nil, err
	}
	cmd := exec.Command(path, "acp") //nolint:gosec // the installed CLI
	cmd.Env = env
	var started struct{ SessionID string }
	id := 2
	request := func(n int, method string, params any) any {
		return jsonObject{"jsonrpc": "2.0", "id": n, "method": method, "params": params}
	}
	return startProcess(dir, cmd, &agentProcess{
		query: func(text string) any {
			id++
			return request(id, "session/prompt", jsonObject{"sessionId": started.SessionID, "prompt": []jsonObject{{"type": "text", "text": text}}})
		},
		read: func(line []byte) lineResult { return parseACPLine(line, id) },
	},
		handshakeStep{request(1, "initialize", jsonObject{"protocolVersion": 1, "clientInfo": jsonObject{"name": "spool", "version": "1"}}), matchResponse(1, &struct{}{})},
		handshakeStep{request(2, "session/new", jsonObject{"cwd": filepath.Join(dir, "workspace"), "mcpServers": []any{}}), matchResponse(2, &started)})
}

// acpMessage holds the fields of a message of the Agent Client Protocol that this package reads.
type acpMessage struct {
	ID     int
	Method string
	Params struct {
		Update struct {
			Kind    string `json:"sessionUpdate"`
			Content json.RawMessage
		}
	}
	Result struct{ StopReason string }
	Error  *struct{ Message string }
}

// parseACPLine parses a line that `opencode acp` printed during a turn. prompt is the id of the request with the query;
// the response to that request ends the turn.
func parseACPLine(line []byte, prompt int) lineResult {
	var m acpMessage
	if err := json.Unmarshal(line, &m); err != nil {
		return lineResult{err: fmt.Errorf("%w: %s", err, line)}
	}
	if m.Method == "" && m.ID == prompt {
		if m.Error != nil || m.Result.StopReason != "end_turn" {
			return lineResult{err: fmt.Errorf("turn ended with %s", line)}
		}
		return lineResult{ended: true}
	}
	if m.Params.Update.Kind != "agent_message_chunk" {
		return lineResult{}
	}
	var content struct{ Text string }
	err := json.Unmarshal(m.Params.Update.Content, &content)
	return lineResult{text: content.Text != "", err: err}
}

// newOneShotOpenCode returns a conversation that runs `opencode run TEXT` for each turn, from the second turn on with
// --session.
func newOneShotOpenCode(path, dir, url string) (Conversation, error) {
	env, err := OpenCodeVariables(dir, url)
	return &oneShotConversation{
		dir: dir,
		command: func(text, session string) *exec.Cmd {
			args := []string{"run", "--format", "json", "--model", "spool/" + openCodeModel}
			if session != "" {
				args = append(args, "--session", session)
			}
			cmd := exec.Command(path, append(args, text)...) //nolint:gosec // the installed CLI
			cmd.Env = append([]string{}, env...)
			return cmd
		},
		read: parseOpenCodeRunLine,
	}, err
}

// parseOpenCodeRunLine parses a line that `opencode run --format json` printed. It sets session to the id of OpenCode's
// session.
func parseOpenCodeRunLine(line []byte, session *string) lineResult {
	var l struct {
		Type    string
		Session string `json:"sessionID"`
		Part    struct{ Text, Reason string }
	}
	if err := json.Unmarshal(line, &l); err != nil {
		return lineResult{err: fmt.Errorf("%w: %s", err, line)}
	}
	if l.Session != "" {
		*session = l.Session
	}
	if l.Type == "error" {
		return lineResult{err: fmt.Errorf("turn failed: %s", line)}
	}
	return lineResult{text: l.Type == "text" && l.Part.Text != "", ended: l.Type == "step_finish" && l.Part.Reason == "stop"}
}
