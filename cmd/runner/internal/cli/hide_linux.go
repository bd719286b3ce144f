package cli

import (
	"log/slog"

	"golang.org/x/sys/unix"
)

// hideEnvironment keeps programs of the same user from reading this process's
// variables, a key or a token among them, out of /proc.
func hideEnvironment(log *slog.Logger) {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		log.Warn("this process's environment can be read by the agent's programs", "err", err)
	}
}
