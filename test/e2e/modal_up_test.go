package e2e

import (
	"strings"
	"testing"

	"github.com/spoolhq/spool/test/e2e/harness"
)

// TestModal_UpAndDoctor runs the commands of a new user: spool doctor with right and with wrong settings, spool up
// with a turn, and a turn in a region that does not exist. No sandbox may run on Modal afterwards.
func TestModal_UpAndDoctor(t *testing.T) {
	t.Parallel()
	harness.NeedDocker(t)
	m := harness.StartMockModal(t)
	u := m.NewUpInstallation(t)
	empty := func(after string) {
		t.Helper()
		for _, s := range m.RunningSandboxes(t) {
			t.Errorf("%s: Modal still has: %+v", after, s)
		}
	}
	if code, printed := u.RunCLI(nil, "doctor"); code != 0 || !strings.Contains(printed, "a sandbox was started in any region and ended") {
		t.Errorf("spool doctor ended with %d:\n%s", code, printed)
	}
	const region = "SPOOL_MODAL_REGION"
	for setting, wrong := range map[string]string{
		"SPOOL_MODAL_TOKEN_SECRET": "as-wrong", region: "atlantis-1", "SPOOL_MODAL_SERVER_URL": "http://127.0.0.1:1", "SPOOL_EGRESS_LISTEN_TLS": "",
	} {
		variables := []string{setting + "=" + wrong}
		code, printed := u.RunCLI(variables, "doctor")
		if code == 0 || !strings.Contains(printed, setting) || !strings.Contains(printed, "failed checks: 1") {
			t.Errorf("spool doctor with %q ended with %d:\n%s", variables, code, printed)
		}
	}
	empty("doctor")
	query := []string{"run", "--architecture", "spool", "--model", "mock", "--json", "Write a program that prints the first ten primes and run it."}
	u.RunWhileUp(nil, func() {
		if code, printed := u.RunCLI(nil, query...); code != 0 || !strings.Contains(printed, "29") {
			t.Errorf("spool run ended with %d:\n%s", code, printed)
		}
	})
	empty("spool up")
	u.RunWhileUp([]string{region + "=atlantis-1"}, func() {
		code, printed := u.RunCLI(nil, query...)
		failed := ""
		for line := range strings.Lines(printed) {
			if strings.Contains(line, `"execution_failed"`) {
				failed = line
			}
		}
		if code == 0 || !strings.Contains(failed, `"REGION_UNKNOWN"`) || !strings.Contains(failed, region) {
			t.Errorf("spool run ended with %d:\n%s", code, printed)
		}
	})
	empty("an unknown region")
}
