package harness

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"regexp"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"unicode/utf8"
	"unsafe"
)

// Terminal is a run of spool on its own terminal, like that of a user: it asks questions, echoes input, and makes
// Ctrl-C a signal.
type Terminal struct {
	t      testing.TB
	cmd    *exec.Cmd
	keys   *os.File // the other end of the terminal
	mu     sync.Mutex
	screen bytes.Buffer
	read   chan struct{} // closed when all output was read
}

// CtrlC is the input that makes a terminal interrupt its program.
const CtrlC = "\x03"

// Terminal starts spool with gateway 0 on a terminal, with further environment variables. The terminal is so wide
// that no text of a test is wrapped.
func (c *Cluster) Terminal(t testing.TB, folder, data string, env []string, args ...string) *Terminal {
	t.Helper()
	return c.TerminalOf(t, 400, folder, data, env, args...)
}

// TerminalOf is like Terminal with a number of columns.
func (c *Cluster) TerminalOf(t testing.TB, columns uint16, folder, data string, env []string, args ...string) *Terminal {
	t.Helper()
	cmd := c.command(t, folder, data, args...)
	cmd.Env = append(cmd.Env, append([]string{"TERM=xterm", "NO_COLOR=1"}, env...)...)
	cmd.SysProcAttr = &syscall.SysProcAttr{Setsid: true, Setctty: true}
	master, tty, err := openTerminal()
	must(t, err)
	cmd.Stdin, cmd.Stdout, cmd.Stderr = tty, tty, tty
	must(t, errors.Join(cmd.Start(), tty.Close()))
	x := &Terminal{t: t, cmd: cmd, keys: master, read: make(chan struct{})}
	x.Resize(columns)
	go func() {
		defer close(x.read)
		b := make([]byte, 4096)
		for {
			n, err := master.Read(b) // fails when no program uses the terminal any more
			x.mu.Lock()
			x.screen.Write(b[:n])
			x.mu.Unlock()
			if err != nil {
				return
			}
		}
	}()
	t.Cleanup(func() {
		_ = cmd.Process.Kill() // the program has ended, unless the test failed
		<-x.read
		_ = cmd.Wait() // fails if Ended has called it
		check(t, master.Close())
	})
	return x
}

// openTerminal opens a pseudo-terminal.
func openTerminal() (master, tty *os.File, err error) {
	master, err = os.OpenFile("/dev/ptmx", os.O_RDWR, 0)
	if err != nil {
		return nil, nil, err
	}
	var n, unlock int32
	for _, call := range []struct {
		request uintptr
		arg     unsafe.Pointer
	}{{syscall.TIOCSPTLCK, unsafe.Pointer(&unlock)}, {syscall.TIOCGPTN, unsafe.Pointer(&n)}} { //nolint:gosec // as in ioctl_tty(2)
		if err := ioctl(master, call.request, call.arg); err != nil {
			return nil, nil, errors.Join(err, master.Close())
		}
	}
	tty, err = os.OpenFile(fmt.Sprintf("/dev/pts/%d", n), os.O_RDWR|syscall.O_NOCTTY, 0)
	if err != nil {
		return nil, nil, errors.Join(err, master.Close())
	}
	return master, tty, nil
}

// ioctl calls ioctl(2) on a terminal.
func ioctl(f *os.File, request uintptr, arg unsafe.Pointer) error {
	if _, _, e := syscall.Syscall(syscall.SYS_IOCTL, f.Fd(), request, uintptr(arg)); e != 0 {
		return e
	}
	return nil
}

// Resize changes the terminal's number of columns.
func (x *Terminal) Resize(columns uint16) {
	x.t.Helper()
	size := [4]uint16{50, columns}                                      // rows and columns
	must(x.t, ioctl(x.keys, syscall.TIOCSWINSZ, unsafe.Pointer(&size))) //nolint:gosec // as in ioctl_tty(2)
}

