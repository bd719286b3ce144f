package docker

import (
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// TestKillWaitsForNobody: whoever has killed one of the runner's own commands is
// told so at once, though it may take its time to end, or never do.
func TestKillWaitsForNobody(t *testing.T) {
	t.Parallel()
	b := create(t, provide(t, needEngine(t)), newSpec(t))
	// It serves on a socket of its own, whatever becomes of its stdin.
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{
		"runner", "serve", "--socket", "/tmp/other.sock", "--workspace", "/workspace", "--state", "/tmp/state",
	}})
	if err != nil {
		t.Fatal(err)
	}
	waited := make(chan int, 1)
	go func() {
		code, err := proc.Wait()
		if err != nil {
			t.Error(err)
		}
		waited <- code
	}()
	if err := proc.Kill(); err != nil {
		t.Fatal(err)
	}
	select {
	case code := <-waited:
		if code != -1 {
			t.Errorf("exit code %d", code)
		}
	case <-time.After(30 * time.Second):
		t.Fatal("it is waited for, although it was killed")
	}
	out, _, _ := sh(t, b, "cat /proc/*/cmdline | tr '\\0' ' '")
	if !strings.Contains(out, "other.sock") {
		t.Errorf("it has ended by itself, so nothing was shown: %s", out)
	}
}
