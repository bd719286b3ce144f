package architecture_test

import (
	"fmt"
	"slices"
	"testing"

	"github.com/spoolhq/spool/pkg/architecture"
)

func TestCanonical_AcceptsOnlyNamesAndAliases(t *testing.T) {
	t.Parallel()
	for _, name := range architecture.Names() {
		if got, ok := architecture.Canonical(name); !ok || got != name {
			t.Errorf("%s is canonically %q, %t", name, got, ok)
		}
	}
	for alias, name := range architecture.Aliases() {
		if got, ok := architecture.Canonical(alias); !ok || got != name || !slices.Contains(architecture.Names(), name) {
			t.Errorf("%s is canonically %q, %t; want %s", alias, got, ok, name)
		}
		if slices.Contains(architecture.Names(), alias) {
			t.Errorf("%s is both an alias and a name", alias)
		}
	}
	for _, name := range []string{"", "Codex", "claude", "claude-code "} {
		if got, ok := architecture.Canonical(name); ok {
			t.Errorf("%q is canonically %q", name, got)
		}
	}
}

func Example() {
	name, ok := architecture.Canonical("claude-sdk")
	fmt.Println(name, ok)
	fmt.Println(architecture.FormatNames())
	// Output:
	// claude-code true
	// claude-code (alias claude-sdk), codex, opencode, acp, spool
}
