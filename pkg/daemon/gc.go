package daemon

import (
	"os"
	"runtime/debug"
)

// defaultGCPercent is the growth of the heap after which a service collects garbage, in percent of the live heap and
// the stacks. Go's default of 100 costs 50 KB more for each active session, and saves no measurable processor time.
const defaultGCPercent = 50

// SetGCPercent sets how often this process collects garbage, unless the environment variable GOGC is set. RunService
// calls SetGCPercent; a program that runs services within its own process calls it once.
func SetGCPercent() {
	if os.Getenv("GOGC") == "" {
		debug.SetGCPercent(defaultGCPercent)
	}
}