// Echoes reports whether the terminal echoes input and makes Ctrl-C a signal. It does, unless a program has set it to
// raw mode.
func (x *Terminal) Echoes() bool {
	x.t.Helper()
	var mode syscall.Termios
	must(x.t, ioctl(x.keys, syscall.TCGETS, unsafe.Pointer(&mode))) //nolint:gosec // as in ioctl_tty(2)
	return mode.Lflag&(syscall.ECHO|syscall.ISIG|syscall.ICANON) == syscall.ECHO|syscall.ISIG|syscall.ICANON
}

// Signal sends a signal to the program.
func (x *Terminal) Signal(s os.Signal) {
	x.t.Helper()
	must(x.t, x.cmd.Process.Signal(s))
}

// controlSequences matches the control sequences that the program writes: move up some rows, erase to the end, and colours.
var controlSequences = regexp.MustCompile(`\x1b\[(\d+)A|\x1b\[J|\x1b\[[0-9;]*m`)

// Rows returns the rows of a terminal with the given number of columns after all output, without trailing spaces. The
// terminal scrolls without a limit. A row that is longer than the terminal is wrapped.
func (x *Terminal) Rows(columns int) []string {
	x.mu.Lock()
	text := x.screen.String()
	x.mu.Unlock()
	rows, row, column := [][]rune{nil}, 0, 0
	for text != "" {
		if at := controlSequences.FindStringSubmatchIndex(text); at != nil && at[0] == 0 {
			switch {
			case at[2] >= 0:
				n, _ := strconv.Atoi(text[at[2]:at[3]]) // digits
				row = max(0, row-n)
			case text[:at[1]] == "\x1b[J":
				rows, rows[row] = rows[:row+1], rows[row][:min(column, len(rows[row]))]
			}
			text = text[at[1]:]
			continue
		}
		r, size := utf8.DecodeRuneInString(text)
		switch text = text[size:]; {
		case r == '\r':
			column = 0
		case r == '\n':
			row++
		default:
			if column == columns {
				row, column = row+1, 0
			}
			for row >= len(rows) {
				rows = append(rows, nil)
			}
			for len(rows[row]) <= column {
				rows[row] = append(rows[row], ' ')
			}
			rows[row][column] = r
			column++
		}
		for row >= len(rows) {
			rows = append(rows, nil)
		}
	}
	var out []string
	for _, r := range rows {
		out = append(out, strings.TrimRight(string(r), " "))
	}
	return out
}

// Screen returns everything that the program has written to the terminal.
func (x *Terminal) Screen() string {
	x.mu.Lock()
	defer x.mu.Unlock()
	return strings.ReplaceAll(x.screen.String(), "\r\n", "\n")
}

// Shows waits until a text is on the screen.
func (x *Terminal) Shows(text string) {
	x.t.Helper()
	ended := false
	Eventually(x.t, fmt.Sprintf("the terminal shows %q", text), func() bool {
		if strings.Contains(x.Screen(), text) {
			return true
		}
		if ended {
			x.t.Fatalf("the program ended without %q on the screen:\n%s", text, x.Screen())
		}
		select {
		case <-x.read:
			ended = true
		default:
		}
		return false
	})
}

// Type types keys on the terminal.
func (x *Terminal) Type(keys string) {
	x.t.Helper()
	_, err := x.keys.WriteString(keys)
	must(x.t, err)
}

// Ended waits for the end of the program and returns its exit code and all output.
func (x *Terminal) Ended() (code int, screen string) {
	x.t.Helper()
	Eventually(x.t, "the program ends", func() bool {
		select {
		case <-x.read:
			return true
		default:
			return false
		}
	})
	var exit *exec.ExitError
	if err := x.cmd.Wait(); err != nil && !errors.As(err, &exit) {
		x.t.Fatal(err)
	}
	return x.cmd.ProcessState.ExitCode(), x.Screen()
}
