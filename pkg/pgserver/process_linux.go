package pgserver

import (
	"os"
	"os/exec"
	"strconv"
	"strings"
	"syscall"
)

const usesDescriptorPath = true

// setDeathSignal makes the kernel end Postgres with its owner: by a fast shutdown, or at once if no data must be
// kept.
func setDeathSignal(cmd *exec.Cmd, atOnce bool) {
	if cmd.SysProcAttr == nil {
		cmd.SysProcAttr = &syscall.SysProcAttr{}
	}
	cmd.SysProcAttr.Pdeathsig = syscall.SIGINT
	if atOnce {
		cmd.SysProcAttr.Pdeathsig = syscall.SIGQUIT
	}
	// An interrupt at the terminal goes only to the owner, which then calls Stop.
	cmd.SysProcAttr.Setpgid = true
}

// isPostmasterOf reports whether pid is a living postmaster of the cluster. The process id may meanwhile belong to another
// program or to the Postgres of another cluster. A postmaster's working directory is its data folder.
func isPostmasterOf(pid int, cluster string) bool {
	proc := "/proc/" + strconv.Itoa(pid)
	name, err := os.ReadFile(proc + "/comm")
	if err != nil || !strings.HasPrefix(string(name), "post") {
		return false
	}
	cwd, err := os.Stat(proc + "/cwd")
	if err != nil {
		return false
	}
	dir, err := os.Stat(cluster)
	return err == nil && os.SameFile(cwd, dir)
}
