//go:build unix && !linux

package pgserver

import (
	"os/exec"
	"path/filepath"
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

// isPostgres tells a living postmaster from a zombie and from another program that got its number.
func isPostgres(pid int) bool {
	out, err := exec.Command("ps", "-o", "stat=,comm=", "-p", strconv.Itoa(pid)).Output()
	if err != nil {
		return false
	}
	fields := strings.Fields(string(out))
	return len(fields) >= 2 && !strings.HasPrefix(fields[0], "Z") && strings.HasPrefix(filepath.Base(fields[1]), "post")
}
