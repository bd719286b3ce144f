package opencode

import (
	"crypto/sha256"
	_ "embed"
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

// schema names the form of a configuration.
const schema = "https://opencode.ai/config.json"

// configuration is the CLI's, as JSON. The key stays in its variable.
func configuration(l agent.Launch, model string, f files) (string, error) {
	url := "https://api.openai.com/v1"
	if acp.Variable(l, "OPENAI_BASE_URL") != "" {
		url = "{env:OPENAI_BASE_URL}"
	}
	models := object{}
	for _, name := range append(subagentModels(l), model) {
		models[name] = object{
			"name": name, "tool_call": true, "attachment": true,
			"modalities": object{"input": []string{"text", "image"}, "output": []string{"text"}},
			"limit":      object{"context": contextLimit, "output": outputLimit},
		}
	}
	raw, err := json.Marshal(object{
		"$schema":           schema,
		"skills":            object{"paths": native(l)},
		"autoupdate":        false,
		"share":             "disabled",
		"lsp":               false,
		"formatter":         false,
		"model":             provider + "/" + model,
		"small_model":       provider + "/" + model,
		"enabled_providers": []string{provider},
		"instructions":      f.instructions,
		"plugin":            []string{"file://" + f.plugin},
		"provider": object{provider: object{
			"npm": "@ai-sdk/openai-compatible", "name": "Spool",
			"options": object{"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"},
			"models":  models,
		}},
		"permission": askedOf(l),
		"agent": object{
			"general": object{"permission": fixedOf(l, nil, nil)},
			"explore": object{"permission": fixedOf(l, nil, nil).add("edit", "deny").add("todowrite", "deny")},
			// A title would be a call to the model that nobody asked for.
			"title": object{"disable": true},
		},
		// What is denied is told to the model, which goes on without it.
		"experimental": object{"continue_loop_on_deny": true},
	})
	return string(raw), err
}

// native are the folders of the skills that the CLI offers by a tool of its own. That
// lists a skill's files by ripgrep, and would download it; without it the agent
// has its skills by its instructions alone.
func native(l agent.Launch) []string {
	dirs := []string{}
	if _, err := acp.Find(l, "rg"); err != nil {
		return dirs
	}
	for _, s := range l.Listed() {
		dirs = append(dirs, s.Dir)
	}
	return dirs
}

func subagentModels(l agent.Launch) []string {
	var names []string
	for _, a := range l.Subagents {
		if a.Model != "" {
			names = append(names, a.Model)
		}
	}
	return names
}

// library is what the CLI installs from npm into its configuration folder when it starts.
const library = "@opencode-ai/plugin"

//go:embed plugin.js
var plugin []byte

// files are paths of what the CLI has to find when it starts. It is too long for the environment.
type files struct {
	instructions []string
	plugin       string
}

// writeFiles makes the files.
func writeFiles(l agent.Launch) (f files, err error) {
	config := filepath.Join(home(l.Place, "config"), "opencode")
	// An installed package, as the CLI sees it: there is no registry to ask.
	if err := os.MkdirAll(filepath.Join(config, "node_modules"), 0o700); err != nil {
		return f, err
	}
	lock, err := json.Marshal(object{
		"name": "opencode", "lockfileVersion": 3, "packages": object{"": object{"dependencies": object{library: "*"}}},
	})
	if err != nil {
		return f, err
	}
	if err := write(filepath.Join(config, "package-lock.json"), lock); err != nil {
		return f, err
	}
	if f.plugin, err = named(l, "plugin", ".js", plugin); err != nil {
		return f, err
	}
	f.instructions = []string{filepath.Join(l.Workspace, "AGENTS.md")} // the workspace's own, if it has one
	if say := acp.Instructions(l); say != "" {
		path, err := named(l, "instructions", ".md", []byte(say))
		if err != nil {
			return f, err
		}
		f.instructions = append(f.instructions, path)
	}
	return f, nil
}

// named makes a file whose name changes with its content.
func named(l agent.Launch, name, ext string, content []byte) (string, error) {
	sum := sha256.Sum256(content)
	path := filepath.Join(l.State, "opencode", name+"-"+hex.EncodeToString(sum[:8])+ext)
	return path, write(path, content)
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
