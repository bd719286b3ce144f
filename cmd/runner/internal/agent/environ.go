package agent

import (
	"maps"
	"slices"
	"strings"
)

// hasPrefix reports whether the name of a variable begins with one of the prefixes.
func hasPrefix(key string, prefixes []string) bool {
	return slices.ContainsFunc(prefixes, func(p string) bool { return strings.HasPrefix(key, p) })
}

// sortedKeys returns the keys of m in order, so that equal environments are equal lists when the supervisor compares
// them.
func sortedKeys(m map[string]string) []string { return slices.Sorted(maps.Keys(m)) }
