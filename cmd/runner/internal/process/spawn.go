package process

import (
	"os/exec"
	"syscall"
)

// Spawn starts a program as leader of a session and process group. The caller owns the program's standard streams and
// must call Await.
func (g *Group) Spawn(cmd *exec.Cmd) error {
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true}
	return g.startProcess(cmd)
}

// Await waits until a program that was started by Spawn has ended.
func (g *Group) Await(cmd *exec.Cmd) { g.waitForProcess(cmd) }

// EndTree kills a program that was started by Spawn, with its process group, its session and its descendants, also if
// the program itself has ended. It returns when none of them runs. Orphans outside of the group and the session are not
// killed, because another program may have started them.
func (g *Group) EndTree(cmd *exec.Cmd) error { return NewGroup(g.log).killTree(cmd.Process.Pid) }
