package docker

import (
	"testing"

	"github.com/docker/docker/api/types/container"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// A command that the engine has accepted and not started has not ended.
func TestOver_NotForAnUnstartedExec(t *testing.T) {
	t.Parallel()
	for name, c := range map[string]struct {
		got      container.ExecInspect
		hasEnded bool
	}{
		"not begun":       {container.ExecInspect{}, false},
		"running":         {container.ExecInspect{Running: true, Pid: 7}, false},
		"ended well":      {container.ExecInspect{Pid: 7}, true},
		"ended badly":     {container.ExecInspect{Pid: 7, ExitCode: 3}, true},
		"cannot be begun": {container.ExecInspect{ExitCode: 126}, true},
	} {
		if got := hasEnded(c.got); got != c.hasEnded {
			t.Errorf("%s: over is %v", name, got)
		}
	}
}

// A command that is killed at once, possibly before the engine has started it, leaves no process running.
func TestKill_AtOnceLeavesNothing(t *testing.T) {
	t.Parallel()
	b := create(t, provide(t, needEngine(t)), newSpec(t))
	for range 20 {
		proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{"sleep", "1000"}})
		if err != nil {
			t.Fatal(err)
		}
		if err := proc.Kill(); err != nil {
			t.Fatal(err)
		}
		if code, err := proc.Wait(); code != -1 || err != nil {
			t.Fatalf("killed: %d, %v", code, err)
		}
	}
	if out, _, _ := sh(t, b, `grep -lx sleep /proc/[0-9]*/comm | wc -l`); out != "0" {
		t.Errorf("%s processes were left by killed commands", out)
	}
}
