package agent

import (
	"maps"
	"slices"
	"strings"
)

func hasPrefix(key string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(key, p) })
}

// sortedKeys returns the keys in order, because the supervisor compares environments.
func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }
