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

// providerName is the name of the model API in the CLI's configuration.
const providerName = "spool"

// contextTokenLimit and outputTokenLimit are in tokens: from contextTokenLimit on the CLI compacts a conversation, and it asks for
// answers of at most outputTokenLimit. The CLI knows neither for a model that is not in its own list.
const (
	contextTokenLimit = 128_000
	outputTokenLimit  = 32_000
)

// jsonObject is a JSON object.
type jsonObject = map[string]any

// configSchemaURL is the address of the JSON schema of the CLI's configuration.
const configSchemaURL = "https://opencode.ai/config.json"

// encodeConfig returns the CLI's configuration for a launch as JSON. The configuration names the environment variable
// with the model's key, not the key itself.
func encodeConfig(l agent.Launch, model string, f configFiles) (string, error) {
	url := "https://api.openai.com/v1"
	if acp.LaunchVariable(l, "OPENAI_BASE_URL") != "" {
		url = "{env:OPENAI_BASE_URL}"
	}
	models := jsonObject{}
	for _, name := range append(subagentModels(l), model) {
		models[name] = jsonObject{
			"name": name, "tool_call": true, "attachment": true,
			"modalities": jsonObject{"input": []string{"text", "image"}, "output": []string{"text"}},
			"limit":      jsonObject{"context": contextTokenLimit, "output": outputTokenLimit},
		}
	}
	raw, err := json.Marshal(jsonObject{
		"$schema":           configSchemaURL,
		"skills":            jsonObject{"paths": nativeSkillDirs(l)},
		"autoupdate":        false,
		"share":             "disabled",
		"lsp":               false,
		"formatter":         false,
		"snapshot":          false, // of Git repositories: they serve /undo, which ACP lacks, and delay every request to the model
		"model":             providerName + "/" + model,
		"small_model":       providerName + "/" + model,
		"enabled_providers": []string{providerName},
		"instructions":      f.instructions,
		"plugin":            []string{"file://" + f.plugin},
		"provider": jsonObject{providerName: jsonObject{
			"npm": "@ai-sdk/openai-compatible", "name": "Spool",
			"options": jsonObject{"baseURL": url, "apiKey": "{env:OPENAI_API_KEY}"},
			"models":  models,
		}},
		"permission":     mainAgentRules(l),
		"subagent_depth": max(l.SubagentDepth, 1), // the CLI refuses the start of a sub-agent below it
		"agent": jsonObject{
			"general": jsonObject{"permission": subagentRules(l, nil, nil)},
			"explore": jsonObject{"permission": subagentRules(l, nil, nil).replaceRule("edit", "deny").replaceRule("todowrite", "deny")},
			// Generating a title would be an additional call to the model.
			"title": jsonObject{"disable": true},
		},
		// The model learns about a denial and continues without the tool.
		"experimental": jsonObject{"continue_loop_on_deny": true},
	})
	return string(raw), err
}

// nativeSkillDirs returns the folders of the skills that the CLI offers with its own tool for skills; none if ripgrep
// is not installed, because the tool needs ripgrep and the CLI would download it. The agent then learns about its
// skills from its instructions only.
func nativeSkillDirs(l agent.Launch) []string {
	dirs := []string{}
	if _, err := acp.FindProgram(l, "rg"); err != nil {
		return dirs
	}
	for _, s := range l.MainAgentSkills() {
		dirs = append(dirs, s.Dir)
	}
	return dirs
}

// subagentModels returns the names of the models that the definitions of sub-agents name.
func subagentModels(l agent.Launch) []string {
	var names []string
	for _, a := range l.Subagents {
		if a.Model != "" {
			names = append(names, a.Model)
		}
	}
	return names
}

// pluginPackage is the npm package that the CLI installs into its configuration folder when it starts.
const pluginPackage = "@opencode-ai/plugin"

//go:embed plugin.js
var pluginSource []byte

// configFiles holds the paths of the files that the CLI reads when it starts. Their contents are too long for
// environment variables.
type configFiles struct {
	instructions []string
	plugin       string
}

// writeConfigFiles creates the files that the CLI reads when it starts, unless they exist, and returns their paths.
func writeConfigFiles(l agent.Launch) (f configFiles, err error) {
	config := filepath.Join(homeDir(l.Folders, "config"), "opencode")
	// This looks like an installed package to the CLI, because no npm registry can be reached.
	if err := os.MkdirAll(filepath.Join(config, "node_modules"), 0o700); err != nil {
		return f, err
	}
	lock, err := json.Marshal(jsonObject{
		"name": "opencode", "lockfileVersion": 3, "packages": jsonObject{"": jsonObject{"dependencies": jsonObject{pluginPackage: "*"}}},
	})
	if err != nil {
		return f, err
	}
	if err := writeFileOnce(filepath.Join(config, "package-lock.json"), lock); err != nil {
		return f, err
	}
	if f.plugin, err = writeHashNamedFile(l, "plugin", ".js", pluginSource); err != nil {
		return f, err
	}
	f.instructions = []string{filepath.Join(l.Workspace, "AGENTS.md")} // the file of the workspace, if it exists
	if say := acp.Instructions(l); say != "" {
		path, err := writeHashNamedFile(l, "instructions", ".md", []byte(say))
		if err != nil {
			return f, err
		}
		f.instructions = append(f.instructions, path)
	}
	return f, nil
}

// writeHashNamedFile creates a file whose name contains a hash of its content, and returns the path of the file.
func writeHashNamedFile(l agent.Launch, name, ext string, content []byte) (string, error) {
	sum := sha256.Sum256(content)
	path := filepath.Join(l.State, "opencode", name+"-"+hex.EncodeToString(sum[:8])+ext)
	return path, writeFileOnce(path, content)
}

// writeFileOnce creates a file atomically. It does nothing if the file exists.
func writeFileOnce(path string, content []byte) error {
	if _, err := os.Stat(path); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	tmp := path + ".new"
	if err := os.WriteFile(tmp, content, 0o600); err != nil {
		return err
	}
	return os.Rename(tmp, path)
}
