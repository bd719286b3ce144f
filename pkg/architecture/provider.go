package architecture

import "slices"

// Model providers: the APIs by which agents reach models. What else speaks the
// API of one of them is that provider, with a base URL of its own.
const (
	Anthropic = "anthropic"
	OpenAI    = "openai"
	NVIDIA    = "nvidia"
)

// ModelProviders returns all of them, in the order of documents.
func ModelProviders() []string { return []string{Anthropic, OpenAI, NVIDIA} }

// ModelProvidersOf returns the model providers that an architecture can use, its
// default first; nil for an unknown architecture.
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
