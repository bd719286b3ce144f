package command

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"

	"golang.org/x/sys/unix"
	"golang.org/x/term"
)

// ProcessIO returns the IO with the standard streams, the terminal and the signals of this process.
func ProcessIO(local LocalMachine) IO {
	signals := make(chan os.Signal, 4)
	signal.Notify(signals, os.Interrupt, syscall.SIGTERM)
	env := IO{
		In: os.Stdin, InTTY: isTerminal(os.Stdin),
		Out: os.Stdout, OutTTY: isTerminal(os.Stdout) && os.Getenv("TERM") != "dumb",
		Err: os.Stderr, ErrTTY: isTerminal(os.Stderr) && os.Getenv("TERM") != "dumb", Color: os.Getenv("NO_COLOR") == "",
		Width: terminalWidth, Signals: signals, Local: local, LookupEnv: os.LookupEnv,
	}
	if env.InTTY {
		env.Raw = func() (func() error, error) { return enterRawMode(signals) }
		env.DropInput = func() error { return unix.IoctlSetInt(int(os.Stdin.Fd()), unix.TCFLSH, unix.TCIFLUSH) }
		if command := cmp.Or(os.Getenv("VISUAL"), os.Getenv("EDITOR")); command != "" {
			env.Edit = func(ctx context.Context, text []byte) ([]byte, error) { return editText(ctx, command, text) }
		}
	}
	return env
}

// enterRawMode puts the terminal into raw mode until restore is called. Until then every signal that would end the
// process is sent to signals, so that the program can restore the terminal before it ends.
func enterRawMode(signals chan<- os.Signal) (restore func() error, err error) {
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

// editText opens text in the user's editor and returns the edited text. command is the editor with its arguments.
func editText(ctx context.Context, command string, text []byte) (changed []byte, err error) {
	folder, err := os.MkdirTemp("", "spool")
	if err != nil {
		return nil, err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(folder)) }()
	file := filepath.Join(folder, "arguments.json")
	if err := os.WriteFile(file, text, 0o600); err != nil {
		return nil, err
	}
	cmd := exec.CommandContext(ctx, "sh", "-c", command+` "$1"`, "sh", file) //nolint:gosec // the user's own command
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	if err := cmd.Run(); err != nil {
		return nil, fmt.Errorf("editor %s: %w", command, err)
	}
	return os.ReadFile(file)
}

func isTerminal(f *os.File) bool { return term.IsTerminal(int(f.Fd())) }

// terminalWidth returns the width of the terminal in columns, or 80 if it is unknown.
func terminalWidth() int {
	if n, _, err := term.GetSize(int(os.Stdout.Fd())); err == nil && n > 0 {
		return n
	}
	return 80
}
