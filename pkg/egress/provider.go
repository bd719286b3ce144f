package egress

import (
	"fmt"
	"slices"
	"strings"
)

// providerPrefix is the prefix of the allowlist entry provider:FEATURE, which lets agents use a feature that runs on
// the servers of model providers.
const providerPrefix = "provider:"

// Features of model providers that allowlists name. A tool has the name of its type, without a date.
const (
	FeatureFetchURL  = "url"    // fetch images and documents by their URLs
	FeatureReadFile  = "file"   // read files of the account
	FeatureUseStored = "stored" // use responses, conversations, prompts and containers that are stored in the account
)

// providerFeatures lists the features of model providers, sorted, that an allowlist entry can name after
// providerPrefix.
var providerFeatures = []string{
	"code_execution", "code_interpreter", "computer_use", FeatureReadFile, "file_search", "image_generation", "mcp", "shell", FeatureUseStored, FeatureFetchURL, "web_fetch", "web_search",
}

// IsProviderFeature reports whether name is a feature of model providers that an allowlist entry can allow.
func IsProviderFeature(name string) bool { return slices.Contains(providerFeatures, name) }

// ProviderEntry returns the allowlist entry that allows a feature of model providers.
func ProviderEntry(feature string) string { return providerPrefix + feature }

// parseProviderEntry parses the allowlist entry provider:FEATURE. ok is false for an entry with a host, such as
// provider:443.
func parseProviderEntry(entry string) (feature string, ok bool, err error) {
	feature, ok = strings.CutPrefix(entry, providerPrefix)
	if !ok || strings.Trim(feature, "0123456789") == "" {
		return "", false, nil
	}
	if !IsProviderFeature(feature) {
		return "", true, fmt.Errorf("%s is not a feature of model providers; after %s must follow one of %s", QuotePrefix(feature), providerPrefix, strings.Join(providerFeatures, ", "))
	}
	return feature, true, nil
}
