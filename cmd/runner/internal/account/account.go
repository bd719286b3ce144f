// Package account changes the runner's user from root to another one, for sandbox providers that start every program as root.
package account

import (
	"fmt"
	"strconv"
	"strings"
)

// UserVariable is the name of the environment variable with the user, as UID:GID, that the runner's process switches
// to. Without the variable the runner keeps its user.
const UserVariable = "SPOOL_RUNNER_USER"

// parseUser parses a user in the form UID:GID. It returns an error for root.
func parseUser(user string) (uid, gid int, err error) {
	first, second, found := strings.Cut(user, ":")
	uid, uerr := strconv.Atoi(first)
	gid, gerr := strconv.Atoi(second)
	if !found || uerr != nil || gerr != nil || uid <= 0 || gid <= 0 {
		return 0, 0, fmt.Errorf("%s: %.40q is not UID:GID, two positive numbers", UserVariable, user)
	}
	return uid, gid, nil
}
