package architecture

import "slices"

// Model providers are the APIs through which agents reach models. A server that implements the API of one of them
// is that provider with another base URL.
const (
	Anthropic = "anthropic"
	OpenAI    = "openai"
	NVIDIA    = "nvidia"
)

// ModelProviders returns the names of all model providers, in the order in which documents list them.
func ModelProviders() []string { return []string{Anthropic, OpenAI, NVIDIA} }

// ModelProvidersOf returns the model providers that an architecture can use, its default first, or nil for an
// unknown architecture.
func ModelProvidersOf(architecture string) []string {
	switch architecture {
	case ClaudeCode:
		return []string{Anthropic}
	case Codex, OpenCode, Spool:
		return []string{OpenAI, NVIDIA}
	case ACP:
		return []string{OpenAI, NVIDIA, Anthropic}
	}
	return nil
}

// CanUse reports whether an architecture can use a model provider.
func CanUse(architecture, provider string) bool {
	return slices.Contains(ModelProvidersOf(architecture), provider)
}
