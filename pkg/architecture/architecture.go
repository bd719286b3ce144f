// Package architecture is the table of agent architectures: their names and
// aliases. The API, the executor and the runner read this table alone, so that
// a name that one of them takes is taken by all.
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
	ACP        = "acp" // any agent that speaks the Agent Client Protocol; the session's command starts it
	Spool      = "spool"
)

// Names returns all architectures, without aliases, in the order of documents.
func Names() []string { return []string{ClaudeCode, Codex, OpenCode, ACP, Spool} }

// Aliases returns the other names that users may write, each with the
// architecture that it stands for. Events hold the architecture, never an alias.
func Aliases() map[string]string { return map[string]string{"claude-sdk": ClaudeCode} }

// Canonical returns the architecture that a name or an alias stands for; ok
// reports whether there is one.
func Canonical(name string) (architecture string, ok bool) {
	if stands, isAlias := Aliases()[name]; isAlias {
		return stands, true
	}
	if slices.Contains(Names(), name) {
		return name, true
	}
	return "", false
}

// List returns the names as a sentence has them, each with its aliases:
// "claude-code (alias claude-sdk), codex, …".
func List() string {
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
