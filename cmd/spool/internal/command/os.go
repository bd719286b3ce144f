package command

import (
	"os"
	"os/signal"
	"syscall"

	"golang.org/x/term"
)

// OS returns the IO of this process.
func OS(local Local) IO {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	world := IO{
		In: os.Stdin, InTTY: isTerminal(os.Stdin),
		Out: os.Stdout, OutTTY: isTerminal(os.Stdout) && os.Getenv("TERM") != "dumb",
		Err: os.Stderr, ErrTTY: isTerminal(os.Stderr) && os.Getenv("TERM") != "dumb", Color: os.Getenv("NO_COLOR") == "",
		Width: width, Signals: signals, Local: local, LookupEnv: os.LookupEnv,
	}
	if world.InTTY {
		world.Raw = func() (func() error, error) { return raw(signals) }
	}
	return world
}

// raw puts the terminal into raw mode. Until it is restored, every signal that ends a process goes to signals, so
// that the program can restore the terminal before it ends.
func raw(signals chan<- os.Signal) (restore func() error, err error) {
	signal.Notify(signals, syscall.SIGHUP, syscall.SIGQUIT)
	fd := int(os.Stdin.Fd())
	was, err := term.MakeRaw(fd)
	if err != nil {
		return nil, err
	}
	return func() error {
		err := term.Restore(fd, was)
		signal.Reset(syscall.SIGHUP, syscall.SIGQUIT)
		return err
	}, nil
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// width returns the terminal's width in columns, or 80 if it is unknown.
func width() int {
	if n, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil && n > 0 {
		return n
	}
	return 80
}
