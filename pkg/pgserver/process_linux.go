package pgserver

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

const clusterByDescriptor = true

// setDeathSignal makes the kernel end Postgres with its owner: by a fast shutdown, or at once where nothing is worth keeping.
func setDeathSignal(cmd *exec.Cmd, atOnce bool) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGINT
	if atOnce {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGQUIT
	}
	// A terminal's interrupt is for the owner, who then calls Stop.
	cmd.SysProcAttr.Setpgid = true
}

// isPostgres tells a living postmaster from a zombie and from another program that got its number.
func isPostgres(pid int) bool {
	b, err := os.ReadFile("/proc/" + strconv.Itoa(pid) + "/stat")
	if err != nil {
		return false
	}
	// The name is in parentheses and may itself contain them.
	stat := string(b)
	open, end := strings.IndexByte(stat, '('), strings.LastIndexByte(stat, ')')
	if open < 0 || end < open || len(stat) < end+3 {
		return false
	}
	name, state := stat[open+1:end], stat[end+2]
	return (name == "postgres" || name == "postmaster") && state != 'Z' && state != 'X'
}
