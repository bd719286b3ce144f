package cli

import (
	"log/slog"

	"golang.org/x/sys/unix"
)

// hideEnvironment keeps programs that the agent runs as the same user from
// reading the agent's variables, its key among them, out of /proc.
func hideEnvironment(log *slog.Logger) {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		log.Warn("the agent's environment can be read by its programs", "err", err)
	}
}
