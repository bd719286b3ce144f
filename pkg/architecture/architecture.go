// Package architecture is the table of agent architectures: their names and aliases. The API, the executor and the
// runner all use this table, so that they accept the same names.
package architecture

import (
	"fmt"
	"maps"
	"slices"
	"strings"
)

// The architectures.
const (
	ClaudeCode = "claude-code"
	Codex      = "codex"
	OpenCode   = "opencode"
	ACP        = "acp" // any agent that implements the Agent Client Protocol; the session's command starts it
	Spool      = "spool"
)

// Names returns the names of all architectures, without aliases, in the order in which documents list them.
func Names() []string { return []string{ClaudeCode, Codex, OpenCode, ACP, Spool} }

// Aliases returns the alternative names that users may write, each with its architecture. Events contain the
// architecture, never an alias.
func Aliases() map[string]string { return map[string]string{"claude-sdk": ClaudeCode} }

// Canonical returns the architecture that a name or an alias denotes; ok is false if there is none.
func Canonical(name string) (architecture string, ok bool) {
	if stands, isAlias := Aliases()[name]; isAlias {
		return stands, true
	}
	if slices.Contains(Names(), name) {
		return name, true
	}
	return "", false
}

// FormatNames returns the architectures as an enumeration for messages, each with its aliases: "claude-code (alias
// claude-sdk), codex, …".
func FormatNames() string {
	var names []string
	for _, name := range Names() {
		for _, alias := range slices.Sorted(maps.Keys(Aliases())) {
			if Aliases()[alias] == name {
				name = fmt.Sprintf("%s (alias %s)", name, alias)
			}
		}
		names = append(names, name)
	}
	return strings.Join(names, ", ")
}
