package docker

import (
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/sandbox"
)

// Wait returns at once after Kill of one of the runner's own commands, although the command may take long to end, or
// never end.
func TestKillWaitsForNobody(t *testing.T) {
	t.Parallel()
	b := create(t, provide(t, needEngine(t)), newSpec(t))
	// It serves on its own socket and ignores the end of its stdin.
	proc, err := b.Exec(t.Context(), sandbox.Command{Args: []string{
		"runner", "serve", "--socket", "/tmp/other.sock", "--workspace", "/workspace", "--state", "/tmp/state",
	}})
	if err != nil {
		t.Fatal(err)
	}
	// The engine may not have started it yet, and does not start it after its caller is gone.
	runs := func() string {
		out, _, _ := sh(t, b, "cat /proc/[0-9]*/cmdline | tr '\\0' ' '")
		return out
	}
	for deadline := time.Now().Add(30 * time.Second); !strings.Contains(runs(), "other.sock"); {
		if time.Now().After(deadline) {
			t.Fatal("it did not start")
		}
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
	if out := runs(); !strings.Contains(out, "other.sock") {
		t.Errorf("it has ended by itself, so nothing was shown: %s", out)
	}
}
