package cli

import (
	"log/slog"

	"golang.org/x/sys/unix"
)

// hideProcess prevents programs of the same user from reading the memory and the variables of this process, which hold
// keys and tokens, through /proc, from tracing it, and from taking its file descriptors.
func hideProcess(log *slog.Logger) {
	if err := unix.Prctl(unix.PR_SET_DUMPABLE, 0, 0, 0, 0); err != nil {
		log.Warn("this process can be read by the agent's programs", "err", err)
	}
}
