package eventlog

import (
	"fmt"
	"os"
	"strconv"
)

// HostAndProcessID returns "<host name>:<process id>". A service states it in the actor of its commits, so that the log shows which replica
// of the service wrote them. It differs after each start.
func HostAndProcessID() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("name this process: %w", err)
	}
	return host + ":" + strconv.Itoa(os.Getpid()), nil
}
