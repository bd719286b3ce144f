package architecture

import (
	"encoding/json"
	"slices"
)

// Preset defines how a known ACP agent receives its model. The placeholders in the values are those of model
// settings: ${MODEL}, ${MODEL_BASE_URL}, ${MODEL_KEY}.
type Preset struct {
	Name      string
	Agent     string            // command and package of the agent, for documents
	Providers []string          // the model providers whose API the agent supports, its default first
	Env       map[string]string // a variable that contains ${MODEL} is omitted if no model is set
}

// Presets returns the model settings of all known ACP agents, in the order in which documents list them.
func Presets() []Preset {
	return []Preset{
		{"claude", "`claude-code-acp` of npm's @zed-industries/claude-code-acp", []string{Anthropic}, map[string]string{
			"ANTHROPIC_API_KEY": "${MODEL_KEY}", "ANTHROPIC_BASE_URL": "${MODEL_BASE_URL}", "ANTHROPIC_MODEL": "${MODEL}", "ANTHROPIC_SMALL_FAST_MODEL": "${MODEL}",
		}},
		{"opencode", "`opencode acp` of npm's opencode-ai", []string{OpenAI, NVIDIA}, map[string]string{
			"OPENAI_API_KEY": "${MODEL_KEY}", "OPENCODE_CONFIG_CONTENT": openCodeConfig(),
		}},
		{"qwen", "`qwen --acp` of npm's @qwen-code/qwen-code", []string{OpenAI, NVIDIA}, map[string]string{
			"OPENAI_API_KEY": "${MODEL_KEY}", "OPENAI_BASE_URL": "${MODEL_BASE_URL}", "OPENAI_MODEL": "${MODEL}",
		}},
	}
}

// FindPreset returns the preset of the ACP agent with the given name; ok is false if there is none.
func FindPreset(name string) (p Preset, ok bool) {
	i := slices.IndexFunc(Presets(), func(p Preset) bool { return p.Name == name })
	if i < 0 {
		return Preset{}, false
	}
	return Presets()[i], true
}

// openCodeConfig returns a configuration with one provider and one model for the environment variable of OpenCode that
// takes precedence over files of the workspace.
func openCodeConfig() string {
	type object = map[string]any
	raw, err := json.Marshal(object{
		"$schema": "https://opencode.ai/config.json", "autoupdate": false, "share": "disabled",
		"model": "spool/${MODEL}", "small_model": "spool/${MODEL}", "enabled_providers": []string{"spool"},
		"provider": object{"spool": object{
			"npm": "@ai-sdk/openai-compatible", "name": "Spool",
			"options": object{"baseURL": "${MODEL_BASE_URL}", "apiKey": "{env:OPENAI_API_KEY}"},
			"models":  object{"${MODEL}": object{"name": "${MODEL}", "tool_call": true}},
		}},
	})
	if err != nil {
		panic(err) // unreachable: a literal of strings and booleans
	}
	return string(raw)
}
