package permitter_test

import (
	"testing"

	"github.com/spoolhq/spool/cmd/runner/permitter"
	"github.com/spoolhq/spool/pkg/events"
	"github.com/spoolhq/spool/pkg/permission"
)

func TestPermit_FollowsThePolicy(t *testing.T) {
	t.Parallel()
	p, err := permitter.New(t.Context(), events.Permissions{Rules: []events.PermissionRule{{Command: []string{"rm"}, Then: events.PermissionDeny}}})
	if err != nil {
		t.Fatal(err)
	}
	for command, want := range map[string]bool{"ls": true, "rm x": false} {
		if got := p.IsAllowed(permission.Call{Tool: "Bash", Kind: permission.KindShell, Command: command}); got != want {
			t.Errorf("%s: %v, want %v", command, got, want)
		}
	}
	if _, err := permitter.New(t.Context(), events.Permissions{Preset: "unknown"}); err == nil {
		t.Error("an invalid policy was accepted")
	}
}
