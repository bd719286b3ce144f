package executor

import (
	"fmt"
	"strconv"
	"strings"

	"github.com/spoolhq/spool/pkg/runner"
)

// openCodeModel is OpenCode's model where nobody names one: it has no default of its own.
const openCodeModel = "gpt-4.1-mini"

// agent gives the model and the environment of an architecture's process. The
// environment reaches that process alone: not the log, nor the rest of the sandbox.
func (c Config) agent(architecture, model string) (string, map[string]string) {
	if architecture == "claude-code" && model == "" {
		model = c.AnthropicModel
	}
	if architecture == "opencode" && model == "" && c.OpenAIModel == "" && (c.NVIDIAKey == "" || c.OpenAIKey != "") {
		model = openCodeModel
	}
	if c.Sandbox == Docker {
		return c.routed(architecture, model)
	}
	env := map[string]string{}
	set := func(key, value string) {
		if value != "" {
			env[key] = value
		}
	}
	if architecture == "claude-code" || architecture == "acp" {
		set("ANTHROPIC_API_KEY", c.AnthropicKey)
		set("ANTHROPIC_BASE_URL", c.AnthropicBaseURL)
	}
	if architecture == "claude-code" {
		return model, env
	}
	// NVIDIA's names have a vendor before a slash; without a model it serves where OpenAI's API is not set up.
	openAI := c.OpenAIKey != "" || c.OpenAIBaseURL != ""
	if c.NVIDIAKey != "" && (strings.Contains(model, "/") || !openAI) {
		set("OPENAI_API_KEY", c.NVIDIAKey)
		set("OPENAI_BASE_URL", c.NVIDIABaseURL)
		if model == "" {
			model = c.NVIDIAModel
		}
		return model, env
	}
	set("OPENAI_API_KEY", c.OpenAIKey)
	set("OPENAI_BASE_URL", c.OpenAIBaseURL)
	if model == "" {
		model = c.OpenAIModel
	}
	return model, env
}

// noKey is what stands where agents want a key: the egress proxy puts the real one in.
const noKey = "spool"

// routed is agent for sandboxes that reach models by the egress proxy's routes.
func (c Config) routed(architecture, model string) (string, map[string]string) {
	env := map[string]string{
		"HTTP_PROXY": runner.EgressURL, "HTTPS_PROXY": runner.EgressURL, "http_proxy": runner.EgressURL, "https_proxy": runner.EgressURL,
		"NO_PROXY": "127.0.0.1,localhost", "no_proxy": "127.0.0.1,localhost",
	}
	if architecture == "claude-code" || architecture == "acp" {
		env["ANTHROPIC_API_KEY"], env["ANTHROPIC_BASE_URL"] = noKey, runner.EgressURL+"/"+runner.EgressAnthropic
	}
	if architecture == "claude-code" {
		return model, env
	}
	if model == "" {
		model = c.OpenAIModel
	}
	route := runner.EgressOpenAI
	if strings.Contains(model, "/") { // NVIDIA's names have a vendor before a slash
		route = runner.EgressNVIDIA
	}
	env["OPENAI_API_KEY"], env["OPENAI_BASE_URL"] = noKey, runner.EgressURL+"/"+route
	return model, env
}

// pool is how many sandboxes are kept ready, by architecture.
func (c Config) pool() (map[string]int, error) {
	out := map[string]int{}
	for _, entry := range c.Pool {
		if entry == "" {
			continue
		}
		architecture, count, ok := strings.Cut(entry, "=")
		n, err := strconv.Atoi(count)
		if !ok || architecture == "" || err != nil || n < 0 || n > maxSlots {
			return nil, fmt.Errorf("pool: %q is not an architecture and a number up to %d, like claude-code=2", entry, maxSlots)
		}
		out[architecture] = n
	}
	return out, nil
}
