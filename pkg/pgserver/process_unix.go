//go:build unix && !linux

package pgserver

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

const clusterByDescriptor = false

// setDeathSignal has nothing to set: only Linux ends a child with its parent. A postmaster that stays is stopped by the next start.
func setDeathSignal(cmd *exec.Cmd, _ bool) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
}

// serves reports whether pid is a living postmaster of the cluster: another program, or another cluster's Postgres, may have got the
// number since.
func serves(pid int, cluster string) bool {
	out, err := exec.Command("ps", "-ww", "-o", "stat=,command=", "-p", strconv.Itoa(pid)).Output()
	line := strings.TrimSpace(string(out))
	return err == nil && !strings.HasPrefix(line, "Z") && strings.Contains(line, "postgres") && strings.Contains(line, "-D "+cluster+" ")
}
