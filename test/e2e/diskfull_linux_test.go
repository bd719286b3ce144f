package e2e

import (
	"net/http"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/spoolhq/spool/pkg/natsserver/natstest"
	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestDiskFull_ExecutionsGoOnWithoutARestartOfServices tests that executions that stand still because the disk of NATS
// has no space end within 30 s after it has space again, that readiness and spool doctor name the streams meanwhile,
// and that the log is sound.
func TestDiskFull_ExecutionsGoOnWithoutARestartOfServices(t *testing.T) {
	t.Parallel()
	disk := natstest.MountSmallDisk(t)
	c := harness.New(t, harness.Options{DataDir: filepath.Join(disk.Dir, "data"), Script: untilFile})
	flag := filepath.Join(t.TempDir(), "flag")
	var executions []string
	for range 4 {
		executions = append(executions, c.PostMessage(c.CreateSession("spool", nil), "wait for "+flag))
	}
	phase := func(execution string) string {
		var x struct{ Phase string }
		c.Call(0, http.MethodGet, "/api/executions/"+execution, nil, &x)
		return x.Phase
	}
	for _, x := range executions {
		harness.Eventually(t, "the execution runs", func() bool { return phase(x) == "running" })
	}
	doctor := func() string {
		_, out, _ := c.RunCLI(t, t.TempDir(), t.TempDir(), "doctor")
		return out
	}
	if out := doctor(); !strings.Contains(out, " is ready: ") {
		t.Errorf("spool doctor before the disk is full:\n%s", out)
	}
	disk.Fill()
	if err := os.WriteFile(flag, nil, 0o600); err != nil {
		t.Fatal(err)
	}
	harness.Eventually(t, "readiness names the streams that cannot be written", func() bool {
		var r struct{ Checks map[string]string }
		status := c.Call(0, http.MethodGet, "/readyz", nil, &r)
		return status == http.StatusServiceUnavailable && strings.Contains(r.Checks["nats"], "EVENTS-0") && strings.Contains(r.Checks["nats"], "no space left")
	})
	if out := doctor(); !strings.Contains(out, "NATS cannot use streams") {
		t.Errorf("spool doctor does not report the streams:\n%s", out)
	}
	disk.Free()
	deadline := time.Now().Add(natstest.RecoveryTimeout)
	for _, x := range executions {
		harness.Eventually(t, "the execution completes", func() bool {
			p := phase(x)
			if p != "completed" && time.Now().After(deadline) {
				t.Fatalf("execution %s is %s, %s after the disk has space", x, p, natstest.RecoveryTimeout)
			}
			return p == "completed"
		})
	}
}
