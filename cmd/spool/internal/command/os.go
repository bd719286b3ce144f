package command

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"
)

// OS is the process's own world.
func OS(local Local) IO {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	return IO{
		In: os.Stdin, InTTY: isTerminal(os.Stdin),
		Out: os.Stdout, OutTTY: isTerminal(os.Stdout) && os.Getenv("TERM") != "dumb",
		Err: os.Stderr, ErrTTY: isTerminal(os.Stderr) && os.Getenv("TERM") != "dumb", Color: os.Getenv("NO_COLOR") == "",
		Width: width, Signals: signals, Local: local, LookupEnv: os.LookupEnv,
	}
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// width is the terminal's columns now; one that does not tell them has 80.
func width() int {
	if n, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil && n > 0 {
		return n
	}
	return 80
}
