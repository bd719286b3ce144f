package docker

import (
	"io"
	"net"
	"os"
)

// asSSH makes the test binary be the command ssh: its value is the engine's socket.
const asSSH = "SPOOL_DOCKER_TEST_SSH"

// dialStdio joins stdin and stdout to an engine's socket, as `docker system dial-stdio` does.
func dialStdio() int {
	c, err := net.Dial("unix", os.Getenv(asSSH))
	if err != nil {
		return 1
	}
	go func() {
		_, _ = io.Copy(c, os.Stdin) // its end is the caller's
		_ = c.(*net.UnixConn).CloseWrite()
	}()
	if _, err := io.Copy(os.Stdout, c); err != nil {
		return 1
	}
	return 0
}
