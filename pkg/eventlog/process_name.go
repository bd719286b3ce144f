package eventlog

import (
	"fmt"
	"os"
	"strconv"
)

// ReplicaName returns the name of this process among the replicas of a service, for the actors of its commits: host name
// and process id.
func ReplicaName() (string, error) {
	host, err := os.Hostname()
	if err != nil {
		return "", fmt.Errorf("name this replica: %w", err)
	}
	return host + ":" + strconv.Itoa(os.Getpid()), nil
}
