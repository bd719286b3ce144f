package egress

import (
	"fmt"
	"slices"
	"strings"
)

// providerPrefix begins an entry that is about what a model provider does itself, on its own servers.
const providerPrefix = "provider:"

// What an entry can allow a model provider to do for an agent. Tools have the name of their type, without a date.
const (
	ProviderURL    = "url"    // fetch images and documents by their URLs
	ProviderFile   = "file"   // read files of the account
	ProviderStored = "stored" // go on from responses, conversations, prompts and containers of the account
)

// providerFeatures are the names that may follow providerPrefix, sorted.
var providerFeatures = []string{
	"code_execution", "code_interpreter", "computer_use", ProviderFile, "file_search", "image_generation", "mcp", "shell", ProviderStored, ProviderURL, "web_fetch", "web_search",
}

// IsProviderFeature reports whether an entry can allow what has the name.
func IsProviderFeature(name string) bool { return slices.Contains(providerFeatures, name) }

// ProviderEntry is the entry that allows a feature.
func ProviderEntry(feature string) string { return providerPrefix + feature }

// parseProvider reads provider:feature. ok is false for an entry that is about a host; provider:443 is one.
func parseProvider(entry string) (feature string, ok bool, err error) {
	feature, ok = strings.CutPrefix(entry, providerPrefix)
	if !ok || strings.Trim(feature, "0123456789") == "" {
		return "", false, nil
	}
	if !IsProviderFeature(feature) {
		return "", true, fmt.Errorf("%s is not something that a model provider can be allowed: after %s stands one of %s", Printable(feature), providerPrefix, strings.Join(providerFeatures, ", "))
	}
	return feature, true, nil
}
