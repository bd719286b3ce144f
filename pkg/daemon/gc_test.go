package daemon_test

import (
	"runtime/debug"
	"testing"

	"github.com/spoolhq/spool/pkg/daemon"
)

//nolint:paralleltest // it changes the garbage collection of the process
func TestSetGCPercent_LeavesTheChoiceToGOGC(t *testing.T) {
	defer debug.SetGCPercent(debug.SetGCPercent(70))
	t.Setenv("GOGC", "70")
	daemon.SetGCPercent()
	if now := debug.SetGCPercent(70); now != 70 {
		t.Errorf("with GOGC: %d", now)
	}
	t.Setenv("GOGC", "")
	daemon.SetGCPercent()
	if now := debug.SetGCPercent(70); now != 50 {
		t.Errorf("without GOGC: %d", now)
	}
}
