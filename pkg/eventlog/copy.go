package eventlog

import (
	"fmt"
	"os"
	"strconv"
)

// Copy names this process among the copies of a service, for the actors of its commits: host and process id.
func Copy() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("name this copy: %w", err)
	}
	return host + ":" + strconv.Itoa(os.Getpid()), nil
}
