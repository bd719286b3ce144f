package opencode

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/spoolhq/spool/cmd/runner/internal/acp"
	"github.com/spoolhq/spool/cmd/runner/internal/agent"
)

// provider is the name under which the CLI knows the model's API.
const provider = "spool"

// contextLimit and outputLimit are in tokens: from the first on the CLI sums a
// conversation up, the second is what it asks for as the longest answer. It
// knows neither of a model that is not in its own list.
const (
	contextLimit = 128_000
	outputLimit  = 32_000
)

type object = map[string]any

// asked are the rules of the agent itself: everything is asked for, so that the
// policy decides and records it. Sub-agents other than these two would ask in
// vain: the CLI does not tell of questions that a sub-agent has.
var asked = object{
	"*":         "ask",
	"doom_loop": "deny", // the same call for the third time
	"question":  "deny", // nobody is there to answer
	"task":      object{"*": "deny", "general": "ask", "explore": "ask"},
}

// fixed are a sub-agent's rules: the policy `workspace`, as far as the CLI can hold to it by itself.
func fixed(edit string) object {
	return object{
		"*": "deny", "read": "allow", "glob": "allow", "grep": "allow", "list": "allow", "bash": "allow",
		"edit": edit, "todowrite": edit, "external_directory": "deny",
	}
}

// configuration is the CLI's, as JSON. The key stays in its variable.
func configuration(l agent.Launch, model string, instructions []string) (string, error) {
	url := "https://api.openai.com/v1"
	if acp.Variable(l, "OPENAI_BASE_URL") != "" {
		url = "{env:OPENAI_BASE_URL}"
	}
	raw, err := json.Marshal(object{
		"$schema":           "https://opencode.ai/config.json",
		"autoupdate":        false,
		"share":             "disabled",
		"lsp":               false,
		"formatter":         false,
		"model":             provider + "/" + model,
		"small_model":       provider + "/" + model,
		"enabled_providers": []string{provider},
		"instructions":      instructions,
		"provider": object{provider: object{
			"npm": "@ai-sdk/openai-compatible", "name": "Spool",
			"options": object{"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"},
			"models": object{model: object{
				"name": model, "tool_call": true, "attachment": true,
				"modalities": object{"input": []string{"text", "image"}, "output": []string{"text"}},
				"limit":      object{"context": contextLimit, "output": outputLimit},
			}},
		}},
		"permission": asked,
		"agent": object{
			"general": object{"permission": fixed("allow")},
			"explore": object{"permission": fixed("deny")},
			// A title would be a call to the model that nobody asked for.
			"title": object{"disable": true},
		},
		// What is denied is told to the model, which goes on without it.
		"experimental": object{"continue_loop_on_deny": true},
	})
	return string(raw), err
}

// plugin is what the CLI installs from npm into its configuration folder when it starts.
const plugin = "@opencode-ai/plugin"

// layOut makes the files that the CLI needs before it starts, and gives the
// paths of those with instructions. They are too long for the environment.
func layOut(l agent.Launch) ([]string, error) {
	config := filepath.Join(home(l.Place, "config"), "opencode")
	// An installed package, as the CLI sees it: there is no registry to ask.
	if err := os.MkdirAll(filepath.Join(config, "node_modules"), 0o700); err != nil {
		return nil, err
	}
	lock, err := json.Marshal(object{
		"name": "opencode", "lockfileVersion": 3, "packages": object{"": object{"dependencies": object{plugin: "*"}}},
	})
	if err != nil {
		return nil, err
	}
	if err := write(filepath.Join(config, "package-lock.json"), lock); err != nil {
		return nil, err
	}
	instructions := []string{filepath.Join(l.Workspace, "AGENTS.md")} // the workspace's own, if it has one
	if say := acp.Instructions(l); say != "" {
		sum := sha256.Sum256([]byte(say))
		path := filepath.Join(l.State, "opencode", "instructions-"+hex.EncodeToString(sum[:8])+".md")
		if err := write(path, []byte(say)); err != nil {
			return nil, err
		}
		instructions = append(instructions, path)
	}
	return instructions, nil
}

// write makes a file in one step, unless it is there.
func write(path string, content []byte) error {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, content, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
