//go:build unix && !linux

package pgserver

import (
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

const usesDescriptorPath = false

// setDeathSignal does nothing: only Linux can end a child with its parent. The next start stops a remaining
// postmaster.
func setDeathSignal(cmd *exec.Cmd, _ bool) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Setpgid = true
}

// isPostmasterOf reports whether pid is a living postmaster of the cluster. The process id may meanwhile belong to another
// program or to the Postgres of another cluster.
func isPostmasterOf(pid int, cluster string) bool {
	out, err := exec.Command("ps", "-ww", "-o", "stat=,command=", "-p", strconv.Itoa(pid)).Output()
	line := strings.TrimSpace(string(out))
	return err == nil && !strings.HasPrefix(line, "Z") && strings.Contains(line, "postgres") && strings.Contains(line, "-D "+cluster+" ")
}
