package command

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/pkg/events"
)

func TestDefaultInstance_HasADifferentReferenceForEachAgent(t *testing.T) {
	t.Parallel()
	long := strings.Repeat("a.", 31) + "aa"
	seen := map[events.Reference]string{}
	for agent, want := range map[string]string{
		"reviewer":                        "reviewer.default",
		"acme/reviewer":                   "acme/reviewer.default",
		"identity_account/acc/reviewer":   "identity_account/acc/reviewer.default",
		"platform/reviewer":               "organization/platform/reviewer.default",
		"platform/acme/reviewer":          "platform.acme/reviewer.default",
		"platform/" + long + "/reviewer":  "",
		long:                              "",
		strings.Repeat("a.", 31) + "ab":   "",
		strings.Repeat("b", 56):           strings.Repeat("b", 56) + ".default",
		"reviewer.default":                "reviewer.default.default",
		"organization/platform/something": "organization/platform/something.default",
	} {
		ref, err := events.ParseReference(agent)
		if err != nil {
			t.Fatal(err)
		}
		ref.Version = "stable"
		got := DefaultInstance(ref)
		if err := got.Check(); err != nil || want != "" && got.String() != want {
			t.Errorf("agent %s has the default instance %s (%v), want %s", agent, got, err, want)
		}
		if other, taken := seen[got]; taken {
			t.Errorf("agents %s and %s share %s", agent, other, got)
		}
		seen[got] = agent
	}
}
