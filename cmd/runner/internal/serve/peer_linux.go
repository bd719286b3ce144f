package serve

import (
	"net"

	"golang.org/x/sys/unix"
)

// peer is the process at the other end, 0 when it cannot be told, as for one of another pid namespace.
func peer(c *net.UnixConn) int {
	raw, err := c.SyscallConn()
	if err != nil {
		return 0
	}
	pid := 0
	if err := raw.Control(func(fd uintptr) {
		if cred, err := unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED); err == nil { //nolint:gosec // a descriptor
			pid = int(cred.Pid)
		}
	}); err != nil {
		return 0
	}
	return pid
}
