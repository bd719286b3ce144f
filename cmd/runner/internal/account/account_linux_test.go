//go:build !race

// With the race detector a program has threads that Go does not know of, in which no call for all threads is possible.

package account

import (
	"os"
	"os/exec"
	"strings"
	"testing"
)

// child is the variable that makes the test binary the process that changes its user.
const child = "SPOOL_ACCOUNT_TEST"

func TestMain(m *testing.M) {
	if os.Getenv(child) == "" {
		os.Exit(m.Run())
	}
	if err := SwitchUser(os.Getenv(UserVariable)); err != nil {
		_, _ = os.Stderr.WriteString(err.Error())
		os.Exit(1)
	}
	out, err := exec.Command("sh", "-c", "id -u; id -g; id -G; grep NoNewPrivs /proc/self/status").CombinedOutput()
	_, _ = os.Stdout.Write(out)
	if err != nil {
		os.Exit(1)
	}
	os.Exit(0)
}

// become runs a child that changes its user, and returns the ids of its programs.
func become(t *testing.T, user string) (string, error) {
	t.Helper()
	cmd := exec.Command(os.Args[0])
	cmd.Dir = "/"
	cmd.Env = append(os.Environ(), child+"=1", UserVariable+"="+user)
	out, err := cmd.CombinedOutput()
	return strings.ReplaceAll(string(out), "\t", " "), err
}

func TestBecome(t *testing.T) {
	t.Parallel()
	if os.Geteuid() != 0 {
		if out, err := become(t, "10001:10002"); err != nil || strings.HasPrefix(out, "10001") {
			t.Errorf("a process that is not root's: %q, %v", out, err)
		}
		return
	}
	if out, err := become(t, "10001:10002"); err != nil || out != "10001\n10002\n10002\nNoNewPrivs: 1\n" {
		t.Errorf("%q, %v", out, err)
	}
	if out, err := become(t, ""); err != nil || !strings.HasPrefix(out, "0\n0\n") {
		t.Errorf("without a user: %q, %v", out, err)
	}
	for _, bad := range []string{"0:10001", "10001:0", "10001", "a:b", "-1:5", "root:root", "1:2:3"} {
		if out, err := become(t, bad); err == nil || !strings.HasPrefix(out, UserVariable+": ") {
			t.Errorf("%q: %q, %v", bad, out, err)
		}
	}
}
