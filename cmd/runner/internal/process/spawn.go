package process

import (
	"os/exec"
	"syscall"
)

// Spawn starts a program whose streams are its starter's own, as leader of a
// session and process group. Await has to be called.
func (n *Nursery) Spawn(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return n.start(cmd)
}

// Await waits for a program of Spawn.
func (n *Nursery) Await(cmd *exec.Cmd) { n.wait(cmd) }

// EndTree kills a program of Spawn with its group, its session and its
// descendants, until none is left, also when it is gone itself. Orphans that
// left them are not its own for sure, and stay.
func (n *Nursery) EndTree(cmd *exec.Cmd) error { return NewNursery(n.log).killTree(cmd.Process.Pid) }
