package cli

import (
	"log/slog"

	"golang.org/x/sys/unix"
)

// hideProcess keeps programs of the same user from reading this process's memory and variables, which hold keys
// and tokens, out of /proc, from tracing it and from taking its descriptors.
func hideProcess(log *slog.Logger) {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		log.Warn("this process can be read by the agent's programs", "err", err)
	}
}
